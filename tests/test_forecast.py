"""A forecast is shown by --dry-run, held against what is free, and comes from whatever trainer there is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agenttrain import hookimpl
from agenttrain.errors import ModelError, PluginError
from agenttrain.forecast import forecast, size, table
from agenttrain.local.forecast import forecast as local_forecast
from agenttrain.prepare import Job, prepare
from agenttrain.protocols import Forecast, ForecastContext, MemoryPart

GIB = 2**30


class Trainers:
    """A plugin whose trainer forecasts what it is told to."""

    def __init__(self, found: Any) -> None:
        self.found = found
        self.asked: list[ForecastContext] = []

    @hookimpl
    def agenttrain_register_trainers(self, register: Any) -> None:
        register("told", lambda context: context, forecast=self.forecast)
        register("silent", lambda context: context)

    def forecast(self, context: ForecastContext) -> Forecast:
        self.asked.append(context)
        if isinstance(self.found, Exception):
            raise self.found
        found: Forecast = self.found
        return found


def told(gib: float, free: float = 8.0, **more: Any) -> Forecast:
    parts = (
        MemoryPart(process="trainer", name="weights", memory="machine", n_bytes=int(gib * GIB) - GIB // 2),
        MemoryPart(process="engine", name="cache", memory="machine", n_bytes=GIB // 2),
    )
    return Forecast(parts=parts, free_bytes={"machine": int(free * GIB)}, disk_bytes=3 * GIB, **more)


def job_of(project: Any, plugin: Trainers, name: str = "told") -> Job:
    flags = {"trainer": {"name": name}}
    return prepare(project.graph, cwd=project.folder, flags=flags, extra_plugins={"trainers": plugin})


def test_a_run_that_fits_is_forecast_by_its_trainer(project: Any, policy_folder: Path) -> None:
    plugin = Trainers(told(4))
    found = forecast(job_of(project, plugin))
    assert found == told(4)
    (asked,) = plugin.asked
    assert (asked.model, asked.n_rollouts) == (str(policy_folder), 4)


def test_a_run_that_can_not_fit_is_refused_with_the_figures(project: Any) -> None:
    plugin = Trainers(told(9.5, remedies=("trainer.steps = 1", "a smaller model")))
    with pytest.raises(ModelError) as error:
        forecast(job_of(project, plugin))
    assert (
        "needs up to 9.50 GiB of memory (machine), and 8.00 GiB are free: trainer weights 9.00 GiB, engine cache "
        "512 MiB. In this order: trainer.steps = 1; a smaller model."
    ) in str(error.value)


def test_a_tight_fit_is_a_note(project: Any) -> None:
    found = forecast(job_of(project, Trainers(told(7.5, notes=("a",)))))
    assert found is not None
    assert found.notes == ("a", "Memory is tight: up to 7.50 GiB of 8.00 GiB free (machine).")


def test_a_memory_of_which_nothing_is_known_refuses_nothing(project: Any) -> None:
    unknown = replace(told(99), free_bytes={})
    assert forecast(job_of(project, Trainers(unknown))) == unknown


def test_a_trainer_without_a_forecast_says_nothing(project: Any) -> None:
    assert forecast(job_of(project, Trainers(None), "silent")) is None


def test_a_forecast_that_raises_is_its_plugins_fault(project: Any) -> None:
    plugin = Trainers(ZeroDivisionError("by zero"))
    with pytest.raises(PluginError, match="'trainers' raised in the forecast of its trainer 'told': ZeroDivisionError"):
        forecast(job_of(project, plugin))


class Engines:
    """A plugin whose engine forecasts what it will hold."""

    @hookimpl
    def agenttrain_register_engines(self, register: Any) -> None:
        register("big", str, forecast=self.forecast)

    def forecast(self, context: ForecastContext) -> list[MemoryPart]:
        return [MemoryPart(process="server", name="weights", memory="machine", n_bytes=GIB * context.n_rollouts)]


def test_an_engines_part_is_added_to_its_trainers(project: Any) -> None:
    flags = {"trainer": {"name": "told"}, "engine": {"name": "big"}}
    plugins = {"trainers": Trainers(told(3)), "engines": Engines()}
    job = prepare(project.graph, cwd=project.folder, flags=flags, extra_plugins=plugins)
    found = forecast(job)
    assert found is not None
    assert [(part.process, part.n_bytes) for part in found.parts[-1:]] == [("server", 4 * GIB)]
    assert found.needed_bytes("machine") == 7 * GIB


def test_only_trainers_and_engines_have_forecasts(project: Any) -> None:
    class Advantages:
        @hookimpl
        def agenttrain_register_advantages(self, register: Any) -> None:
            register("mine", list, forecast=str)

    with pytest.raises(PluginError, match="register for advantages takes no forecast="):
        prepare(project.graph, cwd=project.folder, flags={}, extra_plugins={"advantages": Advantages()})


def test_dry_run_shows_a_line_for_each_part(project: Any, command: Any) -> None:
    done = command("fit", "graph.py", "--dry-run")
    lines = done.out.splitlines()
    (head,) = [line for line in lines if line.startswith("memory at most: ")]
    assert head.endswith(" free (machine)")
    rows = [line.split() for line in lines if line.startswith("  ")]
    assert ["trainer", "program", "400", "MiB"] in rows
    assert "disk at most: 36 MiB" in lines


def test_dry_run_gives_programs_the_bytes(project: Any, command: Any, policy_folder: Path) -> None:
    found = command("fit", "graph.py", "--dry-run", "--json").json["forecast"]
    weights = [p["bytes"] for p in found["parts"] if (p["process"], p["name"]) == ("trainer", "weights")]
    assert weights == [4 * 868352]
    assert found["memory"]["machine"]["needed_bytes"] == sum(part["bytes"] for part in found["parts"])
    assert not project.runs


def test_a_model_that_can_not_fit_ends_a_fit_before_it_starts(project: Any, command: Any, tmp_path: Path) -> None:
    """A configuration of 70 layers, 8192 wide; there are no weights behind it that could be read."""
    import json
    import shutil

    from agenttrain.local.forecast import available_bytes

    if available_bytes() is None or available_bytes() > 400 * GIB:  # type: ignore[operator]
        pytest.skip("this machine could hold it")
    folder = tmp_path / "large"
    shutil.copytree(Path(__file__).parents[1] / "examples" / "order-desk" / "policy", folder)
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 70, "layer_types": None}
    (folder / "config.json").write_text(json.dumps(settings))
    done = command("fit", "graph.py", "--model", folder, "--set", "trainer.adapter=none")
    assert done.code != 0
    assert "ModelError: A fit of " in done.err
    assert 'In this order: trainer.adapter = "lora"; trainer.micro_batch_tokens = 1024;' in done.err
    assert not project.runs


def test_a_size_in_words() -> None:
    assert (size(1610612736), size(3145728), size(0)) == ("1.50 GiB", "3 MiB", "0 MiB")
    assert table(told(4))[0] == "memory at most: 4.00 GiB of 8.00 GiB free (machine)"
    assert local_forecast.__module__ == "agenttrain.local.forecast"
