"""What killed runs left: half-written files that are old, and engines without a run."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from agenttrain.doctor.leftovers import OLD_S, Process, engine_findings, part_findings, processes
from agenttrain.local.process import SERVE

NOW = 1_800_000_000.0


def written(path: Path, age_s: float) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("half")
    os.utime(path, (NOW - age_s, NOW - age_s))
    return path


def test_old_half_written_files_are_named_once(tmp_path: Path) -> None:
    """A folder, and not what lies in it; one that is young may belong to a run under way."""
    runs = tmp_path / "runs"
    written(runs / "a" / "config.toml.part", OLD_S + 10)
    written(runs / "a" / "metrics.jsonl.part", OLD_S - 10)
    written(runs / "a" / "metrics.jsonl", OLD_S + 10)
    inner = written(runs / "my run" / "checkpoints" / ".step-00005.part" / "weights.part", OLD_S + 10)
    os.utime(inner.parent, (NOW - OLD_S - 10,) * 2)
    findings = part_findings(runs, NOW)
    assert [Path(f.where).name for f in findings] == ["config.toml.part", ".step-00005.part"]
    for finding in findings:
        subprocess.run(shlex.split(finding.fix), check=True)
    assert part_findings(runs, NOW) == []
    assert (runs / "a" / "metrics.jsonl.part").exists()
    shutil.rmtree(runs)
    assert part_findings(runs, NOW) == []


def test_only_engines_without_a_run_are_orphans() -> None:
    """Their parent is the process that takes orphans."""
    engine = f"/venv/bin/python -P -c {SERVE} 7"
    found = engine_findings(
        [
            Process(pid=10, parent=9, command=engine),
            Process(pid=11, parent=1, command="python train.py"),
            Process(pid=12, parent=1, command=engine),
        ]
    )
    assert [(f.where, f.fix) for f in found] == [("process 12", "kill 12")]


def test_the_engine_of_a_containers_first_process_is_no_orphan() -> None:
    run = Process(pid=1, parent=0, command="python -m agenttrain fit graph.py")
    assert engine_findings([run, Process(pid=12, parent=1, command=f"python -c {SERVE} 3")]) == []


def test_processes_are_read_with_parent_and_command() -> None:
    """A child of this one, by its arguments."""
    program = "print(flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", program, "a marker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    try:
        child.stdout.readline()  # it is that program by now
        found = {process.pid: process for process in processes()}[child.pid]
    finally:
        child.communicate(b"\n")
    assert found.parent == os.getpid()
    assert found.command == f"{sys.executable} -c {program} a marker"
