"""The way back, on policies that are a few bytes: also when the run that serves is gone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from agenttrain.errors import PromotionError
from agenttrain.folder_hash import policy_hash
from agenttrain.gate.way_back import rolled_back
from agenttrain.prepare import model_hash
from agenttrain.promotion.ledger import Ledger
from agenttrain.promotion_record import BASE, LedgerEntry
from agenttrain.run_folder import RunFolder


class Desk:
    """The current directory, with a base and a ledger."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ledger = Ledger(folder / "promotions" / "desk")
        self.base = policy("base", folder / "desk" / "base")

    def promote(self, run_id: str, *, base: str = "desk/base") -> LedgerEntry:
        run = RunFolder(self.folder / "runs" / run_id)
        if not run.path.exists():
            policy(run_id, run.policy)
            run.write_config({"model": str(self.base)}, {"graph": str(self.folder / "desk" / "graph.py")})
        return self.ledger.append(
            "promoted",
            graph=f"{self.folder}/desk/graph.py:graph",
            run_id=run_id,
            policy=run.policy,
            weights=policy_hash(run.policy),
            base=base and self.folder / base,
            why="every rule holds",
            hashes={"model": model_hash(self.base)},
        )


def policy(note: str, folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_text(note)
    return folder


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.chdir(tmp_path)
    return Desk(tmp_path)


def test_the_base_serves_again_when_the_run_that_serves_is_gone(desk: Desk) -> None:
    """The ledger says where it stands."""
    desk.promote("desk-1")
    shutil.rmtree(desk.folder / "runs")
    (line,) = rolled_back(desk.ledger, why="complaints")
    assert (line.deed, line.run_id, line.incumbent) == ("rolled_back", BASE, "desk-1")
    assert (line.policy, line.weights) == (str(desk.base), policy_hash(desk.base))


def test_what_is_gone_too_is_passed_over_only_when_what_serves_is_gone(desk: Desk) -> None:
    """One that is there serves again, else the base; while what serves is there, nothing is passed over."""
    for run_id in ("desk-1", "desk-2", "desk-3"):
        desk.promote(run_id)
    shutil.rmtree(desk.folder / "runs" / "desk-2")
    with pytest.raises(PromotionError, match=r"desk-2 .* isn't there any more\. .* or promote another run"):
        rolled_back(desk.ledger, why="complaints")
    shutil.rmtree(desk.folder / "runs" / "desk-3")
    (line,) = rolled_back(desk.ledger, why="complaints")
    assert (line.run_id, line.why) == ("desk-1", "complaints; desk-2 is gone")
    shutil.rmtree(desk.folder / "runs")
    (line,) = rolled_back(desk.ledger, why="complaints")
    assert (line.run_id, line.why) == (BASE, "complaints")


def test_an_older_ledger_knows_the_base_from_an_earlier_way_back(desk: Desk) -> None:
    desk.promote("desk-1", base="")
    rolled_back(desk.ledger, why="complaints")
    desk.promote("desk-1", base="")
    shutil.rmtree(desk.folder / "runs")
    (line,) = rolled_back(desk.ledger, why="it is gone")
    assert line.policy == str(desk.base)


def test_an_older_ledger_knows_the_base_from_the_run(desk: Desk) -> None:
    desk.promote("desk-1", base="")
    (line,) = rolled_back(desk.ledger, why="complaints")
    assert line.policy == str(desk.base)


def test_a_base_that_is_another_by_now_does_not_serve(desk: Desk) -> None:
    desk.promote("desk-1")
    (desk.base / "pytorch_model.bin").write_text("other")
    with pytest.raises(PromotionError, match="is not as it was when that was promoted"):
        rolled_back(desk.ledger, why="complaints")
    shutil.rmtree(desk.folder / "runs")
    with pytest.raises(PromotionError, match=r"can't be found, .*desk/base, where the ledger has it, holds it no more"):
        rolled_back(desk.ledger, why="complaints")
    assert len(desk.ledger.entries()) == 1


def test_a_folder_that_is_gone_is_one_story_and_has_a_way_back(desk: Desk, command: Any) -> None:
    """--status, serve and export say the same, and --rollback works, also of the run by name."""
    desk.promote("desk-1")
    gone = desk.folder / "runs" / "desk-1" / "policy"
    shutil.rmtree(desk.folder / "runs")
    story = (
        f"desk-1 was accepted to serve by line 1 of the ledger, and its policy, {gone}, isn't there any more. Put it "
        "back from a copy, or let what was accepted before serve again: agenttrain promote --rollback."
    )
    status = command("promote", "--status")
    assert (status.code, f"\nGONE: {story}\n" in status.out) == (0, True)
    found = command("promote", "--status", "--json").json["serving"]
    assert (found["state"], found["fault"]) == ("gone", story)
    assert story in command("export", "promoted").err
    assert story in command("serve", "promoted").err
    assert command("promote", "desk-1", "--rollback").out.splitlines()[-1] == "The base serves."
    assert "fault" not in command("promote", "--status").out


def test_other_bytes_are_told_too(desk: Desk, command: Any) -> None:
    desk.promote("desk-1")
    (desk.folder / "runs" / "desk-1" / "policy" / "config.json").write_text("{ }")
    assert "\nCHANGED: desk-1 was accepted to serve by line 1" in command("promote", "--status").out


def test_what_is_not_promoted_is_not_exported(desk: Desk, command: Any) -> None:
    done = command("export", "promoted", "--json")
    assert done.json["error"]["message"] == (
        f"Nothing was promoted here: {desk.folder / 'promotions'} holds no ledger. agenttrain promote RUN begins one."
    )
