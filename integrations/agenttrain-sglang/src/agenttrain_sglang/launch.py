"""Settings, a virtual environment and a model become the command line and the variables of one server. Starts nothing.

Invariant: what agenttrain relies on (the model, the address, ids without a tokenizer, metrics, seeds, adapters, routed
experts) can't be set otherwise by `arguments`; all else can, since those come last. CPU servers have been run with
SGLang 0.5.23 and 0.5.12; the command line for CUDA has not been run on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agenttrain.errors import ConfigError

from agenttrain_sglang.environment import Device, Environment, cpu_variables
from agenttrain_sglang.settings import SglangTable

HOST = "127.0.0.1"
CPU_CACHE_TOKENS = 65536
CPU_MEMORY_SHARE = "0.5"
"""Of the free memory, for weights and KV cache; the number of positions caps it long before."""
ADAPTERS_AT_ONCE = 2
"""The one that answers and the one that arrives."""
SMALL_BYTES = 64 * 1024 * 1024
"""Up to here a model on a CPU is answered fastest by one thread: more of them wait for each other."""
PLUGIN = "agenttrain_sglang_on_cpu"

OWNED: Mapping[str, str] = {
    "--model-path": "--model of the run",
    "--model": "--model of the run",
    "--tokenizer-path": "--model of the run",
    "--host": "nothing else: servers that are started here answer on this machine alone",
    "--port": "nothing else: a free one is chosen",
    "--api-key": "nothing else: servers that are started here answer on this machine alone",
    "--ssl-keyfile": "nothing else: servers that are started here answer on this machine alone",
    "--device": "sglang.device",
    "--dtype": "sglang.dtype",
    "--tp": "sglang.tensor_parallel",
    "--tp-size": "sglang.tensor_parallel",
    "--tensor-parallel-size": "sglang.tensor_parallel",
    "--max-running-requests": "sglang.max_running",
    "--max-total-tokens": "sglang.cache_tokens",
    "--enable-deterministic-inference": "sglang.deterministic",
    "--enable-return-routed-experts": "sglang.routed_experts",
    "--enable-lora": "trainer.lora_rank and sglang.adapters",
    "--max-lora-rank": "trainer.lora_rank",
    "--lora-target-modules": "trainer.lora_targets",
    "--lora-paths": "trainer.lora_rank and sglang.adapters",
    "--max-loaded-loras": "nothing else: agenttrain counts the adapters",
    "--max-loras-per-batch": "nothing else: agenttrain counts the adapters",
    "--skip-tokenizer-init": "nothing else: ids travel, and no text",
    "--enable-metrics": "nothing else: it is always on",
    "--weight-version": "nothing else: agenttrain counts it",
    "--enable-trace": "OTEL_EXPORTER_OTLP_ENDPOINT",
    "--otlp-traces-endpoint": "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "--random-seed": "--seed of the run",
    "--config": "sglang.arguments, each by its name",
    "--nnodes": "sglang.servers: start a server of several machines yourself and name its address",
    "--node-rank": "sglang.servers: start a server of several machines yourself and name its address",
    "--dist-init-addr": "sglang.servers: start a server of several machines yourself and name its address",
    "--nccl-init-addr": "sglang.servers: start a server of several machines yourself and name its address",
}
"""Arguments that agenttrain sets, and where to set them instead."""

DROPPED = (
    *("SGLANG_RETURN_ORIGINAL_LOGPROB", "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"),
    *("VIRTUAL_ENV", "OTEL_SERVICE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
)
DROPPED_FAMILIES = (
    *("PYTHON", "CONDA_", "AGENTTRAIN_", "RAY_", "VERL_", "TORCHELASTIC_", "OMP_"),
    *("OTEL_TRACES_", "OTEL_METRICS_", "OTEL_LOGS_", "OTEL_PYTHON_"),
)
"""Variables that belong to this process, its environment or its cluster, and not to a server; by name and by start.

Two are SGLang's: log probabilities would be of another temperature, and health would say nothing of the scheduler.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One server that can be started."""

    command: tuple[str, ...]
    variables: Mapping[str, str]
    """The whole environment of the process."""
    port: int
    device: Device
    n_gpus: int
    """That it holds while it runs; 0 on a CPU."""

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.port}"


def launch_of(
    settings: SglangTable,
    environment: Environment,
    model: Path,
    *,
    port: int,
    replica: int = 0,
    deterministic: bool,
    adapter_rank: int | None = None,
    adapter_targets: Sequence[str] = (),
    tells_experts: bool = False,
    otlp_endpoint: str | None = None,
    seed: int = 0,
    inherited: Mapping[str, str] | None = None,
) -> Launch:
    """How one server of a run is started.

    Args:
        settings: the table [sglang].
        environment: where SGLang is installed.
        model: a Hugging Face folder.
        port: free on this machine.
        replica: which of `settings.replicas`, from 0.
        deterministic: each token is drawn from its call's seed and its position.
        adapter_rank: the highest rank of LoRA adapters that it will get. None: it gets none.
        adapter_targets: names of the layers that they adapt, such as "q_proj".
        tells_experts: answers hold the experts that each token went through.
        otlp_endpoint: an address that takes OTLP over HTTP. None: no spans.
        seed: of what is drawn without a seed of its own.
        inherited: variables to start from. None: those of this process.

    Raises:
        ConfigError: `settings.arguments` holds one that agenttrain sets, or there are fewer GPUs than servers need.
    """
    refuse_owned(settings.arguments)
    given = dict(os.environ) if inherited is None else dict(inherited)
    arguments = [
        *("--model-path", str(model), "--host", HOST, "--port", str(port), "--device", environment.device),
        *("--dtype", _dtype(settings, environment.device), "--tp-size", str(settings.tensor_parallel)),
        *("--max-running-requests", str(settings.max_running), "--random-seed", str(seed)),
        *("--skip-tokenizer-init", "--skip-server-warmup", "--sleep-on-idle", "--enable-metrics"),
        *("--grammar-backend", "none"),
        *_device_arguments(settings, environment),
        *(["--enable-deterministic-inference"] if deterministic else []),
        *(["--enable-return-routed-experts"] if tells_experts else []),
        *(_adapter_arguments(adapter_rank, adapter_targets, environment.device) if adapter_rank is not None else []),
        *(["--enable-trace", "--otlp-traces-endpoint", otlp_endpoint] if otlp_endpoint is not None else []),
        *settings.arguments,
    ]
    variables = _variables(given, settings, environment.device, model=model, replica=replica)
    if otlp_endpoint is not None:
        variables["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] = "http/protobuf"
    return Launch(
        command=(str(environment.python), "-m", "sglang.launch_server", *arguments),
        variables=variables,
        port=port,
        device=environment.device,
        n_gpus=settings.tensor_parallel if environment.device == "cuda" else 0,
    )


def refuse_owned(arguments: Sequence[str]) -> None:
    """Refuse arguments that agenttrain sets; SGLang takes any beginning of a name for it.

    Raises:
        ConfigError: with where to set it instead.
    """
    for argument in arguments:
        name = argument.partition("=")[0]
        owned = name if name in OWNED else next((each for each in OWNED if each.startswith(name)), None)
        if owned is not None and name.startswith("--") and name != "--":
            short = "" if name == owned else f" (short for {owned})"
            raise ConfigError(
                f"sglang.arguments holds {name}{short}, which agenttrain sets. Take it out, and use {OWNED[owned]}."
            )


def _dtype(settings: SglangTable, device: Device) -> str:
    if settings.dtype != "auto":
        return settings.dtype
    return "float32" if device == "cpu" else "bfloat16"


def _device_arguments(settings: SglangTable, environment: Environment) -> list[str]:
    tokens = settings.cache_tokens
    if environment.device == "cuda":
        return ["--max-total-tokens", str(tokens)] if tokens is not None else []
    return [
        *("--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-overlap-schedule"),
        *_without_graphs(environment.version),
        *("--mem-fraction-static", CPU_MEMORY_SHARE, "--max-total-tokens", str(tokens or CPU_CACHE_TOKENS)),
    ]


def _without_graphs(version: str) -> list[str]:
    from agenttrain_sglang import sglang_0_5_12 as old

    if version == old.VERSION:
        return list(old.WITHOUT_GRAPHS)
    return ["--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"]


def _adapter_arguments(rank: int, targets: Sequence[str], device: Device) -> list[str]:
    """A server takes adapters of any rank up to the one that it was started with."""
    return [
        *("--enable-lora", "--max-lora-rank", str(rank), "--lora-target-modules", *(targets or ("all",))),
        *("--max-loras-per-batch", str(ADAPTERS_AT_ONCE), "--max-loaded-loras", str(ADAPTERS_AT_ONCE)),
        *(["--lora-backend", "torch_native"] if device == "cpu" else []),
    ]


def _variables(
    given: dict[str, str], settings: SglangTable, device: Device, *, model: Path, replica: int
) -> dict[str, str]:
    kept = {
        name: value for name, value in given.items() if name not in DROPPED and not name.startswith(DROPPED_FAMILIES)
    }
    kept["HF_HUB_OFFLINE"] = "1"  # The model is a folder.
    if device == "cuda":
        return kept | _gpus_of(given, settings, replica)
    if "SGLANG_PLUGINS" in kept:
        kept["SGLANG_PLUGINS"] += f",{PLUGIN}"
    threads = given.get("OMP_NUM_THREADS") or str(_threads(model, settings.replicas))
    return kept | cpu_variables() | {"OMP_NUM_THREADS": threads}


def _threads(model: Path, replicas: int) -> int:
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    return 1 if size <= SMALL_BYTES else max(1, len(os.sched_getaffinity(0)) // replicas)


def _gpus_of(given: Mapping[str, str], settings: SglangTable, replica: int) -> dict[str, str]:
    """GPUs of one of several servers: the next `tensor_parallel` of those that this process may use.

    Example: CUDA_VISIBLE_DEVICES=4,5,6,7, tensor_parallel 2, replica 1 -> CUDA_VISIBLE_DEVICES=6,7
    """
    if settings.replicas == 1:
        return {}
    n, visible = settings.tensor_parallel, given.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return {"CUDA_VISIBLE_DEVICES": ",".join(str(gpu) for gpu in range(replica * n, (replica + 1) * n))}
    gpus = [gpu.strip() for gpu in visible.split(",") if gpu.strip()]
    if len(gpus) < settings.replicas * n:
        raise ConfigError(
            f"{settings.replicas} servers with {n} GPUs each need {settings.replicas * n}, and CUDA_VISIBLE_DEVICES "
            f"names {len(gpus)}. Lower sglang.replicas or sglang.tensor_parallel."
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[replica * n : (replica + 1) * n])}
