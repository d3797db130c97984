"""ONE TASK, and what plugins in graph.py may decide and see of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agenttrain.capture.render import open_renderer

POLICY = Path(__file__).parents[1] / "examples" / "order-desk" / "policy"

PLUGINS = """
from agenttrain import hookimpl
from pathlib import Path
HERE = Path(__file__).parent

@hookimpl
def agenttrain_register_advantages(register):
    register("upside-down", lambda rewards: [sum(rewards) / len(rewards) - r for r in rewards])
    register("broken", lambda rewards: 1 / 0)

@hookimpl
def agenttrain_rollout_finished(result):
    raise ValueError("the dashboard is down")

@hookimpl
def agenttrain_turn_recorded(turn):
    with (HERE / "turns.txt").open("a") as file:
        file.write(turn.id + "\\n")

@hookimpl
def agenttrain_update_done(step_result):
    with (HERE / "steps.txt").open("a") as file:
        file.write(f"{step_result.step}\\n")

@hookimpl
def agenttrain_checkpoint_written(step, folder):
    (HERE / "checkpoints.txt").write_text(f"{step} {sorted(path.name for path in folder.iterdir())}")

@hookimpl
def agenttrain_admit(result):
    return "siblings of odd number" if result.rollout.sibling == 1 else None

@hookimpl
def agenttrain_role(site):
    return ("frozen", "drafts are not trained") if site.node == "draft" else None

builder.add_node("draft", agent)
builder.add_node("agent", agent)
builder.set_entry_point("draft")
builder.add_edge("draft", "agent")
"""


def test_a_plugin_in_graph_py(new_project: Any, command: Any) -> None:
    """Its estimator trains, its reasons keep rollouts out, its roles hold, and an observer that raises is noted."""
    project = new_project(PLUGINS)
    arguments = ("--set", "trainer.advantage=upside-down", "--set", "trainer.group_size=4", "--json")
    done = command("fit", "graph.py", *arguments)
    assert done.code == 0, done.err
    store = project.store
    assert {turn.site.node: (turn.role, turn.role_reason) for turn in turns_of(store)} == {
        "draft": ("frozen", "drafts are not trained"),
        "agent": ("trained", "the graph's one model"),
    }
    check_admission(done.json["tokens"], store, project.run.metrics())
    written = (project.folder / "turns.txt").read_text().splitlines()
    assert sorted(written) == sorted(turn.id for turn in turns_of(store))
    assert (project.folder / "steps.txt").read_text() == "1\n2\n"
    assert (project.folder / "checkpoints.txt").read_text().startswith("2 [")
    told = [alarm for alarm in done.json["alarms"] if alarm["code"] == "plugin_raised"]
    assert [(alarm["severity"], alarm["step"]) for alarm in told] == [("note", 0)]
    assert told[0]["message"] == (
        "Plugin 'graph.py' raised in agenttrain_rollout_finished: ValueError: the dashboard is down. "
        "Nothing else was stopped by it."
    )


def turns_of(store: Any) -> list[Any]:
    return [turn for rollout in store.rollouts() for turn in store.turns(rollout.id)]


def check_admission(tokens: dict[str, Any], store: Any, rows: list[dict[str, Any]]) -> None:
    """The reason stands in the report, in the step's line and in the rollout's cause; its tokens are not trained."""
    cause = "not admitted: siblings of odd number"
    kept_out = {r.id for r in store.rollouts() if r.cause == cause}
    assert kept_out == {r.id for r in store.rollouts() if r.phase == "train" and r.sibling == 1}
    assert tokens["dropped_by_cause"][cause] > 0
    assert not kept_out & {sample.extra_fields["rollout_id"] for sample in store.trained_samples()}
    assert {reason for row in rows for id, reason in row["dropped"].items() if id in kept_out} == {cause}
    assert tokens["sampled"] == tokens["trained"] + tokens["frozen"] + tokens["dropped"]


def test_an_estimator_that_raises_ends_the_run(new_project: Any, command: Any) -> None:
    """It is named, and what was rolled out stands in the store."""
    project = new_project(PLUGINS)
    done = command("fit", "graph.py", "--set", "trainer.advantage=broken", "--set", "trainer.group_size=4")
    assert done.code == 2
    assert done.err.splitlines()[-1] == (
        "PluginError: The advantage estimator 'broken' raised ZeroDivisionError: division by zero. Mend it there, "
        f"then agenttrain fit --resume {project.run.id}."
    )
    assert any(rollout.phase == "train" for rollout in project.store.rollouts())


def test_a_plugin_that_decides_and_raises_ends_the_run(new_project: Any, command: Any) -> None:
    """Unlike an observer, it can't be left out: nobody would know what it would have said."""
    body = """
from agenttrain import hookimpl
@hookimpl
def agenttrain_admit(result):
    raise KeyError("threshold")
builder.add_node("agent", agent)
builder.set_entry_point("agent")
"""
    new_project(body)
    done = command("fit", "graph.py")
    assert done.code == 2
    assert done.err.splitlines()[-1] == (
        "PluginError: Plugin 'graph.py' raised in agenttrain_admit: KeyError: 'threshold'."
    )


def test_the_task_at_hand_is_known_inside(new_project: Any, command: Any) -> None:
    """In nodes and verifiers, each rollout sees its own, however many run at once."""
    body = """
def node(state):
    return {"messages": [("ai", current_task().id)]}
builder.add_node("agent", node)
builder.set_entry_point("agent")
"""
    decorated = """
def same(task, state):
    return state["messages"][-1].text == task.id == current_task().id
graph = trainable(builder, model=POLICY, tasks="tasks.jsonl", verifier=same)
"""
    project = new_project(body, decorated=decorated)
    done = command("eval", "graph.py", "--split", "train", "--repeats", "3", "--json")
    assert (done.json["success"], done.json["rollouts"]) == (1.0, 12), done.err
    assert json.loads(Path(project.run.report_json).read_text())["model"]["replaces"].startswith("no model")


def test_a_graph_that_asks_for_an_object_and_gets_none_ends_by_the_policys_fault(
    new_project: Any, command: Any
) -> None:
    """It is asked for in the prompt of each call, the reply's turn says what it lacks, and the report tells."""
    body = """
from pydantic import BaseModel
class Place(BaseModel):
    room: str
model = ChatOpenAI(model="gpt-4o", api_key="unused", max_tokens=60)
asks = model.with_structured_output(Place, method="json_schema")

def node(state):
    return {"messages": [("ai", str(asks.invoke(state["messages"])))]}
builder.add_node("agent", node)
builder.set_entry_point("agent")
"""
    project = new_project(body)
    done = command("eval", "graph.py", "--json")
    turns = turns_of(project.store)
    assert (done.json["policy_failures"], done.json["success"]) == (3, 0.0), done.err
    assert {turn.missed for turn in turns} == {"response_format"}
    (note,) = [alarm for alarm in done.json["alarms"] if alarm["code"] == "asked_and_missed"]
    assert note["message"].startswith("3 of 3 replies lack what their call asked for")
    renderer = open_renderer(str(POLICY), family="default")
    assert all("with one JSON object of this schema" in renderer.decode(turn.prompt_ids) for turn in turns)
