"""Sandboxes that bwrap makes, as root and as an ordinary user."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agenttrain.errors import SandboxError
from agenttrain.sandbox import bubblewrap
from agenttrain.sandbox.bubblewrap import BubblewrapBackend
from agenttrain.sandbox_protocol import Sandbox, SandboxFile, SandboxRequest
from agenttrain.sandbox_spec import BOUNDARIES, LIMITS, SandboxLimits
from agenttrain.testing import SandboxBackendContract

PYTHON = "/usr/bin/python3"
"""That every user may run."""
NOBODY = 65534
needs_same_python = pytest.mark.skipif(
    not os.path.exists(f"/usr/lib/python{sys.version_info[0]}.{sys.version_info[1]}/os.py"),
    reason="the system's Python is of another version than this one, whose packages it can't import",
)
as_root = pytest.mark.skipif(
    os.geteuid() != 0 or not os.path.exists(PYTHON), reason="needs root and the system's Python"
)


@pytest.fixture(scope="module")
def bubblewrap_here() -> BubblewrapBackend:
    made = BubblewrapBackend()
    try:
        made.isolation(request())
    except SandboxError as error:
        pytest.skip(str(error))
    return made


def request(**limits: Any) -> SandboxRequest:
    return SandboxRequest(name="a test", files={"a/x.txt": SandboxFile(data=b"hello")}, limits=SandboxLimits(**limits))


@pytest.fixture
def backend(bubblewrap_here: BubblewrapBackend) -> BubblewrapBackend:
    return bubblewrap_here


@pytest.fixture
def sandbox(backend: BubblewrapBackend) -> Iterator[Sandbox]:
    made = backend.open(request(memory_mib=256, disk_mib=8, processes=16))
    yield made
    made.close()


def test_everything_is_enforced(backend: BubblewrapBackend) -> None:
    isolation = backend.isolation(request())
    assert isolation.unenforced == ()
    assert set(isolation.enforced) == {*BOUNDARIES, *LIMITS}
    assert isolation.enforced["disk_mib"] == "tmpfs of that size"
    assert "network" not in backend.isolation(SandboxRequest(name="a test", network=True)).enforced


def test_nothing_of_the_machine_can_be_written_and_little_is_seen(sandbox: Sandbox) -> None:
    here = Path(__file__).resolve()
    code = f"""
import os
for path in ("/x", "/usr/x", "/etc/x", "/dev/x"):
    try:
        open(path, "w")
        print("written", path)
    except OSError as error:
        print(error.strerror)
print(os.path.exists({str(here)!r}), os.path.exists("/etc/shadow"), os.getpid() < 10)
"""
    assert sandbox.run(["python", "-c", code]).stdout == "Read-only file system\n" * 4 + "False False True\n"


def test_this_python_and_its_packages_are_there(sandbox: Sandbox) -> None:
    run = sandbox.run(["python", "-c", "import pytest, sys; print(sys.executable)"])
    assert run.stdout == f"{sys.executable}\n"


def test_programs_are_an_ordinary_user_who_can_not_become_more(sandbox: Sandbox) -> None:
    run = sandbox.run("id -un; grep -E '^(CapEff|NoNewPrivs)' /proc/self/status; unshare -U true; echo $?")
    assert run.stdout == "sandbox\nCapEff:\t0000000000000000\nNoNewPrivs:\t1\n1\n"


def test_one_size_holds_for_all_that_can_be_written(sandbox: Sandbox) -> None:
    """8 MiB: 5 in the working directory leave no room for 5 elsewhere."""
    run = sandbox.run("head -c 5242880 /dev/zero > x; head -c 5242880 /dev/zero > /tmp/x; head -c 1 x | wc -c")
    assert run.stdout == "1\n"
    assert "No space left on device" in run.stderr


def test_no_address_is_reached_not_even_this_machine_s(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket; print(socket.socket().connect_ex(('127.0.0.1', {port})))"
        assert sandbox.run(["python", "-c", code]).stdout == "111\n"


def test_with_a_network_an_address_of_this_machine_is_reached(backend: BubblewrapBackend) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        sandbox = backend.open(SandboxRequest(name="a test", network=True))
        try:
            code = f"import socket; print(socket.create_connection(('127.0.0.1', {port})).getpeername()[1])"
            assert sandbox.run(["python", "-c", code]).stdout == f"{port}\n"
        finally:
            sandbox.close()


def test_what_is_named_visible_is_seen_read_only(backend: BubblewrapBackend, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir(mode=0o755)
    (tmp_path / "data" / "x").write_text("seen")
    tmp_path.chmod(0o755)
    sandbox = backend.open(SandboxRequest(name="a test", visible=(str(tmp_path / "data"),)))
    try:
        run = sandbox.run(f"cat {tmp_path}/data/x; touch {tmp_path}/data/y")
    finally:
        sandbox.close()
    assert run.stdout == "seen"
    assert "Read-only file system" in run.stderr


KILLED = """
    import contextlib, os, signal
    from agenttrain.sandbox.bubblewrap import BubblewrapBackend
    from agenttrain.sandbox_protocol import SandboxRequest
    sandbox = BubblewrapBackend().open(SandboxRequest(name="killed"))
    sandbox.write("stay.py", "open('ready', 'w').write('x'); import time; time.sleep(1000)")
    marked = f"of {os.getpid()}"
    sandbox.run(f"setsid python stay.py '{marked}' >/dev/null 2>&1 & while [ ! -s ready ]; do sleep 0.01; done")
    seen = []
    for each in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{each}/cmdline", "rb") as file:
            if file.read().split(b"\\0")[1:3] == [b"stay.py", marked.encode()]:
                seen.append(int(each))
    print(seen, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def by_another(code: str, *, user: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own that may be killed, and may be another user's."""
    paths = [path for path in sys.path if path.endswith(("site-packages", "src"))]
    return subprocess.run(
        [PYTHON if user is not None else sys.executable, "-B", "-W", "ignore", "-c", textwrap.dedent(code)],
        env={"PYTHONPATH": ":".join(paths), "PATH": os.environ["PATH"]},
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


def test_nothing_is_left_of_a_killed_agenttrain(backend: BubblewrapBackend) -> None:
    killed = by_another(KILLED)
    assert killed.returncode == -signal.SIGKILL
    (daemon,) = json.loads(killed.stdout)
    try:
        handle = os.pidfd_open(daemon)
    except ProcessLookupError:
        return
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    assert poll.poll(60_000)
    os.close(handle)


@pytest.mark.slow
@as_root
@needs_same_python
def test_an_ordinary_user_has_the_same(backend: BubblewrapBackend) -> None:
    code = """
        import json
        from agenttrain.sandbox.bubblewrap import BubblewrapBackend
        from agenttrain.sandbox_protocol import SandboxRequest
        backend = BubblewrapBackend()
        request = SandboxRequest(name="user")
        isolation = backend.isolation(request)
        sandbox = backend.open(request)
        run = sandbox.run("id -un; unshare -U true || echo refused; touch /usr/x || echo refused")
        sandbox.close()
        print(json.dumps([isolation.unenforced, isolation.enforced["privileges"], run.stdout]))
    """
    unenforced, privileges, printed = json.loads(by_another(code, user=NOBODY).stdout)
    assert unenforced == []
    assert privileges == "user namespace that allows no other, no_new_privs"
    assert printed == "sandbox\nrefused\nrefused\n"


def test_a_machine_without_bubblewrap_is_told_how_to_get_it() -> None:
    with pytest.raises(SandboxError, match=r"^No program 'no-bwrap' is on the PATH\. Install bubblewrap \(apt-get "):
        BubblewrapBackend(program="no-bwrap").isolation(request())


def without(options: tuple[str, ...], folder: Path) -> str:
    """A bwrap that does not name some options in its usage."""
    program = folder / "bwrap"
    pattern = "|".join(options)
    program.write_text(
        f'#!/bin/sh\n[ "$1" = --help ] && {{ bwrap --help 2>&1 | grep -vE -e "{pattern}"; exit; }}\nexec bwrap "$@"\n'
    )
    program.chmod(0o755)
    return str(program)


def test_an_older_bubblewrap_s_tmpfs_has_no_size(backend: BubblewrapBackend, tmp_path: Path) -> None:
    """What is written is watched then, which is no limit that always holds."""
    trial = bubblewrap._Trial.of(without(("--size",), tmp_path))
    assert not trial.has("--size")
    assert "--size" not in trial._room(8)
    older = BubblewrapBackend(program=without(("--size",), tmp_path))
    assert older.isolation(request()).unenforced == ("disk_mib",)
    sandbox = older.open(request(disk_mib=8))
    try:
        ended = sandbox.run("for n in 1 2 3 4; do head -c 4194304 /dev/zero > $n; done; sleep 60")
    finally:
        sandbox.close()
    assert (ended.exit_code, ended.ended_by) == (None, "disk_mib")


def test_a_bubblewrap_that_is_too_old_is_refused_by_the_option(backend: BubblewrapBackend, tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match=r"has no option --as-pid-1\. Install bubblewrap 0\.5\.0 or newer"):
        BubblewrapBackend(program=without(("--as-pid-1",), tmp_path)).isolation(request())


@pytest.mark.slow
class TestContract(SandboxBackendContract):
    """What every backend keeps to, by bwrap."""

    @pytest.fixture
    def backend(self, bubblewrap_here: BubblewrapBackend) -> BubblewrapBackend:  # type: ignore[override]
        return bubblewrap_here
