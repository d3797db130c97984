"""The private folder of an own Ray cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from agenttrain_verl import ray_folder
from agenttrain_verl.ray_folder import RayFolder, Stamp, running, stamp


@pytest.fixture
def folder() -> Iterator[RayFolder]:
    made = RayFolder.make()
    yield made
    made.remove()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def stamped(process: subprocess.Popen[bytes]) -> Stamp:
    found = stamp(psutil.Process(process.pid))
    assert found is not None
    return found


def test_the_folder_is_private_and_short_enough_for_rays_sockets(folder: RayFolder) -> None:
    session = folder.path / "session_2026-11-30_09-21-09_441818_4194304" / "sockets" / "plasma_store"
    assert len(str(session)) <= 107
    assert folder.path.stat().st_mode & 0o077 == 0
    assert folder.path.parent.stat().st_mode & 0o077 == 0


def test_a_long_temporary_folder_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    made = RayFolder.make()
    made.remove()
    assert made.path.is_relative_to("/tmp")
    assert not made.path.is_relative_to(long)


def test_the_processes_and_files_of_a_dead_driver_go_at_the_next_start(
    folder: RayFolder, sleeper: subprocess.Popen[bytes]
) -> None:
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    left = folder.path.parent / "of-a-dead-driver"
    left.mkdir()
    owner = {"driver": [int(dead.stdout), 1.0], "processes": [stamped(sleeper)]}
    (left / "owner.json").write_text(json.dumps(owner))
    RayFolder.make().remove()
    assert not left.exists()
    assert sleeper.wait(timeout=5) == -9
    assert folder.path.exists()


DRIVER = """
import subprocess, sys, time
import psutil
from agenttrain_verl.ray_folder import RayFolder, stamp

folder = RayFolder.make()
guard = folder.guarded()
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
folder.write_owner([stamp(psutil.Process(left.pid))])
print(folder.path, left.pid, flush=True)
{end}
"""


def test_what_a_killed_driver_leaves_is_gone_soon() -> None:
    """Though nobody starts another one: its guard outlives it, and ends with it."""
    driver = subprocess.Popen([sys.executable, "-c", DRIVER.format(end="time.sleep(60)")], stdout=subprocess.PIPE)
    assert driver.stdout is not None
    path, pid = driver.stdout.readline().split()
    family = [*psutil.Process(driver.pid).children(), psutil.Process(int(pid))]
    driver.kill()
    driver.communicate()
    _, left = psutil.wait_procs(family, timeout=20)
    assert left == []
    assert not Path(path.decode()).exists()


def test_the_guard_of_a_driver_that_ended_what_it_began_touches_nothing() -> None:
    """It goes when it is told that all is done."""
    end = "guard.communicate(b'closed'); assert left.poll() is None; left.kill(); folder.remove()"
    subprocess.run([sys.executable, "-c", DRIVER.format(end=end)], check=True, capture_output=True, timeout=30)


def test_a_pid_that_was_given_again_is_nobodys(folder: RayFolder, sleeper: subprocess.Popen[bytes]) -> None:
    pid, began = stamped(sleeper)
    assert running((pid, began)) is not None
    assert ray_folder.end([(pid, began - 100)]) == []
    assert sleeper.poll() is None


def test_a_folder_that_is_being_made_stays(folder: RayFolder) -> None:
    fresh = folder.path.parent / "being-made"
    fresh.mkdir()
    try:
        RayFolder.make().remove()
        assert fresh.exists()
    finally:
        fresh.rmdir()
