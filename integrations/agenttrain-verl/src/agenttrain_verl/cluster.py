"""Ray for one run: a cluster of its own here, or one that runs already.

An own cluster is this machine's, private and short-lived: whatever it started is gone when it is closed, by pid, also
after an interrupt in the middle of its start. A cluster that was joined is only left. Knows Ray, and nothing of veRL
but what a plan needs.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from agenttrain.errors import ConfigError, TrainerError

from agenttrain_verl import needs
from agenttrain_verl.needs import NodeFree
from agenttrain_verl.node_check import check_nodes
from agenttrain_verl.plan import Plan
from agenttrain_verl.ray_folder import RayFolder, Stamp, end, stamp, wait_gone
from agenttrain_verl.worker_logs import worker_trouble as worker_trouble

REACHED_IN_S = 10.0
"""For a connection to a cluster that is to be joined."""
PATIENCE_S = 120.0
"""How long a joined cluster may take until its nodes are there."""
STARTS = 3
"""How often Ray is tried where its node is too slow to start: it waits 30 s, whatever the machine (2.60: node.py)."""
TOO_SLOW = "timed out during startup"
LEAST_STORE_BYTES = 100 * 2**20
STORE_SHARE_OF_SHM = 0.5
STORE_SHARE_OF_MEMORY = 0.3
SPARE_CPUS = 16
"""Places for actors that ask Ray for a CPU while they start; on an own cluster a number and nothing else."""
ENDS_IN_S = 2.0
"""For what Ray has told to end."""
QUEUE = "TransferQueueController"
"""The one name that the queue has in a cluster; who starts another joins it (TransferQueue 0.1.11, interface.py)."""
LOG_BYTES = 20 * 2**20
"""Of one process's log, what is kept."""


class Cluster:
    """A Ray cluster that this process is the driver of, until `close`.

    Args:
        address: of a cluster that runs already. None: an own one.
        folder: of an own cluster. None: joined.
    """

    def __init__(self, *, run_dir: Path, address: str | None, folder: RayFolder | None) -> None:
        self.run_dir, self.address, self.folder = run_dir, address, folder
        self.node_id = ""
        """Ray's name of the node that this process is on."""
        self._guard = folder.guarded() if folder is not None else None
        self._before = frozenset(child.pid for child in psutil.Process().children())
        self._closed = False

    @classmethod
    def open(
        cls, plan: Plan, *, run_dir: Path, runtime_env: Mapping[str, Any], patience_s: float = PATIENCE_S
    ) -> Cluster:
        """Start a cluster, or join the one that the plan names.

        Call it on a thread that lives as long as the cluster, best the main one: Ray's processes die with the thread
        that started them (Ray 2.60: _private/utils.py, PR_SET_PDEATHSIG).

        Args:
            plan: its model is where every node finds the policy, as shipping.runtime_env gives it.
            runtime_env: for every process of the run, as shipping.runtime_env gives it.
            patience_s: how long a joined cluster may take until its nodes are there.

        Raises:
            ConfigError: an address that can't be joined from here.
            TrainerError: Ray can't be started or reached, has no place for the plan, has another run's queue, or its
                nodes differ from this one.
            RunError: there is no folder for an own cluster.
        """
        address = plan.settings.address
        refuse_address(address)
        refuse_silent(address)
        set_variables(own=address is None)
        for _ in range(STARTS - 1):
            try:
                return cls._opened(plan, run_dir=run_dir, runtime_env=runtime_env, patience_s=patience_s)
            except TrainerError as error:
                if TOO_SLOW not in str(error):
                    raise
        return cls._opened(plan, run_dir=run_dir, runtime_env=runtime_env, patience_s=patience_s)

    @classmethod
    def _opened(cls, plan: Plan, *, run_dir: Path, runtime_env: Mapping[str, Any], patience_s: float) -> Cluster:
        address = plan.settings.address
        cluster = cls(run_dir=run_dir, address=address, folder=None if address else RayFolder.make())
        try:
            with signals_kept():
                cluster._start(plan, dict(runtime_env))
            if address is not None:
                cluster._wait_for_place(plan, patience_s)
                check_nodes(cluster.nodes(), model=plan.model)
        except BaseException:
            with suppress(OSError):
                cluster.keep_logs()
            cluster.close()
            raise
        return cluster

    def close(self) -> None:
        """Leave the cluster, and end all that an own one started. May be called twice."""
        if self._closed:
            return
        processes = self._processes()
        try:
            ray.shutdown()
        finally:
            if self.folder is not None:
                self._end(processes)
                self.folder.remove()
            if self._guard is not None:
                self._guard.communicate(b"closed")
        self._closed = True

    def _end(self, processes: list[Stamp]) -> None:
        """End what Ray has left; one that was just forked shows only when it has begun its own program."""
        wait_gone(processes, ENDS_IN_S)
        for _ in range(2):
            processes = [*{*processes, *self._processes()}]
            end(processes)
            time.sleep(0.1)
        for pid, _ in processes:
            with suppress(ChildProcessError):  # not this process's own, or waited for by Ray
                os.waitpid(pid, os.WNOHANG)

    def keep_logs(self) -> Path | None:
        """Copy the logs of the cluster's processes into the run's verl/logs, before `close`.

        Returns:
            That folder, or None: a joined cluster keeps its own.
        """
        if self.folder is None or not self.folder.logs.is_dir():
            return None
        target = self.run_dir / "verl" / "logs"
        target.mkdir(parents=True, exist_ok=True)
        for log in self.folder.logs.glob("*.*"):
            if log.is_file() and log.suffix in (".log", ".out", ".err") and log.stat().st_size:
                _copy_end(log, target / log.name)
        return target

    @property
    def n_nodes(self) -> int:
        return len(self.nodes())

    def cpu_s(self) -> float:
        """CPU seconds of an own cluster's processes, and of what they started and waited for; 0 where it was joined.

        What a worker started and still runs, such as a server of an engine, is left out: engines tell theirs.
        """
        total = 0.0
        for process in self._of_ray():
            for each in (process, *_children(process, deep=False)):
                with suppress(psutil.Error):
                    total += sum(each.cpu_times()[:4])
        return total

    def nodes(self) -> list[NodeFree]:
        """What the nodes of the cluster have, and what of it is free."""
        free = ray._private.state.available_resources_per_node()
        return [
            NodeFree(
                node_id=node["NodeID"],
                address=node["NodeManagerAddress"],
                gpus=node["Resources"].get("GPU", 0.0),
                cpus=node["Resources"].get("CPU", 0.0),
                free_gpus=free.get(node["NodeID"], {}).get("GPU", 0.0),
                free_cpus=free.get(node["NodeID"], {}).get("CPU", 0.0),
            )
            for node in ray.nodes()
            if node["Alive"]
        ]

    def _start(self, plan: Plan, runtime_env: dict[str, Any]) -> None:
        where = f"The Ray cluster at {self.address}" if self.address else "An own Ray cluster"
        try:
            ray.init(
                address=self.address or "local",
                runtime_env=runtime_env,
                log_to_driver=False,
                logging_level=logging.WARNING,
                **(self._own(plan) if self.folder is not None else {}),
            )
        except Exception as error:  # Ray's own is a bare one where a node starts too slowly (2.60: _private/node.py)
            did = "can't be joined" if self.address else "can't be started"
            told = (str(error).strip() or repr(error)).splitlines()[0]
            raise TrainerError(f"{where} {did}: {told} {self._next_step()}") from error
        self.node_id = ray.get_runtime_context().get_node_id()
        self.note_processes()

    def note_processes(self) -> None:
        """Write down what runs now, so that it is ended should this process be killed."""
        if self.folder is not None:
            self.folder.write_owner(self._processes())

    def _own(self, plan: Plan) -> dict[str, Any]:
        """What an own cluster is started with."""
        assert self.folder is not None
        counted = {"num_gpus": plan.n_devices} if plan.device == "cpu" else {}
        free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
        return counted | {
            "num_cpus": max(os.cpu_count() or 1, needs.needs_of(plan).cpus + SPARE_CPUS),
            "include_dashboard": False,
            "object_store_memory": object_store_bytes(shm_free=free, memory_free=psutil.virtual_memory().available),
            "_temp_dir": str(self.folder.path),
        }

    def _next_step(self) -> str:
        if self.address is None:
            return f"See its logs in {self.run_dir / 'verl' / 'logs'}, and whether another Ray holds memory or ports."
        return (
            "See that it runs (ray status), that its Ray and Python have the versions of this environment, and that "
            "this machine is one of its nodes; a cluster that asks for a token takes it from RAY_AUTH_TOKEN."
        )

    def _wait_for_place(self, plan: Plan, patience_s: float) -> None:
        """Nodes of a joined cluster may still be on their way."""
        needed, until = needs.needs_of(plan), time.monotonic() + patience_s
        while (needed.shortage(self.nodes()) is not None or _has_queue()) and time.monotonic() < until:
            time.sleep(1.0)
        if _has_queue():
            raise TrainerError(
                f"The Ray cluster at {self.address} has a transfer queue already ({QUEUE}): another run of veRL is on "
                "it, and this one would train that one's rows. Wait until it has ended, or use another cluster."
            )
        needs.check(needed, self.nodes(), address=str(self.address))

    def _processes(self) -> list[Stamp]:
        """All processes of an own cluster, with what they started."""
        of_ray = self._of_ray()
        below = [each for child in of_ray for each in _children(child, deep=True)]
        return [stamped for each in (*of_ray, *below) if (stamped := stamp(each)) is not None]

    def _of_ray(self) -> list[psutil.Process]:
        """Processes of an own cluster that this one started."""
        if self.folder is None:
            return []
        path, children = str(self.folder.path), psutil.Process().children()
        return [child for child in children if child.pid not in self._before and _names(child, path)]


def _has_queue() -> bool:
    return any(actor["name"] == QUEUE for actor in ray.util.list_named_actors(all_namespaces=True))


def refuse_address(address: str | None) -> None:
    """Raises:
    ConfigError: an address through Ray's client, which veRL's trainer can't be driven through.
    """
    if address is not None and address.startswith("ray://"):
        raise ConfigError(
            f"verl.address is {address!r}, and veRL's driver must be on a node of the cluster, which ray:// is not. "
            'Run agenttrain there (ray job submit, or a RayJob), with verl.address = "auto" or "host:6379".'
        )


def refuse_silent(address: str | None) -> None:
    """Raises:
    TrainerError: nothing listens at an address; Ray would try for minutes.
    """
    host, colon, port = (address or "").rpartition(":")
    if not colon or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACHED_IN_S).close()
    except OSError as error:
        raise TrainerError(
            f"Nothing answers at verl.address {address!r} ({error}). Give the address of the cluster's head, with "
            'the port of its GCS (6379 unless it was changed); on a node of the cluster "auto" finds it.'
        ) from error


def set_variables(*, own: bool) -> None:
    """What Ray reads of the environment before it starts, where a user has not set it.

    An own cluster gets a token of its own: without one Ray 2.60 writes one into the user's home. RAY_AUTH_MODE is
    Ray's to set: it has read that when it was imported (_private/authentication).
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if own and not any(name in os.environ for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)


@contextmanager
def signals_kept() -> Iterator[None]:
    """Ray puts its own handler of SIGTERM in when it starts (2.60: _private/worker.py, init); the former one stays."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def object_store_bytes(*, shm_free: int, memory_free: int) -> int:
    """What an own cluster's object store may grow to: a share of what is free, and at least what Ray needs.

    Example: 24 GiB of shared memory and 20 GiB of memory free -> 6 GiB
    """
    return max(LEAST_STORE_BYTES, int(min(STORE_SHARE_OF_SHM * shm_free, STORE_SHARE_OF_MEMORY * memory_free)))


def _names(process: psutil.Process, text: str) -> bool:
    try:
        return any(text in part for part in process.cmdline())
    except psutil.Error:
        return False


def _children(process: psutil.Process, *, deep: bool) -> list[psutil.Process]:
    try:
        return list(process.children(recursive=deep))
    except psutil.NoSuchProcess:
        return []


def _copy_end(log: Path, target: Path) -> None:
    with log.open("rb") as source, target.open("wb") as copy:
        source.seek(max(0, log.stat().st_size - LOG_BYTES))
        shutil.copyfileobj(source, copy)
