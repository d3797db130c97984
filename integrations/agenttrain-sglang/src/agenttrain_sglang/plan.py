"""A run's configuration to what its servers will be: everything that can be wrong is found here, and nothing starts.

A plan is made twice, for the check before a run and for the run; both times from the same configuration.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from agenttrain.config import Config, environment, plugin_table
from agenttrain.errors import ConfigError, EngineError, ModelError
from agenttrain.exporters import exported
from agenttrain.protocols import EngineContext

from agenttrain_sglang.client import ServerClient, ServerFacts, ServerGone, ServerRefused, checked_address
from agenttrain_sglang.environment import Environment, find_environment
from agenttrain_sglang.experts import RoutedShape, routed_shape
from agenttrain_sglang.launch import Launch, launch_of
from agenttrain_sglang.one_server import Server
from agenttrain_sglang.replica import Replica, ReplicaSettings
from agenttrain_sglang.server import ServerProcess, free_port
from agenttrain_sglang.settings import SglangTable

ANSWERS_IN_S = 10.0
"""How long a server that was given may take to answer the check before a run."""
OF_STARTED = {"arguments", "cache_tokens", "deterministic", "device", "dtype", "environment", "tensor_parallel"}
"""Keys that mean something only for servers that are started here."""
MOST_SEEDS = 2**32
"""SGLang hands its seed to NumPy, which takes no larger one."""
OTLP = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the servers of a run will be."""

    settings: SglangTable
    model: Path
    weights_from: Path | None
    environment: Environment | None
    """Of the servers that are started. None: all are given."""
    model_type: str
    n_vocabulary: int
    routed: RoutedShape | None
    """Where the model routes. None: it is no mixture of experts, or its experts are not wanted."""
    adapter_rank: int | None
    """Of the LoRA adapter that will travel alone. None: whole weights travel."""
    adapter_targets: tuple[str, ...]
    seed: int
    """Of what servers draw without a call's seed."""
    otlp_endpoint: str | None
    """Where servers send their spans. None: nowhere."""
    folder: Path | None
    """For logs and the weights that a replaced server gets. None: a temporary one."""

    @property
    def is_given(self) -> bool:
        """Whether the servers are somebody else's."""
        return bool(self.settings.servers)

    @property
    def device(self) -> str:
        return self.environment.device if self.environment is not None else "cuda"

    @property
    def begins_with(self) -> Path | None:
        """The folder whose weights the servers have to get first: whoever started them may have left others."""
        return self.weights_from or (self.model if self.is_given else None)

    @property
    def deterministic(self) -> bool:
        wanted = self.settings.deterministic
        return wanted if wanted is not None else self.device == "cpu"

    @property
    def n_gpus(self) -> int:
        """Held by servers that are started here."""
        started_on_gpus = self.environment is not None and self.device == "cuda"
        return self.settings.replicas * self.settings.tensor_parallel if started_on_gpus else 0

    def launch(self, replica: int) -> Launch:
        """How one server is started, on a port that is free now."""
        assert self.environment is not None
        return launch_of(
            self.settings,
            self.environment,
            self.model,
            port=free_port(),
            replica=replica,
            deterministic=self.deterministic,
            adapter_rank=self.adapter_rank,
            adapter_targets=self.adapter_targets,
            tells_experts=self.routed is not None,
            otlp_endpoint=self.otlp_endpoint,
            seed=(self.seed + replica) % MOST_SEEDS,
        )

    def replicas(
        self,
        folder: Path,
        *,
        client_of: Callable[[str], ServerClient],
        restore: Callable[[Server], Awaitable[None]],
        say: Callable[[str], None],
    ) -> list[Replica]:
        """One for each server, none of them filled.

        Args:
            folder: for the servers' logs.
        """
        settings = ReplicaSettings(
            restarts=self.settings.restarts,
            start_s=self.settings.start_s,
            silence_s=self.settings.silence_s,
            max_running=self.settings.max_running,
        )
        n = len(self.settings.servers) or self.settings.replicas
        return [
            Replica(
                number=number,
                settings=settings,
                start=None if self.is_given else self._starter(number, folder),
                address=self.settings.servers[number].rstrip("/") if self.is_given else "",
                client_of=client_of,
                restore=restore,
                say=say,
            )
            for number in range(n)
        ]

    def _starter(self, replica: int, folder: Path) -> Callable[[], ServerProcess]:
        n_started = 0

        def start() -> ServerProcess:
            nonlocal n_started
            n_started += 1
            return ServerProcess(self.launch(replica), log=folder / f"server-{replica}-{n_started}.log")

        return start

    def own_folder(self) -> Path:
        """The folder for logs and weights, made."""
        if self.folder is None:
            return Path(tempfile.mkdtemp(prefix="agenttrain-sglang-"))
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder

    def weights_folder(self, own: Path) -> Path:
        """Where the weights lie that a replaced server gets: one of this run's alone, named as servers can find it.

        In the run's own folder it has one name, so that what a killed life of the run left is removed.
        """
        shared = self.settings.shared_folder
        if shared is None:
            return own.absolute() / "weights"
        return Path(shared).absolute() / f"agenttrain-{secrets.token_hex(4)}"


def plan_of(context: EngineContext) -> Plan:
    """Read the configuration of a run.

    Raises:
        ConfigError: settings that don't go together, or there is no virtual environment to start servers in.
        EngineError: SGLang would serve the model wrongly.
        ModelError: the folder's configuration can't be read.
    """
    config, model = context.config, Path(context.model)
    settings = plugin_table(SglangTable, "sglang", config)
    _refuse(settings, config)
    model_config = _model_config(model)
    routed = routed_shape(model)  # asked in any case: it refuses what SGLang would serve wrongly
    rank = config.trainer.lora_rank if settings.adapters and _wants_adapter(config, model) else None
    plan = Plan(
        settings=settings,
        model=model,
        weights_from=context.weights_from,
        environment=None if settings.servers else find_environment(settings),
        model_type=str(model_config.get("model_type")),
        n_vocabulary=_n_vocabulary(model_config, model),
        routed=routed if settings.routed_experts is not False else None,
        adapter_rank=rank,
        adapter_targets=tuple(config.trainer.lora_targets),
        seed=config.seed,
        otlp_endpoint=_otlp_endpoint(),
        folder=context.run_dir / "sglang" if context.run_dir is not None else None,
    )
    if not plan.is_given:
        plan.launch(settings.replicas - 1)  # for what it refuses: the last server needs the most
    return plan


def check_plan(plan: Plan) -> tuple[str, ...]:
    """Ask the servers that are given whether they are there and fit; gives notes.

    Raises:
        EngineError: one doesn't answer, or is none that agenttrain knows.
    """
    if plan.environment is not None:
        n = plan.settings.replicas
        servers = f"{n} SGLang servers" if n > 1 else "a SGLang server"
        return (f"rollouts: {servers} ({plan.environment.version}) started on this machine's {plan.device.upper()}",)
    notes = [f"rollouts: SGLang at {', '.join(plan.settings.servers)}"]
    if unused := sorted(OF_STARTED & plan.settings.model_fields_set):
        keys = ", ".join(f"sglang.{key}" for key in unused)
        notes.append(f"not used, since the servers run already: {keys}")
    for address, facts in zip(plan.settings.servers, asyncio.run(_facts_of(plan.settings.servers)), strict=True):
        refuse_unfit(plan, address, facts)
        notes += _notes(plan, address, facts)
    return tuple(notes)


def _notes(plan: Plan, address: str, facts: ServerFacts) -> list[str]:
    """What a server that was given does without."""
    notes = []
    if not facts.caches_prefixes:
        notes.append(f"{address} keeps no prefixes: each turn is read from its beginning (--disable-radix-cache)")
    if not facts.takes_seeds:
        notes.append(f"{address} takes no seeds: equal seeds give other ids (no --enable-deterministic-inference)")
    if plan.routed is not None and not facts.tells_experts:
        notes.append(
            f"{address} tells no routed experts: the trainer chooses its own (no --enable-return-routed-experts)"
        )
    return notes


async def _facts_of(addresses: Sequence[str]) -> list[ServerFacts]:
    async with aiohttp.ClientSession() as http:
        return [await _facts_at(address.rstrip("/"), http) for address in addresses]


async def _facts_at(address: str, http: aiohttp.ClientSession) -> ServerFacts:
    try:
        async with asyncio.timeout(ANSWERS_IN_S):
            return await ServerClient(address, http).facts()
    except (ServerGone, ServerRefused, TimeoutError) as error:
        why = str(error) or f"not within {ANSWERS_IN_S:g} s"
        raise EngineError(
            f"No SGLang server answers at {address}: {why}. Start it, mend the address in sglang.servers, or leave "
            "sglang.servers out: a server is started here then."
        ) from None


def refuse_unfit(plan: Plan, address: str, facts: ServerFacts) -> None:
    """Compare what a server is with what the run needs.

    Raises:
        EngineError: it serves another model, or was started without what the run asks of it.
    """
    if facts.model_type != plan.model_type:
        raise EngineError(
            f"The SGLang server at {address} serves a {facts.model_type} ({facts.model_path}), and {plan.model} is a "
            f"{plan.model_type}. Start it on that model's folder."
        )
    if plan.adapter_rank is not None and not facts.takes_adapters:
        raise EngineError(
            f"The SGLang server at {address} was started without LoRA, and this run trains an adapter. Start it with "
            f"--enable-lora --max-lora-rank {plan.adapter_rank}, or send merged weights: sglang.adapters = false."
        )
    if plan.settings.routed_experts and not facts.tells_experts:
        raise EngineError(
            f"The SGLang server at {address} tells no routed experts. Start it with --enable-return-routed-experts, or "
            "leave sglang.routed_experts out."
        )


def _refuse(settings: SglangTable, config: Config) -> None:
    if config.run.deterministic:
        raise ConfigError(
            "run.deterministic = true needs an engine whose batches have a fixed width, and SGLang's have not. Leave "
            "it out (tokens still follow their seeds on the CPU), or use --engine local."
        )
    if settings.servers and settings.replicas > 1:
        raise ConfigError(
            f"sglang.replicas is {settings.replicas}, and sglang.servers names {len(settings.servers)} running "
            "servers. Give one of the two."
        )
    addresses = [checked_address(address) for address in settings.servers]
    if twice := sorted({address for address in addresses if addresses.count(address) > 1}):
        raise ConfigError(f"sglang.servers names {', '.join(twice)} twice. Name each server once.")
    if settings.shared_folder is not None and not Path(settings.shared_folder).is_dir():
        raise ConfigError(f"sglang.shared_folder is {settings.shared_folder}, and there is no such folder. Make it.")


def _model_config(model: Path) -> dict[str, Any]:
    """Raises:
    ModelError: there is none that can be read.
    """
    try:
        config = json.loads((model / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{model / 'config.json'} can't be read: {error}. Give the folder of a model.") from None
    if not isinstance(config, dict):
        raise ModelError(f"{model / 'config.json'} holds no table. Give the folder of a model.")
    return config


def _n_vocabulary(config: Mapping[str, Any], model: Path) -> int:
    """Ids that the model has; of a model with several parts, its text's.

    Raises:
        ModelError: config.json doesn't say.
    """
    n = (config.get("text_config") or config).get("vocab_size")
    if not isinstance(n, int):
        raise ModelError(f"{model / 'config.json'} names no vocab_size. Give the folder of a causal language model.")
    return n


def _wants_adapter(config: Config, model: Path) -> bool:
    if config.trainer.name != "local":
        return False
    from agenttrain.local.adapter import wants_adapter
    from agenttrain.prepare import n_parameters

    return wants_adapter(config.trainer, n_parameters(model))


def _otlp_endpoint() -> str | None:
    """Where this run's own spans go, where that is an OTLP collector."""
    if exported().exporter != "otlp":
        return None
    traces, common = (environment(name) for name in OTLP)
    return traces or f"{(common or 'http://localhost:4318').rstrip('/')}/v1/traces"
