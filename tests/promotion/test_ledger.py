"""The ledger: what serves, and lines that nobody changes unseen."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agenttrain.errors import PromotionError
from agenttrain.promotion.ledger import Ledger, before_now, canary_now, ledger_folder, serving_now
from agenttrain.promotion_record import BASE, Deed, LedgerEntry, RuleResult

RULE = RuleResult(rule="difference", passed=True, figure="+0.130", bound="above 0")


def ledger_of(root: Path, n_lines: int = 3) -> Ledger:
    """A ledger of so many promotions: run-1, run-2 …"""
    ledger = Ledger(ledger_folder(root, "desk"))
    for number in range(1, n_lines + 1):
        added(ledger, "promoted", f"run-{number}")
    return ledger


def added(ledger: Ledger, deed: Deed, run_id: str) -> LedgerEntry:
    root = ledger.folder.parent.parent
    return ledger.append(
        deed,
        graph=f"{root}/desk/graph.py:graph",
        run_id=run_id,
        policy=root / "runs" / run_id / "policy",
        weights="ab" * 32,
        why="it is better",
        by="ada@atlas",
        results=[RULE],
        hashes={"graph": "12", "renderer": None},
        versions={"agenttrain": "0.1"},
    )


def lines_of(ledger: Ledger) -> list[bytes]:
    return ledger.file.read_bytes().splitlines(keepends=True)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """Every field, in order, each line with the hash of the one before."""
    ledger = Ledger(ledger_folder(tmp_path, "desk"))
    assert ledger.folder == tmp_path / "promotions" / "desk"
    assert ledger.entries() == ()
    first, second = added(ledger, "promoted", "run-1"), added(ledger, "canary", "run-2")
    assert ledger.entries() == (first, second)
    assert (first.number, first.deed, first.run_id, first.previous) == (1, "promoted", "run-1", "")
    assert (second.number, second.previous) == (2, first.hash)
    assert first.results == (RULE,)
    assert first.hashes == {"graph": "12", "renderer": None}
    assert first.policy == str(tmp_path / "runs" / "run-1" / "policy")


def test_a_line_of_before_bases_were_noted_is_read(tmp_path: Path) -> None:
    """And one that follows on it holds its hash, as ever."""
    ledger = ledger_of(tmp_path, 1)
    content = json.loads(ledger.file.read_text())
    del content["base"], content["hash"]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    line = json.dumps({**content, "hash": digest}, sort_keys=True, separators=(",", ":"))
    ledger.file.write_text(f"{line}\n")
    ledger.head.write_text(f"1 {digest}\n")
    added(ledger, "promoted", "run-2")
    first, second = ledger.entries()
    assert (first.base, first.hash, second.previous) == ("", digest, digest)


def test_a_base_inside_of_the_project_moves_with_it(tmp_path: Path) -> None:
    ledger = Ledger(ledger_folder(tmp_path / "a", "desk"))
    line = {"graph": "/g.py:graph", "run_id": "r", "weights": "w", "why": ""}
    ledger.append("promoted", policy=tmp_path / "a" / "p", base=tmp_path / "a" / "base", **line)
    shutil.move(tmp_path / "a", tmp_path / "b")
    (entry,) = Ledger(ledger_folder(tmp_path / "b", "desk")).entries()
    assert entry.base == str(tmp_path / "b" / "base")


def test_who_wrote_is_told_where_nobody_says_it(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    entry = ledger.append("promoted", graph="/g.py:graph", run_id="a", policy="/p", weights="w", why="")
    user, _, machine = entry.by.partition("@")
    assert user
    assert machine


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Ledger:
    """Three lines; not to be changed."""
    return ledger_of(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Ledger:
    """Where a test puts changed files."""
    ledger = Ledger(ledger_folder(tmp_path_factory.mktemp("damaged"), "desk"))
    ledger.folder.mkdir(parents=True)
    return ledger


def put(content: bytes, into: Ledger, *, whole: Ledger, name: str = "ledger.jsonl") -> None:
    """The whole ledger, with one of its files as given."""
    for file in (whole.file, whole.head):
        (into.folder / file.name).write_bytes(content if file.name == name else file.read_bytes())


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_any_changed_byte_is_found(whole: Ledger, damaged: Ledger, data: st.DataObject) -> None:
    """Replaced, taken out or put in, anywhere in both files."""
    file = data.draw(st.sampled_from([whole.file, whole.head]))
    before = file.read_bytes()
    at = data.draw(st.integers(0, len(before) - 1))
    new = data.draw(st.binary(max_size=1).filter(lambda byte: byte != before[at : at + 1]))
    width = data.draw(st.sampled_from([0, 1])) if new else 1
    content = before[:at] + new + before[at + width :]
    put(content, damaged, whole=whole, name=file.name)
    with pytest.raises(PromotionError, match=r"ledger\.(jsonl:\d|head)"):
        damaged.entries()


@pytest.mark.parametrize(
    ("order", "line", "what"),
    [
        ((0, 2), 2, "a line was taken out, put in or moved"),
        ((1, 2), 1, "a line was taken out, put in or moved"),
        ((0, 2, 1), 2, "a line was taken out, put in or moved"),
        ((0, 1, 1, 2), 3, "a line was taken out, put in or moved"),
        ((0, 1), 3, "is cut or missing: ledger.head says that it was written whole"),
        ((), 1, "is cut or missing"),
    ],
)
def test_lines_taken_out_put_in_or_moved_are_told_by_number(
    whole: Ledger, damaged: Ledger, order: Sequence[int], line: int, what: str
) -> None:
    lines = lines_of(whole)
    put(b"".join(lines[index] for index in order), damaged, whole=whole)
    with pytest.raises(PromotionError) as refused:
        damaged.entries()
    said = str(refused.value)
    assert f"ledger.jsonl:{line} " in said
    assert what in said
    assert ("Lines 1 to" in said) == (line > 1)
    with pytest.raises(PromotionError):
        added(damaged, "promoted", "run-4")  # nothing is added to what is damaged


def test_a_line_of_another_content_is_told(whole: Ledger, damaged: Ledger) -> None:
    """Also where it is as well formed as before."""
    put(whole.file.read_bytes().replace(b'"run_id":"run-2"', b'"run_id":"run-7"'), damaged, whole=whole)
    with pytest.raises(
        PromotionError, match=r"ledger\.jsonl:2 was changed after it was written.*Lines 1 to 1 are sound"
    ):
        damaged.entries()


def test_a_number_that_became_too_large_is_told(whole: Ledger, damaged: Ledger) -> None:
    """One byte, and the time of a line is no number that JSON can hold."""
    first, *others = lines_of(whole)
    at = first.index(b".")
    put(b"".join([first[:at] + b"e" + first[at + 1 :], *others]), damaged, whole=whole)
    with pytest.raises(PromotionError, match=r"ledger\.jsonl:1 is no JSON"):
        damaged.entries()


def test_an_end_that_was_whole_once_is_missed(whole: Ledger, damaged: Ledger) -> None:
    """A last line that is cut, and a head that is lost: the message says what may be put there."""
    put(whole.file.read_bytes()[:-20], damaged, whole=whole)
    with pytest.raises(PromotionError, match=r"ledger\.jsonl:3 is cut or missing"):
        damaged.entries()
    put(b"", damaged, whole=whole, name="ledger.head")
    damaged.head.unlink()
    with pytest.raises(PromotionError, match=r"ledger\.head is missing") as refused:
        damaged.entries()
    damaged.head.write_text(str(refused.value).rpartition("into it: ")[2] + "\n")
    assert len(damaged.entries()) == 3


def test_a_newer_ledger_is_refused(whole: Ledger, damaged: Ledger) -> None:
    put(whole.file.read_bytes().replace(b'"version":1', b'"version":2', 1), damaged, whole=whole)
    with pytest.raises(
        PromotionError, match=r"ledger\.jsonl:1 is of ledger version 2, and this agenttrain reads up to 1"
    ):
        damaged.entries()


def test_a_line_that_lacks_what_a_line_says_is_told(tmp_path: Path) -> None:
    """Its hash holds, so somebody meant it."""
    ledger = Ledger(tmp_path)
    content = b'{"version":1}'
    line = {"hash": hashlib.sha256(content).hexdigest(), "version": 1}
    ledger.file.write_text(json.dumps(line, separators=(",", ":")) + "\n")
    with pytest.raises(PromotionError, match=r"ledger.jsonl:1 is no line of a ledger: it lacks at, by, deed, graph, "):
        ledger.entries()


def test_a_last_line_that_ends_and_is_no_json_is_damage(whole: Ledger, damaged: Ledger) -> None:
    """Only what lacks its newline was not finished; and the way on leaves the regression set where it is."""
    put(whole.file.read_bytes() + b'{"deed":"prom\n', damaged, whole=whole)
    with pytest.raises(
        PromotionError, match=r"ledger\.jsonl:4 is no JSON\. .* move ledger\.jsonl and ledger\.head aside"
    ):
        damaged.entries()
    assert damaged.unfinished() == ""


def test_a_line_that_was_not_finished_is_no_line_and_is_kept(tmp_path: Path) -> None:
    """A process was killed in it: it is told, nothing else is in doubt, and the next line puts its bytes aside."""
    ledger = ledger_of(tmp_path, 2)
    before = ledger.entries()
    with ledger.file.open("ab") as file:
        file.write(b'{"at":17')
    assert ledger.entries() == before
    assert "ledger.jsonl:3 was not finished" in ledger.unfinished()
    third = added(ledger, "promoted", "run-3")
    assert ledger.entries() == (*before, third)
    assert ledger.unfinished() == ""
    (aside,) = ledger.folder.glob("ledger.unfinished-3-*")
    assert aside.read_bytes() == b'{"at":17'


def test_a_line_whose_head_was_not_written_stands(tmp_path: Path) -> None:
    """A process was killed between the two; also in the first line, when there was no head yet."""
    for n_lines in (1, 3):
        ledger = Ledger(ledger_folder(tmp_path / str(n_lines), "desk"))
        head = None
        for number in range(1, n_lines + 1):
            head = ledger.head.read_bytes() if ledger.head.exists() else None
            added(ledger, "promoted", f"run-{number}")
        ledger.head.unlink() if head is None else ledger.head.write_bytes(head)
        assert len(ledger.entries()) == n_lines
        added(ledger, "promoted", "next")
        assert len(ledger.entries()) == n_lines + 1
        assert ledger.head.read_text() == f"{n_lines + 1} {ledger.entries()[-1].hash}\n"


WRITER = """
import sys
from pathlib import Path
from agenttrain.promotion.ledger import Ledger
ledger = Ledger(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
for number in range(15):
    ledger.append("promoted", graph="/g.py:g", run_id=f"{sys.argv[2]}-{number}", policy="/p", weights="w", why="")
"""


def test_two_processes_that_write_at_once_both_stand(tmp_path: Path) -> None:
    """Every line of both, each one's in its own order, in one sound chain."""
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path / "desk"), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("a", "b")
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.communicate("go\n")
        assert writer.returncode == 0
    written = [entry.run_id for entry in Ledger(tmp_path / "desk").entries()]
    assert sorted(written, key=lambda id: (id[0], int(id[2:]))) == [f"{name}-{n}" for name in "ab" for n in range(15)]
    for name in "ab":
        assert [id for id in written if id[0] == name] == [f"{name}-{n}" for n in range(15)]


def test_what_was_decided_on_an_older_ledger_is_refused(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path, 1)
    seen = ledger.entries()
    added(ledger, "promoted", "run-2")
    same = {"graph": seen[0].graph, "policy": "/p", "weights": "w", "why": ""}
    with pytest.raises(PromotionError, match=r"has grown meanwhile: ada@atlas wrote line 2 \(promoted run-2\)"):
        ledger.append("taken_back", run_id="run-1", decided_on=seen, **same)  # type: ignore[arg-type]
    now = ledger.entries()
    assert ledger.append("canary", run_id="run-3", decided_on=now, **same).number == 3  # type: ignore[arg-type]


def test_what_was_decided_on_another_ledger_is_refused(tmp_path: Path) -> None:
    """It was moved aside meanwhile, or another one of as many lines was put in its place."""
    seen = ledger_of(tmp_path / "before", 2).entries()
    same = {"graph": seen[0].graph, "policy": "/p", "weights": "w", "why": "", "run_id": "run-3", "decided_on": seen}
    for n_lines in (0, 2):
        ledger = ledger_of(tmp_path / f"{n_lines} lines", n_lines)
        with pytest.raises(PromotionError, match="is another one than this was decided on"):
            ledger.append("canary", **same)  # type: ignore[arg-type]
        assert len(ledger.entries()) == n_lines


def test_one_ledger_is_of_one_graph(tmp_path: Path) -> None:
    """Else a graph of the same folder's name would be served another one's policy."""
    ledger = ledger_of(tmp_path, 1)
    with pytest.raises(PromotionError, match=r"is the ledger of .*desk/graph.py:graph, and this is /b/graph.py:graph"):
        ledger.append("promoted", graph="/b/graph.py:graph", run_id="b", policy="/p", weights="w", why="")


def test_a_project_may_be_moved_whole(tmp_path: Path) -> None:
    """What lies beside promotions/ is found at the new place, what lies elsewhere where it was; the chain holds."""
    ledger = ledger_of(tmp_path / "here", 1)
    elsewhere = ledger.append(
        "promoted", graph=ledger.entries()[0].graph, run_id="far", policy="/far/policy", weights="w", why=""
    )
    assert '"policy":"runs/run-1/policy"' in ledger.file.read_text()
    shutil.move(tmp_path / "here", tmp_path / "there")
    moved = Ledger(ledger_folder(tmp_path / "there", "desk"))
    first, second = moved.entries()
    assert first.policy == str(tmp_path / "there" / "runs" / "run-1" / "policy")
    assert first.graph == f"{tmp_path}/there/desk/graph.py:graph"
    assert second.policy == elsewhere.policy == "/far/policy"
    assert added(moved, "promoted", "run-3").number == 3


def test_a_folder_that_may_not_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "promotions").write_text("a file")
    with pytest.raises(PromotionError, match="promotions/desk can't be written"):
        ledger_of(tmp_path, 1)


def entry(number: int, deed: Deed, run_id: str) -> LedgerEntry:
    return LedgerEntry(number=number, at=0.0, deed=deed, graph="g", run_id=run_id, policy="", weights="", why="")


@given(st.lists(st.sampled_from(["promoted", "canary", "taken_back", "rolled_back"]), max_size=25))
def test_what_serves_after_any_deeds(deeds: list[Deed]) -> None:
    """Held against a table kept by hand: who was accepted, and who is tried."""
    accepted, tried, entries = [BASE], None, list[LedgerEntry]()
    for number, deed in enumerate(deeds, start=1):
        run_id = f"run-{number}"
        if deed == "rolled_back":
            accepted = accepted[:-1] or [BASE]
            run_id = accepted[-1]
        elif deed == "taken_back":
            run_id = tried or run_id
        elif deed == "promoted":
            accepted = [*accepted, run_id]
        tried = run_id if deed == "canary" else None
        entries.append(entry(number, deed, run_id))
        serves, canary, before = serving_now(entries), canary_now(entries), before_now(entries)
        assert (serves.run_id if serves else BASE) == accepted[-1]
        assert (canary.run_id if canary else None) == tried
        assert (before.run_id if before else BASE) == (accepted[-2] if len(accepted) > 1 else BASE)


def test_a_rollback_returns_step_by_step() -> None:
    """A, B, C: back to B, then to A, then to the base; what is promoted then has only the base before it."""
    deeds: list[tuple[Deed, str]] = [("promoted", "A"), ("promoted", "B"), ("promoted", "C")]
    befores = []
    for _ in range(3):
        entries = [entry(number, *deed) for number, deed in enumerate(deeds, start=1)]
        before = before_now(entries)
        befores.append(before.run_id if before else BASE)
        deeds.append(("rolled_back", befores[-1]))
    assert befores == ["B", "A", BASE]
    entries = [entry(number, *deed) for number, deed in enumerate([*deeds, ("promoted", "D")], start=1)]
    assert before_now(entries) is None
    assert serving_now(entries) == entries[-1]


def test_a_run_that_was_promoted_twice_is_returned_to_by_its_last_line() -> None:
    entries = [entry(n, "promoted", run) for n, run in enumerate("ABAC", start=1)]
    assert before_now(entries) == entries[2]
    assert before_now([*entries, entry(5, "rolled_back", "A")]) == entries[1]


def test_lines_are_one_text_for_one_content(tmp_path: Path) -> None:
    """Keys in order, no spaces, ASCII, also of text that is no UTF-8."""
    ledger = Ledger(tmp_path)
    ledger.append("promoted", graph="/g.py:graph", run_id="a", policy="/p/\udcff", weights="w", why="größer", share=0.1)
    (line,) = lines_of(ledger)
    content = json.loads(line)
    assert line.decode("ascii") == json.dumps(content, sort_keys=True, separators=(",", ":")) + "\n"
    assert (content["why"], content["share"]) == ("größer", 0.1)
    assert ledger.entries()[0].policy == "/p/\udcff"
