"""What every sandbox backend keeps to, as tests: subclass `SandboxBackendContract` in pytest and give the backend.

A boundary or limit that the backend says it doesn't enforce here is not tested, and the test is skipped by its name;
what it says it enforces is tried from inside, by programs that mean harm, and looked for on the machine afterwards.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agenttrain.errors import SandboxError
from agenttrain.sandbox.uids import running_uids
from agenttrain.sandbox_protocol import Sandbox, SandboxBackend, SandboxFile, SandboxRefusal, SandboxRequest
from agenttrain.sandbox_spec import BOUNDARIES, LIMITS, SandboxLimits
from agenttrain.testing.machine import DAEMON, held_by_us, left_on_the_machine, processes_with, wait_for_none


class SandboxBackendContract:
    """Subclass it, and give `backend`; pytest does the rest.

    Attributes to set where yours differs:
        same_python: "python" is this interpreter. False for images that hold another.
        n_at_once: sandboxes that are open at the same time in one test.
        timeout_s: how long a call from another thread may take.
    """

    same_python: bool = True
    n_at_once: int = 8
    timeout_s: float = 120.0

    @pytest.fixture
    def backend(self) -> SandboxBackend | Iterator[SandboxBackend]:
        """The backend under test."""
        pytest.fail(f"{type(self).__name__} has no fixture `backend`. Write one that gives a SandboxBackend.")

    @pytest.fixture
    def sandbox(self, backend: SandboxBackend) -> Iterator[Sandbox]:
        """One with two files and limits that programs reach soon."""
        with opened(backend, files={"a.txt": b"first\n", "src/b.py": b"print('b')\n"}) as sandbox:
            yield sandbox

    @pytest.fixture
    def marker(self) -> str:
        """What processes, files and groups of one test are found by."""
        return f"marker{uuid.uuid4().hex}"

    # ── what it is ───────────────────────────────────────────────────────────────────────────────────────────────

    def test_it_says_of_each_boundary_and_limit_whether_it_holds(self, backend: SandboxBackend) -> None:
        """Each once; a network that was asked for is in neither."""
        isolation = backend.isolation(SandboxRequest(name="contract"))
        assert isolation.backend == backend.name
        assert sorted((*isolation.enforced, *isolation.unenforced)) == sorted((*BOUNDARIES, *LIMITS))
        assert all(isolation.enforced.values())
        asked = backend.isolation(SandboxRequest(name="contract", network=True))
        assert "network" not in (*asked.enforced, *asked.unenforced)

    def test_a_sandbox_says_the_same(self, backend: SandboxBackend, sandbox: Sandbox) -> None:
        """Of itself."""
        assert sandbox.isolation == backend.isolation(SandboxRequest(name="contract"))
        assert sandbox.run(["pwd"]).stdout == f"{sandbox.path}\n"

    # ── files ────────────────────────────────────────────────────────────────────────────────────────────────────

    def test_files_of_the_request_stand_there(self, backend: SandboxBackend) -> None:
        """With their kinds, and whether they may be executed."""
        files = {
            "empty": SandboxFile(kind="folder"),
            "in/deep/x.bin": SandboxFile(data=bytes(range(256))),
            "go": SandboxFile(data=b"#!/bin/sh\necho gone\n", executable=True),
            "to": SandboxFile(kind="link", data=b"in/deep/x.bin"),
        }
        with opened(backend, files=files) as sandbox:
            folders = {"in": SandboxFile(kind="folder"), "in/deep": SandboxFile(kind="folder")}
            assert sandbox.snapshot() == {**files, **folders}
            assert sandbox.list() == ["empty/", "go", "in/", "in/deep/", "in/deep/x.bin", "to"]
            assert sandbox.list("in") == ["in/deep/", "in/deep/x.bin"]
            assert sandbox.run(["./go"]).stdout == "gone\n"
            assert sandbox.read_bytes("to") == bytes(range(256))

    def test_what_is_written_is_read(self, sandbox: Sandbox) -> None:
        """By calls and by programs; what stood there at first is kept apart."""
        sandbox.write("new/c.txt", "ä\n")
        sandbox.write("a.txt", b"\xff")
        assert sandbox.run(["cat", "new/c.txt"]).stdout == "ä\n"
        assert sandbox.run("echo more >> new/c.txt").ok
        assert sandbox.read("new/c.txt") == "ä\nmore\n"
        assert sandbox.read("a.txt") == "�"
        assert sandbox.initial["a.txt"] == SandboxFile(data=b"first\n")

    def test_a_snapshot_holds_what_is_odd(self, sandbox: Sandbox) -> None:
        """Names of any bytes, a file and a folder that their owner closed, a pipe, links to anywhere."""
        assert sandbox.run(
            "printf x > \"$(printf 'a\\nb')\"; printf y > \"$(printf '\\377')\"; ln -s /etc/passwd out; mkfifo pipe; "
            "printf z > closed; mkdir shut; printf s > shut/s; chmod 0 closed shut; ln -s . round"
        ).ok
        found = sandbox.snapshot()
        assert found["a\nb"].data == b"x"
        assert found["\udcff"].data == b"y"
        assert found["out"] == SandboxFile(kind="link", data=b"/etc/passwd")
        assert (found["closed"].data, found["shut/s"].data, found["pipe"].kind) == (b"z", b"s", "other")
        assert not [name for name in found if name.startswith("round/")]

    @pytest.mark.parametrize("path", ["../x", "/etc/passwd", "out", "out/passwd", "a.txt/x", "src/../../x"])
    def test_a_path_that_leads_out_is_refused(self, sandbox: Sandbox, path: str) -> None:
        """To read or to write, by names or by a link."""
        assert sandbox.run("ln -s /etc out").ok
        for call in (lambda: sandbox.read_bytes(path), lambda: sandbox.write(path, "x")):
            with pytest.raises(SandboxRefusal):
                call()

    def test_what_is_not_there_is_refused(self, sandbox: Sandbox) -> None:
        """A file, a folder, a program; a pipe that nobody writes to holds nobody up."""
        assert sandbox.run("mkfifo pipe").ok
        for call in (
            lambda: sandbox.read("none"),
            lambda: sandbox.read("src"),
            lambda: sandbox.read("pipe"),
            lambda: sandbox.write("src", "x"),
            lambda: sandbox.list("none"),
            lambda: sandbox.list("a.txt"),
            lambda: sandbox.run(["no-such-program"]),
            lambda: sandbox.run(["true"], folder="none"),
            lambda: sandbox.run([]),
        ):
            with pytest.raises(SandboxRefusal):
                call()

    # ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def test_a_program_is_run(self, sandbox: Sandbox) -> None:
        """Its arguments as they are, its input, environment and folder; one text is the shell's."""
        ran = sandbox.run(
            ["sh", "-c", 'cat; echo "$0 $X"; pwd >&2; exit 3', "a b"], stdin="in ", env={"X": "ä"}, folder="src"
        )
        assert (ran.exit_code, ran.stdout, ran.stderr) == (3, "in a b ä\n", f"{sandbox.path}/src\n")
        assert (ran.ok, ran.ended_by, ran.n_dropped) == (False, "", 0)
        assert sandbox.run("kill -TERM $$").exit_code == -15
        assert sandbox.run(["python", "src/b.py"]).stdout == "b\n"

    def test_python_is_this_python(self, sandbox: Sandbox) -> None:
        """By its name, for programs too, with what is installed for it."""
        if not self.same_python:
            pytest.skip("another Python is in the image")
        code = "import importlib.util, sys; assert importlib.util.find_spec('pytest'); print(sys.version)"
        for words in (["python", "-c", code], f'exec python -c "{code}"'):
            assert sandbox.run(words).stdout == f"{sys.version}\n"

    def test_nothing_of_our_environment_is_passed_on(
        self, backend: SandboxBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """PATH, HOME, LANG, TMPDIR and what is given."""
        monkeypatch.setenv("A_SECRET_OF_OURS", "secret")
        with opened(backend, env={"GIVEN": "1"}) as sandbox:
            lines = sandbox.run(["env"], env={"MORE": "2"}).stdout.splitlines()
            assert sorted(line.split("=")[0] for line in lines) == ["GIVEN", "HOME", "LANG", "MORE", "PATH", "TMPDIR"]
            assert sandbox.run('test -w "$HOME" && test -w "$TMPDIR" && touch "$TMPDIR/x"').ok

    def test_runs_go_side_by_side(self, sandbox: Sandbox) -> None:
        """Each waits for what another does."""
        assert sandbox.run("mkfifo one two").ok
        with ThreadPoolExecutor(2) as threads:
            first = threads.submit(sandbox.run, "echo hello > one; cat two")
            second = threads.submit(sandbox.run, "cat one; echo back > two")
            assert second.result(self.timeout_s).stdout == "hello\n"
            assert first.result(self.timeout_s).stdout == "back\n"

    def test_what_a_program_leaves_goes_on(self, sandbox: Sandbox) -> None:
        """It holds no run up, and may write."""
        assert sandbox.run("(while :; do echo x; echo x > beat; sleep 0.05; done) & echo left").stdout[:4] in (
            "left",
            "x\nle",
        )
        assert sandbox.run("rm -f beat; while ! test -e beat; do sleep 0.01; done").ok

    # ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────

    def test_seconds_end_a_run_and_what_it_started(self, sandbox: Sandbox, marker: str) -> None:
        """Its children and their sessions, whatever signals they ignore."""
        self._needs(sandbox, "seconds")
        code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
        ran = sandbox.run(f"setsid python -c '{code}' {marker} & python -c '{code}' {marker}", seconds=1.5)
        assert (ran.exit_code, ran.ended_by) == (None, "seconds")
        assert wait_for_none(marker) == []
        assert sandbox.run(["echo", "after"]).stdout == "after\n"

    def test_output_is_kept_up_to_its_limit(self, sandbox: Sandbox) -> None:
        """The rest is counted, and the program goes on."""
        self._needs(sandbox, "output_kib")
        ran = sandbox.run(["python", "-c", "import sys; print('o' * 99999); print('e' * 8, file=sys.stderr)"])
        assert ran.ok
        assert (len(ran.stdout), ran.stderr, ran.n_dropped) == (8192, "e" * 8 + "\n", 100000 - 8192)
        assert sandbox.run("python -c 'print(\"o\" * 99999)' > big").ok
        with pytest.raises(SandboxRefusal):
            sandbox.read("big")
        assert len(sandbox.read_bytes("big")) == 100000

    def test_memory_is_limited(self, sandbox: Sandbox) -> None:
        """One program that takes ever more does not get it."""
        self._needs(sandbox, "memory_mib")
        ran = sandbox.run(
            ["python", "-c", "x = []\nfor i in range(999):\n x.append(b'x' * 2**20); print(i, flush=True)"]
        )
        assert not ran.ok
        assert ran.ended_by in ("", "memory_mib")
        assert int(ran.stdout.split()[-1]) < 1.5 * sandbox_limits().memory_mib  # what holds it may count too
        assert sandbox.run(["echo", "after"]).stdout == "after\n"

    def test_memory_of_all_processes_together_is_limited(self, sandbox: Sandbox) -> None:
        """Eight programs that would each stay below it."""
        self._needs(sandbox, "memory_mib")
        code = "import time; x = b'x' * (60 * 2**20); print('held', flush=True); time.sleep(2)"
        ran = sandbox.run(f'for i in 1 2 3 4 5 6 7 8; do python -c "{code}" & done; wait')
        assert ran.stdout.count("held") < 8
        assert sandbox.run(["echo", "after"]).stdout == "after\n"

    def test_processes_are_limited(self, sandbox: Sandbox, marker: str) -> None:
        """A program that starts ever more does not get them, and all of them end."""
        self._needs(sandbox, "processes")
        code = """
import os, sys, time
n = 1
while n < 200:
    try:
        if os.fork() == 0:
            time.sleep(600)
    except OSError:
        break
    n += 1
print(n)
"""
        ran = sandbox.run(["python", "-c", code, marker])
        assert 1 < int(ran.stdout) <= sandbox_limits().processes
        sandbox.settle()
        assert wait_for_none(marker) == []
        assert sandbox.run(["echo", "after"]).stdout == "after\n"

    def test_disk_is_limited(self, sandbox: Sandbox) -> None:
        """Many files together, one file, and what is written by calls."""
        self._needs(sandbox, "disk_mib")
        code = "import os\nfor i in range(99):\n open(f'f{i}', 'wb').write(os.urandom(2**20)); print(i, flush=True)"
        ran = sandbox.run(["python", "-c", code])
        assert not ran.ok
        assert len(ran.stdout.split()) <= sandbox_limits().disk_mib
        with pytest.raises(SandboxRefusal):
            sandbox.write("more", b"x" * (sandbox_limits().disk_mib * 2**20))
        assert sandbox.run("rm -f f* more; head -c 1000000 /dev/zero > small").ok

    # ── boundaries ───────────────────────────────────────────────────────────────────────────────────────────────

    def test_nothing_of_the_machine_is_seen(self, sandbox: Sandbox, tmp_path: Path) -> None:
        """Neither by a program nor through a link that a call follows; and the system can't be changed."""
        self._needs(sandbox, "filesystem")
        secret = tmp_path / "secret"
        secret.write_text("secret of ours")
        os.chmod(secret, 0o644)
        assert sandbox.run(f"ln -s {secret} link").ok
        assert not sandbox.run(["cat", str(secret)]).ok
        with pytest.raises(SandboxRefusal):
            sandbox.read("link")
        assert sandbox.snapshot()["link"].kind == "link"
        for place in ("/usr/bin", "/etc", "/", "/usr/lib", "/proc/sys/kernel"):
            assert not sandbox.run(f"touch {place}/of-the-contract || rm {place}/*").ok

    def test_there_is_no_network(self, sandbox: Sandbox, marker: str) -> None:
        """Neither the machine's own addresses, nor its sockets with a name but no file."""
        self._needs(sandbox, "network")
        with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as named:
            named.bind(f"\0{marker}")
            named.listen()
            code = """
import socket, sys
for family, address in ((2, ("127.0.0.1", int(sys.argv[1]))), (1, "\\0" + sys.argv[2]), (2, ("192.0.2.1", 80))):
    try:
        with socket.socket(family) as end:
            end.settimeout(2)
            end.connect(address)
        print("connected")
    except OSError:
        print("refused")
"""
            ran = sandbox.run(["python", "-c", code, str(server.getsockname()[1]), marker])
            assert ran.stdout.split() == ["refused"] * 3

    def test_programs_have_no_rights(self, sandbox: Sandbox) -> None:
        """Not root's, no capabilities, none to gain, and no namespace of users to have them in."""
        self._needs(sandbox, "privileges")
        code = """
import os
lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(os.getuid() != 0, int(lines["CapEff"], 16), int(lines["CapPrm"], 16), lines["NoNewPrivs"].strip())
"""
        assert sandbox.run(["python", "-c", code]).stdout == "True 0 0 1\n"
        assert not sandbox.run(["unshare", "-U", "true"]).ok
        assert not sandbox.run(["mount", "-t", "tmpfs", "none", sandbox.path]).ok

    def test_the_sandbox_itself_can_not_be_ended_or_seen_into(self, sandbox: Sandbox) -> None:
        """By whatever a program sends to all or sets."""
        self._needs(sandbox, "processes_end")
        assert reaches_no_one(sandbox), "what is sent to all would reach processes of this machine, and is not tried"
        code = """
import os, resource, signal
for call in (
    lambda: os.kill(1, 9), lambda: os.kill(1, 19), lambda: os.kill(1, 2), lambda: os.kill(os.getppid(), 9),
    lambda: os.kill(os.getppid(), 19), lambda: open("/proc/1/mem", "rb"), lambda: open("/proc/1/environ", "rb").read(),
    lambda: os.listdir("/proc/1/fd"), lambda: os.readlink("/proc/1/root"),
    lambda: resource.prlimit(1, resource.RLIMIT_AS, (0, 0)), lambda: os.sched_setaffinity(1, {0}),
):
    try:
        call()
    except OSError:
        print("refused")
    else:
        print("done")
"""
        ran = sandbox.run(["python", "-c", code])
        assert ran.stdout.split()[5:] == ["refused"] * 6
        sandbox.run("kill -9 -1")
        assert sandbox.run(["echo", "after"]).stdout == "after\n"

    # ── what ends ────────────────────────────────────────────────────────────────────────────────────────────────

    def test_settle_leaves_no_process_and_every_file(self, sandbox: Sandbox, marker: str) -> None:
        """Daemons, runs under way, and programs that start another for each that ends."""
        self._needs(sandbox, "processes_end")
        assert sandbox.run(["python", "-c", DAEMON, marker]).ok
        with ThreadPoolExecutor(1) as threads:
            under_way = threads.submit(
                sandbox.run, f"touch on; while :; do setsid sh -c 'sleep 0.01' {marker} & sleep 0.01; done"
            )
            assert sandbox.run("while ! test -e on; do sleep 0.01; done").ok
            sandbox.settle()
            assert under_way.result(self.timeout_s).exit_code == -9
        assert processes_with(marker) == []
        assert sandbox.read("a.txt") == "first\n"
        assert sandbox.run(["echo", "after"]).stdout == "after\n"

    def test_a_fresh_one_shares_nothing(self, sandbox: Sandbox) -> None:
        """Not its files, nor what it has in other folders; it has limits of its own."""
        assert sandbox.run('echo x > "$TMPDIR/left"; echo x > left').ok
        limits = SandboxLimits(seconds=5, output_kib=1)
        with sandbox.fresh({"only": "this"}, limits=limits) as fresh:
            assert fresh.list() == ["only"]
            assert not fresh.run('test -e "$TMPDIR/left"').ok
            assert len(fresh.run("python -c 'print(\"o\" * 9999)'").stdout) == 1024
            fresh.write("only", "other")
        assert sandbox.list() == ["a.txt", "left", "src/", "src/b.py"]
        with pytest.raises(SandboxError):
            fresh.run(["true"])

    def test_close_ends_everything(self, backend: SandboxBackend, marker: str) -> None:
        """Processes, files wherever they are, mounts, groups, descriptors; a call under way fails."""
        with opened(backend):
            pass  # what is made once per process is made
        before = held_by_us()
        with opened(backend, name=marker) as sandbox:
            assert sandbox.run(["python", "-c", DAEMON, marker]).ok
            sandbox.run(f'for d in . "$HOME" "$TMPDIR" /tmp /var/tmp /dev/shm; do touch "$d/{marker}"; done')
            with ThreadPoolExecutor(1) as threads:
                under_way = threads.submit(sandbox.run, f"touch on; sh -c 'sleep 600; :' {marker}")
                assert sandbox.run("while ! test -e on; do sleep 0.01; done").ok
                sandbox.close()
                assert isinstance(under_way.exception(self.timeout_s), SandboxError)
        sandbox.close()
        if "processes_end" in sandbox.isolation.enforced:
            assert wait_for_none(marker) == []
        assert left_on_the_machine(marker) == []
        assert held_by_us() == before
        for call in (sandbox.list, sandbox.settle, sandbox.snapshot, lambda: sandbox.run(["true"])):
            with pytest.raises(SandboxError):
                call()

    def test_many_are_open_at_once(self, backend: SandboxBackend) -> None:
        """Each by a thread of its own, each with its own files."""
        barrier = threading.Barrier(self.n_at_once)

        def one(i: int) -> str:
            with opened(backend, files={"mine": str(i).encode()}, name=f"many-{i}") as sandbox:
                barrier.wait(self.timeout_s)
                ran = sandbox.run('cat mine; echo " $X"; sleep 0.1', env={"X": str(i)})
                return ran.stdout + ",".join(sandbox.list())

        with ThreadPoolExecutor(self.n_at_once) as threads:
            assert list(threads.map(one, range(self.n_at_once))) == [f"{i} {i}\nmine" for i in range(self.n_at_once)]

    def _needs(self, sandbox: Sandbox, *names: str) -> None:
        for name in names:
            if name in sandbox.isolation.unenforced:
                pytest.skip(f"{sandbox.isolation.backend} does not enforce {name} here")


def reaches_no_one(sandbox: Sandbox) -> bool:
    """Whether a signal from inside to all, or to process 1, can reach no process of the machine's."""
    code = "import os; print(os.readlink('/proc/self/ns/pid'), os.getuid())"
    namespace, uid = sandbox.run(["python", "-c", code]).stdout.split()
    return namespace != os.readlink("/proc/self/ns/pid") or int(uid) not in {0, os.getuid(), *running_uids()}


def sandbox_limits() -> SandboxLimits:
    """Of the contract's sandboxes."""
    return SandboxLimits(seconds=20, memory_mib=160, processes=24, disk_mib=8, output_kib=8)


@contextlib.contextmanager
def opened(
    backend: SandboxBackend,
    *,
    files: Mapping[str, SandboxFile | bytes] | None = None,
    name: str = "contract",
    **more: Any,
) -> Iterator[Sandbox]:
    """One that is closed afterwards."""
    laid = {path: SandboxFile(data=file) if isinstance(file, bytes) else file for path, file in (files or {}).items()}
    sandbox = backend.open(SandboxRequest(name=name, files=laid, limits=sandbox_limits(), **more))
    try:
        yield sandbox
    finally:
        sandbox.close()
