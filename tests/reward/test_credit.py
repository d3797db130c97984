"""reward/credit.py: what a verifier says of nodes and turns."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from agenttrain.errors import PolicyFailure, RewardError
from agenttrain.part import Part
from agenttrain.records import CallSite, Credit, Reward, Role, Task, Turn, TurnView
from agenttrain.reward.layers import passes
from agenttrain.reward.score import VerifierPolicyFailure, score

TASK = Task(id="t", input={})


def turn(index: int, role: Role = "trained", *, node: str | None = None, around: str = "") -> Turn:
    site = CallSite(node=node, checkpoint_ns=around)
    return Turn(id=f"r#{index}", rollout_id="r", index=index, role=role, role_reason="", site=site)


TURNS = (turn(0), turn(1, "frozen"), turn(2), turn(3, "auxiliary"))


def scored(*answers: Any, weight: float = 1.0, turns: Any = TURNS) -> Reward:
    verifiers = {f"v{n}": Part(lambda task, state, a=answer: a, weight) for n, answer in enumerate(answers)}
    return score(verifiers, task=TASK, state={}, timeout_s=5.0, turns=turns)


def refusal(answer: Any) -> str:
    with pytest.raises(RewardError) as caught:
        scored(answer)
    return str(caught.value)


def test_credit_is_weighted_and_adds_up_over_verifiers() -> None:
    """Twice (0.2 + 0.5) for the planner, and once each for the rest; the score is as it was."""
    reward = scored(
        {"score": 1.0, "nodes": {"planner": 0.2, "writer": -0.1}},
        {"score": 0.5, "nodes": {"planner": 0.5}, "turns": {0: 1, np.int64(2): np.float32(0.25)}},
        True,
        weight=2.0,
    )
    assert reward.score == 5.0
    assert reward.credit == Credit(by_node={"planner": 1.4, "writer": -0.2}, by_turn={0: 2.0, 2: 0.5})


@pytest.mark.parametrize("answer", [1.0, {"score": 1.0}, {"score": 1.0, "nodes": {}, "turns": None}])
def test_without_nodes_and_turns_there_is_none(answer: Any) -> None:
    assert scored(answer).credit is None


def test_a_node_that_the_rollout_did_not_come_to_is_no_error() -> None:
    assert scored({"score": 0.0, "nodes": {"elsewhere": 1.0}}).credit == Credit(by_node={"elsewhere": 1.0})


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (
            {"turns": {4: 1.0}},
            "credits turn 4, and the rollout has 4 turns, counted from 0. Trained turns of this rollout: 0, 2.",
        ),
        ({"turns": {1: 1.0}}, "credits turn 1, which is frozen. Trained turns of this rollout: 0, 2."),
        ({"turns": {3: 1.0}}, "credits turn 3, which is auxiliary. Trained turns of this rollout: 0, 2."),
        ({"turns": {"0": 1.0}}, "credits the turn '0'. A turn in \"turns\" is its index, a whole number."),
        ({"turns": {True: 1.0}}, "credits the turn True."),
        ({"nodes": {0: 1.0}}, 'credits the node 0. A node in "nodes" is its name, a text.'),
        ({"nodes": {"a": math.nan}}, 'answered with "nodes" \'a\': nan, and a finite number is expected: {"score"'),
        ({"turns": {0: math.inf}}, 'answered with "turns" 0: inf, and a finite number is expected'),
        ({"nodes": {"a": "much"}}, "answered with \"nodes\" 'a': 'much', and a finite number is expected"),
        ({"nodes": ["a"]}, "answered with \"nodes\" ['a'], and a mapping is expected"),
    ],
)
def test_what_can_not_be_credit_is_refused_by_the_verifiers_name(answer: dict[str, Any], text: str) -> None:
    found = refusal({"score": 0.0, **answer})
    assert found.startswith("Verifier 'v0' ")
    assert text in found


def test_any_index_is_taken_where_the_turns_are_not_known() -> None:
    """As-is, when no turn is trained."""
    assert scored({"score": 0.0, "turns": {7: 1.0}}, turns=None).credit == Credit(by_turn={7: 1.0})


def test_credit_is_no_part_of_success() -> None:
    assert passes(scored({"score": 1.0, "nodes": {"a": -5.0}}))
    assert not passes(scored({"score": 0.0, "nodes": {"a": 5.0}}))


def test_credit_of_the_others_stays_where_one_verifier_blames_the_policy() -> None:
    def blames(task: Task, state: Any) -> float:
        raise PolicyFailure("wrong tool")

    named = {"a": Part(lambda task, state: {"score": 1.0, "turns": {0: 0.5}}), "b": Part(blames)}
    with pytest.raises(VerifierPolicyFailure) as caught:
        score(named, task=TASK, state={}, timeout_s=5.0, turns=TURNS)
    assert caught.value.reward.credit == Credit(by_turn={0: 0.5})


def test_a_verifier_may_ask_for_turns() -> None:
    """Views are made when one asks, once for all that ask."""
    view = TurnView(index=0, node="planner", role="trained", text="plan", n_tool_calls=0, stop_reason="stop")
    made: list[int] = []

    def views() -> list[TurnView]:
        made.append(1)
        return [view]

    def asks(turns: tuple[TurnView, ...]) -> dict[str, Any]:
        return {"score": 0.0, "turns": {each.index: float(len(each.text)) for each in turns}}

    both = {"a": Part(asks), "b": Part(asks)}
    found = score(both, task=TASK, state={}, timeout_s=5.0, turns=TURNS, views=views)
    assert (found.credit, made) == (Credit(by_turn={0: 8.0}), [1])
    score({"c": Part(lambda task, state: 1)}, task=TASK, state={}, timeout_s=5.0, turns=TURNS, views=views)
    assert made == [1]


def test_a_turn_gets_the_credit_of_its_node_of_those_around_it_and_its_own() -> None:
    """model within team: 0.25 + 0.5 - 1; a number by which LangGraph counts subgraphs is no node."""
    inside = turn(2, node="model", around="team:a1|1|model:b2")
    assert inside.site.nodes == ("model", "team")
    credit = Credit(by_node={"team": 0.5, "model": 0.25, "1": 9.0, "other": 9.0}, by_turn={2: -1.0, 0: 9.0})
    assert credit.of(inside) == -0.25
    assert credit.of(turn(1)) == 0.0


def test_a_node_within_one_of_its_name_is_credited_once() -> None:
    """A prebuilt agent's `agent`, in a node that its user called so too."""
    assert Credit(by_node={"agent": 0.5}).of(turn(0, node="agent", around="agent:a1|agent:b2")) == 0.5
