"""A call becomes prompt ids, and what was sampled the Reply: the part that rollouts and serving have in common.

Invariants: a prompt that continues a turn is that turn's stored ids and a suffix, never made again; `stop` texts cut
the reply's text and not the ids; ids of tool calls derive from the call's seed, so they are the same in every run.
Knows nothing of rollouts, engines or stores.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b
from typing import TypeVar

from agenttrain.capture.conversations import Prompt
from agenttrain.capture.instructions import told
from agenttrain.errors import CaptureError
from agenttrain.protocols import Parsed, Renderer, TellsSpelling
from agenttrain.records import BreakCause, Generation, Ids, InvalidCall, ModelCall, ParsedCall, Reply, Respelling, Turn

CallT = TypeVar("CallT", ParsedCall, InvalidCall)


def prompt_ids_of(
    renderer: Renderer, call: ModelCall, prompt: Prompt, parent: Turn | None
) -> tuple[Ids, BreakCause | None]:
    """The stored ids of the parent and a suffix where that holds, else the whole conversation rendered anew.

    Returns:
        The ids, and why they don't begin with the parent's. None: they do, or there is no parent.
    """
    if parent is None:
        return renderer.render(told(renderer, call), call.tools), None
    stored = parent.prompt_ids + parent.response_ids
    new = call.messages[prompt.n_known :]
    ids = renderer.extend(parent.prompt_ids, parent.response_ids, new, call.tools)
    if ids is not None and ids[: len(stored)] == stored:
        return ids, None
    broke: BreakCause = "truncated_turn" if parent.stop_reason == "length" else "template"
    if ids is None and isinstance(renderer, TellsSpelling) and renderer.drops_thinking(parent.response_ids, new):
        broke = "thinking_dropped"
    return renderer.render(told(renderer, call), call.tools), broke


def respelled(renderer: Renderer, call: ModelCall, prompt: Prompt, parent: Turn | None) -> tuple[Respelling, ...]:
    """How the template would write the parent's reply otherwise than it stands in the prompt; empty where not known."""
    if parent is None or not isinstance(renderer, TellsSpelling):
        return ()
    answered, new = call.messages[prompt.n_known - 1], call.messages[prompt.n_known :]
    try:
        return renderer.respelled(parent.response_ids, answered, new)
    except Exception:  # of a plugin; what is only told costs no rollout
        return ()


def read_answer(renderer: Renderer, call: ModelCall, generation: Generation, *, prompt_ids: Ids, seed: int) -> Parsed:
    """Sampled ids as the message that goes back to the graph.

    Raises:
        CaptureError: the renderer raised.
    """
    try:
        parsed = _parsed(renderer, call, generation.token_ids, prompt_ids)
    except Exception as error:
        raise CaptureError(
            f"Renderer {renderer.identity} can't read what was sampled: {type(error).__name__}: {error}. Any ids must "
            'be read; name another renderer.family ("default" is the chat template of the model\'s folder).'
        ) from error
    return replace(
        parsed,
        text=_cut(parsed.text, call.stop),
        tool_calls=tuple(_named(each, seed, i) for i, each in enumerate(_allowed(parsed.tool_calls, call))),
        invalid_tool_calls=tuple(_named(each, seed, -1 - i) for i, each in enumerate(parsed.invalid_tool_calls)),
    )


def _parsed(renderer: Renderer, call: ModelCall, ids: Ids, prompt_ids: Ids) -> Parsed:
    """As the renderer reads it; as text alone where no tool may be called."""
    if call.tool_choice != "none":
        return renderer.parse(ids, call.tools, prompt_ids)
    end = len(ids) - (1 if ids and ids[-1] in renderer.stop_ids else 0)
    return Parsed(text=renderer.decode(ids[:end]), reasoning=None, tool_calls=(), invalid_tool_calls=())


def reply_of(turn: Turn, parsed: Parsed, *, n_cached_ids: int, model_name: str) -> Reply:
    """What goes back to the graph for one turn."""
    return Reply(
        call_id=turn.id,
        text=parsed.text,
        reasoning=parsed.reasoning,
        tool_calls=parsed.tool_calls,
        invalid_tool_calls=parsed.invalid_tool_calls,
        stop_reason=turn.stop_reason,
        n_prompt_ids=len(turn.prompt_ids),
        n_response_ids=len(turn.response_ids),
        n_cached_ids=n_cached_ids,
        model=model_name,
    )


def hash63(text: str) -> int:
    """63 bits of a text, the same in every process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def _named(call: CallT, seed: int, place: int) -> CallT:
    """The call with an id that is unique in the rollout and the same in every run; one the format carries stays."""
    return replace(call, id=f"call_{hash63(f'{seed} {place}'):016x}"[:13]) if call.id.startswith("call_") else call


def _allowed(calls: tuple[ParsedCall, ...], call: ModelCall) -> tuple[ParsedCall, ...]:
    """The first one only where the user's model was told `parallel_tool_calls=False`."""
    return calls[:1] if call.parallel_tool_calls is False else calls


def _cut(text: str, stops: tuple[str, ...]) -> str:
    """The text before the first stop text."""
    return text[: min((at for stop in stops if stop and (at := text.find(stop)) >= 0), default=len(text))]
