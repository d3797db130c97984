"""A run's configuration to its servers: what is wrong is said before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from agenttrain.config import resolve
from agenttrain.errors import ConfigError, EngineError, ModelError
from agenttrain.protocols import EngineContext
from agenttrain.testing import tiny_model

from agenttrain_sglang.plan import Plan, check_plan, plan_of

HERE = "http://127.0.0.1:30000"


def planned(model: Path, sglang: dict[str, Any] | None = None, **tables: Any) -> Plan:
    """With servers that are given: no environment is looked for."""
    config = resolve(("the test", {"sglang": {"servers": [HERE], **(sglang or {})}, **tables}))
    return plan_of(EngineContext(config=config, model=str(model)))


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"run": {"deterministic": True}}, "run.deterministic = true needs an engine whose batches"),
        ({"sglang": {"replicas": 2}}, "sglang.replicas is 2, and sglang.servers names 1"),
        ({"sglang": {"servers": [HERE, f"{HERE}/"]}}, f"sglang.servers names {HERE} twice"),
        ({"sglang": {"servers": ["10.0.0.7:30000"]}}, "is no address of a server"),
        ({"sglang": {"shared_folder": "/no/such/folder"}}, "sglang.shared_folder is /no/such/folder"),
        ({"sglang": {"replica": 2}}, "replica"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(small_folder: Path, tables: Any, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        planned(small_folder, **tables)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("content", "words"), [(None, "can't be read"), ("{", "can't be read"), ("[]", "no table"), ("{}", "vocab_size")]
)
def test_a_folder_that_is_no_model_is_refused(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=words):
        planned(tmp_path)


def test_a_mixture_that_sglang_would_serve_wrongly_is_refused_whatever_is_recorded(tmp_path: Path) -> None:
    """Its dense layers would get experts; nobody has to ask for routed experts to be told."""
    model = tiny_model(tmp_path / "mixture", experts=4)
    config = json.loads((model / "config.json").read_text())
    assert config["mlp_only_layers"]
    for routed_experts in (None, False):
        with pytest.raises(EngineError, match=r"SGLang 0\.5\.23 gives every layer experts"):
            planned(model, {"routed_experts": routed_experts})
    (model / "config.json").write_text(json.dumps({**config, "mlp_only_layers": [], "tie_word_embeddings": False}))
    assert planned(model).routed is not None
    assert planned(model, {"routed_experts": False}).routed is None


def started(odd: Any, model: Path, sglang: dict[str, Any], **tables: Any) -> Plan:
    """With servers that are started here."""
    return planned(model, {"servers": [], "environment": str(odd.folder), **sglang}, **tables)


def test_what_a_server_can_not_be_started_with_is_told_before(small_folder: Path, odd: Any) -> None:
    """Not by the first server."""
    with pytest.raises(ConfigError, match=r"sglang\.arguments holds --port"):
        started(odd, small_folder, {"arguments": ["--port", "1"]})


def test_servers_draw_from_the_seed_of_the_run_and_each_from_its_own(small_folder: Path, odd: Any) -> None:
    """Where calls have none: siblings on two servers must not be the same."""
    plan = started(odd, small_folder, {"replicas": 2}, seed=2**32 + 7)
    commands = [plan.launch(replica).command for replica in range(2)]
    assert [command[command.index("--random-seed") + 1] for command in commands] == ["7", "8"]


def test_files_for_servers_are_named_in_full(
    small_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may have another working directory."""
    (tmp_path / "shared").mkdir()
    monkeypatch.chdir(tmp_path)
    plan = planned(small_folder, {"shared_folder": "shared"})
    assert plan.weights_folder(Path("own")).parent == tmp_path / "shared"


def test_what_the_servers_begin_with(small_folder: Path, odd: Any) -> None:
    """Those of somebody else may hold anything; those that are started hold the model, unless a run goes on."""
    assert planned(small_folder).begins_with == small_folder
    config = resolve(("the test", {"sglang": {"environment": str(odd.folder)}}))
    started = plan_of(EngineContext(config=config, model=str(small_folder)))
    assert started.begins_with is None
    resumed = plan_of(EngineContext(config=config, model=str(small_folder), weights_from=odd.folder))
    assert resumed.begins_with == odd.folder


def test_an_adapter_travels_alone_where_the_run_trains_one(small_folder: Path) -> None:
    lora = {"adapter": "lora", "lora_rank": 5}
    assert planned(small_folder, trainer=lora).adapter_rank == 5
    assert planned(small_folder, {"adapters": False}, trainer=lora).adapter_rank is None
    assert planned(small_folder).adapter_rank is None


def test_a_given_server_that_is_not_there_is_told_before_the_run(small_folder: Path) -> None:
    with pytest.raises(EngineError, match=r"No SGLang server answers at http://127\.0\.0\.1:9: .*sglang\.servers"):
        check_plan(planned(small_folder, {"servers": ["http://127.0.0.1:9"]}))


def test_what_a_given_server_does_without_is_told(small_folder: Path, odd: Any) -> None:
    """It is no error: rollouts are slower, or can't be repeated."""
    process = odd.other()
    plan = planned(small_folder, {"servers": [process.address]})
    assert check_plan(plan) == (f"rollouts: SGLang at {process.address}",)
    more = {"servers": [process.address], "dtype": "bfloat16", "max_running": 4}
    *_, unused = check_plan(planned(small_folder, more))
    assert unused == "not used, since the servers run already: sglang.dtype"
    odd.does(server_info={"disable_radix_cache": True, "enable_deterministic_inference": False})
    _, prefixes, seeds = check_plan(plan)
    assert "keeps no prefixes" in prefixes
    assert "takes no seeds" in seeds


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"trainer": {"adapter": "lora", "lora_rank": 3}}, "--enable-lora --max-lora-rank 3"),
        ({"sglang": {"routed_experts": True}}, "tells no routed experts"),
    ],
)
def test_a_given_server_that_can_not_serve_the_run_is_refused(
    small_folder: Path, odd: Any, tables: Any, words: str
) -> None:
    sglang = {**tables.get("sglang", {}), "servers": [odd.other().address]}
    with pytest.raises(EngineError, match=words):
        check_plan(planned(small_folder, sglang, trainer=tables.get("trainer", {})))


def test_a_given_server_of_another_model_is_refused(tmp_path: Path, odd: Any) -> None:
    model = tiny_model(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    with pytest.raises(EngineError, match=r"serves a qwen3 .* is a llama"):
        check_plan(planned(model, {"servers": [odd.other().address]}))
