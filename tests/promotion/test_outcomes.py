"""Each conversation counts once by its last word, each look is made once, whichever process comes to it."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agenttrain.errors import PromotionError
from agenttrain.promotion.canary import ArmCount
from agenttrain.promotion.outcomes import Outcomes


@pytest.fixture
def outcomes(tmp_path: Path) -> Iterator[Outcomes]:
    with closing(Outcomes(tmp_path)) as opened:
        yield opened


def count(n: int, n_success: int) -> ArmCount:
    return ArmCount(n=n, n_success=n_success)


def test_the_last_word_about_a_conversation_counts(outcomes: Outcomes, tmp_path: Path) -> None:
    """And every word is kept."""
    outcomes.record("t", "1", True, is_canary=True)
    outcomes.record("t", "1", False, is_canary=True, why="the customer called")
    outcomes.record("t", "2", True, is_canary=False)
    outcomes.record("other", "3", True, is_canary=False)
    assert outcomes.counts("t") == (count(1, 0), count(1, 1))
    with closing(sqlite3.connect(tmp_path / "canary.db")) as db:
        told = db.execute("select conversation, success, why from history where trial = 't' order by id").fetchall()
    assert told == [("1", 1, ""), ("1", 0, "the customer called"), ("2", 1, "")]


def test_runs_that_ended_count_until_somebody_says_how_one_went(outcomes: Outcomes) -> None:
    """A raised one counts in any case, and what was told is not unsaid by a run that ends."""
    for name in "abc":
        outcomes.record("t", name, True, is_canary=False, source="ended")
    outcomes.record("t", "d", False, is_canary=True, source="raised")
    assert outcomes.counts("t") == (count(1, 0), count(3, 3))
    outcomes.record("t", "a", False, is_canary=False)
    outcomes.record("t", "a", True, is_canary=False, source="ended")
    assert outcomes.counts("t") == (count(1, 0), count(1, 0))


def test_who_began_to_answer_is_kept(outcomes: Outcomes) -> None:
    """The first one, unless the conversation was noted as older than the canary."""
    outcomes.answered("t", "1", "canary")
    outcomes.answered("t", "1", "incumbent")
    outcomes.answered("t", "2", "incumbent")
    outcomes.answered("t", "3", "before")
    assert [outcomes.arm_of("t", name) for name in "1234"] == ["canary", "incumbent", "before", None]
    assert outcomes.conversations("t") == (1, 1)
    outcomes.answered("t", "3", "incumbent")
    outcomes.disown("t", ["1"])
    assert [outcomes.arm_of("t", name) for name in "13"] == ["before", "incumbent"]


def fill(outcomes: Outcomes, *, canary: ArmCount, incumbent: ArmCount, start: int = 0) -> None:
    for is_canary, arm in ((True, canary), (False, incumbent)):
        for i in range(start, arm.n):
            outcomes.record("t", f"{is_canary}-{i}", i < arm.n_success, is_canary=is_canary)


def test_a_look_is_made_once_when_it_is_due(outcomes: Outcomes) -> None:
    fill(outcomes, canary=count(9, 8), incumbent=count(90, 80))
    assert outcomes.look("t", min_outcomes=10, false_alarm=0.05) is None
    assert outcomes.looks("t") == ()
    fill(outcomes, canary=count(10, 8), incumbent=count(90, 80), start=9)
    for _ in range(2):
        assert outcomes.look("t", min_outcomes=10, false_alarm=0.05) is None
    (look,) = outcomes.looks("t")
    assert (look.number, look.canary, look.incumbent) == (1, count(10, 8), count(90, 80))


def test_a_look_that_shows_a_worse_canary_is_given_again(outcomes: Outcomes) -> None:
    """To whoever asks, until it is acted on; looks that were skipped spend nothing."""
    fill(outcomes, canary=count(40, 8), incumbent=count(90, 80))
    first = outcomes.look("t", min_outcomes=10, false_alarm=0.05)
    assert first is not None
    assert first.number == 8
    assert outcomes.look("t", min_outcomes=10, false_alarm=0.05) == first
    assert [look.number for look in outcomes.looks("t")] == [8]


WRITER = """
import sys
from pathlib import Path
from agenttrain.promotion.outcomes import Outcomes
outcomes = Outcomes(Path(sys.argv[1]))
for i in range(50):
    outcomes.record("t", f"{sys.argv[2]}-{i}", i % 2 == 0, is_canary=i < 10)
    outcomes.look("t", min_outcomes=2, false_alarm=0.05)
"""


@pytest.mark.slow
def test_several_processes_count_together(tmp_path: Path) -> None:
    """None loses a row, and no look is made twice."""
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    writers = [subprocess.Popen([*command, name]) for name in "ab"]
    assert [writer.wait() for writer in writers] == [0, 0]
    with closing(Outcomes(tmp_path)) as outcomes:
        assert outcomes.counts("t") == (count(20, 10), count(80, 40))
        numbers = [look.number for look in outcomes.looks("t")]
    assert numbers == sorted(set(numbers))


def test_a_damaged_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "canary.db").write_bytes(b"no database" * 100)
    with pytest.raises(PromotionError, match=r"canary\.db can't be used: file is not a database\. It counts how"):
        Outcomes(tmp_path)
