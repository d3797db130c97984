"""Whole runs over servers that end: what a user is told, and what is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from agenttrain.errors import EngineError
from agenttrain.testing.toy import ToyRun, toy_project

OPENS = """
import os, signal, sys, time
from pathlib import Path
from agenttrain.config import resolve
from agenttrain.protocols import EngineContext
from agenttrain_sglang.engine import SglangEngine
from agenttrain_sglang.plan import plan_of

settings = {"environment": sys.argv[1], "transport": "tensor"}
engine = SglangEngine(plan_of(EngineContext(config=resolve(("the test", {"sglang": settings})), model=sys.argv[2])))
print(engine.replicas[0].server.process.pid, flush=True)
time.sleep(600)
"""


def run(odd: Any, folder: Path, **table: Any) -> ToyRun:
    sglang = {"environment": str(odd.folder), "transport": "tensor", "silence_s": 5.0, **table}
    return toy_project(folder).fit(engine={"name": "sglang"}, sglang=sglang, trainer={"steps": 3})


def ending_servers(folder: Path, is_enough: Callable[[int], bool]) -> threading.Thread:
    """A thread that ends each server of the runs in a folder once that has answered a call."""

    def end() -> None:
        n, ended = 0, set[int]()
        until = time.monotonic() + 60
        while not is_enough(n) and time.monotonic() < until:
            for process in psutil.Process().children(recursive=True):
                try:
                    if str(folder) in " ".join(process.cmdline()) and process.pid not in ended and has_sampled(process):
                        ended.add(process.pid)
                        os.killpg(os.getpgid(process.pid), signal.SIGKILL)
                        n += 1
                except (psutil.Error, OSError):
                    continue
            time.sleep(0.02)

    thread = threading.Thread(target=end)
    thread.start()
    return thread


def has_sampled(process: psutil.Process) -> bool:
    """By the server's own count; one that is killed before it may be asked ends a run."""
    for each in process.net_connections("tcp"):
        if each.status == psutil.CONN_LISTEN:
            with urllib.request.urlopen(f"http://127.0.0.1:{each.laddr.port}/metrics", timeout=5) as answer:
                return int(answer.read().split()[1]) > 0
    return False


def test_a_run_whose_server_is_ended_says_so_and_its_counts_hold(odd: Any, tmp_path: Path) -> None:
    odd.does(token_s=0.03)
    killer = ending_servers(odd.folder, lambda n: n == 1)
    report = run(odd, tmp_path / "project").report
    killer.join()
    tokens = report["tokens"]
    assert tokens["sampled"] == tokens["trained"] + tokens["frozen"] + tokens["dropped"]
    assert sum(tokens["dropped_by_cause"].values()) == tokens["dropped"]
    assert report["engine_counts"]["restarts"] == 1
    assert report["engine_counts"]["server_sampled_ids"] >= report["engine_counts"]["sampled_ids"]
    assert any("takes the place of one that was gone" in alarm["message"] for alarm in report["alarms"])


def test_a_run_that_has_no_server_any_more_ends_with_the_cause(odd: Any, tmp_path: Path) -> None:
    """Nothing hangs, whatever it was doing, and it says how to go on."""
    odd.does(token_s=0.03)
    killer = ending_servers(odd.folder, lambda n: n == 2)
    with pytest.raises(EngineError, match=r"was replaced 1 times already.* agenttrain fit --resume "):
        run(odd, tmp_path / "project", restarts=1)
    killer.join()


def test_no_server_outlives_a_run_that_is_killed(odd: Any) -> None:
    """However it ends: the whole group goes."""
    process = subprocess.Popen(
        [sys.executable, "-c", OPENS, str(odd.folder), str(odd.model)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    leader = int(process.stdout.readline())
    group = [leader, *(child.pid for child in psutil.Process(leader).children(recursive=True))]
    assert len(group) >= 2
    process.kill()
    process.wait()
    process.stdout.close()
    odd.until(lambda: not [pid for pid in group if psutil.pid_exists(pid)])
