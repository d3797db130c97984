import json
import subprocess
import sys
from importlib.metadata import version

import pytest

import agenttrain
from agenttrain import errors, markers, records
from agenttrain import trainable as decorator

PUBLIC = [
    "External",
    "Limits",
    "Part",
    "PolicyFailure",
    "SandboxLimits",
    "SandboxRefusal",
    "SandboxSpec",
    "Served",
    "Task",
    "attach",
    "chat_model",
    "current_sandbox",
    "current_serving",
    "current_task",
    "hookimpl",
    "idempotency_key",
    "open_sandbox",
    "record_outcome",
    "trainable",
    "use",
]
HEAVY = ("torch", "langgraph", "langchain_core", "transformers", "renderers", "numpy", "openai", "typer")


def modules_after(code: str) -> set[str]:
    """What a fresh interpreter has imported after this code."""
    program = f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


@pytest.mark.parametrize(
    "code",
    [
        "import agenttrain",
        "import agenttrain\n@agenttrain.trainable(model='m')\ndef graph(): ...",
        "import agenttrain.trainable\nassert callable(agenttrain.trainable), agenttrain.trainable",
    ],
)
def test_a_graph_file_that_imports_agenttrain_stays_light(code: str) -> None:
    """A server that loads graph.py pays for none of the trainer's imports, nor does a decorated graph."""
    modules = modules_after(code)
    assert "agenttrain" in modules
    assert modules & set(HEAVY) == set()


def test_every_name_together_loads_nothing_that_trains_or_serves() -> None:
    """`chat_model` is a chat model, so LangChain comes along; torch and tokenizers come with the first served call."""
    modules = modules_after("from agenttrain import *")
    assert modules & {"torch", "transformers", "renderers", "openai", "typer"} == set()


def test_public_names_are_those_of_their_modules() -> None:
    """The very same objects."""
    from agenttrain.graph import chat_model
    from agenttrain.serving import attached as serving

    assert (agenttrain.attach, agenttrain.use) == (serving.attach, serving.use)
    assert agenttrain.chat_model is chat_model.chat_model
    assert agenttrain.Task is records.Task
    assert agenttrain.PolicyFailure is errors.PolicyFailure
    assert agenttrain.hookimpl is markers.hookimpl
    assert agenttrain.trainable is decorator
    assert callable(decorator)


def test_every_public_name_is_there() -> None:
    """What `__all__` lists can be had, and no other name stands in for it."""
    assert agenttrain.__all__ == PUBLIC
    for name in agenttrain.__all__:
        assert getattr(agenttrain, name).__module__.startswith(("agenttrain.", "pluggy."))


def test_a_name_that_is_not_public_says_which_are() -> None:
    """As an AttributeError, so that hasattr and getattr with a default work."""
    expected = f"module 'agenttrain' has no attribute 'Rollout'. Public names: {', '.join(PUBLIC)}."
    with pytest.raises(AttributeError) as caught:
        _ = agenttrain.Rollout
    assert str(caught.value) == expected
    assert not hasattr(agenttrain, "nothing")


def test_the_version_is_the_distributions() -> None:
    """One number in both places."""
    assert agenttrain.__version__ == version("agenttrain")
