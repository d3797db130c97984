"""For authors of plugins: contracts to subclass in pytest, and small real parts to test with.

    EngineContract     ids in, ids and log probabilities out          engine_contract
    TrainerContract    steps, an account of every rollout, resume     trainer_contract
    VerifierContract   a score, the same twice, on any state          verifier_contract
    RendererContract   messages to ids, ids to messages               renderer_contract
    tiny_model         a Hugging Face folder, made in a second        small_model
    toy_project        graph.py, tasks.jsonl and agenttrain.toml      toy
    OddOnes            a world without a graph, for trainers          odd_ones
    strategies         Hypothesis strategies of records               strategies

Nothing here is a mock: models sample, graphs run, weights move. Each name is imported at its first use, since pytest,
torch and Hypothesis are not there for everybody.

Example:
    from agenttrain.testing import EngineContract, tiny_model

    class TestMine(EngineContract):
        @pytest.fixture
        def engine(self, tmp_path):
            engine = MyEngine(tiny_model(tmp_path / "model"))
            yield engine
            engine.close()
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agenttrain.testing import strategies
    from agenttrain.testing.engine_contract import EngineContract
    from agenttrain.testing.odd_ones import OddOnes
    from agenttrain.testing.renderer_contract import RendererContract
    from agenttrain.testing.small_model import tiny_model
    from agenttrain.testing.toy import ToyProject, ToyRun, toy_project
    from agenttrain.testing.trainer_contract import TrainerContract
    from agenttrain.testing.verifier_contract import VerifierContract

__all__ = [
    "EngineContract",
    "OddOnes",
    "RendererContract",
    "ToyProject",
    "ToyRun",
    "TrainerContract",
    "VerifierContract",
    "strategies",
    "tiny_model",
    "toy_project",
]

_homes = {
    "EngineContract": "engine_contract",
    "OddOnes": "odd_ones",
    "RendererContract": "renderer_contract",
    "ToyProject": "toy",
    "ToyRun": "toy",
    "TrainerContract": "trainer_contract",
    "VerifierContract": "verifier_contract",
    "tiny_model": "small_model",
    "toy_project": "toy",
}
_needs = {"pytest": "pytest>=8.3", "hypothesis": "hypothesis>=6.130"}
"""What the base installation lacks, and what to install for it."""


def __getattr__(name: str) -> Any:
    """Load a public name from its module at first use (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module 'agenttrain.testing' has no attribute {name!r}. It has {', '.join(__all__)}.")
    try:
        module = importlib.import_module(f"agenttrain.testing.{_homes.get(name, name)}")
    except ModuleNotFoundError as error:
        if error.name not in _needs:
            raise
        raise ModuleNotFoundError(
            f"agenttrain.testing.{name} needs {error.name}, which is not installed. pip install '{_needs[error.name]}'",
            name=error.name,
        ) from error
    value = module if name == "strategies" else getattr(module, name)
    globals()[name] = value
    return value
