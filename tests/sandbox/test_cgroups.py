"""Control groups of this machine, real ones; a tree of version 2 stands in a folder where none is delegated."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from agenttrain.errors import SandboxError
from agenttrain.sandbox import cgroups
from agenttrain.sandbox.cgroups import Group, Hierarchy, open_group

Start = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture
def group() -> Iterator[Group]:
    made = open_group("test: a group", memory_mib=64, processes=8)
    if made is None:
        pytest.skip("no control groups can be made here")
    yield made
    made.close()


@pytest.fixture
def start(group: Group) -> Iterator[Start]:
    """Starts a Python that runs the code once it is in the group."""
    with ExitStack() as stack:

        def started(code: str) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", "import sys; sys.stdin.readline()\n" + textwrap.dedent(code)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            group.add(process.pid)
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.flush()
            return process

        yield started


def runs(pid: int) -> bool:
    """Whether it does; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline()


def test_too_much_memory_is_ended_by_the_kernel(group: Group, start: Start) -> None:
    assert line(start("print(len(bytearray(16 * 2**20)))")) == b"16777216\n"
    assert group.n_out_of_memory() == 0
    assert start("print(len(bytearray(128 * 2**20)))").wait(timeout=60) == -signal.SIGKILL
    assert group.n_out_of_memory() == 1
    peak = group.peak_mib()
    assert peak is not None
    assert 60 < peak <= 64


def test_memory_of_all_processes_counts_together(group: Group, start: Start) -> None:
    """Four of 24 MiB each are too many for 64 MiB, though each alone is not."""
    code = """
        import os, signal
        for _ in range(4):
            if os.fork() == 0:
                kept = bytearray(24 * 2**20)
                signal.pause()
        print(os.WTERMSIG(os.wait()[1]), flush=True)
        signal.pause()
    """
    assert line(start(code)) == b"9\n"
    assert group.n_out_of_memory() in (1, 2)  # the second before the first is gone, on a busy machine


def test_processes_are_counted(group: Group, start: Start) -> None:
    """Itself and seven others; the eighth is refused."""
    code = """
        import os, signal
        n = 0
        try:
            while n < 100:
                if os.fork() == 0:
                    signal.pause()
                n += 1
        except BlockingIOError:
            print(n, flush=True)
            signal.pause()
    """
    process = start(code)
    assert line(process) == b"7\n"
    assert len(cgroups._processes(group.pids)) == 8
    group.close()
    assert process.wait(timeout=10) == -signal.SIGKILL


def test_close_ends_what_left_its_session_and_its_parent(group: Group, start: Start) -> None:
    """A daemon: setsid, a second fork, its parent gone."""
    code = """
        import os, signal
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                print(os.getpid(), flush=True)
                signal.pause()
            os._exit(0)
    """
    process = start(code)
    daemon = int(line(process))
    process.wait(timeout=10)
    assert daemon in cgroups._processes(group.pids)
    group.close()
    assert not group.memory.exists()
    assert not group.pids.exists()
    group.close()


def test_a_process_that_is_gone_can_not_be_added(group: Group) -> None:
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", ""])
    process.wait()
    with pytest.raises(SandboxError, match=rf"^Process {process.pid} can't be put into the control group "):
        group.add(process.pid)


def test_a_killed_owner_leaves_groups_that_the_next_removes() -> None:
    code = """
        import os, signal, subprocess, sys
        from agenttrain.sandbox.cgroups import open_group
        group = open_group("left", memory_mib=64, processes=8)
        if group is None:
            sys.exit(3)
        pause = [sys.executable, "-I", "-S", "-c", "import signal; signal.pause()"]
        child = subprocess.Popen(pause, stdout=subprocess.DEVNULL)
        group.add(child.pid)
        print(group.memory, group.pids, child.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    owner = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, timeout=60)
    if owner.returncode == 3:
        pytest.skip("no control groups can be made here")
    memory, pids, child = owner.stdout.decode().split()
    assert {Path(memory), Path(pids)} <= set(cgroups.left_behind())
    assert int(child) in cgroups._processes(Path(pids))
    cgroups.remove_left_behind()
    assert not Path(memory).exists()
    assert not Path(pids).exists()
    assert not runs(int(child))


def test_a_living_owner_s_group_is_not_left_behind(group: Group) -> None:
    assert group.memory not in cgroups.left_behind()
    cgroups.remove_left_behind()
    assert group.memory.exists()


def test_where_groups_can_not_be_written_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = Hierarchy(controllers=frozenset({"memory", "pids"}), mount=tmp_path / "gone", own=tmp_path / "gone")
    monkeypatch.setattr(cgroups, "hierarchies", lambda: [nowhere])
    assert open_group("none", memory_mib=64, processes=8) is None


def test_version_2_comes_first_where_it_is_delegated(tmp_path: Path) -> None:
    own, parent = tmp_path / "user" / "scope", tmp_path / "user"
    own.mkdir(parents=True)
    (own / "cgroup.subtree_control").write_text("")
    (parent / "cgroup.subtree_control").write_text("cpu memory pids\n")
    version_2 = Hierarchy(controllers=frozenset(), mount=tmp_path, own=own)
    memory = Hierarchy(controllers=frozenset({"memory"}), mount=tmp_path / "m", own=tmp_path / "m" / "a")
    pids = Hierarchy(controllers=frozenset({"pids"}), mount=tmp_path / "p", own=tmp_path / "p" / "b")
    assert list(cgroups._places([memory, version_2, pids])) == [(parent, parent), (memory.own, pids.own)]
    (parent / "cgroup.subtree_control").write_text("cpu memory\n")
    assert list(cgroups._places([version_2, memory])) == []


@pytest.mark.parametrize(
    ("root", "path", "seen"), [("/", "/a/b", "/m/a/b"), ("/a", "/a/b", "/m/b"), ("/docker/x", "/", "/m")]
)
def test_a_group_is_found_below_what_is_mounted(root: str, path: str, seen: str) -> None:
    assert cgroups._below(Path("/m"), root, path) == Path(seen)
