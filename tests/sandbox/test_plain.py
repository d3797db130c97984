"""Sandboxes of ordinary processes, with real users, real processes and real limits."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agenttrain.errors import SandboxError
from agenttrain.sandbox import plain, uids
from agenttrain.sandbox.plain import SubprocessBackend
from agenttrain.sandbox_protocol import Sandbox, SandboxFile, SandboxRefusal, SandboxRequest
from agenttrain.sandbox_spec import SandboxLimits
from agenttrain.testing import SandboxBackendContract

PYTHON = "/usr/bin/python3"
"""That every user may run."""
NOBODY = 65534
IS_ROOT = os.geteuid() == 0
OF_OTHERS = f"python={PYTHON!r}" if IS_ROOT else ""
"""What SubprocessBackend is made with in code: as root a Python that other users may run."""
needs_same_python = pytest.mark.skipif(
    not os.path.exists(f"/usr/lib/python{sys.version_info[0]}.{sys.version_info[1]}/os.py"),
    reason="the system's Python is of another version than this one, whose packages it can't import",
)
as_root = pytest.mark.skipif(not IS_ROOT or not os.path.exists(PYTHON), reason="needs root and the system's Python")
DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    pid = os.fork()
    if pid == 0:
        os.close(1)
        os.close(2)
        time.sleep(1000)
    print(pid, flush=True)
    os._exit(0)
os.wait()
"""


def backend() -> SubprocessBackend:
    return SubprocessBackend(python=PYTHON if IS_ROOT else None)


def request(**limits: Any) -> SandboxRequest:
    return SandboxRequest(name="a test", files={"a/x.txt": SandboxFile(data=b"hello")}, limits=SandboxLimits(**limits))


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    made = backend().open(request(memory_mib=128, disk_mib=8, processes=16))
    yield made
    made.close()


def runs(pid: int) -> bool:
    """Whether it does; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def by_another(code: str, *, user: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own that may be killed, and may be another user's."""
    paths = [path for path in sys.path if path.endswith(("site-packages", "src"))]
    return subprocess.run(
        [PYTHON if user is not None else sys.executable, "-B", "-W", "ignore", "-c", textwrap.dedent(code)],
        env={"PYTHONPATH": ":".join(paths), "PATH": "/usr/bin:/bin"},
        user=user,
        group=user,
        extra_groups=[] if user is not None else None,
        cwd="/",
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=120,
        check=False,
    )


@as_root
def test_as_root_all_but_files_is_kept_apart() -> None:
    isolation = backend().isolation(request())
    assert isolation.unenforced == ("filesystem", "disk_mib")
    assert {name: isolation.enforced[name] for name in ("processes_end", "processes", "network")} == {
        "processes_end": "a user of its own",
        "processes": "RLIMIT_NPROC of a user of its own",
        "network": "seccomp: no sockets",
    }
    assert isolation.enforced["memory_mib"] in ("control group", "RLIMIT_DATA and a watcher")


@as_root
def test_a_network_that_was_asked_for_is_in_neither() -> None:
    isolation = backend().isolation(SandboxRequest(name="a test", network=True))
    assert isolation.unenforced == ("filesystem", "disk_mib")
    assert "network" not in isolation.enforced


@as_root
@pytest.mark.slow
@needs_same_python
def test_an_ordinary_user_s_can_not_keep_apart_what_programs_of_the_same_user_could_undo() -> None:
    code = """
        import json
        from agenttrain.sandbox.plain import SubprocessBackend
        from agenttrain.sandbox_protocol import SandboxRequest
        backend = SubprocessBackend()
        request = SandboxRequest(name="user")
        sandbox = backend.open(request)
        run = sandbox.run(["python", "-c", "import os; print(os.getuid())"])
        background = sandbox.run("setsid sleep 1000 >/dev/null 2>&1 & echo $!")
        sandbox.close()
        print(json.dumps([backend.isolation(request).unenforced, run.stdout, int(background.stdout), sandbox.path]))
    """
    unenforced, printed, background, path = json.loads(by_another(code, user=NOBODY).stdout)
    assert unenforced == ["filesystem", "network", "processes_end", "processes", "disk_mib"]
    assert printed == "65534\n"
    assert not runs(background)
    assert not Path(path).parent.exists()


@as_root
def test_a_python_that_another_user_can_not_run_is_refused_with_the_next_step(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    (closed / "python").symlink_to(PYTHON)
    with pytest.raises(SandboxError, match=r"can't: .*Permission denied.* Use a Python that every user may"):
        SubprocessBackend(python=str(closed / "python")).isolation(request())


def test_programs_see_their_folder_and_nothing_of_this_process_s_environment(sandbox: Sandbox) -> None:
    os.environ["AGENTTRAIN_TEST_SECRET"] = "seen"
    try:
        again = backend().open(request())
    finally:
        del os.environ["AGENTTRAIN_TEST_SECRET"]
    names = again.run("env | cut -d= -f1 | sort").stdout.split()
    again.close()
    assert names == ["HOME", "LANG", "PATH", "PWD", "TMPDIR"]
    assert sandbox.list() == ["a/", "a/x.txt"]
    assert sandbox.read("a/x.txt") == "hello"


@as_root
def test_no_two_sandboxes_at_once_have_one_user_and_none_reads_the_other_s_files(sandbox: Sandbox) -> None:
    other = backend().open(request())
    try:
        users = [int(each.run(["id", "-u"]).stdout) for each in (sandbox, other)]
        read = other.run(["cat", f"{sandbox.path}/a/x.txt"])
    finally:
        other.close()
    assert users[0] != users[1]
    assert all(user in uids.RANGE for user in users)
    assert read.exit_code == 1
    assert "Permission denied" in read.stderr


@as_root
def test_no_socket_can_be_made_but_a_pair(sandbox: Sandbox) -> None:
    code = """
import socket
print(len(socket.socketpair()))
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK, socket.AF_VSOCK):
    try:
        socket.socket(family)
        print("made")
    except OSError as error:
        print(error.errno)
"""
    assert sandbox.run(["python", "-c", code]).stdout == "2\n1\n1\n1\n1\n1\n"


def test_no_user_namespace_can_be_made(sandbox: Sandbox) -> None:
    assert sandbox.run(["unshare", "-U", "true"]).exit_code == 1


@as_root
def test_settle_and_close_end_what_left_its_session_and_its_parent(sandbox: Sandbox) -> None:
    daemon = int(sandbox.run(["python", "-c", DAEMON]).stdout)
    assert runs(daemon)
    sandbox.settle()
    assert not runs(daemon)
    again = int(sandbox.run(["python", "-c", DAEMON]).stdout)
    sandbox.close()
    assert not runs(again)
    assert not Path(sandbox.path).parent.exists()


def test_what_all_files_together_take_is_watched(sandbox: Sandbox) -> None:
    """Four of 4 MiB; 8 are allowed, and each alone would be."""
    ended = sandbox.run("for n in 1 2 3 4; do head -c 4194304 /dev/zero > $n; done; sleep 60")
    assert (ended.exit_code, ended.ended_by) == (None, "disk_mib")


def test_more_files_than_can_be_looked_at_are_too_much_disk(sandbox: Sandbox) -> None:
    """Empty ones take no room, and looking at all of them again and again would hold up everything else."""
    code = "import os, time\nfor i in range(3000): open(str(i), 'w')\ntime.sleep(60)"
    ended = sandbox.run(["python", "-I", "-S", "-c", code])
    assert (ended.exit_code, ended.ended_by) == (None, "disk_mib")


def test_a_working_directory_that_programs_removed_ends_nothing_but_what_needs_it(sandbox: Sandbox) -> None:
    assert sandbox.run("cd .. && mv work away && sleep 0.2").ok
    for call in (lambda: sandbox.read("a/x.txt"), lambda: sandbox.run(["true"]), sandbox.snapshot):
        with pytest.raises(SandboxRefusal):
            call()
    sandbox.settle()


def test_a_folder_that_its_owner_closed_is_removed_all_the_same(sandbox: Sandbox) -> None:
    sandbox.run("mkdir -p closed/inner; touch closed/inner/x; chmod 0 closed/inner closed")
    sandbox.close()
    assert not Path(sandbox.path).parent.exists()


@as_root
def test_what_its_user_left_where_everybody_may_write_is_removed(sandbox: Sandbox) -> None:
    path = sandbox.run("mktemp -d /tmp/left-by-a-test-XXXXXX; mktemp /dev/shm/left-by-a-test-XXXXXX").stdout.split()
    assert [Path(each).exists() for each in path] == [True, True]
    sandbox.close()
    assert [Path(each).exists() for each in path] == [False, False]


def test_what_is_removed_is_what_was_opened_and_never_where_a_link_leads(tmp_path: Path) -> None:
    """Another user who may write there could put a link in the place of a folder at any moment."""
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o755)
    (victim / "kept").write_text("x")
    (tmp_path / "of" / "a").mkdir(parents=True)
    (tmp_path / "of" / "link").symlink_to(victim)
    with plain._opened(str(tmp_path / "of")) as top, plain._opened_or_unlinked("a", top) as held:
        (tmp_path / "of" / "a").rename(tmp_path / "of" / "b")
        (tmp_path / "of" / "a").symlink_to(victim)
        assert held is not None
        assert os.listdir(held) == []
    plain._remove(tmp_path / "of")
    assert not (tmp_path / "of").exists()
    assert (victim.stat().st_mode & 0o777, os.listdir(victim)) == (0o755, ["kept"])


LATE = """
    import threading
    from agenttrain.sandbox.plain import SubprocessBackend
    from agenttrain.sandbox_protocol import SandboxRequest
    def late():
        threading.main_thread().join()
        sandbox = SubprocessBackend({python}).open(SandboxRequest(name="late"))
        print(sandbox.run(["echo", "x"]).stdout, end="", flush=True)
        sandbox.close()
    SubprocessBackend({python}).open(SandboxRequest(name="first")).close()
    threading.Thread(target=late).start()
"""


def test_a_thread_that_goes_on_after_the_main_one_makes_sandboxes_too() -> None:
    assert by_another(LATE.format(python=OF_OTHERS)).stdout == "x\n"


FORKED = """
    import os
    from agenttrain.sandbox.plain import SubprocessBackend
    from agenttrain.sandbox_protocol import SandboxRequest
    def used():
        sandbox = SubprocessBackend({python}).open(SandboxRequest(name="forked"))
        print(sandbox.run(["echo", "x"]).stdout, end="", flush=True)
        sandbox.close()
    used()
    if os.fork() == 0:
        used()
        os._exit(0)
    print(os.wait()[1])
"""


def test_a_process_that_is_forked_makes_sandboxes_too() -> None:
    """Though it has none of the threads of the one that has made some."""
    assert by_another(FORKED.format(python=OF_OTHERS)).stdout == "x\nx\n0\n"


KILLED = """
    import contextlib, os, signal
    from agenttrain.sandbox.plain import SubprocessBackend
    from agenttrain.sandbox_protocol import SandboxRequest
    sandbox = SubprocessBackend({python}).open(SandboxRequest(name="killed"))
    pid = sandbox.run(["python", "-c", {daemon!r}]).stdout.strip()
    print(pid, sandbox.path, flush=True)
    {first}
    os.kill(os.getpid(), signal.SIGKILL)
"""
KILL_THE_FIRST = """
    for each in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # others come and go
            if open(f"/proc/{each}/stat").read().rpartition(")")[2].split()[1] == str(os.getpid()):
                os.kill(int(each), signal.SIGKILL)
"""
"""The sandbox's first process is the one child of agenttrain's."""


def test_a_killed_agenttrain_leaves_a_folder_that_the_next_run_removes() -> None:
    killed = by_another(KILLED.format(python=OF_OTHERS, daemon=DAEMON, first=""))
    assert killed.returncode == -signal.SIGKILL
    daemon, path = killed.stdout.split()
    wait_until_ended(int(daemon))
    assert Path(path).parent in plain.left_folders(Path(path).parent.parent)
    backend().open(request()).close()
    assert not Path(path).parent.exists()


@as_root
def test_where_the_first_process_was_killed_too_the_next_run_ends_what_is_left() -> None:
    killed = by_another(KILLED.format(python=OF_OTHERS, daemon=DAEMON, first=KILL_THE_FIRST.strip()))
    daemon, path = killed.stdout.split()
    assert runs(int(daemon))
    backend().open(request()).close()
    assert not runs(int(daemon))
    assert not Path(path).parent.exists()


def wait_until_ended(pid: int) -> None:
    """It is no child of this process."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    assert poll.poll(60_000)
    os.close(handle)


@as_root
def test_a_user_is_taken_while_anything_has_its_lock() -> None:
    """The first process of a sandbox has it, and may live a moment longer than who leased it."""
    lease = uids.lease()
    with subprocess.Popen([PYTHON, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[lease.lock.fileno()]) as process:
        lease.close()
        with uids.held(lease.uid) as is_held:
            assert not is_held
        process.communicate(b"\n")
    with uids.held(lease.uid) as is_held:
        assert is_held


@as_root
def test_two_processes_never_lease_one_user() -> None:
    lease = uids.lease()
    try:
        code = """
            from agenttrain.sandbox import uids
            held = [uids.lease() for _ in range(3)]
            print([each.uid for each in held])
        """
        others = json.loads(by_another(code).stdout)
        assert lease.uid not in others
        assert len(set(others)) == 3
        with uids.held(lease.uid) as is_held:
            assert not is_held
    finally:
        lease.close()
    with uids.held(lease.uid) as is_held:
        assert is_held


@pytest.mark.slow
class TestContract(SandboxBackendContract):
    """What every backend keeps to, by ordinary processes."""

    same_python = not IS_ROOT

    @pytest.fixture
    def backend(self) -> SubprocessBackend:  # type: ignore[override]
        return backend()
