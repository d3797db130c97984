"""Attacks by processes that outlive, and by using up what the machine has: all of it ends, at its limit or before."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from attacks.harness import Siege, attack, run

from agenttrain.sandbox_protocol import Execution, Sandbox, SandboxRefusal

OUTLIVING, RESOURCES = "processes that outlive", "resources"

SURVIVORS = [
    attack(
        OUTLIVING,
        "a daemon",
        "forks twice with a session of its own, so that its parent is process 1",
        """
        def daemon():
            os.setsid()
            background(lambda: time.sleep(600))
        background(daemon)
        """,
    ),
    attack(
        OUTLIVING,
        "deaf to signals",
        "ignores every signal that can be ignored",
        """
        def deaf():
            for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
                signal.signal(number, signal.SIG_IGN)
            while True:
                time.sleep(600)
        background(deaf)
        time.sleep(0.05)
        """,
    ),
    attack(
        OUTLIVING,
        "holding stdout open",
        "keeps the pipes of the run that started it, and writes to them",
        """
        def writing():
            while True:
                os.write(1, b"still here\\n")
                time.sleep(0.01)
        background(writing)
        """,
    ),
    attack(
        OUTLIVING,
        "a stopped process",
        "stops itself, so that it takes no signal but two",
        """
        background(lambda: os.kill(os.getpid(), signal.SIGSTOP) or time.sleep(600))
        """,
    ),
    attack(
        OUTLIVING,
        "a tree that grows again",
        "forks anew all the time, each child ending its parent",
        """
        def growing():
            while True:
                time.sleep(0.02)
                try:
                    pid = os.fork()
                except OSError:
                    continue
                if pid:
                    time.sleep(0.2)
                    os._exit(0)
                os.setsid()
        for _ in range(2):
            background(growing)
        """,
    ),
    attack(
        OUTLIVING,
        "another name",
        "executes another program under another name, in another folder and process group",
        """
        def other():
            os.setpgid(0, 0)
            os.chdir("/")
            os.execve("/bin/sh", ["kworker/0:1", "-c", "while :; do sleep 60; done"], dict(os.environ))
        background(other)
        time.sleep(0.05)
        """,
    ),
    attack(
        OUTLIVING,
        "threads without their first",
        "ends its main thread while others go on",
        """
        def half():
            threading.Thread(target=lambda: time.sleep(600)).start()
            libc.syscall(60, 0)
        background(half)
        """,
    ),
]


@pytest.mark.parametrize("body", SURVIVORS)
def test_nothing_outlives_its_sandbox(siege: Siege, body: str) -> None:
    """It runs before the end of the rollout, and neither after `settle` nor after `close`."""
    siege.skip_unless_it_holds("processes_end")
    with siege.sandbox(processes=24) as sandbox:
        execution = run(sandbox, body)
        assert "TRIED" in execution.stdout, execution.text
        assert siege.prey.left_processes() != [], "it did not outlive its run, so this says nothing"
        sandbox.settle()
        assert siege.prey.left_processes() == []
        assert sandbox.run(["echo", "again"]).stdout == "again\n"


@pytest.mark.parametrize("body", SURVIVORS[:2])
def test_nothing_outlives_a_sandbox_that_is_only_closed(siege: Siege, body: str) -> None:
    siege.skip_unless_it_holds("processes_end")
    with siege.sandbox(processes=24) as sandbox:
        run(sandbox, body)
        assert siege.prey.left_processes() != []


@pytest.mark.attack(
    kind=OUTLIVING,
    name="editing while the verifier looks",
    tried="puts the solution in place, and the program that it hides back, thousands of times a second",
    outcome="contained",
)
def test_after_settle_no_file_changes_any_more(siege: Siege) -> None:
    siege.skip_unless_it_holds("processes_end")
    with siege.sandbox(processes=24) as sandbox:
        execution = run(
            sandbox,
            """
            def edit():
                n = 0
                while True:
                    n += 1
                    with open("next", "w") as file:
                        file.write(str(n))
                    os.rename("next", "calc.py")
            for _ in range(3):
                background(edit)
            while not os.path.exists("calc.py"):
                time.sleep(0.001)
            """,
        )
        assert "TRIED" in execution.stdout, execution.text
        sandbox.settle()
        first = sandbox.snapshot()
        assert "calc.py" in first
        assert siege.prey.left_processes() == []
        assert sandbox.snapshot() == first


@pytest.mark.attack(
    kind=OUTLIVING,
    name="ending what reads the files",
    tried="kills every process that it sees, the sandbox's own file work among them",
    outcome="contained",
)
def test_file_work_that_is_ended_is_the_policys_and_settle_still_works(siege: Siege) -> None:
    siege.skip_unless_it_holds("processes_end")
    with siege.sandbox(processes=24) as sandbox:
        execution = run(
            sandbox,
            """
            def killing():
                while True:
                    for name in os.listdir("/proc"):
                        if name.isdigit() and int(name) not in (1, os.getpid()):
                            try:
                                os.kill(int(name), signal.SIGKILL)
                            except OSError:
                                pass
            print("TRIED", flush=True)
            background(killing)
            """,
        )
        assert "TRIED" in execution.stdout
        for _ in range(5):
            try:
                sandbox.write("a.txt", "x")
            except SandboxRefusal:
                break
        sandbox.settle()
        sandbox.write("a.txt", "x")
        assert sandbox.read("a.txt") == "x"


USES = [
    attack(
        RESOURCES,
        "a fork bomb",
        "starts processes that start processes",
        "processes",
        {"processes": 12},
        """
        made = 0
        for _ in range(64):
            try:
                background(lambda: time.sleep(60))
            except OSError:
                break
            made += 1
        if made > 12:
            won(f"{made} processes")
        """,
        ("", "processes"),
    ),
    attack(
        RESOURCES,
        "threads",
        "starts threads that wait",
        "processes",
        {"processes": 12},
        """
        threading.stack_size(1 << 16)
        made, wait = 0, threading.Event()
        for _ in range(64):
            try:
                threading.Thread(target=wait.wait, daemon=True).start()
            except RuntimeError:
                break
            made += 1
        if made > 12:
            won(f"{made} threads")
        print("TRIED", flush=True)
        os._exit(0)
        """,
        ("",),
    ),
    attack(
        RESOURCES,
        "memory",
        "takes four times the memory and writes to it",
        "memory_mib",
        {"memory_mib": 64},
        """
        kept = []
        for _ in range(16):
            kept.append(bytearray(os.urandom(1 << 20) * 16))
        won("256 MiB")
        """,
        ("", "memory_mib"),
    ),
    attack(
        RESOURCES,
        "memory of many",
        "shares the taking of memory among processes",
        "memory_mib",
        {"memory_mib": 64, "processes": 12},
        """
        def take():
            kept = bytearray(os.urandom(1 << 20) * 24)
            os.write(full, b".")
            time.sleep(60)
        ready, full = os.pipe()
        os.set_blocking(ready, False)
        for _ in range(8):
            background(take)
        time.sleep(0.8)
        n = len(may_fail(os.read, ready, 100) or b"")
        if n >= 5:
            won(f"{n} times 24 MiB")
        """,
        ("", "memory_mib"),
    ),
    attack(
        RESOURCES,
        "files in memory",
        "fills /dev/shm, /tmp and a memory file",
        "memory_mib",
        {"memory_mib": 64, "disk_mib": 8},
        """
        n = 0
        for path in ("/dev/shm/full", "full"):
            try:
                with open(path, "wb", buffering=0) as file:
                    for _ in range(64):
                        n += file.write(bytes(1 << 20))
            except OSError as error:
                print("HELD", error)
            finally:
                os.remove(path)
        fd = may_fail(os.memfd_create, "full")
        if fd is not None:
            try:
                for _ in range(64):
                    n += os.write(fd, bytes(1 << 20))
            except OSError as error:
                print("HELD", error)
        if n > 64 << 20:
            won(f"{n} bytes")
        """,
        ("", "memory_mib", "disk_mib"),
    ),
    attack(
        RESOURCES,
        "disk",
        "writes many files, one large one, and one that grows through holes",
        "disk_mib",
        {"disk_mib": 8},
        """
        n = 0
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        for number in range(64):
            try:
                with open(f"file{number}", "wb", buffering=0) as file:
                    n += file.write(bytes(1 << 20))
            except OSError as error:
                print("HELD", error)
                break
        if n > 9 << 20:
            won(f"{n} bytes")
        if may_fail(os.truncate, "file0", 1 << 40) is None and os.path.getsize("file0") > 9 << 20:
            won("a file of a tebibyte")
        """,
        ("", "disk_mib"),
    ),
    attack(
        RESOURCES,
        "inodes",
        "makes files without content until there is no room",
        "disk_mib",
        {"disk_mib": 4},
        """
        n = 0  # of files without content
        try:
            for n in range(20000):
                os.close(os.open(f"{n}", os.O_CREAT | os.O_WRONLY))
            won(f"{n} files")
        except OSError as error:
            print("HELD", n, error)
        """,
        ("", "disk_mib"),
    ),
    attack(
        RESOURCES,
        "an archive that grows",
        "unpacks kilobytes that become a thousand times as much",
        "disk_mib",
        {"disk_mib": 8},
        """
        import io, zipfile
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            for n in range(3):
                archive.writestr(f"{n}", bytes(8 << 20))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            zipfile.ZipFile(packed).extractall(".")
            won("an archive")
        except OSError as error:
            print("HELD", error)
        """,
        ("", "disk_mib"),
    ),
    attack(
        RESOURCES,
        "open files",
        "opens files and pipes until there is no number left",
        "processes",
        {},
        """
        n = 0
        try:
            for n in range(4096):
                os.open("/dev/null", os.O_RDONLY)
            won(f"{n} files")
        except OSError as error:
            print("HELD", n, error)
        """,
        ("",),
    ),
    attack(
        RESOURCES,
        "an endless loop",
        "computes for ever, with the alarm and SIGTERM ignored",
        "seconds",
        {"seconds": 0.7},
        """
        for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGINT, signal.SIGXCPU):
            signal.signal(number, signal.SIG_IGN)
        print("TRIED", flush=True)
        while True:
            pass
        """,
        ("seconds",),
    ),
    attack(
        RESOURCES,
        "endless output",
        "writes to both outputs for ever",
        "output_kib",
        {"seconds": 2.5, "output_kib": 8},
        """
        print("TRIED", flush=True)
        while True:
            os.write(1, b"y" * 4096)
            os.write(2, b"n" * 4096)
        """,
        ("seconds",),
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "limits", "body", "ends"), USES)
def test_what_is_used_up_is_the_sandboxes_own(
    siege: Siege, limit: str, limits: dict[str, float], body: str, ends: tuple[str, ...]
) -> None:
    """It gets no more than its limit, or is ended by it; the sandbox can be used afterwards, its files read."""
    siege.skip_unless_it_holds(limit)
    if "files without content" in body and siege.backend.name == "bubblewrap":
        pytest.skip("bubblewrap limits the bytes of files, not their number")
    with siege.sandbox(**{"memory_mib": 256, "disk_mib": 8, "processes": 24, **limits}) as sandbox:
        execution = run(sandbox, body)
        assert execution.ended_by in ends, execution.text
        assert execution.ended_by or execution.exit_code != 0 or "TRIED" in execution.stdout, execution.text
        siege.hold(execution)
        if limit == "output_kib":
            assert (len(execution.stdout), len(execution.stderr)) == (8192, 8192)
            assert execution.n_dropped > 0
        still_works(sandbox)


def still_works(sandbox: Sandbox) -> None:
    """Whatever was done to it."""
    sandbox.settle()
    sandbox.run(["find", ".", "-mindepth", "1", "-delete"])
    sandbox.run('rm -rf "$TMPDIR"/*')
    sandbox.write("after.txt", "fine")
    assert sandbox.read("after.txt") == "fine"
    assert sandbox.run(["echo", "alive"]).stdout == "alive\n"


@pytest.mark.attack(
    kind=RESOURCES,
    name="a bomb in the shell",
    tried="defines a function that pipes itself into itself, unbounded",
    outcome="contained",
)
def test_a_bomb_ends_with_its_run_or_with_settle(siege: Siege) -> None:
    siege.skip_unless_it_holds("processes")
    with siege.sandbox(processes=12, seconds=1) as sandbox:
        sandbox.run("bomb() { bomb | bomb & }; bomb; sleep 0.3")
        sandbox.settle()
        assert siege.prey.left_processes() == []
        still_works(sandbox)


@pytest.mark.attack(
    kind=RESOURCES,
    name="deep folders",
    tried="makes folders in folders past what a path can be",
    outcome="contained",
)
def test_deep_folders_neither_crash_nor_stay(siege: Siege) -> None:
    with siege.sandbox(disk_mib=16) as sandbox:
        execution = run(
            sandbox,
            """
            n = 0
            try:
                for n in range(1500):
                    os.mkdir("deeper")
                    os.chdir("deeper")
            except OSError as error:
                print("HELD", error)
            print("levels", n)
            """,
        )
        assert "TRIED" in execution.stdout
        names = sandbox.list()
        assert names[0] == "deeper/"
        sandbox.settle()
        assert sandbox.snapshot()["deeper"].kind == "folder"


@pytest.mark.attack(
    kind=RESOURCES,
    name="many names",
    tried="leaves thousands of files with the longest names for list and snapshot",
    outcome="contained",
)
def test_many_long_names_are_listed(siege: Siege) -> None:
    with siege.sandbox(disk_mib=16) as sandbox:
        run(sandbox, "for n in range(3000): os.close(os.open(f'{n:04}' + 'x' * 240, os.O_CREAT))")
        assert len(sandbox.list()) == 3000
        sandbox.settle()
        assert len(sandbox.snapshot()) == 3000


@pytest.mark.attack(
    kind=RESOURCES,
    name="names that are no text",
    tried="leaves files whose names hold line breaks, invalid UTF-8 and control characters",
    outcome="contained",
)
def test_odd_names_are_data(siege: Siege) -> None:
    with siege.sandbox() as sandbox:
        execution = run(
            sandbox,
            r"""
            for name in (b"a\nb", b"\xff\xfe", b"\x1b[2J", b" ", b"-rf", b"\r\n", "е\u202e".encode()):
                os.close(os.open(name, os.O_CREAT))
            """,
        )
        assert "TRIED" in execution.stdout
        names = sandbox.list()
        assert len(names) == 7
        json.dumps(names)
        sandbox.settle()
        assert set(sandbox.snapshot()) == set(names)


@pytest.mark.attack(
    kind=RESOURCES,
    name="output that is no text",
    tried="writes every byte, control characters and half of a character to its outputs",
    outcome="contained",
)
def test_output_is_text_that_can_be_kept(siege: Siege) -> None:
    with siege.sandbox() as sandbox:
        execution = run(sandbox, "os.write(1, bytes(range(256)) + b'\\xe2\\x82'); os.write(2, b'\\x1b]0;mine\\x07')")
        assert execution.exit_code == 0
        assert execution.stdout.startswith("\0\1\2")
        execution.text.encode("utf-8")
        json.dumps(execution.text)


@pytest.mark.attack(
    kind=RESOURCES,
    name="huge arguments",
    tried="has a tool run a program with megabytes of arguments, environment, or zero bytes",
    outcome="contained",
)
def test_arguments_that_no_program_takes_are_refused(siege: Siege) -> None:
    with siege.sandbox() as sandbox:
        for argv, env in (
            (["echo", "x" * (4 << 20)], {}),
            (["echo"], {"HUGE": "x" * (4 << 20)}),
            (["echo", "a\0b"], {}),
            ([], {}),
            (["x" * 5000], {}),
        ):
            with pytest.raises(SandboxRefusal):
                sandbox.run(argv, env=env)
        assert refused_or_run(sandbox, ["echo", "\udc80\ud800"]) in ("refused", "run")
        assert sandbox.run(["echo", "alive"]).ok


def refused_or_run(sandbox: Sandbox, argv: list[str]) -> str:
    try:
        ran: Execution = sandbox.run(argv)
    except SandboxRefusal:
        return "refused"
    return "run" if ran.exit_code is not None else "ended"


@pytest.mark.attack(
    kind=RESOURCES,
    name="files that are none",
    tried="leaves a pipe, a socket, a device and a huge sparse file where a file is read or written",
    outcome="contained",
)
def test_reading_what_is_no_file_neither_hangs_nor_fills(siege: Siege) -> None:
    with siege.sandbox(disk_mib=8, output_kib=8) as sandbox:
        execution = run(
            sandbox,
            """
            os.mkfifo("pipe")
            os.symlink("/dev/zero", "zero")
            os.symlink("loop", "loop")
            may_fail(lambda: socket.socket(socket.AF_UNIX).bind("socket"))
            may_fail(os.truncate, os.open("sparse", os.O_CREAT | os.O_WRONLY), 4 << 20)
            os.mkdir("closed")
            put("closed/file", "x")
            os.chmod("closed", 0)
            """,
        )
        assert "TRIED" in execution.stdout
        for path in ("pipe", "zero", "loop", "sparse", "closed"):
            with pytest.raises(SandboxRefusal):
                sandbox.read(path)
        for path in ("pipe", "zero", "loop", "closed"):
            with pytest.raises(SandboxRefusal):
                sandbox.write(path, "x")
        sandbox.settle()
        found = sandbox.snapshot()
        assert {found["pipe"].kind, found["zero"].kind, found["loop"].kind} == {"other", "link"}
        assert found["closed/file"].data == b"x"


@pytest.mark.slow
@pytest.mark.attack(
    kind=RESOURCES,
    name="texts that no tool can pass on",
    tried="asks with half characters, as JSON can write them, and with times that are no number",
    outcome="contained",
)
def test_what_can_not_be_passed_on_is_refused_and_no_failure_of_the_sandbox(siege: Siege) -> None:
    """An environment failure would be tried again; a refusal is the agent's own."""
    half = "\ud800"
    asked: list[Callable[[Sandbox], Any]] = [
        lambda it: it.write("a.txt", half),
        lambda it: it.write(half, "x"),
        lambda it: it.read(half),
        lambda it: it.read_bytes(half),
        lambda it: it.list(half),
        lambda it: it.run(["true"], folder=half),
        lambda it: it.run(["true"], stdin=half),
        lambda it: it.run(["echo", half]),
        lambda it: it.run(f"echo {half}"),
        lambda it: it.run(["true"], env={"A": half}),
        lambda it: it.run(["true"], env={"A=B": "x"}),
        lambda it: it.read("a/" * 5000),
        lambda it: it.write("a" * 300, "x"),
    ]
    with siege.sandbox(seconds=1) as sandbox:
        for ask in asked:
            with pytest.raises(SandboxRefusal):
                ask(sandbox)
        for seconds in (math.nan, math.inf, 1e300):
            assert sandbox.run(["sleep", "60"], seconds=seconds).ended_by == "seconds"
        assert sandbox.run(["echo", "alive"]).ok
