"""A policy's folder becomes greedy answers: of an engine, and of transformers, which knows nothing of agenttrain.

Invariant: two answers are held against each other by `promotion.fixed_set` alone, whoever gives them; where rounding
might have decided, transformers says how far the two tokens are apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agenttrain.capture.model_folder import hashes_of, load_tokenizer, stop_ids_of
from agenttrain.capture.probe import CONVERSATIONS
from agenttrain.capture.render import open_renderer
from agenttrain.config import Config
from agenttrain.errors import ConfigError, ModelError
from agenttrain.export.recorded_turns import RecordedTurn
from agenttrain.plugins import Plugins
from agenttrain.promotion.fixed_set import Agreement, FixedTurn, Greedy, agreement, answered_turn, scored_turn
from agenttrain.protocols import Engine, EngineContext
from agenttrain.records import Ids, Sampling

if TYPE_CHECKING:
    from agenttrain.local.reloaded import Reloaded

TRANSFORMERS = "transformers"
MOST_TOKENS = 64
"""Of an answer that is generated for a fixed set."""


def reloaded(folder: Path, *, base: Path | None = None) -> Reloaded:
    """A folder loaded anew by transformers, with peft where it is an adapter.

    Raises:
        ModelError: it can't be loaded.
    """
    from agenttrain.local.reloaded import Reloaded

    return Reloaded(folder, base=base)


def rescored(model: Reloaded, turns: Sequence[RecordedTurn]) -> Agreement:
    """Recorded turns by one pass each: greedy ones must be the likeliest again, all must have their probabilities."""
    seen = []
    for each in turns:
        scored = model.scored(each.turn.prompt_ids, each.turn.response_ids, temperature=each.temperature or 1.0)
        seen.append(
            scored_turn(
                each.turn,
                likeliest=scored.likeliest,
                behind=scored.behind,
                logprobs=scored.logprobs,
                is_greedy=each.temperature == 0,
            )
        )
    return agreement(TRANSFORMERS, [each.turn for each in turns], seen)


def generated(by: str, turns: Sequence[FixedTurn], answer: Greedy, model: Reloaded) -> Agreement:
    """Turns by greedy answers to their prompts."""
    return agreement(by, turns, (answered_turn(turn, answer, tie_gap=model.difference) for turn in turns))


def check_tokenizer(folder: Path, renderer: str) -> None:
    """Refuse a folder whose tokenizer or chat template would make other ids.

    Args:
        renderer: identity of what made the ids that its policy was trained on.

    Raises:
        ModelError: they differ, or can't be loaded.
    """
    seen = hashes_of(folder, load_tokenizer(folder))
    family, _, hashes = renderer.partition(":")
    if seen != hashes:
        raise ModelError(
            f"{folder} makes its ids by {family}:{seen}, and the policy was trained with {renderer} (family, hash of "
            "the tokenizer, hash of the chat template). Put tokenizer files and chat template back as they were."
        )


def stop_ids(folder: Path) -> Ids:
    """Where replies of a policy end."""
    return stop_ids_of(folder, load_tokenizer(folder))


def synthetic_prompts(folder: Path, config: Config) -> tuple[str, list[Ids]]:
    """The renderer's identity, and prompts that are of no task: the openings of conversations of our own."""
    renderer = open_renderer(str(folder), family=config.renderer.family, history=config.renderer.history)
    prompts = [
        renderer.render(talk.messages[:n], talk.tools)
        for talk in CONVERSATIONS
        if not talk.optional and (renderer.supports_tools or not talk.tools)
        for n, message in enumerate(talk.messages)
        if message["role"] == "assistant"
    ]
    return renderer.identity, list(dict.fromkeys(prompts))


@contextmanager
def opened_engine(
    plugins: Plugins, config: Config, folder: Path, *, adapter: Path | None = None
) -> Iterator[tuple[Engine, Greedy]]:
    """An engine that serves a folder, and how it answers; closed afterwards.

    Args:
        config: names the engine.
        folder: of the model; with `adapter`, its base.
        adapter: folder of an adapter that it is to sample with.

    Raises:
        ConfigError: it takes no adapters.
        EngineError: it can't serve the folder.
    """
    engine = plugins.engine(config.engine.name)(EngineContext(config=config, model=str(folder)))
    try:
        engine.stats()  # waits until it is ready
        if adapter is not None:
            _adapt(engine, adapter)
        yield engine, _greedy(engine, stop_ids(adapter or folder))
    finally:
        engine.close()


def adapter_tables(adapter: Path) -> dict[str, Any]:
    """Of the configuration, by which an engine gets ready for an adapter."""
    from agenttrain.local.reloaded import adapter_config

    given: Mapping[str, Any] = adapter_config(adapter)
    targets = sorted({name.rpartition(".")[2] for name in given["target_modules"]})
    return {"name": "local", "adapter": "lora", "lora_rank": given["r"], "lora_targets": targets}


def _adapt(engine: Engine, adapter: Path) -> None:
    from agenttrain.local.reloaded import adapter_weights

    if not getattr(engine, "takes_adapters", False):
        raise ConfigError(
            f"Engine {engine.name} samples with no adapter beside a base. Export the merged form, or leave --engine "
            "out: transformers and peft check it in any case."
        )
    engine.update_adapter(adapter_weights(adapter), 1)  # type: ignore[attr-defined]


def _greedy(engine: Engine, ends: Ids) -> Greedy:
    numbers = count()

    def answer(prompt_ids: Ids, max_tokens: int) -> tuple[Ids, Sequence[float]]:
        session = f"export-{next(numbers)}"
        sampling = Sampling(temperature=0.0, max_tokens=max_tokens, seed=0, stop_ids=ends)
        try:
            generation = engine.generate(prompt_ids, sampling, session=session).result()
        finally:
            engine.release(session)
        return generation.token_ids, generation.logprobs

    return answer


def fixed_turns(prompts: Sequence[tuple[str, Ids, int]], engine: Engine, answer: Greedy) -> list[FixedTurn]:
    """What an engine answers to prompts; those that leave no room are left out.

    Args:
        prompts: (name, ids, most tokens) of each.
    """
    turns = []
    for name, ids, wanted in prompts:
        room = min(wanted, MOST_TOKENS, engine.max_length - len(ids))
        if room > 0:
            response, logprobs = answer(ids, room)
            turns.append(FixedTurn(name=name, prompt_ids=ids, response_ids=response, logprobs=tuple(logprobs)))
    return turns
