"""Credit by node and turn through a whole fit: what is stored, what is shown, and that it alone can teach."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from agenttrain.records import Rollout, Turn
from agenttrain.testing import toy_project
from agenttrain.testing.toy import ToyRun

GRAPH = '''
"""A planner, and two workers that it sends work to at once; all three ask one model."""

import operator
from typing import Annotated, TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import StateGraph
from langgraph.types import Send

from agenttrain import trainable

model = ChatOpenAI(model="gpt-4o-mini", api_key="unused", max_tokens=5)


class State(TypedDict):
    messages: list
    done: Annotated[list, operator.add]


def planner(state: State) -> dict:
    return {"done": [model.invoke(state["messages"]).text]}


def worker(state: dict) -> dict:
    return {"done": [model.invoke([("user", f"Work {state['part']}")]).text]}


def title(state: State) -> dict:
    return {"done": [model.invoke([("user", "A title")]).text]}


def share(text: str) -> float:
    """Of odd characters, in a text as Python writes it."""
    return sum(ord(character) % 2 for character in repr(text)) / len(repr(text))


VERIFIER


@trainable(model="model", tasks="tasks.jsonl", VERIFIERS, frozen=["title"])
def graph():
    builder = StateGraph(State)
    for node in (planner, worker, title):
        builder.add_node(node)
    builder.set_entry_point("planner")
    builder.add_conditional_edges("planner", lambda _: [Send("worker", {"part": part}) for part in "ab"], ["worker"])
    builder.add_edge("worker", "title")
    return builder.compile()
'''
BOTH = """
def outcome(task, state) -> float:
    return share(state["done"][0])


def parts(task, state, turns) -> dict:
    assert [(t.node, t.role, t.n_tool_calls) for t in turns][::3] == [
        ("planner", "trained", 0), ("title", "frozen", 0)
    ]
    assert state["done"][0].strip() in turns[0].text
    last = max((t for t in turns if t.node == "worker"), key=lambda t: share(t.text))
    return {"score": 0, "nodes": {"worker": share(state["done"][1]), "nobody": 1}, "turns": {last.index: 0.25}}
"""
OF_THE_WORKER = """
def parts(task, state, turns) -> dict:
    said = "".join(turn.text for turn in turns if turn.node == "worker")
    return {"score": 0.5, "nodes": {"worker": share(said)}}
"""
LEARNING = {"steps": 10, "tasks_per_step": 4, "group_size": 6, "learning_rate": 0.02, "final_learning_rate": 1.0}


def fitted(folder: Path, verifier: str, verifiers: str, **trainer: Any) -> ToyRun:
    project = toy_project(folder)
    text = GRAPH.replace("VERIFIERS", verifiers).replace("VERIFIER", verifier)
    project.graph.write_text(text, encoding="utf-8")
    return project.fit(trainer={"warmup_steps": 0, **trainer})


def reward_of(rollout: Rollout, turn: Turn) -> float:
    """By the rule of docs/credit.md, of what the store holds."""
    reward = rollout.reward
    assert reward is not None
    assert reward.credit is not None
    return (
        reward.score + reward.credit.by_node.get(turn.site.node or "", 0.0) + reward.credit.by_turn.get(turn.index, 0)
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    named = 'verifiers={"outcome": (outcome, 1.0), "parts": (parts, 2.0)}'
    return fitted(tmp_path_factory.mktemp("credit"), BOTH, named, group_size=3, steps=2)


def test_what_each_token_got_is_the_rule_worked_on_the_stored_rewards(run: ToyRun) -> None:
    """GRPO over three siblings; worker's two turns are one place, and the frozen title got nothing."""
    view = run.store
    groups: defaultdict[str, list[Rollout]] = defaultdict(list)
    for rollout in view.rollouts():
        if rollout.phase == "train":
            groups[rollout.group_id].append(rollout)
    assert [len(group) for group in groups.values()] == [3] * 4
    for group in groups.values():
        turns = {r.id: [t for t in view.turns(r.id) if t.role == "trained"] for r in group}
        for rollout in group:
            got = advantages_by_turn(run, rollout)
            assert sorted(got) == [0, 1, 2]
            for turn in turns[rollout.id]:
                values = []
                for sibling in group:
                    there = [reward_of(sibling, t) for t in turns[sibling.id] if t.site.node == turn.site.node]
                    values.append(reward_of(rollout, turn) if sibling is rollout else sum(there) / len(there))
                mean = sum(values) / 3
                deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / 3)
                expected = (reward_of(rollout, turn) - mean) / deviation if deviation > 1e-9 else 0.0
                assert got[turn.index] == pytest.approx([expected] * len(turn.response_ids), abs=1e-6)
    assert any(
        len({a[0] for a in advantages_by_turn(run, r).values()}) == 3 for group in groups.values() for r in group
    )


def advantages_by_turn(run: ToyRun, rollout: Rollout) -> dict[int, list[float]]:
    """As the loss saw them, read from the store by the places of the turns."""
    view = run.store
    index_by_turn = {turn.id: turn.index for turn in view.turns(rollout.id)}
    paths = {path.index: path for path in view.trajectories(rollout.id)}
    found = {}
    for trained in view.trained(rollout.id):
        for span in paths[trained.sample.extra_fields["trajectory"]].spans:
            if span.trained:
                found[index_by_turn[span.turn_id]] = list(trained.advantages[span.start : span.end])
    return found


def test_credit_is_stored_weighted_and_the_score_is_the_rollouts(run: ToyRun) -> None:
    """Twice what `parts` said; reports and success go by the score."""
    for rollout in run.store.rollouts():
        assert rollout.reward is not None
        assert rollout.reward.credit is not None
        assert rollout.reward.score == pytest.approx(rollout.reward.parts[0].score)
        assert rollout.reward.credit.by_node["nobody"] == 2.0
        assert list(rollout.reward.credit.by_turn.values()) == [0.5]


def test_a_node_that_no_call_was_made_in_is_noted(run: ToyRun) -> None:
    """Once for each evaluation, with the nodes seen."""
    told = [alarm for alarm in run.report["alarms"] if alarm["code"] == "credit_without_turns"]
    assert [(alarm["severity"], alarm["message"]) for alarm in told] == [
        (
            "note",
            "Verifiers credit 'nobody', and no trained call of 2 rollouts was made in a node of that name. Nodes with "
            "trained calls: planner, worker.",
        )
    ] * 2


def test_inspect_shows_credit_and_advantage_by_turn(run: ToyRun, command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each trained turn's credit; the frozen one has none."""
    monkeypatch.chdir(run.folder.path)
    rollout = next(r for r in run.store.rollouts() if r.phase == "train")
    assert rollout.reward is not None
    assert rollout.reward.credit is not None
    turns = run.store.turns(rollout.id)
    credit = [rollout.reward.credit.of(turn) for turn in turns]
    said = command("inspect", run.folder.path, rollout.id).out.splitlines()
    lines = [line for line in said if line.startswith("turn ")]
    assert [line.partition(", credit ")[2] for line in lines] == [*(f"{number:+g}" for number in credit[:3]), ""]
    told = command("inspect", run.folder.path, rollout.id, "--json").json
    assert [turn["credit"] for turn in told["turns"]] == [*credit[:3], None]
    of_call = command("inspect", run.folder.path, "--turn", turns[1].id, "--json").json
    assert of_call["call"]["advantages"] == advantages_by_turn(run, rollout)[1]


def test_a_turn_that_is_not_trained_fails_the_verifier_by_name(tmp_path: Path) -> None:
    """Turn 3 is the frozen title."""
    wrong = "def parts(task, state): return {'score': 1, 'turns': {3: 1.0}}"
    with pytest.raises(
        Exception, match=r"Verifier 'parts' credits turn 3, which is frozen\. Trained turns .*: 0, 1, 2"
    ):
        fitted(tmp_path / "wrong", wrong, "verifier=parts")


def test_without_an_engine_no_turn_is_trained_and_credit_is_no_error(tmp_path: Path, command: Any) -> None:
    """As-is: the user's own model answers, and a verifier says what it says."""
    project = toy_project(tmp_path / "as-is")
    fake = "from langchain_core.language_models import FakeListChatModel\nmodel = FakeListChatModel(responses=['ab'])\n"
    text = GRAPH.replace("VERIFIERS", "verifier=parts").replace(
        "VERIFIER", fake + "def parts(task, state): return {'score': 1, 'nodes': {'worker': 1}, 'turns': {0: 1.0}}"
    )
    project.graph.write_text(text, encoding="utf-8")
    done = command("eval", project.graph, "--run", "as-is", "--json")
    assert done.code == 0, done.err
    assert (done.json["success"], done.json["alarms"]) == (1.0, [])


@pytest.mark.slow
def test_credit_alone_teaches(tmp_path: Path) -> None:
    """Every score is 0.5, so that all advantages of the planner are 0; what the worker is credited for, it learns."""
    run = fitted(tmp_path / "learn", OF_THE_WORKER, "verifier=parts", **LEARNING)
    shares: defaultdict[int, list[float]] = defaultdict(list)
    for rollout in run.store.rollouts():
        if rollout.phase == "train" and rollout.reward is not None and rollout.reward.credit is not None:
            assert rollout.reward.score == 0.5
            assert set(advantages_by_turn(run, rollout).get(0, [0.0])) == {0.0}
            shares[rollout.step].append(rollout.reward.credit.by_node["worker"])
    by_step = [sum(of_step) / len(of_step) for _, of_step in sorted(shares.items())]
    assert sum(by_step[-3:]) / 3 > sum(by_step[:3]) / 3 + 0.05, by_step
