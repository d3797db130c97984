"""What the built-in plugin registers, and that finding it costs nothing."""

from __future__ import annotations

import subprocess
import sys

from agenttrain.local import plugin, sft_plugin


def test_registers_the_local_engine_trainer_and_estimators() -> None:
    found: dict[str, object] = {}
    plugin.agenttrain_register_engines(lambda name, make: found.update({f"engine {name}": make}))
    plugin.agenttrain_register_trainers(lambda name, make, *, forecast: found.update({f"trainer {name}": make}))
    plugin.agenttrain_register_advantages(lambda name, make: found.update({f"advantage {name}": make}))
    estimators = ["advantage centered", "advantage group", "advantage leave-one-out", "advantage reward"]
    assert sorted(found) == [*estimators, "engine local", "trainer local"]


def test_sft_is_a_plugin_of_its_own() -> None:
    found: dict[str, object] = {}
    sft_plugin.agenttrain_register_trainers(lambda name, make, *, forecast: found.update({name: forecast}))
    assert found == {"sft": plugin.forecast}


def test_importing_it_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, agenttrain.local.sft_plugin; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
