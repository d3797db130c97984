import functools
import inspect
import threading
from contextvars import copy_context
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agenttrain.errors import ConfigError
from agenttrain.part import Part
from agenttrain.records import Task
from agenttrain.trainable import (
    Limits,
    current_task,
    current_task_is,
    function_name,
    trainable,
    trainable_of,
    trainables_in,
)


def answered(task: Task, state: dict[str, Any]) -> float:
    return 1.0


class Judge:
    def __call__(self, task: Task, state: dict[str, Any]) -> float:
        return 0.0

    def __len__(self) -> int:
        return 0


def noted(**settings: Any) -> Any:
    """The settings that the decorator notes for a fresh object."""

    @trainable(**settings)
    def graph() -> None: ...

    return trainable_of(graph)


def refusal(**settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        trainable(**settings)
    return str(caught.value)


def test_the_very_same_object_comes_back() -> None:
    """Servers and langgraph.json see the user's own object with its own signature."""

    def factory(config: dict[str, Any]) -> str:
        return "graph"

    assert trainable(model="m")(factory) is factory
    assert trainable(factory) is factory
    assert str(inspect.signature(factory)) == "(config: dict[str, typing.Any]) -> str"


def test_it_decorates_with_and_without_parentheses() -> None:
    """Both note settings; without them all are the defaults."""

    @trainable
    def bare() -> None: ...

    @trainable()
    def empty() -> None: ...

    for graph in (bare, empty):
        settings = trainable_of(graph)
        assert settings is not None
        assert (settings.target, settings.model, settings.tasks, dict(settings.verifiers)) == (graph, None, None, {})
        assert (settings.train, settings.frozen, settings.auxiliary, settings.limits) == ((), (), (), Limits())
        assert settings.allow_escapes is False


def test_settings_are_noted() -> None:
    """As they were given, lists as tuples."""
    settings = noted(
        model="m",
        tasks="t.jsonl",
        verifier=answered,
        train=["agent"],
        frozen=["summarize", "tag:judge"],
        auxiliary=["model:gpt-4o"],
        limits=Limits(turns=3, seconds=1.5),
        allow_escapes=True,
    )
    assert (settings.model, settings.tasks, settings.verifiers) == ("m", "t.jsonl", {"answered": Part(answered)})
    assert (settings.train, settings.frozen, settings.auxiliary) == (
        ("agent",),
        ("summarize", "tag:judge"),
        ("model:gpt-4o",),
    )
    assert (settings.limits, settings.allow_escapes) == (Limits(turns=3, tokens=None, seconds=1.5), True)


def test_the_file_is_the_one_that_decorates() -> None:
    """Paths in the decorator are relative to its folder, whichever way it is called."""

    @trainable
    def bare() -> None: ...

    for graph in (bare, trainable(lambda: None), trainable(model="m")(lambda: None)):
        settings = trainable_of(graph)
        assert settings is not None
        assert Path(settings.file) == Path(__file__).resolve()


def test_the_file_of_code_that_has_none_is_what_it_was_compiled_as(tmp_path: Path) -> None:
    """As in a notebook or exec."""
    scope: dict[str, Any] = {"trainable": trainable}
    exec(compile("graph = trainable(lambda: None)", str(tmp_path / "cell.py"), "exec"), scope)
    settings = trainable_of(scope["graph"])
    assert settings is not None
    assert settings.file == str((tmp_path / "cell.py").resolve())


def test_an_object_that_was_not_decorated_has_no_settings() -> None:
    """Nor has one that is only equal to a decorated one."""
    first, equal = [1], [1]
    trainable(first)
    assert trainable_of(first) is not None
    assert trainable_of(equal) is None
    assert trainable_of(None) is None


def test_objects_that_take_no_attributes_can_be_decorated() -> None:
    """Settings stand beside the object, never on it."""

    class Slotted:
        __slots__ = ()

        def __hash__(self) -> int:
            raise TypeError("unhashable")

    graph = Slotted()
    assert trainable(graph, model="m") is graph
    settings = trainable_of(graph)
    assert settings is not None
    assert settings.model == "m"


def test_a_module_lists_its_decorated_objects_in_order() -> None:
    """By the names they have there; others are not in it."""
    module = ModuleType("graph")
    second, first = trainable(lambda: None), trainable(lambda: None)
    vars(module).update(zeta=second, other=lambda: None, alpha=first)
    assert list(trainables_in(module)) == ["zeta", "alpha"]
    assert trainables_in(module)["alpha"].target is first


def test_several_verifiers_keep_their_names_and_weights() -> None:
    """Given as a function, (function, weight) or a Part, all are Parts: outcomes where nothing else is said."""
    judge, gate = Judge(), Part(answered, kind="format")
    settings = noted(verifiers={"answer": (answered, 0.5), "tone": judge, "form": gate})
    assert settings.verifiers == {"answer": Part(answered, 0.5), "tone": Part(judge, 1.0), "form": gate}
    assert [part.kind for part in settings.verifiers.values()] == ["outcome", "outcome", "format"]


def test_a_verifier_goes_by_its_own_name_else_its_classs() -> None:
    """The name that reports show."""
    assert function_name(answered) == "answered"
    assert function_name(Judge()) == "Judge"
    assert function_name(functools.partial(answered)) == "partial"
    assert list(noted(verifier=Judge()).verifiers) == ["Judge"]
    assert noted(verifier=Part(answered, high=1.0)).verifiers == {"answered": Part(answered, high=1.0)}


def test_both_ways_to_give_verifiers_are_refused() -> None:
    """One of them would be ignored."""
    assert refusal(verifier=answered, verifiers={"a": (answered, 1.0)}) == (
        "@trainable got verifier= and verifiers=. Keep one: verifiers={'name': (function, weight)}."
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"verifier": "answered"},
        {"verifiers": {"answer": "answered"}},
        {"verifiers": {"answer": (answered, "1")}},
        {"verifiers": {"answer": (answered, float("nan"))}},
        {"verifiers": {"answer": (answered,)}},
        {"verifiers": {"answer": (1.0, answered)}},
    ],
)
def test_a_verifier_that_could_not_be_asked_is_refused(settings: dict[str, Any]) -> None:
    """Where it is written, not when the first rollout is scored."""
    text = refusal(**settings)
    assert text.startswith("The verifier ")
    assert "a function with a finite weight is expected: verifiers={" in text


@pytest.mark.parametrize("name", ["train", "frozen", "auxiliary"])
def test_an_adapter_for_each_node_is_refused(name: str) -> None:
    """One policy answers in all nodes; what can differ by node is the reward."""
    assert refusal(**{name: {"planner": "adapter-a", "writer": "adapter-b"}}) == (
        f"@trainable got {name}={{'planner': 'adapter-a', 'writer': 'adapter-b'}}, a mapping. One policy is trained "
        "for all nodes: none has weights or an adapter of its own. Write a list of selectors: "
        f"{name}=['planner', 'writer']. What each node is worth, a verifier says: "
        '{"score": …, "nodes": {name: number}}.'
    )


@pytest.mark.parametrize("name", ["train", "frozen", "auxiliary"])
def test_a_selector_that_is_no_list_is_refused(name: str) -> None:
    """A string would be read letter by letter."""
    assert refusal(**{name: "agent"}) == f"@trainable got {name}='agent', one selector. Write a list: {name}=['agent']."
    assert refusal(**{name: answered}).endswith(f"one selector. Write a list: {name}=[answered].")


def test_limits_and_verifiers_of_another_type_are_refused() -> None:
    """At the decorator, and not with an AttributeError when a command starts."""
    assert refusal(limits={"turns": 3}) == (
        "@trainable got limits={'turns': 3}. Write limits=Limits(turns=…, tokens=…, seconds=…)."
    )
    assert refusal(verifiers=["answered"]) == (
        "@trainable got verifiers=['answered']. Write verifiers={'name': (function, weight)}."
    )


def test_the_current_task_is_there_inside_the_block_only() -> None:
    """Blocks nest, and end also when the code in them raises."""
    outer, inner = Task(id="outer", input={}), Task(id="inner", input={})

    def raising_tool() -> None:
        with current_task_is(inner):
            assert current_task() is inner
            raise ValueError("tool")

    with current_task_is(outer):
        with pytest.raises(ValueError, match="tool"):
            raising_tool()
        assert current_task() is outer
    with pytest.raises(LookupError, match="No rollout is running here"):
        current_task()


def test_each_thread_has_its_own_current_task() -> None:
    """Rollouts at once don't see each other's; a copied context carries it, as LangGraph's executors do."""
    seen: list[str] = []

    def look() -> None:
        try:
            seen.append(current_task().id)
        except LookupError:
            seen.append("none")

    with current_task_is(Task(id="mine", input={})):
        for target in (look, functools.partial(copy_context().run, look)):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
    assert seen == ["none", "mine"]
