"""The weights of now: their version, how each server gets them, and what one that takes another's place gets.

Invariants: a server may be asked only when it holds the weights of now; what a replaced server gets is what the others
got; no answer counts that a server gave from other weights than it was given, or from older ones. Called on the
trainer's thread, and on threads of the engine's loop when a server is replaced; one at a time.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from agenttrain.errors import EngineError
from agenttrain.protocols import AdapterWeights
from safetensors import safe_open

from agenttrain_sglang.adapters import Adapter, Loaded
from agenttrain_sglang.one_server import Server
from agenttrain_sglang.settings import SglangTable
from agenttrain_sglang.weights import (
    SPOILED,
    Choice,
    Link,
    Pushed,
    ServerSpoiled,
    Snapshot,
    Tags,
    Trainer,
    WeightsRefused,
    choose,
    open_link,
    push,
)
from agenttrain_sglang.weights.adapter import WHY
from agenttrain_sglang.wire import Version

FRESH = "default"
"""What a server calls the weights that it was started with."""


class OtherWeights(EngineError):
    """A server holds no longer what it was given; it must get the weights of now again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a push."""

    dead: Mapping[Server, str]
    """Servers to why they have to be replaced; those that take their places get the weights of now."""
    refusal: WeightsRefused | None = None
    """Why the weights of before are those of now still. None: the new ones are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """What a server was given last."""

    version: int
    adapter: Adapter | None


BEHIND = _Held(version=-1, adapter=None)


class Published:
    """What every server of a run holds, or is to hold."""

    def __init__(
        self,
        settings: SglangTable,
        *,
        model: Path,
        begins_with: Path | None,
        has_adapters: bool,
        folder: Path,
        say: Callable[[str], None],
    ) -> None:
        """Hold version 0.

        Args:
            model: the folder that the servers' model was loaded from.
            begins_with: a folder whose weights are version 0. None: those that a server was started with.
            has_adapters: whether adapters will be published, over the base.
            folder: for the weights that a replaced server gets.
            say: told which way weights take, once that is known.
        """
        self.version = 0
        self.update_s = self.pause_s = 0.0
        """Of all pushes together: until the last server had the weights, and while the slowest could not sample."""
        self._settings, self._model, self._begins_with, self._say = settings, model, begins_with, say
        self._folder, self._tags, self._has_adapters = folder, Tags(), has_adapters
        self._snapshot: Snapshot | None = None
        self._can_restore = True
        """Whether the base weights of now can be had again: all began with them, or they were kept."""
        self._choice: Choice | None = None
        self._adapter: Adapter | None = None
        self._link_by_server: dict[Server, Link] = {}
        self._held_by_server: dict[Server, _Held] = {}
        self._loaded_by_server: dict[Server, Loaded] = {}
        self._lock = threading.Lock()

    def on(self, server: Server) -> tuple[str | None, Version]:
        """The adapter that a call to a server has to name now, and what the weights of its answer are.

        The second raises OtherWeights for weights that the server was not given, or that are older than those that it
        holds now.
        """
        held = self._held_by_server.get(server, BEHIND)

        def version_of(tag: str) -> int:
            version = self._version_of(tag)
            if held.adapter is not None:
                return held.adapter.version
            if version < held.version:
                raise OtherWeights(
                    f"{server.client.address} answered from version {version} of the weights, and it has taken "
                    f"version {held.version}"
                )
            return version

        return (held.adapter.name if held.adapter is not None else None), version_of

    def check(self, tag: str) -> None:
        """Compare what a server says of its weights.

        Raises:
            OtherWeights: they are not those that it was given.
        """
        self._version_of(tag)

    def is_behind(self, server: Server) -> bool:
        """Whether a server holds other weights than those of now."""
        return self._held_by_server.get(server, BEHIND).version != self.version

    def restore(self, server: Server) -> None:
        """Give a server the weights of now; nothing travels where it was just started with them.

        Raises:
            ServerSpoiled: another server in its place may take them.
            EngineError: it didn't take them.
        """
        with self._lock:
            self._drop_gone()
            self._link(server)
            if self._has_kept:
                version = self.version if self._adapter is None else 0
                (outcome,) = self._sent([server], self._kept(), self._tags.of(version), is_new=False).values()
                if isinstance(outcome, EngineError):
                    raise outcome
            elif server in self._held_by_server or not self._can_restore:
                raise ServerSpoiled(
                    f"{server.client.address} lacks the weights of now, and they were not kept; with sglang.restarts "
                    "above 0 they are."
                )
            if self._adapter is not None:
                self._load(server, self._adapter)
            self._held_by_server[server] = _Held(version=self.version, adapter=self._adapter)

    def push(self, weights: Iterable[tuple[str, Any]], version: int, servers: Sequence[Server]) -> Outcome:
        """Send new weights to the servers that are up; where none is, they are kept for those that will be.

        Args:
            weights: all of the model's, or the same ones each time.

        Raises:
            EngineError: they can be neither sent nor kept.
        """
        with self._lock:
            self._drop_gone()
            outcomes = self._sent(servers, weights, self._tags.of(version), is_new=True)
            dead = {server: str(error) for server, error in outcomes.items() if isinstance(error, ServerSpoiled)}
            taken = {server: each for server, each in outcomes.items() if isinstance(each, Pushed)}
            for outcome in outcomes.values():
                if isinstance(outcome, WeightsRefused):
                    self._held_by_server |= dict.fromkeys(taken, BEHIND)
                    return Outcome(dead=dead, refusal=outcome)
            self.version, self._adapter, self._can_restore = version, None, self._snapshot is not None
            self._held_by_server |= dict.fromkeys(taken, _Held(version=version, adapter=None))
            self._note(taken.values())
            return Outcome(dead=dead)

    def push_adapter(self, adapter: AdapterWeights, version: int, servers: Sequence[Server]) -> Outcome:
        """Send a new adapter over the base, as `push` sends weights; calls go on with the one before until all have it.

        Raises:
            EngineError: as for `push`.
        """
        with self._lock:
            self._drop_gone()
            new = Adapter.copied(adapter, name=self._tags.of(version), version=version)
            taken: dict[Server, Pushed] = {}
            dead: dict[Server, str] = {}
            refusal: WeightsRefused | None = None
            for server in servers:
                try:
                    taken[server] = self._load(server, new)
                except ServerSpoiled as error:
                    dead[server] = str(error)
                except WeightsRefused as error:
                    refusal = error
            if refusal is None:
                self._adapter, self.version = new, version
                self._held_by_server |= dict.fromkeys(taken, _Held(version=version, adapter=new))
                self._note(taken.values())
            return Outcome(dead=dead, refusal=refusal)

    def close(self) -> None:
        """Let go of servers and files."""
        with self._lock:
            for link in self._link_by_server.values():
                link.close()
            self._link_by_server.clear()
            if self._snapshot is not None:
                self._snapshot.close()
                shutil.rmtree(self._folder, ignore_errors=True)

    # ── with the lock held ───────────────────────────────────────────────────────────────────────────────────────

    @property
    def _has_kept(self) -> bool:
        """Whether there are weights of now to send. False: a server was started with them, or they were not kept."""
        if self._snapshot is not None and self._snapshot.path is not None:
            return True
        return self._begins_with is not None and self._can_restore

    def _kept(self) -> Iterator[tuple[str, Any]]:
        """The base weights of now: what was pushed last, over what all begins with."""
        names = set()
        if self._snapshot is not None:
            for name, tensor in self._snapshot.weights():
                names.add(name)
                yield name, tensor
        if self._begins_with is not None:
            yield from weights_of(self._begins_with, without=names)

    def _sent(
        self, servers: Sequence[Server], weights: Iterable[tuple[str, Any]], tag: str, *, is_new: bool
    ) -> dict[Server, Pushed | EngineError]:
        links = {server: self._link(server) for server in servers}
        keeps = is_new or (self._choice is not None and self._choice.name == "disk")
        if not links and self._snapshot is None:
            raise EngineError(
                "No SGLang server is up that could take new weights, and none is replaced. Look into their logs; "
                "sglang.restarts allows replacements."
            )
        try:
            outcomes = push(
                list(links.values()),
                weights,
                tag,
                bucket_mib=self._settings.bucket_mib,
                dtype=self._choice.dtype if self._choice is not None else None,
                snapshot=self._snapshot if keeps else None,
            )
        except BaseException:
            self._held_by_server |= dict.fromkeys(servers, BEHIND)
            raise
        return {server: outcomes[link.address] for server, link in links.items()}

    def _link(self, server: Server) -> Link:
        link = self._link_by_server.get(server)
        if link is None:
            choice = self._chosen(server)
            link = open_link(
                choice,
                address=server.client.address,
                timeout_s=self._settings.update_s,
                model_folder=self._model,
            )
            self._link_by_server[server] = link
        return link

    def _chosen(self, server: Server) -> Choice:
        """One way for all servers: the first one's."""
        if self._choice is None:
            facts = {
                "version": server.facts.version,
                "device": server.facts.device,
                "dtype": server.facts.dtype,
                "tp_size": server.facts.tensor_parallel,
                "dp_size": server.facts.data_parallel,
            }
            self._choice = choose(self._settings, facts, address=server.client.address, trainer=_trainer(server))
            if self._settings.restarts or self._choice.name == "disk":
                self._snapshot = Snapshot(self._folder)
            self._say(WHY if self._has_adapters else self._choice.why)
        return self._choice

    def _load(self, server: Server, adapter: Adapter) -> Pushed:
        shapes, dtype = self._link(server).shapes, self._choice.dtype if self._choice is not None else None
        loaded = self._loaded_by_server.setdefault(server, Loaded(server.client.address, self._settings.update_s))
        held = self._held_by_server.get(server, BEHIND).adapter
        return loaded.load(
            adapter,
            beside=held.name if held is not None else None,
            n_ranks=server.facts.tensor_parallel,
            dtype=dtype,
            shapes=shapes,
            is_0_5_12=self._choice is not None and self._choice.is_0_5_12,
        )

    def _note(self, pushed: Collection[Pushed]) -> None:
        self.update_s += max((each.seconds for each in pushed), default=0.0)
        self.pause_s += max((each.pause_s for each in pushed), default=0.0)

    def _drop_gone(self) -> None:
        for server in [server for server in self._link_by_server if server.gone.done()]:
            self._link_by_server.pop(server).close()
            self._held_by_server.pop(server, None)
            self._loaded_by_server.pop(server, None)

    def _version_of(self, tag: str) -> int:
        """Of the base, where an adapter is over it.

        Raises:
            OtherWeights: nobody gave those to it, or it was started again.
            EngineError: another run gave those to it.
        """
        if tag == FRESH and self._begins_with is None:
            return 0
        if tag in (FRESH, SPOILED):
            raise OtherWeights(f"its weights are {tag!r}, and it was given others: it was started again, or half fed")
        return self._tags.version(tag)


def weights_of(folder: Path, *, without: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
    """(name, tensor) of a Hugging Face folder, one tensor in memory at a time."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (no mapping)
                if name not in without:
                    yield name, weights.get_tensor(name)


def _trainer(server: Server) -> Trainer:
    """This side. The first GPU is the trainer's, and that of a server that is started here too."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Trainer(device=device) if server.process is None else Trainer(device=device, n_gpus=1)
