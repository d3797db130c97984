"""namespaces.py: sandboxes in namespaces keep to the contract, as root and as nobody, and to what only they promise."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agenttrain.errors import SandboxError
from agenttrain.sandbox.namespaces import NamespacesBackend
from agenttrain.sandbox.starting import starter
from agenttrain.sandbox_protocol import Sandbox, SandboxFile, SandboxRefusal, SandboxRequest
from agenttrain.sandbox_spec import SandboxLimits
from agenttrain.testing import SandboxBackendContract
from agenttrain.testing.machine import wait_for_none
from agenttrain.testing.sandbox_contract import opened, sandbox_limits

ROOT = Path(__file__).parents[2]


@pytest.fixture
def backend() -> NamespacesBackend:
    backend = NamespacesBackend()
    try:
        backend.isolation(SandboxRequest(name="trial"))
    except SandboxError as error:
        pytest.skip(str(error))
    return backend


@pytest.fixture
def sandbox(backend: NamespacesBackend) -> Iterator[Sandbox]:
    with opened(backend) as sandbox:
        yield sandbox


class TestContract(SandboxBackendContract):
    @pytest.fixture
    def backend(self, backend: NamespacesBackend) -> NamespacesBackend:
        return backend


def test_everything_is_enforced(backend: NamespacesBackend) -> None:
    assert backend.isolation(SandboxRequest(name="r")).unenforced == ()


def test_only_what_was_meant_is_there(sandbox: Sandbox) -> None:
    """No home, no repository, no temporary folder of the machine; made-up users; devices that only give or take."""
    assert sandbox.run(["cat", "/etc/passwd"]).stdout.splitlines()[1] == "sandbox:x:1000:1000:sandbox:/tmp:/bin/sh"
    assert not sandbox.run(["ls", str(ROOT / "README.md")]).ok
    assert sandbox.run(["ls", str(ROOT)]).stdout == ""  # the folder is there where this Python lies below it
    assert not sandbox.run(["test", "-e", "/sys"]).ok
    assert not sandbox.run(["test", "-e", "/etc/shadow"]).ok
    assert sandbox.run("cd /dev && echo *").stdout == "fd full null random shm stderr stdin stdout urandom zero\n"
    assert sandbox.run(["find", "/tmp", "/home", "/mnt", "/opt", "/var", "/srv", "-type", "f"]).stdout == ""
    code = "import os; print(sum(name.isdigit() for name in os.listdir('/proc')))"
    assert sandbox.run(["python", "-c", code]).stdout == "2\n"


def test_what_is_visible_is_seen_and_stays(backend: NamespacesBackend, tmp_path: Path) -> None:
    """With its own path, read-only, and nothing beside it."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "a").write_text("seen\n")
    (tmp_path / "beside").write_text("x")
    with opened(backend, visible=(str(data), str(tmp_path / "none"))) as sandbox:
        assert sandbox.run(["cat", f"{data}/a"]).stdout == "seen\n"
        assert not sandbox.run(f"echo x > {data}/a || rm {data}/a || touch {data}/b").ok
        assert sandbox.run(["ls", str(tmp_path)]).stdout == "data\n"
    assert (data / "a").read_text() == "seen\n"


CALLS = """
import ctypes, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(*words):
    return "done" if libc.syscall(*words) >= 0 else os.strerror(ctypes.get_errno())
def family(number):
    try:
        socket.socket(number).close()
        return "done"
    except OSError as error:
        return error.strerror
print(family(socket.AF_VSOCK), family(38), family(17), sep="; ")
print(call(425, 1, 0), call(319, b"x", 0), call(103, 10, 0, 0), sep="; ")
print(call(101, 16, 1, 0, 0), call(141, 0, 1, 19), call(302, 1, 9, b"\\0" * 16, 0), sep="; ")
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of calls are those of x86_64")
def test_calls_that_no_namespace_holds_are_not_there(sandbox: Sandbox) -> None:
    """Sockets to the machine's own host and to the kernel, rings, memory that nothing counts, the kernel's log; and
    process 1 can't be traced, slowed or limited."""
    assert sandbox.run(["python", "-c", CALLS]).stdout.splitlines() == [
        "; ".join(["Address family not supported by protocol"] * 3),
        "Operation not permitted; Function not implemented; Operation not permitted",
        "; ".join(["Operation not permitted"] * 3),
    ]


def test_a_program_that_memory_runs_out_for_says_so(sandbox: Sandbox) -> None:
    """Where a control group ends it; else Python itself finds none left."""
    ran = sandbox.run(["python", "-c", "x = b'x' * (900 * 2**20)"])
    if sandbox.isolation.enforced["memory_mib"] == "control group":
        assert (ran.exit_code, ran.ended_by) == (None, "memory_mib")
    else:
        assert ran.stderr.splitlines()[-1] == "MemoryError"


FILLS_MEMORY = """
import os, time
open("/proc/self/oom_score_adj", "w").write("0")
for _ in range(150):
    try:
        if os.fork() == 0:
            time.sleep(60)
    except OSError:
        break
with open("/dev/shm/fill", "wb") as file:
    while True:
        file.write(b"x" * 65536)
"""


def test_a_program_that_has_the_kernel_end_the_sandbox_itself_is_told_its_limit(backend: NamespacesBackend) -> None:
    """Many small programs, and files that are no process's memory; it is no failure of the environment."""
    limits = SandboxLimits(memory_mib=64, disk_mib=256, processes=200, seconds=60)
    sandbox = backend.open(SandboxRequest(name="fills", limits=limits))
    try:
        if sandbox.isolation.enforced["memory_mib"] != "control group":
            pytest.skip("no control groups can be made here")
        ran = sandbox.run(["python", "-I", "-S", "-c", FILLS_MEMORY])
        assert (ran.exit_code, ran.ended_by) == (None, "memory_mib")
        sandbox.settle()
        assert sandbox.run(["true"]).ended_by == "memory_mib"
        with pytest.raises(SandboxRefusal, match=r"^The sandbox was ended by its limit memory_mib=64, and its files"):
            sandbox.snapshot()
    finally:
        sandbox.close()
    with pytest.raises(SandboxError):
        sandbox.run(["true"])


def test_a_run_with_no_process_left_says_so(sandbox: Sandbox) -> None:
    """Files can be worked on, and all is well after settling."""
    code = "import os, time\nwhile True:\n try:\n  if os.fork() == 0: time.sleep(600)\n except OSError: break"
    assert sandbox.run(["python", "-c", code]).ok
    ran = sandbox.run("sleep 0; sleep 0; sleep 0")
    assert ran.ended_by == "processes" or "fork" in ran.stderr
    sandbox.write("a", "x")
    sandbox.settle()
    assert sandbox.run("sleep 0; cat a").stdout == "x"


def test_the_starter_may_end(backend: NamespacesBackend) -> None:
    """What is open goes on, and the next sandbox is forked from a new one."""
    with opened(backend, files={"a": b"x"}) as first:
        old = starter.pid
        assert old is not None
        os.kill(old, signal.SIGKILL)
        with opened(backend, files={"a": b"y"}) as second:
            assert starter.pid != old
            assert (first.run(["cat", "a"]).stdout, second.run(["cat", "a"]).stdout) == ("x", "y")


FORKED = """
import os
from agenttrain.sandbox.namespaces import NamespacesBackend
from agenttrain.sandbox_protocol import SandboxRequest
def used():
    sandbox = NamespacesBackend().open(SandboxRequest(name="forked"))
    print(sandbox.run(["echo", "x"]).stdout, end="", flush=True)
    sandbox.close()
used()
if os.fork() == 0:
    used()
    os._exit(0)
print(os.wait()[1], flush=True)
used()
"""


def test_a_process_that_is_forked_has_a_starter_of_its_own(backend: NamespacesBackend) -> None:
    ran = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=120)
    assert ran.stdout == "x\nx\n0\nx\n"


KILLED = """
import os, signal, sys
from agenttrain.sandbox.namespaces import NamespacesBackend
from agenttrain.sandbox_protocol import SandboxRequest
sandboxes = [NamespacesBackend().open(SandboxRequest(name=sys.argv[1])) for _ in range(2)]
for sandbox in sandboxes:
    sandbox.run(f"setsid sh -c 'sleep 600; :' {sys.argv[1]} > /dev/null 2>&1 &")
print(len(sandboxes), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_outlives_a_killed_agenttrain(backend: NamespacesBackend) -> None:
    marker = f"marker{os.getpid()}killed"
    ran = subprocess.run([sys.executable, "-c", KILLED, marker], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout) == (-9, "2\n")
    assert wait_for_none(marker) == []


def test_a_file_of_the_request_that_does_not_fit_is_an_error(backend: NamespacesBackend) -> None:
    files = {"big": SandboxFile(data=b"x" * (9 * 2**20))}
    with pytest.raises(SandboxError, match=r"its files can't be laid. The disk of the sandbox is full: disk_mib=8"):
        backend.open(SandboxRequest(name="big", files=files, limits=sandbox_limits()))


AS_NOBODY = """
set -e
for each in {needed}; do mkdir -p {hold}$each; mount --rbind $each {hold}$each; done
for each in {closed}; do mount -t tmpfs -o mode=0755 none $each; done
for each in {needed}; do mkdir -p $each; mount --rbind {hold}$each $each; done
cd {root}
exec setpriv --reuid 65534 --regid 65534 --clear-groups env HOME=/tmp "$@"
"""
"""In a mount namespace: folders of this Python that only root may enter are made to hold nothing but it."""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become nobody")
@pytest.mark.skipif(not shutil.which("setpriv"), reason="setpriv is not installed")
def test_an_ordinary_user_gets_the_same(tmp_path: Path) -> None:
    """The whole of this file but this test, as nobody: the same boundaries, by the same names."""
    closed = {str(parent) for prefix in (sys.prefix, sys.base_prefix, ROOT) for parent in Path(prefix).parents}
    closed = {path for path in closed if not os.stat(path).st_mode & 0o005}
    needed = {
        str(prefix) for prefix in (sys.prefix, sys.base_prefix, ROOT) if {*map(str, Path(prefix).parents)} & closed
    }
    hold = tmp_path / "hold"
    script = AS_NOBODY.format(needed=" ".join(sorted(needed)), closed=" ".join(sorted(closed)), hold=hold, root=ROOT)
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", str(Path(__file__))]
    began = time.monotonic()
    ran = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", *words], capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr} after {time.monotonic() - began:.0f} s"
    assert "skipped" not in ran.stdout


def test_what_sandboxes_took_of_the_processor_is_known_when_they_are_closed(backend: NamespacesBackend) -> None:
    """So that the cost of a run counts it: programs are no children of this process."""
    before = starter.cpu_s
    with opened(backend) as sandbox:
        sandbox.run(["python", "-c", "import time\nwhile time.process_time() < 0.3: pass"])
    deadline = time.monotonic() + 10
    while starter.cpu_s - before < 0.3 and time.monotonic() < deadline:
        time.sleep(0.01)  # the starter has yet to hear that it has ended
    assert 0.3 <= starter.cpu_s - before < 3
