"""Ray of its own: what it leaves, what it says, how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest
from agenttrain.errors import ConfigError, TrainerError

from agenttrain_verl.cluster import object_store_bytes, refuse_address, refuse_silent
from agenttrain_verl.ray_folder import Stamp, running, stamp, wait_gone

POLICY = Path(__file__).parents[4] / "examples" / "order-desk" / "policy"
GIB = 2**30
PRESSED_EVERY_S = 30.0
"""Longer than an interrupted start takes to end."""

DRIVER = """
import contextlib, json, os, signal, subprocess, sys, time
from pathlib import Path

from agenttrain.config import resolve
from agenttrain_verl.cluster import Cluster
from agenttrain_verl.plan import plan_of
from agenttrain_sglang.server import LEAD
from agenttrain_verl.worker_logs import worker_trouble
import ray

plan = plan_of(resolve(("test", {"trainer": {"name": "verl"}})), sys.argv[1], n_tasks=20)
run_dir = Path(sys.argv[2])


def opened():
    return Cluster.open(plan, run_dir=run_dir, runtime_env={"env_vars": {"AGENTTRAIN_TEST": "carried"}})


def tell(**facts):
    print(json.dumps(facts), file=sys.stderr, flush=True)


def trouble(call):
    try:
        ray.get(call)
    except Exception as error:
        return str(worker_trouble(error))


@ray.remote
class Worker:
    def pid(self):
        return os.getpid()

    def variable(self):
        return os.environ["AGENTTRAIN_TEST"]

    def serve(self):
        # as agenttrain-sglang starts one
        theirs, self.mine = os.pipe()
        command = ["/bin/sh", "-c", LEAD, "server", "sleep", "3600"]
        self.server = subprocess.Popen(command, stdin=theirs, start_new_session=True)
        os.close(theirs)

    def fail(self):
        raise ValueError("no such order")

    def asks(self, other):
        return ray.get(other.fail.remote())

    def end(self):
        print("the last words", file=sys.stderr, flush=True)
        os._exit(3)
"""


def test_the_object_store_takes_a_share_of_what_is_free() -> None:
    assert object_store_bytes(shm_free=24 * GIB, memory_free=20 * GIB) == 6 * GIB
    assert object_store_bytes(shm_free=GIB, memory_free=20 * GIB) == GIB // 2
    assert object_store_bytes(shm_free=0, memory_free=20 * GIB) == 100 * 2**20


def test_rays_client_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"verl.address is 'ray://head:10001', and veRL's driver must be on a node"):
        refuse_address("ray://head:10001")
    refuse_address("auto")
    refuse_address("head:6379")
    refuse_address(None)


def test_an_address_where_nothing_runs_is_told_at_once() -> None:
    with pytest.raises(TrainerError, match=r"Nothing answers at verl\.address '127\.0\.0\.1:1' \(.*refused\)\. Give"):
        refuse_silent("127.0.0.1:1")
    refuse_silent("auto")
    refuse_silent(None)


def driver(tmp_path: Path, body: str) -> subprocess.Popen[str]:
    """A process that is the driver of a cluster; what it tells comes on its standard error, a JSON object a line."""
    file = tmp_path / "driver.py"
    file.write_text(DRIVER + textwrap.dedent(body))
    return subprocess.Popen(
        [sys.executable, str(file), str(POLICY), str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "HOME": str(tmp_path / "home")},
    )


def told(process: subprocess.Popen[str]) -> dict[str, object]:
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("{"):
            facts: dict[str, object] = json.loads(line)
            return facts
    raise AssertionError(f"the driver ended with {process.wait()} and told nothing")


def below(pid: int) -> list[Stamp]:
    found = [stamp(process) for process in psutil.Process(pid).children(recursive=True)]
    return [each for each in found if each is not None]


@pytest.mark.verl
def test_a_cluster_is_opened_used_and_gone(tmp_path: Path) -> None:
    """No process, no file and nothing on standard output is left of it, and handlers of signals are as before.

    A worker that died is told with its last words.
    """
    process = driver(
        tmp_path,
        """
        before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
        cluster = opened()
        worker = Worker.remote()
        dying = Worker.remote()
        pid = ray.get(dying.pid.remote())
        with contextlib.redirect_stdout(sys.stderr):  # Ray tells there of each worker that died
            tell(pid=pid, died=trouble(dying.end.remote()))
            kept = cluster.keep_logs()
            tell(kept=str(kept), words=[log.name for log in kept.iterdir() if "the last words" in log.read_text()])
            time.sleep(2.0)
        tell(
            variable=ray.get(worker.variable.remote()),
            node=cluster.node_id == ray.get_runtime_context().get_node_id(),
            n_nodes=cluster.n_nodes,
            signals=before == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)),
            asked=trouble(Worker.remote().asks.remote(worker)),
            cpu=cluster.cpu_s() > 0,
            folder=str(cluster.folder.path),
            is_private=os.environ["RAY_AUTH_TOKEN"] != "",
        )
        time.sleep(1.0)
        cluster.close()
        cluster.close()
        tell(closed=True)
        time.sleep(3600)
        """,
    )
    try:
        facts = told(process)
        pid = facts["pid"]
        assert re.fullmatch(rf"Worker \(pid {pid} on [\d.]+\) died; it said last: the last words", str(facts["died"]))
        logs = told(process)
        assert logs["kept"] == str(tmp_path / "run" / "verl" / "logs")
        assert [name.rpartition("-")[2] for name in logs["words"]] == [f"{pid}.err"]  # type: ignore[attr-defined]
        facts = told(process)
        processes = below(process.pid)
        assert told(process) == {"closed": True}
        assert [each for each in processes if running(each)] == []
        assert len(processes) >= 6
        folder = str(facts.pop("folder"))
        assert not Path(folder).exists()
        assert not (tmp_path / "home").exists()
        assert facts == {
            "variable": "carried",
            "node": True,
            "n_nodes": 1,
            "signals": True,
            "asked": "ValueError: no such order",
            "cpu": True,
            "is_private": True,
        }
    finally:
        process.kill()
        out, _ = process.communicate()
    assert out == ""


@pytest.mark.long
def test_an_interrupt_while_ray_starts_leaves_nothing(tmp_path: Path) -> None:
    """Ray swallows an interrupt that comes at some moments of its start: then the next one ends what has started."""
    process = driver(
        tmp_path,
        """
        tell(starting=True)
        cluster = None
        try:
            cluster = opened()
            time.sleep(3600)
        except KeyboardInterrupt:
            if cluster is not None:
                cluster.close()
            tell(interrupted=True)
        time.sleep(3600)
        """,
    )
    told_of_it = threading.Event()

    def press() -> None:
        while not told_of_it.wait(PRESSED_EVERY_S):
            process.send_signal(signal.SIGINT)

    try:
        assert told(process) == {"starting": True}
        seen: list[Stamp] = []
        until = time.monotonic() + 60
        while len(seen) < 2 and time.monotonic() < until:
            seen = below(process.pid)
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        threading.Thread(target=press, daemon=True).start()
        assert told(process) == {"interrupted": True}
        told_of_it.set()
        assert wait_gone([*seen, *below(process.pid)], 5.0) == []
        assert below(process.pid) == []
    finally:
        told_of_it.set()
        process.kill()
        process.communicate()


@pytest.mark.long
def test_what_a_killed_driver_leaves_goes_at_the_next_start(tmp_path: Path) -> None:
    """Workers and their servers end by themselves; Ray's agents and files may need the next start."""
    process = driver(
        tmp_path,
        """
        cluster = opened()
        worker = Worker.remote()
        ray.get(worker.serve.remote())
        time.sleep(1.0)
        tell(folder=str(cluster.folder.path))
        time.sleep(3600)
        """,
    )
    folder = Path(str(told(process)["folder"]))
    processes = below(process.pid)
    commands = {each: " ".join(psutil.Process(each[0]).cmdline()) for each in processes}
    assert sum("sleep 3600" in command for command in commands.values()) >= 2
    process.kill()
    process.communicate()
    left = {commands[each].strip() for each in wait_gone(processes, 15.0)}
    assert left <= {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}
    assert folder.exists()
    again = driver(tmp_path, "opened().close(); tell(done=True)")
    assert told(again) == {"done": True}
    again.communicate(timeout=60)
    assert not folder.exists()
    assert [each for each in processes if running(each)] == []
