"""The scenarios of agents, as tests of a user's own model, template and engine: subclass `ScenarioContract` in pytest.

    chains     conversations that only grow                            T1–T6, T15, T17, T22, T23, T25, T26
    trees      those that part, shrink or are asked twice              T7–T9, T11–T14, T16, T24
    faults     engines, stores and graphs that fail                    T10, T18–T21, T27
    sampled    the same with what an engine really samples             where there is an `engine`
    world      what they are played in; `base` its fixtures

Each test says in its docstring what agenttrain is expected to do; the numbers are those of the survey that the
scenarios came from (docs/renderers.md lists them).
"""

from __future__ import annotations

from agenttrain.testing.scenarios.chains import ChainScenarios
from agenttrain.testing.scenarios.faults import FaultScenarios
from agenttrain.testing.scenarios.sampled import SampledScenarios
from agenttrain.testing.scenarios.trees import TreeScenarios
from agenttrain.testing.scenarios.world import World

__all__ = ["ScenarioContract", "World"]


class ScenarioContract(ChainScenarios, TreeScenarios, FaultScenarios, SampledScenarios):
    """Subclass it, and give `model_folder`; pytest does the rest.

    A scenario that the template can't express (no tools, no thinking, one call a reply) is skipped with that reason.

    Fixtures to replace:
        model_folder: your model's folder; its tokenizer and chat template are read.
        renderer: a renderer of your own. As it is: the one that agenttrain opens for the folder.
        engine: what samples, closed by the fixture. As it is: none, and the scenarios that sample are skipped.

    Attributes to set where yours differs:
        family: renderer.family of your configuration. None: guessed, as `fit` does.
        history: renderer.history of your configuration.
    """
