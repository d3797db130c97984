import json
import os
import shutil
import string
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agenttrain.config import resolve
from agenttrain.errors import RunError
from agenttrain.run_folder import SPARE_BYTES, RunFolder, check_room, find_run, new_run

KEYS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
SCALARS = (
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
)
TABLES = st.recursive(
    st.dictionaries(KEYS, SCALARS | st.lists(SCALARS, max_size=3), max_size=4),
    lambda tables: st.dictionaries(KEYS, tables, max_size=3),
    max_leaves=6,
)
ROWS = st.lists(st.fixed_dictionaries({"step": st.integers(1, 9), "note": st.text(max_size=10)}), max_size=6)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return new_run(tmp_path / "runs", "graph")


def made_run(root: Path, name: str, *, modified_s: int) -> None:
    """A run folder whose config.toml was written at a given time."""
    (root / name).mkdir(parents=True)
    (root / name / "config.toml").write_text("")
    os.utime(root / name / "config.toml", (modified_s, modified_s))


def files_in(folder: Path) -> Iterator[str]:
    return (path.name for path in folder.rglob("*") if path.is_file())


def test_a_new_run_has_its_folders(tmp_path: Path) -> None:
    """Its id is the name, the date and four hexadecimal digits; two of them never share a folder."""
    first, second = (new_run(tmp_path / "deep" / "runs", "order-desk") for _ in range(2))
    name, day, clock, digits = first.id.rsplit("-", 3)
    assert (name, len(day), len(clock), len(digits)) == ("order-desk", 8, 6, 4)
    assert set(digits) <= set(string.hexdigits)
    assert (first.rollouts.is_dir(), first.checkpoints.is_dir(), first.policy.exists()) == (True, True, False)
    assert first.path != second.path


def test_a_new_run_stays_where_it_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that changes the current directory doesn't move the run."""
    monkeypatch.chdir(tmp_path)
    run = new_run(Path("runs"), "graph")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run.append_metrics({"step": 1})
    assert run.path.parent == tmp_path / "runs"
    assert run.metrics() == [{"step": 1}]


def test_a_file_in_the_place_of_runs_is_refused(tmp_path: Path) -> None:
    """The path, what the system said, and where to start instead."""
    (tmp_path / "runs").write_text("not a folder")
    with pytest.raises(RunError, match=r"runs can't be written: Not a directory\. .*start in a folder"):
        new_run(tmp_path / "runs", "graph")
    with pytest.raises(RunError, match=r"deeper can't be written: Not a directory"):
        new_run(tmp_path / "runs" / "deeper", "graph")


def test_too_little_room_is_refused_with_both_figures(tmp_path: Path) -> None:
    """Before anything of the run is made."""
    with pytest.raises(RunError, match=r"has \d+ MiB free, and this run needs about 1099511627840 MiB\. Make room"):
        new_run(tmp_path / "runs", "graph", n_bytes=2**60)
    assert not (tmp_path / "runs").exists()


def test_room_is_asked_for_on_both_sides_of_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many bytes as are free is enough, one more is not; a run asks for its rollouts too."""
    usage = shutil.disk_usage(tmp_path)._replace(free=SPARE_BYTES)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    check_room(tmp_path, SPARE_BYTES)
    with pytest.raises(RunError, match="has 64 MiB free"):
        check_room(tmp_path, SPARE_BYTES + 1)
    assert new_run(tmp_path / "a", "graph").path.is_dir()
    with pytest.raises(RunError):
        new_run(tmp_path / "b", "graph", n_bytes=1)


@settings(max_examples=50, deadline=None)
@given(tables=TABLES, provenance=st.dictionaries(KEYS, SCALARS, max_size=3))
def test_config_comes_back_as_it_was_written(tables: dict[str, Any], provenance: dict[str, Any]) -> None:
    """Tables and provenance, whatever text is in them."""
    tables.pop("provenance", None)
    with TemporaryDirectory() as folder:
        run = RunFolder(Path(folder))
        run.write_config(tables, provenance)
        assert run.read_config() == (tables, provenance)
        assert list(files_in(run.path)) == ["config.toml"]


def test_a_resolved_configuration_survives_the_folder(run: RunFolder) -> None:
    """Keys without a value are left out and come back as their default: a resumed run has the same configuration."""
    config = resolve(("toml", {"seed": 2**63 - 1, "verl": {"nodes": 2}}), plugin_tables=["verl"])
    run.write_config(config.model_dump(), {"model": None, "life": 1})
    saved, provenance = run.read_config()
    assert resolve(("saved", saved), plugin_tables=["verl"]) == config
    assert provenance == {"life": 1}


@pytest.mark.parametrize("text", [None, "seed = ", "seed = 1\nseed = 2\n"])
def test_a_config_that_cant_be_read_is_refused(run: RunFolder, text: str | None) -> None:
    """It is missing, or no TOML."""
    if text is not None:
        (run.path / "config.toml").write_text(text)
    with pytest.raises(
        RunError, match=r"config\.toml can't be read: .* Name the folder of a run that agenttrain made\."
    ):
        run.read_config()


@settings(max_examples=50, deadline=None)
@given(rows=ROWS)
def test_metrics_come_back_in_order(rows: list[dict[str, Any]]) -> None:
    """One line each, whatever text is in them."""
    with TemporaryDirectory() as folder:
        run = RunFolder(Path(folder))
        for row in rows:
            run.append_metrics(row)
        assert run.metrics() == rows


@settings(max_examples=50, deadline=None)
@given(rows=ROWS, step=st.integers(0, 9))
def test_metrics_after_a_checkpoint_are_dropped(rows: list[dict[str, Any]], step: int) -> None:
    """Those up to its step stay, and nothing is left beside the file."""
    with TemporaryDirectory() as folder:
        run = RunFolder(Path(folder))
        for row in rows:
            run.append_metrics(row)
        run.drop_metrics_after(step)
        assert run.metrics() == [row for row in rows if row["step"] <= step]
        assert list(files_in(run.path)) == ["metrics.jsonl"]


def test_metrics_of_a_new_run_are_empty(run: RunFolder) -> None:
    """No file yet is no line yet."""
    assert run.metrics() == []


@pytest.mark.parametrize("torn", ['{"step": 2, "rew', "{", '{"step": 2}'])
def test_a_line_cut_by_a_kill_is_no_line(run: RunFolder, torn: str) -> None:
    """A step stands when its line has its end; on resume the torn one goes, and the next is whole again."""
    run.append_metrics({"step": 1})
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    assert run.metrics() == [{"step": 1}]
    run.drop_metrics_after(5)
    run.append_metrics({"step": 2})
    assert run.metrics() == [{"step": 1}, {"step": 2}]


def test_a_damaged_line_within_metrics_is_an_error(run: RunFolder) -> None:
    """It is never skipped: the figures of a step would be missing."""
    (run.path / "metrics.jsonl").write_text('{"step": 1}\noops\n{"step": 3}\n')
    with pytest.raises(RunError, match=r"metrics\.jsonl is damaged: .* Take that line out by hand"):
        run.metrics()


def test_metrics_that_cant_be_written_are_an_error(run: RunFolder) -> None:
    """A folder stands in the file's place."""
    (run.path / "metrics.jsonl").mkdir()
    with pytest.raises(RunError, match=r"metrics\.jsonl can't be written: Is a directory"):
        run.append_metrics({"step": 1})


def test_a_report_is_there_once_the_run_has_ended(run: RunFolder) -> None:
    """None before, then what was written; a new one replaces it whole, and no part file stays."""
    assert run.read_report() is None
    run.write_report({"run_id": "a", "baseline": None}, "# a\n")
    run.write_report({"run_id": "é"}, "# é\n")
    assert run.read_report() == {"run_id": "é"}
    assert (run.path / "report.md").read_text(encoding="utf-8") == "# é\n"
    assert sorted(files_in(run.path)) == ["report.json", "report.md"]


def test_a_half_written_report_is_never_seen(run: RunFolder) -> None:
    """The part file of a process that was killed while it wrote is no report."""
    (run.path / "report.json.part").write_text('{"run_id": ')
    assert run.read_report() is None


def test_a_report_whose_text_cant_be_written_has_not_ended_the_run(run: RunFolder) -> None:
    """report.json comes last; what failed leaves no part file."""
    (run.path / "report.md").mkdir()
    with pytest.raises(RunError, match=r"report\.md can't be written: Is a directory"):
        run.write_report({"run_id": "a"}, "# a\n")
    assert run.read_report() is None
    assert list(files_in(run.path)) == []


def test_a_report_with_text_that_is_no_unicode_is_written(run: RunFolder) -> None:
    """A model or a tool may leave half a surrogate pair in a cause; the run's result doesn't fall over it."""
    run.write_report({"cause": "\ud83d"}, "cause \ud83d\n")
    assert run.read_report() == {"cause": "\ud83d"}
    assert (run.path / "report.md").read_text(encoding="utf-8") == "cause \\ud83d\n"


def test_a_damaged_report_is_an_error(run: RunFolder) -> None:
    """Somebody else wrote into it."""
    run.report_json.write_text("{")
    with pytest.raises(RunError, match=r"report\.json is damaged"):
        run.read_report()


def test_checkpoints_are_listed_by_step(run: RunFolder) -> None:
    """By number and not by name; parts, files and other folders are none."""
    for name in ("step-10", "step-00009", ".step-11.part", "step-x", "7"):
        (run.checkpoints / name).mkdir()
    (run.checkpoints / "step-12").write_text("a file")
    assert [(step, folder.name) for step, folder in run.checkpoint_folders()] == [(9, "step-00009"), (10, "step-10")]


def test_a_run_without_checkpoints_has_none(tmp_path: Path) -> None:
    """Also where the folder is missing, as in a run that was copied without it."""
    assert RunFolder(tmp_path).checkpoint_folders() == []
    RunFolder(tmp_path).prune_checkpoints(1)


@pytest.mark.parametrize(("keep", "left"), [(1, [11]), (2, [9, 11]), (3, [2, 9, 11]), (5, [2, 9, 11])])
def test_pruning_keeps_the_newest_checkpoints(run: RunFolder, keep: int, left: list[int]) -> None:
    """And leaves alone what is no checkpoint."""
    (run.checkpoints / "notes").mkdir()
    for step in (2, 9, 11):
        (run.checkpoints / f"step-{step}").mkdir()
        (run.checkpoints / f"step-{step}" / "weights").write_text("w")
    run.prune_checkpoints(keep)
    assert [step for step, _ in run.checkpoint_folders()] == left
    assert (run.checkpoints / "notes").is_dir()


def test_a_run_is_found_by_id_or_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both give the same folder, with an absolute path."""
    made_run(tmp_path / "runs", "a-1", modified_s=1)
    monkeypatch.chdir(tmp_path)
    for name in ("a-1", "runs/a-1", str(tmp_path / "runs" / "a-1")):
        assert find_run(name, Path("runs")) == RunFolder(tmp_path / "runs" / "a-1")


def test_an_unknown_run_lists_the_newest(tmp_path: Path) -> None:
    """By when they were started, whatever their names; at most five."""
    for age, name in enumerate(["zeta", "alpha", "mid", "beta", "omega", "first"]):
        made_run(tmp_path, name, modified_s=1000 - age)
    (tmp_path / "no-run").mkdir()
    with pytest.raises(RunError) as caught:
        find_run("nothing", tmp_path)
    assert str(caught.value) == (
        f"No run is named 'nothing' under {tmp_path} or at that path. Newest runs there: zeta, alpha, mid, beta, omega."
    )


def test_the_start_of_an_id_is_enough_where_only_one_begins_so(tmp_path: Path) -> None:
    """A whole id is that run, whatever others begin so."""
    for age, name in enumerate(["desk-1", "desk-12", "desk-2", "shop-1"]):
        made_run(tmp_path, name, modified_s=1000 - age)
    assert find_run("sh", tmp_path) == RunFolder(tmp_path / "shop-1")
    assert find_run("desk-1", tmp_path) == RunFolder(tmp_path / "desk-1")
    with pytest.raises(RunError, match=r"3 runs under .* begin with 'desk', the newest desk-1, desk-12, desk-2\. Give"):
        find_run("desk", tmp_path)
    with pytest.raises(RunError, match=r"No run is named ''"):
        find_run("", tmp_path)


def test_an_unknown_run_is_answered_with_what_was_meant(tmp_path: Path) -> None:
    """A close id, and RUN:baseline where a run is wanted; replays of a promotion are named where nothing else is."""
    made_run(tmp_path, "replay-desk-1", modified_s=9)
    with pytest.raises(RunError, match=r"Newest runs there: replay-desk-1\."):
        find_run("gone", tmp_path)
    made_run(tmp_path, "order-desk-2026", modified_s=1)
    with pytest.raises(RunError, match=r"Did you mean 'order-desk-2026'\? Newest runs there: order-desk-2026\."):
        find_run("order-desk-2026x", tmp_path)
    with pytest.raises(RunError, match=r"and a run is wanted here: order-desk-2026\."):
        find_run("order-desk-2026:baseline", tmp_path)


@pytest.mark.parametrize("root", ["runs", "."])
def test_an_unknown_run_where_there_are_none(tmp_path: Path, root: str) -> None:
    """Neither a missing runs/ nor an empty one lists anything."""
    with pytest.raises(RunError, match=r"No run is named 'x' .* There are no runs there\."):
        find_run("x", tmp_path / root)


def test_a_folder_without_config_is_no_run(tmp_path: Path) -> None:
    """Such as one whose making was cut short."""
    (tmp_path / "half").mkdir()
    with pytest.raises(RunError, match="No run is named 'half'"):
        find_run("half", tmp_path)


def test_metrics_are_json_lines(run: RunFolder) -> None:
    """Other programs read them line by line."""
    run.append_metrics({"step": 1, "reward": 0.5})
    run.append_metrics({"step": 2, "reward": 0.25})
    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["reward"] for line in lines] == [0.5, 0.25]
