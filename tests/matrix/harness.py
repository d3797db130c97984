"""A graph rolled out for the support matrix: all of agenttrain is real, and a script speaks in the policy's place.

The script reads what the engine was given, decoded from its ids, and says what the policy says next; its words become
ids again by the policy's own tokenizer. So a row walks a graph where it wants, and every id it "sampled" is known.
`roll` holds what every row must keep to: no sampled id is lost, none is trained twice, and none that is frozen or of
another model is trained.
"""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agenttrain.capture.render import open_renderer
from agenttrain.capture.store import SqliteStore, read_store
from agenttrain.config import resolve
from agenttrain.graph.load import LoadedGraph
from agenttrain.graph.roles import detected_use
from agenttrain.plugins import Plugins
from agenttrain.records import Generation, Ids, RolloutRequest, RolloutResult, Sampling, Task, Turn
from agenttrain.rollout import open_runner
from agenttrain.sample.account import TokenAccount, drifted, token_account
from agenttrain.trainable import trainable, trainable_of

VERSION = 3
"""Of the weights that the script stands for."""
MESSAGE = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Seen:
    """What the engine was asked, read back from its ids."""

    text: str
    messages: tuple[tuple[str, str], ...]
    """(role, text) of each; tools stand as `name: description` lines in the first."""

    @property
    def last(self) -> str:
        """Text of the last message."""
        return self.messages[-1][1]

    @property
    def last_role(self) -> str:
        return self.messages[-1][0]

    @property
    def n_tool_results(self) -> int:
        return sum(role == "tool" for role, _ in self.messages)


Script = Callable[[Seen], str]


def call(name: str, /, **arguments: Any) -> str:
    """A tool call as the policy of these tests writes it; several are joined with a line break."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class ScriptedEngine:
    """Answers ids by a script; keeps each prompt and each answer."""

    name = "scripted"
    takes_seeds = True
    max_length = 200_000
    weight_version = VERSION

    def __init__(self, renderer: Any, script: Script) -> None:
        self._renderer, self._script, self._lock = renderer, script, threading.Lock()
        self.asked: list[tuple[str, Ids, Ids]] = []
        """(session, prompt ids, response ids) of each call."""

    def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str) -> Future[Generation]:
        text = self._renderer.decode(prompt_ids)
        said = self._script(Seen(text, tuple(MESSAGE.findall(text))))
        ids = (*self._renderer.encode(said), self._renderer.stop_ids[0])
        stop = "stop" if len(ids) <= sampling.max_tokens else "length"
        ids = ids[: sampling.max_tokens]
        with self._lock:
            self.asked.append((session, prompt_ids, ids))
        logprobs = tuple(-(((id * 31 + i * 7 + sampling.seed) % 997) + 1) / 1000 for i, id in enumerate(ids))
        answer: Future[Generation] = Future()
        answer.set_result(
            Generation(token_ids=ids, logprobs=logprobs, weight_versions=(VERSION,) * len(ids), stop_reason=stop)
        )
        return answer

    def decode(self, ids: Ids) -> str:
        return str(self._renderer.decode(ids))

    def release(self, session: str) -> None: ...

    def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        raise AssertionError("no row of the matrix trains")

    def stats(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None: ...


@dataclass(frozen=True)
class Rolled:
    """Rollouts of one row, with what stands in the store of them."""

    results: tuple[RolloutResult, ...]
    engine: ScriptedEngine
    n_escapes: int = 0
    raised: list[BaseException] = field(default_factory=list)

    @property
    def result(self) -> RolloutResult:
        (result,) = self.results
        return result

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Of all rollouts, in the order in which their calls began."""
        return tuple(turn for result in self.results for turn in result.turns)

    @property
    def roles(self) -> dict[str, int]:
        """How many turns each role has."""
        return dict(sorted(Counter(turn.role for turn in self.turns).items()))

    @property
    def places(self) -> list[tuple[str | None, str]]:
        """(node, role) of each turn."""
        return [(turn.site.node, turn.role) for turn in self.turns]

    @property
    def said(self) -> list[str]:
        """What the policy said in each of its turns, without the id that ends it."""
        ids = [turn.response_ids[:-1] for turn in self.turns if turn.role != "auxiliary"]
        return [self.engine.decode(each) for each in ids]

    @property
    def asked(self) -> list[str]:
        """The prompt of each turn of the policy, as text."""
        return [self.engine.decode(turn.prompt_ids) for turn in self.turns if turn.role != "auxiliary"]

    @property
    def account(self) -> TokenAccount:
        return token_account(self.results, [sample for result in self.results for sample in result.samples])


Roll = Callable[..., Rolled]


def full_marks(task: Task, state: Any) -> bool:
    return True


def roll_graph(
    target: Any,
    script: Script,
    *,
    model: Path,
    folder: Path,
    input: Mapping[str, Any] | None = None,
    context: Mapping[str, Any] | None = None,
    runs: int = 1,
    status: str = "completed",
    turns: int = 40,
    tables: Mapping[str, Any] | None = None,
    **decorated: Any,
) -> Rolled:
    """Roll a graph out as training does, one rollout after the other, and hold the account of its tokens.

    Args:
        target: anything that `trainable` takes.
        model: folder of the policy, whose tokenizer and template are used; its weights are not.
        runs: siblings of the one task.
        status: that each rollout must end with.
        decorated: keywords of `trainable`: frozen, auxiliary, train, setup, on_interrupt, allow_escapes, …
    """
    decorated.setdefault("verifier", full_marks)
    trainable(target, model=str(model), **decorated)
    config = resolve(
        ("the row", {"model": str(model), "limits": {"turns": turns, "tokens": 100_000, "seconds": 60}}),
        ("its tables", tables or {}),
    )
    loaded = LoadedGraph(file=Path(__file__), attribute="graph", target=target, trainable=trainable_of(target))
    renderer = open_renderer(str(model), family="default", history=config.renderer.history)
    engine, store = ScriptedEngine(renderer, script), SqliteStore(folder / "rollouts")
    task = Task(id="task", input=input or {"messages": [{"role": "user", "content": "go"}]}, context=context)
    try:
        with open_runner(
            config, loaded, renderer=renderer, store=store, plugins=Plugins.load(only="sandbox"), model_name="tiny"
        ) as runner:
            results = tuple(
                runner.run(RolloutRequest(task=task, phase="train", step=1, sibling=i, seed=7), engine)
                for i in range(runs)
            )
            rolled = Rolled(results, engine, n_escapes=runner.gate.n_escapes)
            unmatched = runner.roles.unmatched()
    finally:
        store.close()
    ended = [(result.rollout.status, result.rollout.cause) for result in results]
    assert all(each[0] == status for each in ended), ended
    assert not unmatched, unmatched
    hold_account(rolled, folder / "rollouts")
    return rolled


def hold_account(rolled: Rolled, stored: Path) -> None:
    """What every row keeps to, whatever its graph does.

    Raises:
        AssertionError: an id was lost or trained twice, or one that must not be is trained.
    """
    policy_turns = [turn for turn in rolled.turns if turn.role != "auxiliary"]
    assert Counter((turn.rollout_id, turn.prompt_ids, turn.response_ids) for turn in policy_turns) == Counter(
        rolled.engine.asked
    ), "the record is not what the engine was asked and answered"
    view = read_store(stored)
    for result in rolled.results:
        assert view.turns(result.rollout.id) == result.turns, "the store holds other turns"
        _hold_places(result)
        if result.rollout.status in ("completed", "truncated", "budget_exhausted", "policy_failure"):
            assert drifted(result.samples, {turn.id: turn for turn in result.turns}) == 0
    account = rolled.account
    assert account.sampled == sum(len(ids) for _, _, ids in rolled.engine.asked)
    frozen = sum(len(turn.response_ids) for turn in rolled.turns if turn.role == "frozen")
    assert account.frozen == frozen, "frozen tokens are somewhere else"


def _hold_places(result: RolloutResult) -> None:
    """Each policy turn lies in one trajectory; trained in full, or not at all and with a reason."""
    spans = {}
    for path in result.trajectories:
        for span in path.spans:
            assert span.turn_id not in spans, f"turn {span.turn_id} lies in two trajectories"
            spans[span.turn_id] = span, path
    for turn in result.turns:
        if turn.role == "auxiliary":
            assert turn.id not in spans, f"auxiliary turn {turn.id} lies in a trajectory"
            assert not turn.response_ids
            continue
        span, path = spans[turn.id]
        assert path.response_ids[span.start : span.end] == turn.response_ids
        mask = set(path.response_mask[span.start : span.end])
        assert mask == {1 if span.trained else 0}
        assert span.trained or span.reason, f"turn {turn.id} is not trained, for no reason"
        assert turn.role == "trained" or not span.trained, f"frozen turn {turn.id} is trained"
        assert detected_use(turn.site) is None or not span.trained or "train:" in turn.role_reason
    n_trained = sum(sum(path.response_mask) for path in result.trajectories)
    n_in_spans = sum(span.end - span.start for span, _ in spans.values() if span.trained)
    assert n_trained == n_in_spans, "an id outside of every trained turn is in the loss"


def says(*texts: str) -> Script:
    """A script that says one text after the other, whoever asks."""
    left, lock = list(texts), threading.Lock()

    def script(seen: Seen) -> str:
        with lock:
            return left.pop(0)

    return script


def names_of(turns: Sequence[Turn]) -> list[str | None]:
    return [turn.site.node for turn in turns]
