"""The weights of now: their version, how each server gets them, and what one that takes another's place gets.

Invariants: a server may be asked only when it holds the weights of now; what a replaced server gets is what the others
got. Called on the trainer's thread, and on threads of the engine's loop when a server is replaced; one at a time.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from agenttrain.errors import EngineError
from agenttrain.protocols import AdapterWeights
from safetensors import safe_open

from agenttrain_sglang.launch import ADAPTERS_AT_ONCE
from agenttrain_sglang.replica import Server
from agenttrain_sglang.settings import SglangTable
from agenttrain_sglang.weights import (
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
from agenttrain_sglang.weights.adapter import WHY, drop_adapter, push_adapter
from agenttrain_sglang.wire import Version

FRESH = "default"
"""What a server calls the weights that it was started with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Adapter:
    """An adapter as it was when it was published: the trainer goes on changing its own."""

    weights: AdapterWeights
    name: str
    version: int


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
        """Of all pushes: until the last server had the weights, and the longest that one could not sample."""
        self._settings, self._model, self._begins_with, self._say = settings, model, begins_with, say
        self._folder, self._tags, self._has_adapters = folder, Tags(), has_adapters
        self._snapshot: Snapshot | None = None
        self._choice: Choice | None = None
        self._adapter: _Adapter | None = None
        self._adapters_by_server: dict[Server, list[str]] = {}
        """Names of those that a server has loaded, the oldest first."""
        self._link_by_server: dict[Server, Link] = {}
        self._version_by_server: dict[Server, int] = {}
        self._lock = threading.Lock()

    def on(self, server: Server) -> tuple[str | None, Version]:
        """The adapter that a call to a server has to name, and what its answer's weights are."""
        adapter = self._adapter
        if adapter is None:
            return None, self._version_of
        return adapter.name, lambda _: adapter.version

    def is_behind(self, server: Server) -> bool:
        """Whether a server holds other weights than those of now."""
        return self._version_by_server.get(server) != self.version

    def restore(self, server: Server) -> None:
        """Give a server the weights of now; nothing travels where it was just started with them.

        Raises:
            EngineError: it didn't take them.
        """
        with self._lock:
            self._drop_gone()
            self._link(server)
            weights = self._kept()
            if weights is not None:
                version = self.version if self._adapter is None else 0
                (outcome,) = self._sent([server], weights, self._tags.of(version)).values()
                if isinstance(outcome, EngineError):
                    raise outcome
            if self._adapter is not None:
                self._load(server, self._adapter)
            self._version_by_server[server] = self.version

    def push(self, weights: Iterable[tuple[str, Any]], version: int, servers: Sequence[Server]) -> dict[Server, str]:
        """Send new weights to the servers that are up.

        Returns:
            Server to why it has to be replaced; the one that takes its place gets the new weights.

        Raises:
            WeightsRefused: a server didn't take them, or nothing could be kept for one that is replaced.
        """
        with self._lock:
            self._drop_gone()
            outcomes = self._sent(servers, weights, self._tags.of(version))
            for outcome in outcomes.values():
                if isinstance(outcome, WeightsRefused):
                    raise outcome
            self.version, self._adapter = version, None
            taken = {server: outcome for server, outcome in outcomes.items() if isinstance(outcome, Pushed)}
            self._version_by_server |= dict.fromkeys(taken, version)
            self._note(taken.values())
            return {server: str(error) for server, error in outcomes.items() if server not in taken}

    def push_adapter(self, adapter: AdapterWeights, version: int, servers: Sequence[Server]) -> dict[Server, str]:
        """Send a new adapter over the base, as `push` sends weights.

        Raises:
            WeightsRefused: a server didn't take it.
        """
        with self._lock:
            self._drop_gone()
            own = {name: tensor.detach().clone() for name, tensor in adapter.tensors.items()}
            new = _Adapter(
                weights=AdapterWeights(config=adapter.config, tensors=own), name=self._tags.of(version), version=version
            )
            spoiled: dict[Server, str] = {}
            for server in servers:
                try:
                    self._note([self._load(server, new)])
                    self._version_by_server[server] = version
                except ServerSpoiled as error:
                    spoiled[server] = str(error)
            self._adapter, self.version = new, version
            return spoiled

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

    def _kept(self) -> Iterator[tuple[str, Any]] | None:
        """The base weights of now, from files. None: those that a server is started with."""
        if self._snapshot is not None and self._snapshot.path is not None:
            return self._snapshot.weights()
        return weights_of(self._begins_with) if self._begins_with is not None else None

    def _sent(
        self, servers: Sequence[Server], weights: Iterable[tuple[str, Any]], tag: str
    ) -> dict[Server, Pushed | EngineError]:
        links = {server: self._link(server) for server in servers}
        if not links:
            return {}
        outcomes = push(
            list(links.values()),
            weights,
            tag,
            bucket_mib=self._settings.bucket_mib,
            dtype=self._choice.dtype if self._choice is not None else None,
            snapshot=self._snapshot,
        )
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
                "device": server.facts.device,
                "dtype": server.facts.dtype,
                "tp_size": server.facts.tensor_parallel,
            }
            self._choice = choose(
                self._settings, facts, address=server.client.address, trainer=Trainer(device=_own_device())
            )
            if self._settings.restarts or self._choice.name == "disk":
                self._snapshot = Snapshot(self._folder)
            self._say(WHY if self._has_adapters else self._choice.why)
        return self._choice

    def _load(self, server: Server, adapter: _Adapter) -> Pushed:
        """Beside the one before, for the calls that named that; a server has room for two."""
        loaded = self._adapters_by_server.setdefault(server, [])
        address, timeout_s = server.client.address, self._settings.update_s
        if len(loaded) == ADAPTERS_AT_ONCE:
            drop_adapter(address, loaded.pop(0), timeout_s=timeout_s)
        pushed = push_adapter(
            address, adapter.weights, adapter.name, timeout_s=timeout_s, n_ranks=server.facts.tensor_parallel
        )
        loaded.append(adapter.name)
        return pushed

    def _note(self, pushed: Iterable[Pushed]) -> None:
        for each in pushed:
            self.update_s += each.seconds
            self.pause_s = max(self.pause_s, each.pause_s)

    def _drop_gone(self) -> None:
        for server in [server for server in self._link_by_server if server.gone.done()]:
            self._link_by_server.pop(server).close()
            self._version_by_server.pop(server, None)
            self._adapters_by_server.pop(server, None)

    def _version_of(self, tag: str) -> int:
        return 0 if tag == FRESH else self._tags.version(tag)


def weights_of(folder: Path) -> Iterator[tuple[str, Any]]:
    """(name, tensor) of a Hugging Face folder, one tensor in memory at a time."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (no mapping)
                yield name, weights.get_tensor(name)


def _own_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
