"""One rollout's capture, driven by hand: what a graph would ask, what a policy would say, and the account of both.

All of it is agenttrain's own (recorder, renderer, store, tree, samples, account) but for the policy's words: a
`Speaker` says the ids that it is given, or lets a real engine sample. `World.kept` holds what must be true of every
rollout.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from agenttrain.capture.recorder import Recorder, RecorderLimits
from agenttrain.capture.store import SqliteStore, read_store
from agenttrain.protocols import Engine
from agenttrain.records import (
    BreakCause,
    CallSite,
    Generation,
    Ids,
    ModelCall,
    Reply,
    Reward,
    Role,
    Rollout,
    RolloutRequest,
    RolloutResult,
    RoutedExperts,
    Sample,
    Sampling,
    Status,
    Task,
    Trajectory,
    Turn,
)
from agenttrain.sample.account import TokenAccount, drifted, token_account
from agenttrain.sample.build import build_samples
from agenttrain.trajectory.prefix_breaks import prefix_breaks
from agenttrain.trajectory.tree import trajectories

Message = Mapping[str, Any]
Messages = tuple[Message, ...]
Answer = Ids | BaseException | Callable[[Ids, Sampling], Ids]
VERSION: Final = 3
"""Of the weights that a speaker stands for."""
ROOM: Final = 100_000
"""Ids that a speaker takes, unless a scenario wants less."""

LOOK_UP: Final[Message] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Find an order.",
        "parameters": {
            "type": "object",
            "properties": {"id": {"type": "string"}, "row": {"type": "integer"}},
            "required": ["id"],
        },
    },
}
ADD: Final[Message] = {
    "type": "function",
    "function": {"name": "add", "description": "Add two numbers.", "parameters": {"type": "object", "properties": {}}},
}


class Speaker:
    """Plays the engine: says the next of its lines, or what a real engine samples when it has none left.

    Attributes:
        lines: what to say next: ids, an error to fail with, or a function of prompt and sampling.
        asked: prompt ids and sampling of every call.
        tells: routed experts for prompt, answer and sampling. None: it tells none.
        held: while it is set, answers are made and wait in `waiting`.
    """

    name = "speaker"

    def __init__(self, behind: Engine | None = None) -> None:
        self.behind, self.max_length = behind, behind.max_length if behind else ROOM
        self.weight_version = behind.weight_version if behind else VERSION
        self.lines: deque[Answer] = deque()
        self.asked: list[tuple[Ids, Sampling]] = []
        self.tells: Callable[[Ids, Ids, Sampling], RoutedExperts | None] | None = None
        self.held = False
        self.waiting: list[tuple[Future[Generation], Generation]] = []

    def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str) -> Future[Generation]:
        self.asked.append((prompt_ids, sampling))
        if not self.lines and self.behind is not None:
            return self.behind.generate(prompt_ids, sampling, session=session)
        line, future = self.lines.popleft(), Future[Generation]()
        if isinstance(line, BaseException):
            future.set_exception(line)
            return future
        said = (line(prompt_ids, sampling) if callable(line) else line)[: sampling.max_tokens]
        told = self.tells(prompt_ids, said, sampling) if self.tells else None
        answer = replace(_generation(said, sampling.stop_ids), routed_experts=told)
        if self.held:
            self.waiting.append((future, answer))
        else:
            future.set_result(answer)
        return future

    def release(self, session: str) -> None:
        if self.behind is not None:
            self.behind.release(session)

    def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        raise AssertionError("a scenario trains nothing")

    def stats(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None: ...


def _generation(ids: Ids, stop_ids: Ids) -> Generation:
    """With a log probability that tells id and position apart, -0.0 among them."""
    return Generation(
        token_ids=ids,
        logprobs=tuple(-((id * 31 + i * 7) % 997) / 1000 for i, id in enumerate(ids)),
        weight_versions=(VERSION,) * len(ids),
        stop_reason="stop" if ids and ids[-1] in stop_ids else "length",
    )


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What one rollout left, read back from its store."""

    turns: tuple[Turn, ...]
    trajectories: tuple[Trajectory, ...]
    samples: tuple[Sample, ...]
    account: TokenAccount
    breaks: Mapping[BreakCause, int]
    """Prefix breaks by cause."""
    lost: tuple[str, ...]
    """Ids of the calls without an answer."""

    def n(self, *places: int) -> int:
        """Ids that the turns at these places sampled."""
        return sum(len(self.turns[place].response_ids) for place in places)

    @property
    def causes(self) -> list[str | None]:
        """[turns] why each extends nothing; None where it extends."""
        return [turn.break_cause for turn in self.turns]

    @property
    def parents(self) -> list[int | None]:
        """[turns] the place of the turn that each extends."""
        places = {turn.id: i for i, turn in enumerate(self.turns)}
        return [places[turn.extends] if turn.extends else None for turn in self.turns]


@dataclass
class World:
    """A renderer, a speaker and a folder for one scenario after another."""

    renderer: Any
    folder: Path
    speaker: Speaker
    seed: int = 0
    stores: dict[Recorder, SqliteStore] = field(default_factory=dict)

    def open(self, *, request: RolloutRequest | None = None, **limits: Any) -> Recorder:
        """The recorder of a new rollout, in a folder of its own."""
        store = SqliteStore(self.folder / f"rollout-{len(self.stores)}")
        request = request or RolloutRequest(task=Task(id="t", input={}), phase="train", step=1, seed=self.seed)
        store.put_begun(request, started_at=0.0)
        recorder = Recorder(
            request=request,
            engine=self.speaker,
            renderer=self.renderer,
            store=store,
            role_of=lambda site: ("trained", "default"),
            limits=RecorderLimits(**limits),
            model_name="policy",
        )
        self.stores[recorder] = store
        return recorder

    def close(self) -> None:
        for store in self.stores.values():
            store.close()

    # Words of the policy

    def spelt(self, messages: Messages, said: Message, tools: Messages = ()) -> Ids:
        """The ids of a reply as the template itself writes it, with the id that ends it."""
        follows = results(said) or (user("Go on."),)
        prompt = self.renderer.render(messages, tools)
        whole = self.renderer.render((*messages, said, *follows), tools)
        assert whole[: len(prompt)] == prompt, "the template writes the prompt otherwise once it was answered"
        rest: Ids = whole[len(prompt) :]
        end = next(i for i, id in enumerate(rest) if id in self.renderer.stop_ids)
        return rest[: end + 1]

    def ids(self, text: str) -> Ids:
        """A text and the id that ends a reply."""
        return (*self.renderer.encode(text), self.close_id)

    @property
    def close_id(self) -> int:
        """The stop id with which the template ends a reply."""
        whole = self.renderer.render((user("a"), says("b"), user("c")), ())
        return int(next(id for id in whole if id in self.renderer.stop_ids))

    # What came of it

    def kept(self, recorder: Recorder, *, status: Status = "completed") -> Kept:
        """End a rollout, and check what must be true of every one."""
        recorder.close()
        store = self.stores[recorder]
        turns = recorder.turns
        paths = trajectories(turns)
        rollout = _rollout(recorder, status)
        samples = build_samples(rollout, paths)
        result = RolloutResult(
            request=recorder.request, rollout=rollout, turns=turns, trajectories=paths, samples=samples
        )
        store.put_result(result)
        store.flush()
        view = read_store(store.path.parent)
        (read,) = view.results()
        assert read == result, "the store gives back another rollout than it was given"
        check_paths(turns, paths)
        assert drifted(samples, {turn.id: turn for turn in turns}) == 0, "what is trained is not what was sampled"
        return Kept(
            turns=turns,
            trajectories=paths,
            samples=samples,
            account=token_account([read], samples),
            breaks=prefix_breaks(turns),
            lost=tuple(call.turn_id for call in view.lost_calls()),
        )


def _rollout(recorder: Recorder, status: Status) -> Rollout:
    asks = recorder.request
    status = "incomplete" if recorder.lost else status
    return Rollout(
        id=recorder.rollout_id,
        task_id=asks.task.id,
        phase=asks.phase,
        step=asks.step,
        sibling=asks.sibling,
        attempt=asks.attempt,
        status=status,
        reward=None if status in ("incomplete", "aborted") else Reward(score=1.0, parts=()),
    )


def check_paths(turns: Sequence[Turn], paths: Sequence[Trajectory]) -> None:
    """Every sampled id has one place, trained where its turn is, behind exactly what its engine saw."""
    by_id = {turn.id: turn for turn in turns if turn.role != "auxiliary"}
    placed: list[str] = []
    for path in paths:
        ids, n = path.prompt_ids + path.response_ids, len(path.prompt_ids)
        trained = set()
        for span in path.spans:
            turn = by_id[span.turn_id]
            assert ids[: n + span.start] == turn.prompt_ids, f"{turn.id} stands behind another prompt than it saw"
            assert path.response_ids[span.start : span.end] == turn.response_ids
            placed.append(turn.id)
            trained |= set(range(span.start, span.end)) if span.trained else set()
        assert {i for i, mask in enumerate(path.response_mask) if mask} == trained
        assert set(path.response_mask) <= {0, 1}
    assert sorted(placed) == sorted(by_id), "a turn stands in no trajectory, or in two"


# Messages and calls


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def says(text: str, *calls: Message) -> Message:
    """A reply as a graph hands it back."""
    return {"role": "assistant", "content": text, **({"tool_calls": list(calls)} if calls else {})}


def call(id: str, arguments: Mapping[str, Any], *, name: str = "look_up") -> Message:
    """A tool call as a graph hands it back."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": dict(arguments)}}


def results(said: Message, *texts: str) -> Messages:
    """The results of a reply's calls, in its order."""
    calls = said.get("tool_calls") or ()
    return tuple(
        {"role": "tool", "content": text, "tool_call_id": each["id"], "name": each["function"]["name"]}
        for each, text in zip(calls, texts or ["lamp"] * len(calls), strict=True)
    )


def handed_back(reply: Reply) -> Message:
    """A reply as an agent's state holds it."""
    made = [
        {"id": each.id, "type": "function", "function": {"name": each.name, "arguments": dict(each.arguments)}}
        for each in reply.tool_calls
    ]
    return says(reply.text, *made)


def site(task_id: str = "t1", *, node: str = "agent", step: int = 1, attempt: int = 1, around: str = "") -> CallSite:
    """A place in a graph, as LangGraph names it."""
    ns = f"{around}{node}:{task_id}"
    return CallSite(node=node, step=step, task_id=task_id, checkpoint_ns=ns, attempt=attempt, path=f"pull {node}")


def asks(messages: Messages, at: CallSite | None = None, *, role: Role = "trained", **more: Any) -> ModelCall:
    """A model call as the gate hands it to the recorder."""
    reason = "default" if role == "trained" else f"node: {(at or site()).node}"
    return ModelCall(messages=messages, site=at or site(), role=role, role_reason=reason, **more)


# Other spellings


def with_other_arguments(text: str, arguments: dict[str, Any]) -> str | None:
    """A reply with its JSON arguments in other key order and spacing. None: they don't stand in it as JSON."""
    compact, spaced = (",", ":"), (", ", ": ")
    other = {name: arguments[name] for name in reversed(arguments)}
    for mine, others in ((spaced, compact), (compact, spaced)):
        written = json.dumps(arguments, separators=mine)
        if written in text:
            return text.replace(written, json.dumps(other, separators=others))
    return None


def oddly_split(renderer: Any, ids: Ids, *, most: int = ROOM) -> Ids:
    """The same text in more ids than the tokenizer would take: words are cut after their first letter."""
    split: list[int] = []
    n = 0
    for id in ids:
        text = renderer.decode((id,))
        pieces = (*renderer.encode(text[:1]), *renderer.encode(text[1:])) if text.isalpha() and len(text) > 1 else ()
        if n < most and pieces and renderer.decode(pieces) == text:
            split += pieces
            n += 1
        else:
            split.append(id)
    return tuple(split)
