"""How many tokens does the trainer read for a rollout of many turns, and how long do its tree and samples take?

    python benchmarks/trajectory.py [--turns 1 2 4 8 16 32 64] [--json]

Rollouts are made by the real recorder, with a real tokenizer and a scripted engine, in three shapes: plain (an agent
that calls a tool at each turn), compression (every 8 turns the same model sums up, and the sum replaces the history)
and sub-agents (every 4 turns a helper with a system prompt of its own answers in 3 turns). What the local trainer lays
out for them is held against one sample per turn, and against the unique (prefix, token) nodes of all that the engine
read and sampled, which is the least that can be read. All counts are without padding. Needs no model.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from agenttrain.capture.recorder import Recorder, RecorderLimits
from agenttrain.capture.render import open_renderer
from agenttrain.capture.store import SqliteStore
from agenttrain.config import TrainerTable
from agenttrain.local.passes import SHORTEST_PREFIX
from agenttrain.protocols import Renderer
from agenttrain.records import (
    CallSite,
    Generation,
    Ids,
    ModelCall,
    Reply,
    Reward,
    Rollout,
    RolloutRequest,
    RolloutResult,
    Sampling,
    Task,
    Turn,
)
from agenttrain.sample.build import build_samples
from agenttrain.trainer.batches import Lesson, micro_batches
from agenttrain.trajectory.tree import trajectories

POLICY = Path(__file__).parents[1] / "examples" / "order-desk" / "policy"
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Find an order, with its items, their places in the store and what is known of its customer.",
        "parameters": {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]},
    },
}
SYSTEM = "You answer questions about orders. Look each order up before you say anything about it, and be brief. " * 4
HELPER = "You help another agent: find out what it asks for, and answer in one sentence. " * 4
RESULT = '{"item": "lamp", "row": 4, "colour": "green", "customer": "a school", "paid": true}'
COMPRESSED_AFTER, HELPED_AFTER, HELPER_TURNS = 8, 4, 3
Message = Mapping[str, Any]


class ScriptedEngine:
    """Calls a tool at each turn, with another order each time."""

    name, max_length, weight_version = "scripted", 10_000_000, 0

    def __init__(self) -> None:
        self._tokenizer, self._n = Tokenizer.from_file(str(POLICY / "tokenizer.json")), 0

    def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str) -> Future[Generation]:
        self._n += 1
        says = f'<tool_call>\n{{"name": "look_up", "arguments": {{"id": "A{self._n}"}}}}\n</tool_call><|im_end|>'
        ids = tuple(self._tokenizer.encode(says, add_special_tokens=False).ids)
        n, future = len(ids), Future[Generation]()
        future.set_result(Generation(token_ids=ids, logprobs=(-0.5,) * n, weight_versions=(0,) * n, stop_reason="stop"))
        return future

    def release(self, session: str) -> None: ...

    def update_weights(self, weights: Any, version: int) -> None: ...

    def stats(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None: ...


class Agent:
    """Plays the graph for one rollout."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._step = recorder, 0

    def ask(self, messages: Sequence[Message], *, around: str = "", role: Any = "trained") -> list[Message]:
        """The messages, what the policy said, and what its tool found."""
        self._step += 1
        site = CallSite(node="agent", step=self._step, task_id=f"t{self._step}", checkpoint_ns=f"{around}agent")
        call = ModelCall(messages=tuple(messages), tools=(TOOL,), site=site, role=role)
        reply = self._recorder.answer(call)
        return [*messages, *_answered(reply)]


def _answered(reply: Reply) -> list[Message]:
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
        for call in reply.tool_calls
    ]
    results = [{"role": "tool", "content": RESULT, "tool_call_id": call["id"]} for call in calls]
    return [{"role": "assistant", "content": reply.text, "tool_calls": calls}, *results]


def _opening(system: str, text: str) -> list[Message]:
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


def plain(agent: Agent, n_turns: int) -> None:
    messages = _opening(SYSTEM, "Where are my orders?")
    for _ in range(n_turns):
        messages = agent.ask(messages)


def compression(agent: Agent, n_turns: int) -> None:
    messages = _opening(SYSTEM, "Where are my orders?")
    for turn in range(1, n_turns + 1):
        messages = agent.ask(messages)
        if turn % COMPRESSED_AFTER == 0 and turn < n_turns:
            agent.ask([*messages, {"role": "user", "content": "Sum up."}], role="frozen")
            messages = _opening(SYSTEM, f"Until now {turn} orders were found, all of them in row 4. Find the others.")


def sub_agents(agent: Agent, n_turns: int) -> None:
    """Turns of both together."""
    messages, left = _opening(SYSTEM, "Where are my orders?"), n_turns
    while left > 0:
        for _ in range(min(HELPED_AFTER, left)):
            messages = agent.ask(messages)
        left -= HELPED_AFTER
        helped = _opening(HELPER, f"What is known of the last {left} orders?")
        for _ in range(max(0, min(HELPER_TURNS, left))):
            helped = agent.ask(helped, around=f"helper:{left}|")
        left -= HELPER_TURNS


SHAPES: Mapping[str, Callable[[Agent, int], None]] = {
    "plain": plain,
    "compression": compression,
    "sub-agents": sub_agents,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One rollout."""

    shape: str
    turns: int
    trajectories: int
    one_sample_per_turn: int
    nodes: int
    rows: int
    """Ids of the samples, each read by itself."""
    trainer: int
    """Ids that the local trainer reads: what several rows begin with is read once."""
    tree_ms: float
    """CPU time of tree and samples, the least of several."""


def made(shape: str, n_turns: int, renderer: Renderer) -> tuple[Turn, ...]:
    """The turns of one rollout."""
    with tempfile.TemporaryDirectory() as folder:
        store = SqliteStore(Path(folder))
        recorder = Recorder(
            request=RolloutRequest(task=Task(id="t", input={}), phase="train"),
            engine=ScriptedEngine(),
            renderer=renderer,
            store=store,
            role_of=lambda site: ("trained", ""),
            limits=RecorderLimits(),
            model_name="policy",
        )
        SHAPES[shape](Agent(recorder), n_turns)
        store.close()
        return recorder.turns


def unique_nodes(sequences: Sequence[Ids]) -> int:
    """Nodes of the trie of all sequences: each but what the one sorted before it begins with, too."""
    ordered = sorted(sequences)
    shared = sum(_n_common(a, b) for a, b in pairwise(ordered))
    return sum(map(len, ordered)) - shared


def _n_common(a: Ids, b: Ids) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def measured(shape: str, n_turns: int, renderer: Renderer) -> Row:
    turns = made(shape, n_turns, renderer)
    rollout = Rollout(
        id=turns[0].rollout_id, task_id="t", phase="train", step=0, sibling=0, attempt=0, status="completed",
        reward=Reward(score=1.0, parts=()),
    )  # fmt: skip
    times = []
    for _ in range(9):
        began = time.process_time()
        paths = trajectories(turns)
        samples = build_samples(rollout, paths)
        times.append(time.process_time() - began)
    request = RolloutRequest(task=Task(id="t", input={}), phase="train")
    result = RolloutResult(request=request, rollout=rollout, turns=turns, trajectories=paths, samples=samples)
    passes = micro_batches(
        [Lesson(result=result, advantage=1.0)],
        mean="token-mean",
        max_tokens=TrainerTable().micro_batch_tokens,
        n_workers=1,
        weight_version=0,
        padding_id=-1,
        shortest_prefix=SHORTEST_PREFIX,
    )
    whole = [turn.prompt_ids + turn.response_ids for turn in turns]
    return Row(
        shape=shape,
        turns=len(turns),
        trajectories=len(paths),
        one_sample_per_turn=sum(len(ids) for turn, ids in zip(turns, whole, strict=True) if turn.role == "trained"),
        nodes=unique_nodes(whole),
        rows=sum(len(sample.prompt_ids) + len(sample.response_ids) for sample in samples),
        trainer=sum(len(batch.prefix) + int((batch.input_ids >= 0).sum()) for batch in passes),
        tree_ms=1000 * min(times),
    )


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| shape | turns | trajectories | one sample per turn | unique nodes | rows | trainer | trainer / nodes "
        "| per turn / nodes | tree and samples |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.shape} | {row.turns} | {row.trajectories} | {row.one_sample_per_turn:,} | {row.nodes:,} "
        f"| {row.rows:,} | {row.trainer:,} | {row.trainer / row.nodes:.3f} "
        f"| {row.one_sample_per_turn / row.nodes:.1f} | {row.tree_ms:.2f} ms |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--turns", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    arguments.add_argument("--json", action="store_true")
    chosen = arguments.parse_args()
    renderer = open_renderer(str(POLICY), family="default")
    rows = [measured(shape, n, renderer) for shape in SHAPES for n in chosen.turns]
    if chosen.json:
        print(json.dumps([{name: getattr(row, name) for name in Row.__slots__} for row in rows]))
    else:
        print(table(rows))


if __name__ == "__main__":
    main()
