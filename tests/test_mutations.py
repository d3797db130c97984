"""Faults that would poison training, put into a copy of the source one at a time: the tests must turn red.

A test that can't fail guards nothing. Each mutation is one line of the source; when that line changes, the mutation has
to be written anew, and this file says so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """One fault, and the tests that must see it."""

    name: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]


MUTATIONS = (
    Mutation(
        name="mask shifted by one",
        file="trajectory/tree.py",
        right="response_mask=tuple(mask),",
        wrong="response_mask=tuple([*mask[1:], 0]),",
        tests=("tests/trajectory",),
    ),
    Mutation(
        name="a log probability set to 0",
        file="trajectory/tree.py",
        right="response_logprobs=tuple(logprobs),",
        wrong="response_logprobs=tuple([0.0, *logprobs[1:]]),",
        tests=("tests/trajectory",),
    ),
    Mutation(
        name="a log probability set to 0 in the sample",
        file="sample/build.py",
        right="response_logprobs=trajectory.response_logprobs,",
        wrong="response_logprobs=(0.0, *trajectory.response_logprobs[1:]),",
        tests=("tests/sample",),
    ),
    Mutation(
        name="a frozen token trained",
        file="trajectory/tree.py",
        right='if turn.role == "frozen":',
        wrong='if turn.role == "never":',
        tests=("tests/trajectory",),
    ),
    Mutation(
        name="a rollout counted twice in the update",
        file="trainer/batches.py",
        right="kept += [lesson for lesson in both if lesson.samples]",
        wrong="kept += 2 * [lesson for lesson in both if lesson.samples]",
        tests=("tests/trainer", "tests/local/test_trainer.py"),
    ),
    Mutation(
        name="a turn compared with its siblings' turns in any node",
        file="trainer/by_turn.py",
        right="for index, part in self.part_by_turn.items() if self.nodes_by_turn[index] == nodes]",
        wrong="for index, part in self.part_by_turn.items()]",
        tests=("tests/trainer/test_by_turn.py",),
    ),
    Mutation(
        name="credit of the nodes around a call lost",
        file="records.py",
        right="for node in nodes) + self.by_turn",
        wrong="for node in list(nodes)[:1]) + self.by_turn",
        tests=("tests/trainer/test_by_turn.py",),
    ),
    Mutation(
        name="a turn's credit with its first token",
        file="trainer/credit.py",
        right="last_by_turn = {turn.index: at for at, turn in enumerate(walked) if turn is not None}",
        wrong="last_by_turn = {turn.index: walked.index(turn) for turn in walked if turn is not None}",
        tests=("tests/trainer/test_by_turn.py",),
    ),
    Mutation(
        name="a rollout counted once per trajectory in the rollout mean",
        file="trainer/loss.py",
        right="n_rollouts = math.fsum(share[i] for i, n in by_rollout.items() if n)",
        wrong="n_rollouts = math.fsum(share[i] for i, n in zip(rollout_ids, n_trained, strict=True) if n)",
        tests=("tests/trainer",),
    ),
    Mutation(
        name="routed experts shifted by one",
        file="trainer/batches.py",
        right='row[: experts.end] = np.frombuffer(experts.data, "<u2").reshape(-1, *row.shape[1:])',
        wrong='row[: experts.end] = np.roll(np.frombuffer(experts.data, "<u2").reshape(-1, *row.shape[1:]), 1, axis=0)',
        tests=("tests/trainer/test_batches.py", "tests/local/test_routing.py"),
    ),
    Mutation(
        name="a branch without the experts of its history",
        file="trajectory/tree.py",
        right="return RoutedExperts.of_path(parts[::-1])",
        wrong="return RoutedExperts.of_path(parts[:1])",
        tests=("tests/trajectory",),
    ),
    Mutation(
        name="experts replayed with the weights of others",
        file="local/routing.py",
        right="torch.where(known, router.weighing.weights(logits, chosen).to(weights.dtype), weights)",
        wrong="weights",
        tests=("tests/local/test_routing.py",),
    ),
)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_source_still_has_the_line(mutation: Mutation) -> None:
    text = (SOURCE / "agenttrain" / mutation.file).read_text()
    assert text.count(mutation.right) == 1, f"{mutation.file} no longer holds {mutation.right!r} once: write it anew"


@pytest.mark.long
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_tests_see_it(mutation: Mutation, tmp_path: Path) -> None:
    """With the fault in the source, pytest fails by failed tests (exit code 1), not by an error of its own."""
    shutil.copytree(SOURCE, tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / "src" / "agenttrain" / mutation.file
    file.write_text(file.read_text().replace(mutation.right, mutation.wrong))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutation.tests],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "src"), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 1, done.stdout[-2000:]
    assert "FAILURES" in done.stdout
