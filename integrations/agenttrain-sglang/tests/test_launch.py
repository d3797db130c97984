"""Settings to command lines and variables, all of it pure."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from agenttrain.errors import ConfigError

from agenttrain_sglang.environment import Device, Environment
from agenttrain_sglang.launch import OWNED, Launch, launch_of
from agenttrain_sglang.settings import SglangTable


def launched(
    device: Device = "cpu",
    *,
    version: str = "0.5.23",
    inherited: dict[str, str] | None = None,
    model: Path = Path("/models/tiny"),
    replica: int = 0,
    needs: dict[str, Any] | None = None,
    **settings: Any,
) -> Launch:
    return launch_of(
        SglangTable(**settings),
        Environment(Path("/sgl"), device, version),
        model,
        port=4321,
        replica=replica,
        inherited=inherited or {},
        **{"deterministic": False} | (needs or {}),
    )


def value(launch: Launch, name: str) -> str:
    return launch.command[launch.command.index(name) + 1]


def test_a_server_on_a_cpu() -> None:
    launch = launched()
    assert launch.command == (
        *("/sgl/bin/python", "-m", "sglang.launch_server"),
        *("--model-path", "/models/tiny", "--host", "127.0.0.1", "--port", "4321", "--device", "cpu"),
        *("--dtype", "float32", "--tp-size", "1", "--max-running-requests", "128", "--random-seed", "0"),
        *("--skip-tokenizer-init", "--skip-server-warmup", "--sleep-on-idle", "--enable-metrics"),
        *("--grammar-backend", "none", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
        *("--disable-overlap-schedule", "--cuda-graph-backend-decode", "disabled"),
        *("--cuda-graph-backend-prefill", "disabled", "--mem-fraction-static", "0.5", "--max-total-tokens", "65536"),
    )
    assert launch.address == "http://127.0.0.1:4321"
    assert launch.n_gpus == 0
    assert {name: value for name, value in launch.variables.items() if name != "PYTHONPATH"} == {
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    assert (Path(launch.variables["PYTHONPATH"]) / "sgl_kernel" / "__init__.py").exists()


def test_a_server_on_cuda_has_nothing_of_the_cpu() -> None:
    launch = launched("cuda", tensor_parallel=2)
    assert launch.command[3:] == (
        *("--model-path", "/models/tiny", "--host", "127.0.0.1", "--port", "4321", "--device", "cuda"),
        *("--dtype", "bfloat16", "--tp-size", "2", "--max-running-requests", "128", "--random-seed", "0"),
        *("--skip-tokenizer-init", "--skip-server-warmup", "--sleep-on-idle", "--enable-metrics"),
        *("--grammar-backend", "none"),
    )
    assert launch.variables == {"HF_HUB_OFFLINE": "1"}
    assert launch.n_gpus == 2


def test_the_settings_are_on_the_command_line() -> None:
    launch = launched(
        "cuda", dtype="float16", max_running=7, cache_tokens=4096, arguments=["--mem-fraction-static", "0.7"]
    )
    assert value(launch, "--dtype") == "float16"
    assert value(launch, "--max-running-requests") == "7"
    assert value(launch, "--max-total-tokens") == "4096"
    assert launch.command[-2:] == ("--mem-fraction-static", "0.7")


def test_what_a_run_needs_is_switched_on() -> None:
    needs = {
        "deterministic": True,
        "tells_experts": True,
        "adapter_rank": 8,
        "adapter_targets": ["q_proj", "v_proj"],
        "otlp_endpoint": "http://127.0.0.1:4318/v1/traces",
        "seed": 5,
    }
    launch = launched(needs=needs)
    assert launch.command[launch.command.index("--enable-deterministic-inference") :] == (
        *("--enable-deterministic-inference", "--enable-return-routed-experts"),
        *("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj", "v_proj"),
        *("--max-loras-per-batch", "2", "--max-loaded-loras", "2", "--lora-backend", "torch_native"),
        *("--enable-trace", "--otlp-traces-endpoint", "http://127.0.0.1:4318/v1/traces"),
    )
    assert value(launch, "--random-seed") == "5"
    assert launch.variables["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] == "http/protobuf"


def test_the_older_version_has_its_own_flags() -> None:
    command = launched(version="0.5.12").command
    assert "--disable-cuda-graph" in command
    assert "--cuda-graph-backend-decode" not in command


@pytest.mark.parametrize("name", OWNED)
def test_an_argument_that_agenttrain_sets_is_refused_by_name(name: str) -> None:
    for arguments in ([name, "1"], [f"{name}=1"]):
        with pytest.raises(ConfigError, match=f"holds {name}, which agenttrain sets"):
            launched(arguments=arguments)


def test_a_beginning_of_such_an_argument_is_refused_too() -> None:
    """SGLang would take it for the whole name; an argument whose name only goes on from one of those is another."""
    with pytest.raises(ConfigError, match=r"--max-run \(short for --max-running-requests\), .* sglang\.max_running"):
        launched(arguments=["--max-run", "1"])
    assert launched(arguments=["--model-impl", "sglang"]).command[-1] == "sglang"


def test_variables_of_this_process_do_not_reach_the_server() -> None:
    """Those of its Python, its cluster, its run and its telemetry; all others do."""
    names = (
        "PYTHONPATH PYTHONWARNINGS VIRTUAL_ENV RANK WORLD_SIZE LOCAL_RANK MASTER_PORT RAY_ADDRESS VERL_LOGGING_LEVEL "
        "AGENTTRAIN_PLUGINS OTEL_SERVICE_NAME OTEL_TRACES_EXPORTER TORCHELASTIC_RUN_ID SGLANG_RETURN_ORIGINAL_LOGPROB "
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"
    )
    ours = dict.fromkeys(names.split(), "1")
    theirs = {
        "PATH": "/bin",
        "RANKS_OF_MINE": "1",
        "HF_HOME": "/hf",
        "NCCL_DEBUG": "INFO",
        "OTEL_EXPORTER_OTLP_HEADERS": "key=1",
    }
    launch = launched("cuda", inherited=ours | theirs)
    assert launch.variables == theirs | {"HF_HUB_OFFLINE": "1"}


def test_a_users_choice_of_sglang_plugins_keeps_ours_on_a_cpu() -> None:
    assert launched(inherited={"SGLANG_PLUGINS": "a"}).variables["SGLANG_PLUGINS"] == "a,agenttrain_sglang_on_cpu"


def test_threads_on_a_cpu(tmp_path: Path) -> None:
    """One for a tiny model, more for a larger one, and the user's own number first."""
    (tmp_path / "model.safetensors").touch()
    os.truncate(tmp_path / "model.safetensors", 100 * 1024 * 1024)
    cores = len(os.sched_getaffinity(0))
    assert launched(model=tmp_path).variables["OMP_NUM_THREADS"] == str(cores)
    assert launched(model=tmp_path, replicas=1000).variables["OMP_NUM_THREADS"] == "1"
    assert launched(model=tmp_path, inherited={"OMP_NUM_THREADS": "3"}).variables["OMP_NUM_THREADS"] == "3"


def test_several_servers_have_gpus_of_their_own() -> None:
    def gpus(replica: int, visible: str | None = None) -> str:
        inherited = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        launch = launched("cuda", replicas=2, tensor_parallel=2, replica=replica, inherited=inherited)
        return launch.variables["CUDA_VISIBLE_DEVICES"]

    assert [gpus(0), gpus(1)] == ["0,1", "2,3"]
    assert [gpus(0, "4,5,6,7"), gpus(1, "4,5,6,7")] == ["4,5", "6,7"]
    with pytest.raises(ConfigError, match="2 servers with 2 GPUs each need 4, and CUDA_VISIBLE_DEVICES names 3"):
        gpus(0, "4,5,6")


def test_one_server_keeps_the_gpus_that_are_visible() -> None:
    launch = launched("cuda", inherited={"CUDA_VISIBLE_DEVICES": "3"})
    assert launch.variables["CUDA_VISIBLE_DEVICES"] == "3"
