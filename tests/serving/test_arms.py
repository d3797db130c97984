"""What answers a conversation is what the ledger says by now; no policy is loaded for that."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import agenttrain
from agenttrain.errors import PromotionError, RunError
from agenttrain.folder_hash import policy_hash
from agenttrain.promotion.canary import draws_canary
from agenttrain.promotion.ledger import Ledger, canary_now
from agenttrain.promotion.outcomes import Outcomes
from agenttrain.promotion_record import BASE, LedgerEntry
from agenttrain.serving.arm import OneRun
from agenttrain.serving.arms import LedgerArms, ledger_named, open_arms
from agenttrain.serving.attached import open_serving
from agenttrain.serving.served_policy import served_policies

CANARY = "[canary]\nmin_outcomes = 4\n"


class Desk:
    """A folder with runs and a ledger, the current directory; a policy is its config.json and a note."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ledger = Ledger(folder / "promotions" / "desk")
        self.policy("base", folder / "base")

    def policy(self, note: str, folder: Path) -> Path:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "pytorch_model.bin").write_text(note)
        return folder

    def run(self, run_id: str, *, settings: str = CANARY) -> Path:
        policy = self.policy(run_id, self.folder / "runs" / run_id / "policy")
        (policy.parent / "config.toml").write_text(f'model = "{self.folder / "base"}"\n{settings}')
        return policy

    def do(self, deed: Any, run_id: str, *, share: float | None = None, settings: str = CANARY) -> LedgerEntry:
        """Write a line about a run, which is made."""
        policy = self.folder / "runs" / run_id / "policy"
        if not policy.exists():
            self.run(run_id, settings=settings)
        weights = policy_hash(policy)
        graph = f"{self.folder / 'graph.py'}:graph"
        return self.ledger.append(
            deed, graph=graph, run_id=run_id, policy=policy, weights=weights, why="because", share=share
        )

    def arms(self, **options: Any) -> LedgerArms:
        arms = LedgerArms(self.ledger.folder, **options)
        arms.hold()
        return arms


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    monkeypatch.chdir(tmp_path)
    yield Desk(tmp_path)
    assert not served_policies


def run_of(arms: LedgerArms, conversation: str) -> str:
    return arms.arm_for(conversation).source.run_id


def drawn(entry: LedgerEntry, *, share: float = 0.5) -> tuple[str, str]:
    """(a conversation that the canary draws, one that it doesn't)."""
    names = [f"c{i}" for i in range(50)]
    drawn = {name: draws_canary(name, salt=entry.hash, share=share) for name in names}
    return next(n for n in names if drawn[n]), next(n for n in names if not drawn[n])


def test_new_conversations_follow_the_ledger_and_old_ones_stay(desk: Desk) -> None:
    desk.do("promoted", "desk-1")
    with closing(desk.arms()) as arms:
        assert run_of(arms, "a") == "desk-1"
        desk.do("promoted", "desk-2")
        assert [run_of(arms, name) for name in "aba"] == ["desk-1", "desk-2", "desk-1"]
        desk.do("rolled_back", "desk-1")
        assert [run_of(arms, name) for name in "abc"] == ["desk-1", "desk-2", "desk-1"]


def test_a_policy_that_no_conversation_needs_is_let_go(desk: Desk) -> None:
    """At once when its runs were conversations of their own, else after a while; never during a run."""
    desk.do("promoted", "desk-1")
    with closing(desk.arms()) as arms:
        arm = arms.begun("run-1")
        desk.do("promoted", "desk-2")
        arms.arm_for("b")
        assert served() == ["desk-1", "desk-2"]
        assert run_of(arms, "run-1") == "desk-1"
        arms.ended("run-1", arm, is_single=True)
        wait_for(["desk-2"])
    with closing(desk.arms(idle_s=0.0)) as arms:
        arms.arm_for("thread")
        desk.do("promoted", "desk-3")
        arms.arm_for("other")
        wait_for(["desk-3"])
        assert run_of(arms, "thread") == "desk-3"
        arms.arm_for("last")
        assert list(arms.incumbent.heard) == []


def served() -> list[str]:
    return sorted(each.source.run_id for each in served_policies.values())


def wait_for(run_ids: list[str]) -> None:
    """Policies are let go on a thread of their own."""
    for thread in threading.enumerate():
        if thread.name == "agenttrain-unload":
            thread.join()
    assert served() == run_ids


def test_without_a_promotion_the_base_serves(desk: Desk) -> None:
    entry = desk.do("canary", "desk-1", share=0.5)
    with closing(desk.arms()) as arms:
        assert arms.incumbent.source.policy == desk.folder / "base"
        assert arms.incumbent.source.run_id == BASE
        assert [run_of(arms, name) for name in drawn(entry)] == ["desk-1", BASE]


def test_the_base_is_gone_back_to_when_the_run_that_served_is_gone(desk: Desk) -> None:
    """By the agenttrain.toml of its graph, since no run says how it is asked; a server that runs changes over."""
    desk.do("promoted", "desk-1")
    (desk.folder / "agenttrain.toml").write_text("[limits]\ntokens = 77\n")
    with closing(desk.arms()) as arms:
        shutil.rmtree(desk.folder / "runs")
        base, graph = desk.folder / "base", f"{desk.folder / 'graph.py'}:graph"
        line = {"policy": base, "weights": policy_hash(base), "why": "it is gone"}
        desk.ledger.append("rolled_back", graph=graph, run_id=BASE, **line)
        assert run_of(arms, "new") == BASE
        assert arms.incumbent.source.policy == base
        assert arms.incumbent.source.config.limits.tokens == 77


def test_the_base_of_a_project_that_was_moved_serves(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's config.toml names the base where it was; it stands beside graph.py, and moved with it."""
    desk.do("canary", "desk-1", share=0.5)
    config = desk.folder / "runs" / "desk-1" / "config.toml"
    config.write_text(f'{config.read_text()}[provenance]\ngraph = "{desk.folder / "graph.py"}"\n')
    moved = tmp_path.with_name(f"{tmp_path.name}-moved")
    shutil.move(tmp_path, moved)
    monkeypatch.chdir(moved)
    with closing(LedgerArms(moved / "promotions" / "desk")) as arms:
        arms.hold()
        assert arms.incumbent.source.policy == moved / "base"
        assert arms.incumbent.source.graph_file == moved / "graph.py"


def test_after_a_rollback_of_the_first_promotion_the_base_serves(desk: Desk) -> None:
    desk.do("promoted", "desk-1")
    base, graph = desk.folder / "base", f"{desk.folder / 'graph.py'}:graph"
    desk.ledger.append("rolled_back", graph=graph, run_id=BASE, policy=base, weights=policy_hash(base), why="")
    with closing(desk.arms()) as arms:
        assert (run_of(arms, "a"), arms.incumbent.source.policy) == (BASE, base)


def test_every_process_draws_the_same_conversations(desk: Desk) -> None:
    """As many as the share says, by the hash of the canary's line."""
    desk.do("promoted", "desk-1")
    entry = desk.do("canary", "desk-2", share=0.5)
    names = [f"c{i}" for i in range(40)]
    with closing(desk.arms()) as one, closing(desk.arms()) as other:
        by_one = [run_of(one, name) for name in names]
        assert by_one == [run_of(other, name) for name in reversed(names)][::-1]
    expected = ["desk-2" if draws_canary(n, salt=entry.hash, share=0.5) else "desk-1" for n in names]
    assert by_one == expected


def test_conversations_of_a_canary_that_ended_go_to_the_incumbent(desk: Desk) -> None:
    desk.do("promoted", "desk-1")
    with closing(desk.arms()) as arms:
        mine, _ = drawn(desk.do("canary", "desk-2", share=0.5))
        assert run_of(arms, mine) == "desk-2"
        desk.do("taken_back", "desk-2")
        assert run_of(arms, mine) == "desk-1"
        assert arms.trial is None


def test_conversations_of_a_canary_that_is_promoted_stay_with_its_policy(desk: Desk) -> None:
    desk.do("promoted", "desk-1")
    with closing(desk.arms()) as arms:
        mine, _ = drawn(desk.do("canary", "desk-2", share=0.5))
        policy = arms.arm_for(mine).policy
        desk.do("promoted", "desk-2")
        assert arms.arm_for(mine).policy is policy
        assert not arms.arm_for(mine).is_canary


def test_a_conversation_that_is_older_than_the_canary_counts_for_nobody(desk: Desk) -> None:
    desk.do("promoted", "desk-1")
    with closing(desk.arms()) as arms:
        arms.arm_for("old")
        desk.do("canary", "desk-2", share=0.5)
        arms.arm_for("old")
        arms.arm_for("new")
        assert arms.trial is not None
        assert [arms.trial.record(name, True) for name in ("old", "new")] == [False, True]
        assert sum(count.n for count in arms.trial.outcomes.counts(arms.trial.id)) == 1


def test_one_that_was_answered_before_the_canary_began_and_not_since_counts_for_nobody(desk: Desk) -> None:
    """Its outcome comes later, from whatever process, and its hash alone says nothing of who answered."""
    desk.do("promoted", "desk-1")
    with closing(desk.arms()) as arms:
        names = [f"c{i}" for i in range(20)]
        for name in names:
            arms.arm_for(name)
        desk.do("canary", "desk-2", share=0.5)
        assert [agenttrain.record_outcome(name, False) for name in names] == [False] * 20


def test_a_process_that_answered_nobody_since_counts_outcomes_too(desk: Desk) -> None:
    """One worker answers, another one is told how it went."""
    desk.do("promoted", "desk-1")
    with closing(open_serving("promoted")) as one, closing(open_serving("promoted")) as other:
        desk.do("canary", "desk-2", share=0.5)
        one.served("c")
        assert other.record_outcome("c", True)
        desk.do("taken_back", "desk-2")
        assert not one.record_outcome("c", True)


def test_a_changed_policy_is_refused(desk: Desk) -> None:
    """An incumbent before anything starts; a canary is not tried, and nothing of this process counts."""
    desk.do("promoted", "desk-1")
    mine, other = drawn(desk.do("canary", "desk-2", share=0.5))
    (desk.folder / "runs" / "desk-2" / "policy" / "pytorch_model.bin").write_text("other")
    with closing(desk.arms()) as arms:
        arm = arms.arm_for(mine)
        with pytest.raises(PromotionError, match=r"desk-2/policy, is not as it was accepted: its hash"):
            arm.calls()
        arms.refuse(arm, PromotionError("so"))
        assert run_of(arms, mine) == "desk-1"
        assert arms.trial is not None
        arms.arm_for(other)
        assert [arms.trial.record(name, False) for name in (mine, other)] == [False, False]
    (desk.folder / "runs" / "desk-1" / "policy" / "pytorch_model.bin").write_text("other")
    with pytest.raises(PromotionError, match=r"desk-1/policy, is not as it was .* agenttrain promote --roll"):
        LedgerArms(desk.ledger.folder)


def test_a_damaged_ledger_is_refused_and_leaves_what_serves_as_it_was(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    desk.do("promoted", "desk-1")
    with closing(desk.arms()) as arms:
        desk.ledger.file.write_bytes(desk.ledger.file.read_bytes().replace(b"because", b"Because"))
        assert run_of(arms, "a") == "desk-1"
        assert "can't be followed, and all stays as it was" in caplog.text
    with pytest.raises(PromotionError, match=r"ledger.jsonl:1 was changed"):
        LedgerArms(desk.ledger.folder)


def test_what_could_not_be_taken_over_is_tried_again(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    """The folder of a run may come after its line; it is told once."""
    desk.do("promoted", "desk-1")
    with closing(desk.arms(again_s=0.0)) as arms:
        away = desk.folder / "away"
        desk.do("promoted", "desk-2")
        (desk.folder / "runs" / "desk-2").rename(away)
        assert [run_of(arms, name) for name in "ab"] == ["desk-1", "desk-1"]
        assert caplog.text.count("can't be followed, and all stays as it was") == 1
        away.rename(desk.folder / "runs" / "desk-2")
        assert run_of(arms, "c") == "desk-2"


def test_a_canary_whose_tools_cannot_be_held_back_is_not_tried(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    desk.do("promoted", "desk-1")
    mine, _ = drawn(desk.do("canary", "desk-2", share=0.5, settings=f'{CANARY}tools = "stand_in"\n'))
    with closing(desk.arms()) as arms:
        assert run_of(arms, mine) == "desk-1"
        assert "only agenttrain.attach can have them do so" in caplog.text
    with closing(desk.arms(holds_back=True)) as arms:
        assert run_of(arms, mine) == "desk-2"


def test_what_is_not_served_any_more_answers_nobody(desk: Desk) -> None:
    desk.do("promoted", "desk-1")
    arms = desk.arms()
    arms.close()
    with pytest.raises(RunError, match=r"promotions/desk is not served any more: close\(\) was called"):
        arms.arm_for("a")


def test_what_stands_for_a_ledger(desk: Desk) -> None:
    desk.do("promoted", "desk-1")
    for name in ("promoted", "promoted:desk", "promotions/desk", str(desk.ledger.folder)):
        assert ledger_named(name) in (Path("promotions/desk"), desk.ledger.folder)
    assert ledger_named("desk-1") is None
    assert isinstance(open_arms("desk-1"), OneRun)
    shutil.copytree(desk.ledger.folder, desk.folder / "promotions" / "shop")
    assert ledger_named("promoted", beside="shop") == Path("promotions/shop")
    with pytest.raises(PromotionError, match=r"'promoted' names several ledgers\. .*: desk, shop\. Write 'promoted:N"):
        ledger_named("promoted")
    with pytest.raises(PromotionError, match="'promoted:shopp' names no ledger"):
        ledger_named("promoted:shopp")


def test_without_a_ledger_it_is_said_how_one_begins(desk: Desk) -> None:
    with pytest.raises(PromotionError, match=r"'promoted' names no ledger\. There is none in .*agenttrain promote RUN"):
        agenttrain.use("promoted")


def test_a_canary_that_does_worse_is_taken_back_once(desk: Desk) -> None:
    """By whichever process counts the outcome that shows it; both then have the incumbent answer."""
    desk.do("promoted", "desk-1")
    entry = desk.do("canary", "desk-2", share=0.5)
    mine, _ = drawn(entry)
    with closing(desk.arms()) as one, closing(desk.arms()) as other:
        assert [run_of(arms, mine) for arms in (one, other)] == ["desk-2", "desk-2"]
        assert one.trial is not None
        assert other.trial is not None
        for i in range(60):
            for trial in (one.trial, other.trial):
                trial.answered(f"c{i}", "canary" if draws_canary(f"c{i}", salt=entry.hash, share=0.5) else "incumbent")
                trial.record(f"c{i}", not draws_canary(f"c{i}", salt=entry.hash, share=0.5))
        deeds = [line.deed for line in desk.ledger.entries()]
        assert deeds == ["promoted", "canary", "taken_back"]
        assert [run_of(arms, mine) for arms in (one, other)] == ["desk-1", "desk-1"]
    why = desk.ledger.entries()[-1].why
    assert why.startswith("Taken back by itself: the canary succeeded in 0 of ")
    assert "the incumbent in " in why


TELLS = """
import sys
from contextlib import closing
from pathlib import Path
import agenttrain
from agenttrain.promotion.canary import draws_canary
from agenttrain.serving.arms import LedgerArms
with closing(LedgerArms(Path("promotions/desk"))) as arms:
    arms.hold()
    for i in range(30):
        name = f"{sys.argv[1]}-{i}"
        arms.arm_for(name)
        agenttrain.record_outcome(name, not draws_canary(name, salt=sys.argv[2], share=0.5))
"""


@pytest.mark.slow
def test_several_processes_take_it_back_once(desk: Desk) -> None:
    desk.do("promoted", "desk-1")
    salt = desk.do("canary", "desk-2", share=0.5).hash
    tellers = [subprocess.Popen([sys.executable, "-c", TELLS, name, salt]) for name in "ab"]
    assert [teller.wait() for teller in tellers] == [0, 0]
    assert [line.deed for line in desk.ledger.entries()] == ["promoted", "canary", "taken_back"]


def test_a_decision_that_was_not_written_is_made_up_for(desk: Desk) -> None:
    """A process that is killed between its look and its line: the next outcome writes it."""
    desk.do("promoted", "desk-1")
    entry = desk.do("canary", "desk-2", share=0.5)
    with closing(Outcomes(desk.ledger.folder)) as outcomes:
        for i in range(40):
            outcomes.record(entry.hash, f"x{i}", i % 2 == 0, is_canary=i % 2 == 1)
        assert outcomes.look(entry.hash, min_outcomes=4, false_alarm=0.05) is not None
    with closing(desk.arms()) as arms:
        arms.arm_for("y")
        assert agenttrain.record_outcome("y", True)
    assert canary_now(desk.ledger.entries()) is None


def test_one_that_ended_meanwhile_is_not_taken_back(desk: Desk) -> None:
    """The line of a promotion is the last."""
    desk.do("promoted", "desk-1")
    entry = desk.do("canary", "desk-2", share=0.5)
    with closing(desk.arms()) as arms:
        trial = arms.trial
        assert trial is not None
        for i in range(60):
            arms.arm_for(f"c{i}")
        desk.do("promoted", "desk-2")
        for i in range(60):
            assert trial.record(f"c{i}", not draws_canary(f"c{i}", salt=entry.hash, share=0.5))
    assert [line.deed for line in desk.ledger.entries()] == ["promoted", "canary", "promoted"]


def test_outcomes_are_counted_from_any_process(desk: Desk) -> None:
    """Without a canary they are not; what isn't known is none."""
    desk.do("promoted", "desk-1")
    assert not agenttrain.record_outcome("a", True)
    desk.do("canary", "desk-2", share=0.25)
    with closing(desk.arms()) as arms:
        for name in "abc":
            arms.arm_for(name)
        assert agenttrain.record_outcome("a", 1.0, why="paid")
        assert agenttrain.record_outcome("b", 0.9, run="promotions/desk")
        assert not agenttrain.record_outcome("c", None)
        assert not agenttrain.record_outcome("nobody's", True)
        with pytest.raises(PromotionError, match=r"'desk-1' is no ledger\. Write 'promoted'"):
            agenttrain.record_outcome("a", True, run="desk-1")
        for wrong in ("yes", float("nan")):
            with pytest.raises(PromotionError, match=f"is {wrong!r}, which is neither a bool nor a number"):
                agenttrain.record_outcome("c", wrong)  # type: ignore[arg-type]
        assert arms.trial is not None
        told = arms.trial.describe()
    counts = told["outcomes"].values()
    assert (sum(c["n"] for c in counts), sum(c["successes"] for c in counts)) == (2, 1)
    assert (told["run_id"], told["share"], told["tools"]) == ("desk-2", 0.25, "marked")
