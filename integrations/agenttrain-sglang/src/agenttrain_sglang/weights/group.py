"""Weights by a process group of torch.distributed: rank 0 is the trainer, the others are the ranks of one server.

The group stands beside any other group of this process. It is made for one incarnation of a server and thrown away
after any fault, so nothing is left waiting: a server that refuses is told to leave the group, which ends a broadcast
that waits for it; one that dies ends it by itself; one that is silent ends it by the time limit.

Source: SGLang 0.5.23, srt/utils/common.py (init_custom_process_group) and model_executor/model_runner_components/
weight_updater.py (one broadcast per name, in order).
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from agenttrain_sglang.weights.buckets import Bucket
from agenttrain_sglang.weights.faults import WeightsRefused
from agenttrain_sglang.weights.server_http import Gone, Http, Refused
from agenttrain_sglang.weights.session import LAST_S

JOIN_S = 30.0
"""How long a server may take to join a group."""


class GroupTransport:
    """Broadcasts buckets to the ranks of one server. NCCL was not run on a GPU."""

    name = "group"
    has_sessions = True

    def __init__(self, http: Http, *, n_ranks: int, backend: str) -> None:
        """Make nothing yet: the group is made with the first bucket.

        Args:
            http: the server; its time limit holds for each bucket.
            n_ranks: the server's, its tensor-parallel size.
            backend: "gloo", or "nccl" where the trainer and the server hold GPUs of their own.
        """
        self.http, self.backend = http, backend
        self.device = "cuda" if backend == "nccl" else "cpu"
        self._n_ranks = n_ranks
        self._name = ""
        self._group: Any = None
        self._store: Any = None

    def prepare(self) -> None:
        """Have the group ready before anything is paused.

        Raises:
            WeightsRefused: the server did not join.
            Gone: it died or went silent.
        """
        if self._group is None:
            try:
                self._join()
            except BaseException:
                self.drop()
                raise

    def load(self, bucket: Bucket, *, tag: str | None) -> None:
        """Broadcast a bucket; returns when the server has put it into its model.

        Args:
            tag: what the weights are called from now on; with the last bucket only.

        Raises:
            Refused, Gone: the server said no, or nothing; the group is gone too.
        """
        body = {
            "names": [name for name, _ in bucket.tensors],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket.tensors],
            "shapes": [list(tensor.shape) for _, tensor in bucket.tensors],
            "group_name": self._name,
            "flush_cache": tag is not None,
            "weight_version": tag,
        }
        asked = _in_background(lambda: self.http.post("/update_weights_from_distributed", body))
        try:
            works = [dist.broadcast(t, src=0, group=self._group, async_op=True) for _, t in bucket.tensors]
            asked.result()
            self._finish(works)
        except (Refused, Gone):
            self.drop()
            raise
        except RuntimeError as error:
            self.drop()
            with contextlib.suppress(RuntimeError):
                asked.result()
            raise Gone(f"the process group broke: {error}") from error

    def drop(self) -> None:
        """Leave the group, the server first where it answers. Safe without one, and twice."""
        group, name = self._group, self._name
        self._group, self._name = None, ""
        if name:
            with contextlib.suppress(Refused, Gone):
                self.http.post("/destroy_weights_update_group", {"group_name": name}, timeout_s=LAST_S)
        if group is not None:
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group(group)
        self._store = None

    close = drop

    def _finish(self, works: list[Any]) -> None:
        for work in works:
            work.wait(timedelta(seconds=self.http.timeout_s))
        if self.backend == "nccl":
            torch.cuda.synchronize()

    def _join(self) -> None:
        limit = timedelta(seconds=min(JOIN_S, self.http.timeout_s))
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
        self._name = f"agenttrain-{secrets.token_hex(6)}"
        asked = _in_background(self._ask_to_join)
        try:
            self._wait_until_connected(asked)
            self._group = _new_group(self._store, self._name, self.backend, 1 + self._n_ranks, limit)
            asked.result()
        except Refused as refusal:
            raise WeightsRefused(
                f"The server at {self.http.address} did not join the process group that weights travel by "
                f'({self.backend}): {refusal}. Set sglang.transport = "tensor".'
            ) from refusal
        except RuntimeError as error:
            raise WeightsRefused(
                f"The process group ({self.backend}) with the server at {self.http.address} did not come about within "
                f"{limit.total_seconds():.0f} s: {error}. Let the server reach this machine, or set sglang.transport = "
                '"tensor".'
            ) from error
        distributed_c10d._set_pg_timeout(timedelta(seconds=self.http.timeout_s), self._group)

    def _ask_to_join(self) -> None:
        self.http.post(
            "/init_weights_update_group",
            {
                "master_address": address_seen_from(self.http.host),
                "master_port": self._store.port,
                "rank_offset": 1,
                "world_size": 1 + self._n_ranks,
                "group_name": self._name,
                "backend": self.backend,
            },
            timeout_s=JOIN_S,
        )

    def _wait_until_connected(self, asked: Future[None]) -> None:
        """Enter the group only once the server is in its store: one that refuses would leave us waiting there."""
        until = time.monotonic() + JOIN_S
        while self._store.num_keys() == 0:
            if asked.done():
                asked.result()
                return
            if time.monotonic() > until:
                raise RuntimeError("the server did not connect to the port opened for it")
            time.sleep(0.002)


def _new_group(store: Any, name: str, backend: str, size: int, limit: timedelta) -> Any:
    """A group of rank 0, made as SGLang makes its side of it."""
    group, _ = distributed_c10d._new_process_group_helper(
        size,
        0,
        [],
        distributed_c10d.Backend(backend),
        dist.PrefixStore(name, store),
        group_name=name,
        timeout=limit,
    )
    distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    return group


def address_seen_from(host: str) -> str:
    """This machine's number on the way to `host`; nothing is sent."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise Gone(f"{host} can't be reached: {error}") from error


def _in_background(call: Callable[[], Any]) -> Future[Any]:
    """What `call` gives, while something else goes on; the thread ends with it."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="agenttrain-weights", daemon=True).start()
    return future
