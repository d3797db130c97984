"""A server process: started, ended, gone with us; what its end is said to be. Real servers where marked."""

from __future__ import annotations

import os
import signal
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from agenttrain.errors import EngineError

from agenttrain_sglang.launch import Launch
from agenttrain_sglang.server import ServerProcess, last_words

StartSmall = Callable[..., Launch]
WAITS_S = 120.0


def command(*words: str) -> Launch:
    """Of a process that is no SGLang server: what is tested here is the group, its guard and its log."""
    return Launch(command=words, variables=dict(os.environ), port=1, device="cpu", n_gpus=0)


def python(code: str) -> Launch:
    return command(sys.executable, "-c", code)


FAMILY = """
import subprocess, sys, time
code = "import os, signal, time; signal.signal(15, signal.SIG_IGN); print(os.getpid(), flush=True); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", code])
subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
print("started", flush=True)
time.sleep(600)
"""
"""Two children that ignore SIGTERM, one of them outside of the group; both print their number."""


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAITS_S
    while not condition():
        assert time.monotonic() < end, "it didn't happen"
        time.sleep(0.02)


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "server.log"


@pytest.fixture
def family(log: Path) -> Iterator[tuple[ServerProcess, list[int]]]:
    """A process with two children, and their numbers."""
    process = ServerProcess(python(FAMILY), log=log)
    wait_for(lambda: len(log.read_text().split()) == 3)
    yield process, [int(word) for word in log.read_text().split() if word.isdigit()]
    process.kill()


def test_kill_ends_every_process_of_a_server(family: tuple[ServerProcess, list[int]]) -> None:
    """Children that ignore signals too, and one that has left the group; killing twice is fine."""
    process, children = family
    assert process.has_ended() is None
    assert [runs(pid) for pid in children] == [True, True]

    process.kill()
    process.kill()

    assert [runs(pid) for pid in (*children, process.pid)] == [False, False, False]
    assert process.has_ended() == "it was ended by agenttrain"


def test_children_that_outlive_the_first_process_are_ended_too(log: Path) -> None:
    """The server's first process is gone, which is told; its children are still in the group."""
    code = FAMILY.replace("time.sleep(600)\n", "sys.exit(3)\n").replace(", start_new_session=True", "")
    process = ServerProcess(python(code), log=log)
    wait_for(lambda: process.has_ended() is not None and len(log.read_text().split()) == 3)
    children = [int(word) for word in log.read_text().split() if word.isdigit()]
    assert [runs(pid) for pid in children] == [True, True]

    process.kill()

    assert [runs(pid) for pid in children] == [False, False]


PARENT = """
import os, sys, time
from pathlib import Path
from agenttrain_sglang.launch import Launch
from agenttrain_sglang.server import ServerProcess

launch = Launch(command=tuple(sys.argv[2:]), variables=dict(os.environ), port=1, device="cpu", n_gpus=0)
process = ServerProcess(launch, log=Path(sys.argv[1]))
if os.fork() == 0:
    time.sleep(600)
print(process.pid, flush=True)
time.sleep(600)
"""
"""A parent that also has a fork of itself, which holds copies of all that it had open."""


def test_a_server_ends_when_its_parent_is_killed(log: Path) -> None:
    """kill -9 leaves the parent no chance to end anything, and a fork of it lives on."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(log), sys.executable, "-c", FAMILY],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert parent.stdout is not None
    group = int(parent.stdout.readline())
    wait_for(lambda: len(log.read_text().split()) == 3)

    parent.kill()
    parent.wait()
    parent.stdout.close()

    try:
        wait_for(lambda: not any(_group_of(pid) == group and runs(pid) for pid in psutil.pids()))
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        for pid in (int(word) for word in log.read_text().split() if word.isdigit()):
            if runs(pid):
                os.kill(pid, signal.SIGKILL)


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def test_an_end_is_told_with_its_exit_code_and_its_exception(log: Path) -> None:
    process = ServerProcess(python("raise ValueError('no such model')"), log=log)
    wait_for(lambda: process.has_ended() is not None)
    process_says = process.has_ended()
    process.kill()
    assert process_says == f"it ended with exit code 1: ValueError: no such model (log: {log})"


def test_a_kill_from_outside_is_told_as_one(log: Path) -> None:
    """What it was just doing is not its cause."""
    process = ServerProcess(python("import os; print('batch 7', flush=True); os.kill(os.getpid(), 9)"), log=log)
    wait_for(lambda: process.has_ended() is not None)
    told = process.has_ended()
    process.kill()
    assert told is not None
    assert told.startswith("it was ended by SIGKILL (by SGLang itself, by the system for want of memory, or by hand)")
    assert "batch 7" not in told


def test_a_command_that_is_missing_is_told(log: Path) -> None:
    """The shell says so in the log."""
    process = ServerProcess(command("/nowhere/python", "-m", "sglang"), log=log)
    wait_for(lambda: process.has_ended() is not None)
    told = process.has_ended()
    process.kill()
    assert told is not None
    assert "exit code 127" in told
    assert "/nowhere/python" in told


def test_variables_that_no_process_can_have_are_an_error(log: Path) -> None:
    """And no pipe is left open."""
    n_open = len(os.listdir("/proc/self/fd"))
    broken = Launch(command=("x" * 3_000_000,), variables={}, port=1, device="cpu", n_gpus=0)
    with pytest.raises(EngineError, match="A SGLang server can't be started"):
        ServerProcess(broken, log=log)
    assert len(os.listdir("/proc/self/fd")) == n_open


def test_cpu_seconds_are_those_of_all_processes_and_stay_when_they_are_gone(log: Path) -> None:
    busy = "import time\nwhile time.process_time() < 0.4: pass\nprint('done', flush=True)\ntime.sleep(600)"
    process = ServerProcess(python(busy), log=log)
    wait_for(lambda: "done" in log.read_text())
    before = process.cpu_s()
    process.kill()
    assert before >= 0.3
    assert process.cpu_s() >= before


def test_the_last_exceptions_of_a_log_are_what_it_says(log: Path) -> None:
    """Not the harmless ones with their chains of tracebacks, nor what is logged around them."""
    log.write_text(
        "[2026-11-30 06:01:47] ERROR: [Errno 98] error while attempting to bind: address already in use\n"
        "[2026-11-30 06:01:57] post-warmup freeze_gc failed\n"
        "Traceback (most recent call last):\n  File x, line 1\nTimeoutError: timed out\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        "Traceback (most recent call last):\n  File y, line 2\nrequests.exceptions.ReadTimeout: timed out\n"
        "[2026-11-30 06:01:57] INFO: Application shutdown complete.\n"
        "[2026-11-30 06:01:57] kill_process_tree called: parent_pid=1\n"
    )
    assert last_words(log) == (
        "[2026-11-30 06:01:47] ERROR: [Errno 98] error while attempting to bind: address already in use"
    )


def test_a_process_of_a_server_that_crashed_is_named(log: Path) -> None:
    log.write_text(
        "[2026-11-30 06:15:28] Subprocess scheduler_0 (pid=12290) crashed with exit code -9. Triggering SIGQUIT …\n"
        "[2026-11-30 06:15:28] SIGQUIT received. It usually means one child failed.\n"
    )
    assert last_words(log) == (
        "[2026-11-30 06:15:28] Subprocess scheduler_0 (pid=12290) crashed with exit code -9. Triggering SIGQUIT …"
    )


def test_a_traceback_after_a_notice_is_kept(log: Path) -> None:
    """A first process that fails tells of its end before it tells why."""
    log.write_text(
        "[2026-11-30 06:17:50] kill_process_tree called: parent_pid=1\n"
        "Traceback (most recent call last):\n  File x\nValueError: no such model\n"
    )
    assert last_words(log) == "ValueError: no such model"


def test_a_log_without_exceptions_gives_its_last_lines(log: Path) -> None:
    log.write_text("one\n\n" * 9 + "two\nthree\n")
    assert last_words(log) == "one | one | one | one | two | three"
    assert last_words(log.with_name("missing")) == ""


@pytest.mark.sglang
def test_a_server_answers_and_costs_cpu_time(server: Any) -> None:
    assert server.process.has_ended() is None
    assert server.process.listens()
    assert server.process.cpu_s() > 1


@pytest.mark.sglang
def test_a_server_whose_port_is_taken_ends_and_says_so(launch_small: StartSmall, small_folder: Path, log: Path) -> None:
    with socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as other:  # answers nothing
        threading.Thread(target=other.serve_forever, daemon=True).start()
        process = ServerProcess(launch_small(small_folder, port=other.server_address[1]), log=log)
        try:
            wait_for(lambda: process.has_ended() is not None)
            told, listened = process.has_ended(), process.listens()
        finally:
            process.kill()
            other.shutdown()
    assert told is not None
    assert "address already in use" in told
    assert not listened


@pytest.mark.sglang
def test_a_broken_model_folder_ends_a_server(launch_small: StartSmall, tmp_path: Path, log: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-thing"}')
    process = ServerProcess(launch_small(tmp_path), log=log)
    try:
        wait_for(lambda: process.has_ended() is not None)
        told = process.has_ended()
    finally:
        process.kill()
    assert told is not None
    assert "no-such-thing" in told


@pytest.mark.sglang
def test_a_real_server_ends_when_its_parent_is_killed(launch_small: StartSmall, small_folder: Path, log: Path) -> None:
    """The scheduler and the detokenizer too, which outlive the signals that end the first process."""
    launch = launch_small(small_folder)
    code = PARENT.replace("dict(os.environ)", repr(dict(launch.variables)))
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(log), *launch.command], stdout=subprocess.PIPE, start_new_session=True
    )
    assert parent.stdout is not None
    group = int(parent.stdout.readline())
    wait_for(lambda: "fired up" in log.read_text())
    members = [pid for pid in psutil.pids() if _group_of(pid) == group]
    names = {psutil.Process(pid).name() for pid in members}

    parent.kill()
    parent.wait()
    parent.stdout.close()

    try:
        assert {"sglang::scheduler", "sglang::detokenizer"} <= names
        wait_for(lambda: not any(map(runs, members)))
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
