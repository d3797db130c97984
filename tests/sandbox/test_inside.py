"""inside: the program serves over its standard input and output, as a bare process here, and ends with its input."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agenttrain.errors import SandboxError
from agenttrain.records import Isolation
from agenttrain.sandbox.channel import Channel
from agenttrain.sandbox.inside import files, processes
from agenttrain.sandbox.served import INSIDE, Begin, ServedSandbox, begun
from agenttrain.sandbox_protocol import SandboxRefusal, SandboxRequest
from agenttrain.sandbox_spec import SandboxLimits
from agenttrain.testing.machine import DAEMON, processes_with, wait_for_none

LIMITS = SandboxLimits(seconds=20, disk_mib=1, output_kib=4)


IN_A_NAMESPACE = ("unshare", "--pid", "--fork", "sh", "-c", '"$@"; exit $?', "sh")
"""Starts a program as the second process of a namespace, so that nothing else could be ended by it."""


def started(folder: Path, *before: str, **begin: str) -> tuple[ServedSandbox, subprocess.Popen[bytes]]:
    """The bare program in a folder of the machine."""
    process = subprocess.Popen(
        [*before, sys.executable, "-I", "-S", str(INSIDE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    channel = Channel(os.dup(process.stdout.fileno()), os.dup(process.stdin.fileno()))
    process.stdin.close()
    process.stdout.close()
    request = SandboxRequest(name="bare", limits=LIMITS)

    def reopen(request: SandboxRequest) -> ServedSandbox:
        raise SandboxError("none")

    def wait() -> None:
        process.wait(60)

    try:
        served = begun(channel, request, Begin(path=str(folder), env={"PATH": os.defpath}, **{"ends": "tree", **begin}))
    except SandboxError:
        wait()
        raise
    isolation = Isolation(backend="bare", enforced={})
    return (
        ServedSandbox(
            request=request, isolation=isolation, path=str(folder), served=served, reopen=reopen, release=wait
        ),
        process,
    )


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[tuple[ServedSandbox, subprocess.Popen[bytes]]]:
    sandbox, process = started(tmp_path)
    yield sandbox, process
    sandbox.close()


Bare = tuple[ServedSandbox, "subprocess.Popen[bytes]"]


def test_it_ends_with_its_input_and_with_it_what_it_started(bare: Bare) -> None:
    """Its exit code is 0; daemons have no other parent than it."""
    sandbox, process = bare
    marker = f"marker{os.getpid()}of-inside"
    assert sandbox.run([sys.executable, "-c", DAEMON, marker]).ok
    assert len(processes_with(marker)) == 1
    sandbox.close()
    assert process.returncode == 0
    assert wait_for_none(marker) == []


def test_it_does_not_take_the_machine_for_its_namespace(tmp_path: Path) -> None:
    """To end all that it sees is for the first process of a namespace alone."""
    if subprocess.run([*IN_A_NAMESPACE, "true"], capture_output=True).returncode:
        pytest.skip("unshare --pid does not work here")
    with pytest.raises(SandboxError, match=r"it is process 2 of its namespace, not the first"):
        started(tmp_path, *IN_A_NAMESPACE, ends="namespace")


def test_it_does_not_end_the_processes_of_its_own_user(tmp_path: Path) -> None:
    if subprocess.run([*IN_A_NAMESPACE, "true"], capture_output=True).returncode:
        pytest.skip("unshare --pid does not work here")
    with pytest.raises(SandboxError, match=r"it has no user of its own to end the processes of"):
        started(tmp_path, *IN_A_NAMESPACE, ends="uid")


END_ROOT = """
import importlib, sys
sys.path.insert(0, sys.argv[1])
try:
    importlib.import_module("inside.processes").end_processes_of(0, 0)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_processes_of_root_are_never_ended_as_a_sandboxs() -> None:
    """Nor of the user that it was before; tried where nothing else could be ended."""
    if subprocess.run([*IN_A_NAMESPACE, "true"], capture_output=True).returncode:
        pytest.skip("unshare --pid does not work here")
    words = [*IN_A_NAMESPACE, sys.executable, "-c", END_ROOT, str(INSIDE.parent)]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert ran.stdout == "user 0 is not the sandbox's alone, and none of its processes is ended\n"


def test_when_it_is_killed_calls_fail(bare: Bare) -> None:
    sandbox, process = bare
    process.kill()
    process.wait(60)
    with pytest.raises(SandboxError):
        sandbox.run(["true"])


def test_a_program_holds_none_of_its_descriptors(bare: Bare) -> None:
    sandbox, _ = bare
    assert sandbox.run(["ls", "/proc/self/fd"]).stdout.split() == ["0", "1", "2", "3"]  # 3 is the listing's own


def test_a_program_that_reads_no_input_is_not_waited_for(bare: Bare) -> None:
    sandbox, _ = bare
    assert sandbox.run(["true"], stdin="x" * 1_000_000).ok
    assert sandbox.run(["wc", "-c"], stdin="x" * 1_000_000).stdout.strip() == "1000000"


def test_signals_are_as_programs_expect_them(bare: Bare) -> None:
    """None ignored, none blocked, whatever agenttrain was started with."""
    sandbox, _ = bare
    lines = dict(line.split(":", 1) for line in sandbox.run(["cat", "/proc/self/status"]).stdout.splitlines())
    assert (int(lines["SigIgn"], 16), int(lines["SigBlk"], 16)) == (0, 0)


def test_a_file_past_its_limit_is_refused_and_a_program_is_ended_by_it(bare: Bare) -> None:
    sandbox, _ = bare
    with pytest.raises(SandboxRefusal, match=r"The disk of the sandbox is full: disk_mib=1"):
        sandbox.write("big", b"x" * (2**20 + 1))
    ran = sandbox.run(["dd", "if=/dev/zero", "of=big", "bs=65536", "count=17"])
    assert (ran.exit_code, ran.ended_by) == (None, "disk_mib")


def test_a_place_is_within_the_root_or_refused(tmp_path: Path) -> None:
    root = str(tmp_path / "w")
    os.mkdir(root)
    os.mkdir(f"{root}x")
    os.symlink("..", f"{root}/up")
    os.symlink("in", f"{root}/round")
    assert files.place_of(root, ".") == root
    assert files.place_of(root, "round/a") == f"{root}/in/a"
    assert files.place_of(root, f"{root}/a") == f"{root}/a"
    for path in ("..", "../wx", "up", "up/wx/a", f"{root}x", "/", "a\0"):
        with pytest.raises(files.Refusal):
            files.place_of(root, path)


def test_an_id_that_is_named_but_once_is_not_killed() -> None:
    """Between the two it may have become another process's."""
    with subprocess.Popen(["sleep", "60"]) as process:
        names = iter([[process.pid], [], []])
        processes.end_all(lambda: next(names))
        assert process.poll() is None
        processes.end_all(lambda: [process.pid] if process.poll() is None else [])
    assert process.returncode == -9


def test_a_family_is_all_below_a_process_but_not_its_sisters() -> None:
    with (
        subprocess.Popen(["sh", "-c", "setsid sleep 60 & sleep 60"]) as first,
        subprocess.Popen(["sleep", "60"]) as sister,
    ):
        while len(processes.family(first.pid)) < 3:
            pass
        family = processes.family(first.pid)
        assert family[0] == first.pid
        assert sister.pid not in family
        processes.end_all(lambda: processes.family(first.pid))
        sister.kill()
    assert processes.family(first.pid) == []
