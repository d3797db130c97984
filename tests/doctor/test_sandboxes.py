"""What this machine makes of sandboxes, and what killed runs left of theirs, found and removed by the fix itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from agenttrain.doctor import sandboxes
from agenttrain.doctor.sandboxes import EVERYTHING, left_findings, sandbox_findings, what_works
from agenttrain.sandbox.making import BEST_FIRST

LEAVES = """
    import os, signal, subprocess, sys, tempfile
    from pathlib import Path
    from agenttrain.sandbox import uids
    from agenttrain.sandbox.cgroups import open_group
    from agenttrain.sandbox.owners import owned_name
    folder = Path(tempfile.gettempdir(), owned_name("left"))
    folder.mkdir()
    group = open_group("left", memory_mib=64, processes=8)
    user = uids.lease().uid if os.geteuid() == 0 else None
    child = subprocess.Popen(["sleep", "1000"], user=user, cwd="/", stdout=subprocess.DEVNULL)
    if group is not None:
        group.add(child.pid)
    print(folder, group.memory if group else "-", user, child.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_every_backend_is_told_of() -> None:
    found = what_works()
    assert list(found) == [*BEST_FIRST, "docker", "podman"]
    assert all(found.values())


def test_one_backend_that_enforces_everything_is_enough() -> None:
    assert sandbox_findings({"namespaces": "no", "bubblewrap": EVERYTHING, "subprocess": "no"}) == []
    (finding,) = sandbox_findings({"namespaces": "can't", "subprocess": "leaves filesystem unenforced", "docker": "no"})
    assert finding.code == "sandbox_unenforced"
    assert finding.seen == (
        "no backend keeps a sandbox wholly apart: namespaces: can't; subprocess: leaves filesystem unenforced"
    )


def test_what_a_killed_run_left_is_found_and_its_fix_removes_it() -> None:
    killed = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(LEAVES)], stdout=subprocess.PIPE, text=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    folder, group, user, child = killed.stdout.split()
    mine = {folder, group, f"user {user}"}
    found = {finding.where: finding for finding in left_findings() if finding.where in mine}
    assert set(found) == mine - {"-", "user None"}
    assert {finding.code for finding in found.values()} == {"sandbox_left"}
    if user != "None":
        assert found[f"user {user}"].fix == f"kill -9 {child}"
    for finding in found.values():
        subprocess.run(["sh", "-c", finding.fix], check=False, capture_output=True)
    if user == "None" and group == "-":
        os.kill(int(child), signal.SIGKILL)
    assert not Path(folder).exists()
    for finding in found.values():  # a control group may be busy for the moment in which its last process ends
        subprocess.run(["sh", "-c", f"sleep 0.2; {finding.fix}"], check=False, capture_output=True)
    assert not [finding for finding in left_findings() if finding.where in mine]


def test_a_container_that_was_left_is_ended_by_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that lists one of a process that has ended, and one of a process of another machine."""
    dead = subprocess.run(
        [sys.executable, "-c", "from agenttrain.sandbox.owners import owned_name; print(owned_name('x'))"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.strip()
    engine = tmp_path / "docker"
    engine.write_text(f"#!/bin/sh\necho 0123abcd {dead}\necho 4567ef agenttrain-1-1-1-1-x\n")
    engine.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    (finding,) = list(sandboxes._left_containers(sandboxes.DockerBackend()))
    assert (finding.where, finding.fix) == (f"container {dead}", "docker rm --force 0123abcd")
