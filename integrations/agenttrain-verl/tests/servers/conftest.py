"""A tiny model, and what an engine's actor is made of, for the tests of what serves rollouts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agenttrain.config import resolve
from agenttrain.records import RolloutSpec
from agenttrain.testing import tiny_model

from agenttrain_verl.server_spec import ServerSpec

CONFIG = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(name="agenttrain")))


@dataclass(frozen=True, slots=True)
class Specs:
    """Call it for a ServerSpec."""

    model: Path
    folder: Path

    def __call__(
        self, *, model: str = "", engine: str = "local", graph: str | None = None, run: str = "t"
    ) -> ServerSpec:
        file = self.folder / "graph.py"
        if graph is not None:
            file.write_text(graph)
        config = resolve(("the test", {"engine": {"name": engine}}), plugin_tables=[engine])
        rollout = RolloutSpec(
            graph_file=str(file),
            attribute=None,
            config=json.loads(config.model_dump_json()),
            run_dir=str(self.folder / "run"),
            model=model or str(self.model),
        )
        return ServerSpec(rollout=rollout, run=run, device="cpu")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model of 10,000 parameters."""
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def spec(tiny: Path, tmp_path: Path) -> Specs:
    return Specs(tiny, tmp_path)


class Handle:
    """An object as an actor's handle: `.method.remote(…)` gives something to await."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)

        async def called(*args: Any, **kwargs: Any) -> Any:
            answer = method(*args, **kwargs)
            return await answer if asyncio.iscoroutine(answer) else answer

        return SimpleNamespace(remote=lambda *args, **kwargs: asyncio.ensure_future(called(*args, **kwargs)))


@pytest.fixture
def handle_of() -> type[Handle]:
    return Handle


@pytest.fixture
def client_of() -> Callable[..., Any]:
    """A TurnClient over veRL's own router, of servers by name."""
    from verl.workers.rollout.router import GlobalRequestLoadBalancer

    from agenttrain_verl.turn_client import TurnClient

    def client(**servers: Any) -> Any:
        router = GlobalRequestLoadBalancer({name: Handle(server) for name, server in servers.items()})
        return TurnClient(CONFIG, Handle(router))

    return client
