"""A graph with two trained conversations and a summary: what one group was trained on, by hand and from the run.

    python integrations/agenttrain-verl/benchmarks/second_graph.py [--trainer local] [--task desk-08 --step 2] [--all]

Trains tests/graphs/summarizing for two steps in a folder of its own, or reads a run of it. By hand: each token that the
nodes `look` and `reply` sampled, with its rollout's distance from the group's mean reward over the group's deviation;
the tokens of `summarize` are listed too, at mask 0. From the run: ids, log probabilities, masks and advantages as the
trainer handed them to its loss. Prints the run's account of tokens, a table of them (`--all`: else the first and last
of each conversation), and how many are equal; exits 1 when one is not.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from agenttrain.capture.store import StoreView, read_store
from agenttrain.records import Rollout, Turn
from agenttrain.run_folder import RunFolder
from agenttrain.testing.toy import ToyProject

ROOT = Path(__file__).parents[3]
GRAPH = ROOT / "integrations" / "agenttrain-verl" / "tests" / "graphs" / "summarizing"
POLICY = ROOT / "examples" / "order-desk" / "policy"
TRAINED_NODES = ("look", "reply")
LARGEST = 1e-6
"""Difference of advantages, which are of the size of 1; veRL computes them in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token that was trained."""

    rollout_id: str
    conversation: int
    """0: the lookups; 1: the reply."""
    id: int
    logprob: float
    advantage: float


def copied(folder: Path) -> ToyProject:
    """The graph in a folder that may be written to."""
    shutil.copytree(GRAPH, folder)
    return ToyProject(folder)


def in_units_of_deviation(rewards: Sequence[float]) -> list[float]:
    """GRPO's advantages: the distance from the group's mean over its standard deviation."""
    mean = sum(rewards) / len(rewards)
    deviation = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    return [(reward - mean) / deviation for reward in rewards]


def group_of(store: StoreView, task_id: str, *, step: int = 1) -> list[Rollout]:
    """The rollouts of one group that have a reward, by sibling."""
    group = [r for r in store.rollouts() if (r.phase, r.step, r.task_id) == ("train", step, task_id)]
    return sorted((r for r in group if r.reward is not None), key=lambda r: r.sibling)


def teaches(group: Sequence[Rollout]) -> bool:
    """Whether its rewards differ."""
    return len({rollout.reward.score for rollout in group if rollout.reward is not None}) > 1


def by_hand(store: StoreView, group: Sequence[Rollout]) -> list[Token]:
    """What ought to be trained: every token that `look` and `reply` sampled, and nothing else."""
    advantages = in_units_of_deviation([rollout.reward.score for rollout in group if rollout.reward is not None])
    tokens = []
    for rollout, advantage in zip(group, advantages, strict=True):
        for turn in store.turns(rollout.id):
            if turn.site.node in TRAINED_NODES:
                tokens += _tokens_of(turn, advantage)
    return tokens


def _tokens_of(turn: Turn, advantage: float) -> list[Token]:
    place: dict[str, Any] = {
        "rollout_id": turn.rollout_id,
        "conversation": int(turn.site.node == "reply"),
        "advantage": advantage,
    }
    both = zip(turn.response_ids, turn.response_logprobs, strict=True)
    return [Token(id=id, logprob=logprob, **place) for id, logprob in both]


def from_run(store: StoreView, group: Sequence[Rollout]) -> list[Token]:
    """What the trainer handed to its loss."""
    tokens = []
    for rollout in group:
        for conversation, row in enumerate(store.trained(rollout.id)):
            sample = row.sample
            columns = (sample.response_ids, sample.response_logprobs, row.advantages, sample.response_mask)
            tokens += [
                Token(rollout_id=rollout.id, conversation=conversation, id=id, logprob=logprob, advantage=advantage)
                for id, logprob, advantage, mask in zip(*columns, strict=True)
                if mask
            ]
    return tokens


def is_equal(ours: Token, theirs: Token) -> bool:
    """The same token at the same place, log probability to the bit, and the advantage as float32 has it."""
    where = [(t.rollout_id, t.conversation, t.id, t.logprob) for t in (ours, theirs)]
    return where[0] == where[1] and abs(ours.advantage - theirs.advantage) <= LARGEST


# ── the table ────────────────────────────────────────────────────────────────────────────────────────────────────────


def table(store: StoreView, group: Sequence[Rollout], decode: Any, *, shows_all: bool) -> Iterator[str]:
    """Markdown: a line for each trained token, and for each summary."""
    yield "| rollout | conversation | token | id | log probability | mask | advantage by hand | from the run | equal |"
    yield "|---|---|---|---|---|---|---|---|---|"
    pairs = zip(by_hand(store, group), from_run(store, group), strict=True)
    for (rollout_id, conversation), tokens in groupby(pairs, key=lambda pair: _place(pair[0])):
        if conversation:
            yield _summary_line(store, rollout_id)
        lines = [_line(ours, theirs, decode) for ours, theirs in tokens]
        short = (
            lines
            if shows_all or len(lines) < 6
            else [*lines[:2], f"| | | … {len(lines) - 4} more | | | | | | |", *lines[-2:]]
        )
        yield from short


def _place(token: Token) -> tuple[str, int]:
    return token.rollout_id, token.conversation


def _line(ours: Token, theirs: Token, decode: Any) -> str:
    text = repr(decode([ours.id])).replace("|", "\\|")
    name = ("lookups", "reply")[ours.conversation]
    equal = "yes" if is_equal(ours, theirs) else "NO"
    return (
        f"| {ours.rollout_id} | {name} | `{text}` | {ours.id} | {theirs.logprob:.6f} | 1 | {ours.advantage:+.6f} | "
        f"{theirs.advantage:+.6f} | {equal} |"
    )


def _summary_line(store: StoreView, rollout_id: str) -> str:
    n = sum(len(turn.response_ids) for turn in store.turns(rollout_id) if turn.site.node == "summarize")
    return f"| {rollout_id} | summary | {n} tokens | | | 0 | none | none | |"


def told_of(store: StoreView, task_id: str, *, step: int, shows_all: bool) -> bool:
    """Print one group; whether all its tokens are equal."""
    from transformers import AutoTokenizer

    group = group_of(store, task_id, step=step)
    for rollout in group:
        assert rollout.reward is not None
        print(f"{rollout.id}: reward {rollout.reward.score:.6f}")
    print()
    print(*table(store, group, AutoTokenizer.from_pretrained(POLICY).decode, shows_all=shows_all), sep="\n")
    pairs = list(zip(by_hand(store, group), from_run(store, group), strict=True))
    n_equal = sum(is_equal(ours, theirs) for ours, theirs in pairs)
    print(f"\n{n_equal} of {len(pairs)} tokens of {task_id} are equal.")
    return n_equal == len(pairs)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--trainer", choices=("local", "verl"), default="verl")
    options.add_argument("--task", help="the group; else the first that teaches")
    options.add_argument("--step", type=int, default=1)
    options.add_argument("--all", action="store_true", help="every token")
    options.add_argument("--run", type=Path, help="the folder of a run of this graph that has ended")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = RunFolder(chosen.run) if chosen.run else _trained(Path(name), chosen.trainer)
        store, report = read_store(folder.rollouts), folder.read_report() or {}
        print(json.dumps({figure: report.get(figure) for figure in ("tokens", "logprob_gap")}), end="\n\n")
        tasks = dict.fromkeys(r.task_id for r in store.rollouts() if (r.phase, r.step) == ("train", chosen.step))
        task = chosen.task or next(task for task in sorted(tasks) if teaches(group_of(store, task, step=chosen.step)))
        return int(not told_of(store, task, step=chosen.step, shows_all=chosen.all))


def _trained(folder: Path, trainer: str) -> RunFolder:
    run = copied(folder / "summarizing").fit(
        model=str(POLICY), engine={"process": "shared"}, eval={"tasks": 2}, trainer={"name": trainer, "steps": 2}
    )
    return run.folder


if __name__ == "__main__":
    sys.exit(main())
