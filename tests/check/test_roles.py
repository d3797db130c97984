"""Roles that refuse nothing: each model of which nothing was declared is found in one look."""

from __future__ import annotations

import pytest

from agenttrain.check.roles import UNDECLARED, TrialRoles, UndeclaredModel
from agenttrain.check.shape_findings import second_model_findings
from agenttrain.errors import RoleError
from agenttrain.records import CallSite
from agenttrain.trainable import Trainable

ONE, TWO, THREE = ("ChatOpenAI", "one", ""), ("ChatOpenAI", "two", ""), ("ChatOpenAI", "three", "")


def site(model: tuple[str, str, str], node: str = "agent", **fields: object) -> CallSite:
    model_class, name, base_url = model
    return CallSite(node=node, model_class=model_class, model_name=name, base_url=base_url, **fields)  # type: ignore[arg-type]


def noted(**selectors: tuple[str, ...]) -> Trainable:
    return Trainable(target=None, file="graph.py", **selectors)  # type: ignore[arg-type]


def test_three_models_are_two_findings() -> None:
    """The first that is called stays the trained one; the others are answered by the policy and frozen."""
    roles = TrialRoles(noted())
    calls = [site(ONE), site(TWO, "judge"), site(THREE, "title"), site(ONE), site(TWO, "judge")]
    assert [roles.role(call) for call in calls] == [
        ("trained", "the graph's one model"),
        ("frozen", UNDECLARED),
        ("frozen", UNDECLARED),
        ("trained", "the graph's one model"),
        ("frozen", UNDECLARED),
    ]
    assert roles.refused is None
    assert roles.second_models() == (
        UndeclaredModel(identity=TWO, beside=ONE, node="judge", detected=None),
        UndeclaredModel(identity=THREE, beside=ONE, node="title", detected=None),
    )


def test_one_model_is_no_finding() -> None:
    """Though it is called in several nodes, and by stock middleware."""
    roles = TrialRoles(noted())
    assert roles.role(site(ONE))[0] == "trained"
    assert roles.role(site(ONE, source="summarization"))[0] == "frozen"
    assert (roles.second_models(), roles.one_model) == ((), ONE)


def test_what_is_declared_is_as_in_a_fit() -> None:
    """Selectors that match nothing are told as there."""
    roles = TrialRoles(noted(auxiliary=("model:two",), frozen=("title",)))
    assert roles.role(site(ONE))[0] == "trained"
    assert roles.role(site(TWO)) == ("auxiliary", "auxiliary: model:two")
    assert roles.second_models() == ()
    (unmatched,) = roles.unmatched()
    assert unmatched.startswith("frozen=['title'] matched no call.")


def test_a_model_beside_those_that_train_names() -> None:
    roles = TrialRoles(noted(train=("agent",)))
    assert roles.role(site(ONE))[0] == "trained"
    assert roles.role(site(TWO, "judge"))[0] == "frozen"
    assert roles.second_models() == (UndeclaredModel(identity=TWO, beside=ONE, node="judge", detected=None),)


def test_the_one_model_is_that_which_train_names() -> None:
    """Though another was called before it."""
    roles = TrialRoles(noted(train=("agent",)))
    assert [roles.role(site(TWO, "judge"))[0], roles.role(site(ONE))[0]] == ["frozen", "trained"]
    assert roles.one_model == ONE
    assert roles.second_models() == (UndeclaredModel(identity=TWO, beside=ONE, node="judge", detected=None),)


def test_a_predicate_that_raises_is_told() -> None:
    def broken(site: CallSite) -> bool:
        raise KeyError("x")

    roles = TrialRoles(Trainable(target=None, file="graph.py", frozen=(broken,)))
    with pytest.raises(RoleError, match=r"frozen=\[broken\] raised KeyError"):
        roles.role(site(ONE))


def test_models_of_the_code_and_of_calls_are_told_once() -> None:
    """What its calls told goes first; the called one is the trained one, whatever the code's order."""
    called = UndeclaredModel(identity=ONE, beside=TWO, node="judge", detected="made by SummarizationMiddleware")
    found = second_model_findings([ONE, THREE, TWO], [called], one=TWO)
    assert [(each.severity, each.code, each.where) for each in found] == [
        ("error", "second_model", "node judge"),
        ("error", "second_model", "ChatOpenAI:three"),
    ]
    assert found[0].cause == (
        "Node 'judge' calls ChatOpenAI:one (made by SummarizationMiddleware) beside ChatOpenAI:two, and nothing says "
        "who answers it."
    )
    assert 'auxiliary=["model:one"]' in found[0].fix


def test_models_that_no_call_was_made_to() -> None:
    """The first one that was seen is taken for the trained one."""
    assert [each.where for each in second_model_findings([ONE, TWO], [], one=None)] == ["ChatOpenAI:two"]
    assert second_model_findings([ONE], [], one=None) == []
    assert second_model_findings([], [], one=None) == []
