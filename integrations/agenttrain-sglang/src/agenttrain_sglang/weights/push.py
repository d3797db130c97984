"""Published weights into several servers at once: read once, one bucket in memory, and a result for each server.

A server that fails is told apart and does not keep the others from their weights. The snapshot is written on the way,
so that one that is started again gets the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agenttrain.errors import EngineError

from agenttrain_sglang import sglang_0_5_12
from agenttrain_sglang.weights.buckets import MIB, Bucket, in_buckets
from agenttrain_sglang.weights.disk import DiskTransport
from agenttrain_sglang.weights.faults import ServerSpoiled, WeightsRefused
from agenttrain_sglang.weights.group import GroupTransport
from agenttrain_sglang.weights.proof import Proof
from agenttrain_sglang.weights.server_http import Gone, Http, Refused
from agenttrain_sglang.weights.session import UpdateSession
from agenttrain_sglang.weights.shapes import Shapes
from agenttrain_sglang.weights.snapshot import Part, Snapshot
from agenttrain_sglang.weights.tensor import TensorTransport

Transport = GroupTransport | TensorTransport | DiskTransport


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """New weights are in a server."""

    seconds: float
    """From the first bucket asked for to the version read back."""
    pause_s: float
    """Of these, how long no token could be sampled."""
    n_buckets: int
    n_compared: int
    """Tensors whose checksum in the server is that of what was sent. 0: it could not be told."""


class Link:
    """How weights get into one incarnation of one server. One push at a time."""

    def __init__(
        self,
        http: Http,
        transport: Transport,
        *,
        shapes: Shapes | None = None,
        can_prove: bool = False,
        is_0_5_12: bool = False,
    ) -> None:
        """Ask nothing yet.

        Args:
            shapes: what the server's model looks like. None: it can't be read from here.
            can_prove: the server's checksums can be computed here too.
            is_0_5_12: the server is of that version.
        """
        self.address, self.transport = http.address, transport
        self.shapes = shapes
        if is_0_5_12:
            self._session = UpdateSession(http, has_sessions=False, pause_mode=sglang_0_5_12.PAUSE_MODE)
        else:
            self._session = UpdateSession(http, has_sessions=transport.has_sessions)
        self._proof = Proof(http, can_be_made=can_prove)
        self._has_begun = self._is_touched = False
        self.pause_s = 0.0
        self.n_compared = 0

    def take(self, bucket: Bucket, *, tag: str, folder: Path | None) -> None:
        """Send a bucket; with the last one the new weights count.

        Args:
            folder: where the snapshot of this push lies, whole with the last bucket.

        Raises:
            WeightsRefused: nothing was taken.
            ServerSpoiled: the server must be replaced, or all pushed again.
        """
        if bucket.number == 0:
            self._has_begun = self._is_touched = False
            self._proof.begin()
        try:
            self._take(bucket, tag, folder)
        except WeightsRefused as refusal:
            self.abandon()
            if self._is_touched:
                raise ServerSpoiled(f"{refusal} Part of them was sent already: push all again.") from refusal
            raise
        except ServerSpoiled:
            self.abandon()
            raise
        except (Refused, Gone) as fault:
            self.abandon()
            raise self._fault(fault, tag) from fault

    def rename(self, tag: str) -> None:
        """Call the weights that the server has something else.

        Raises:
            ServerSpoiled: it said no, or nothing.
        """
        self._is_touched = False
        try:
            self._session.rename(tag)
            self._session.check(tag)
        except (Refused, Gone) as fault:
            raise self._fault(fault, tag) from fault

    def abandon(self) -> None:
        """Leave a push that can't be finished; the server goes on as it was, or as a spoiled one."""
        self.transport.drop()
        if self._has_begun:
            self._session.give_up(is_spoiled=self._is_touched)
        self._has_begun = False

    def close(self) -> None:
        """Let go of what is held for the server."""
        self.transport.close()

    def _take(self, bucket: Bucket, tag: str, folder: Path | None) -> None:
        if self.shapes is not None:
            self.shapes.check(bucket)
        self._proof.see(bucket)
        if isinstance(self.transport, DiskTransport):
            if folder is None:
                raise WeightsRefused('Transport "disk" needs a snapshot, and none is written. Give a shared folder.')
            if not bucket.is_last:
                return
        if not self._has_begun:
            self.transport.prepare()
            self._has_begun = True
            self._session.begin()
        self._is_touched = True
        if isinstance(self.transport, DiskTransport) and folder is not None:
            self.transport.load_folder(folder, tag=tag)
        else:
            self.transport.load(bucket, tag=tag if bucket.is_last else None)
        if bucket.is_last:
            self._session.end(tag)
            self.n_compared = self._proof.check()
            self.pause_s = self._session.go_on()
            self._has_begun = self._is_touched = False

    def _fault(self, fault: Refused | Gone, tag: str) -> EngineError:
        what = f'Weights {tag} did not get into the server at {self.address} by transport "{self.transport.name}"'
        if isinstance(fault, Refused) and not self._is_touched:
            return WeightsRefused(f"{what}: {fault}. It has the weights that it had; look at its log.")
        if isinstance(fault, Refused):
            return ServerSpoiled(f"{what}: {fault}. It has no good weights now: push all again, or start it again.")
        return ServerSpoiled(f"{what}: {fault}. It is gone or hangs: start it again.")


def push(
    links: Sequence[Link],
    weights: Iterable[tuple[str, Any]],
    tag: str,
    *,
    bucket_mib: float,
    dtype: Any = None,
    snapshot: Snapshot | None = None,
) -> dict[str, Pushed | EngineError]:
    """Bring weights into servers; each goes on sampling with them, or is told as failed.

    Args:
        links: of one kind of transport. Empty: the weights are kept as files only.
        weights: (Hugging Face name, tensor), read once and lazily.
        tag: what the servers call them from now on (`Tags.of`).
        bucket_mib: weights that travel together.
        dtype: the servers' own, which floating-point weights are cast to before they travel. None: as they are.
        snapshot: where they are kept too. It keeps the new ones unless a server refused them.

    Returns:
        Address of each link to what became of it.
    """
    began = time.perf_counter()
    part = snapshot.begin() if snapshot is not None else None
    going = _Going(links, tag, part)
    buckets = in_buckets(
        weights, n_bytes=int(bucket_mib * MIB), dtype=dtype, device=links[0].transport.device if links else "cpu"
    )
    try:
        for bucket in buckets:
            going.send(bucket)
        if going.n_buckets == 0:
            going.each(lambda link: link.rename(tag))
    except BaseException:
        going.stop()
        raise
    finally:
        going.close()
    if snapshot is not None and part is not None:
        _settle(snapshot, part, going)
    return {link.address: going.result(link, began) for link in links}


class _Going:
    """A push under way."""

    def __init__(self, links: Sequence[Link], tag: str, part: Part | None) -> None:
        self._links, self.tag, self._part = links, tag, part
        self.errors: dict[str, EngineError] = {}
        self.n_buckets = 0
        self._ended_at: dict[str, float] = {}
        self._threads = ThreadPoolExecutor(len(links), "agenttrain-weights") if len(links) > 1 else None

    def send(self, bucket: Bucket) -> None:
        """To the files first: a server may be told of them."""
        if self._part is not None:
            self._part.add(bucket)
        folder = self._part.path if self._part is not None else None
        self.n_buckets += 1
        self.each(lambda link: link.take(bucket, tag=self.tag, folder=folder))

    def each(self, step: Callable[[Link], None]) -> None:
        """One step for every server that has not failed, all at once."""

        def one(link: Link) -> None:
            try:
                step(link)
            except EngineError as error:
                self.errors[link.address] = error
            self._ended_at[link.address] = time.perf_counter()

        left = [link for link in self._links if link.address not in self.errors]
        if self._threads is None:
            for link in left:
                one(link)
        else:
            list(self._threads.map(one, left))

    def stop(self) -> None:
        """The weights themselves failed: no server gets the rest."""
        self.each(lambda link: link.abandon())
        if self._part is not None:
            self._part.discard()

    def close(self) -> None:
        """End the threads."""
        if self._threads is not None:
            self._threads.shutdown()

    def result(self, link: Link, began: float) -> Pushed | EngineError:
        """What became of one server."""
        error = self.errors.get(link.address)
        if error is not None:
            return error
        return Pushed(
            seconds=self._ended_at[link.address] - began,
            pause_s=link.pause_s if self.n_buckets else 0.0,
            n_buckets=self.n_buckets,
            n_compared=link.n_compared if self.n_buckets else 0,
        )


def _settle(snapshot: Snapshot, part: Part, going: _Going) -> None:
    """Keep what was written, unless a server refused it; nothing written leaves what was kept."""
    if going.n_buckets == 0 or any(isinstance(error, WeightsRefused) for error in going.errors.values()):
        part.discard()
        if going.n_buckets == 0 and snapshot.path is not None:
            snapshot.tag = going.tag
    else:
        snapshot.keep(part, going.tag)
