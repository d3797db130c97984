"""THE RUN: what a fit writes and reports, how it goes on after it was stopped, and what is never trained."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from agenttrain import hookimpl
from agenttrain.testing import toy_project

SUMMARY_KEYS = {
    "temperature": float,
    "tasks": int,
    "rollouts": int,
    "success": float,
    "reward": float,
    "turns": float,
    "tool_calls": float,
    "invalid_tool_calls": float,
    "tokens": float,
    "seconds": float,
    "safety_violations": type(None),
    "policy_failures": int,
    "environment_failures": int,
    "by_slice": dict,
}
REPORT_KEYS = {
    "run_id": str,
    "graph": str,
    "trainer": str,
    "engine": str,
    "seed": int,
    "model": {"base": str, "parameters": int, "replaces": str},
    "tasks": {"train": int, "held_out": int},
    "baseline": SUMMARY_KEYS,
    "trained": SUMMARY_KEYS,
    "difference": {"success": float, "ci95": list},
    "tokens": {
        "sampled": int,
        "trained": int,
        "frozen": int,
        "dropped": int,
        "masked": int,
        "drifted": int,
        "prefix_breaks": dict,
        "respelled": dict,
    },
    "logprob_gap": {"mean": float, "max": float},
    "wall_s": {"total": float, "rollout": float, "train": float, "evaluate": float, "sync": float},
    "cost": {
        "cpu_hours": float,
        "gpu_hours": float,
        "per_success": dict.fromkeys(("tokens", "tool_calls", "seconds"), float | None),
    },
    "alarms": list,
}
"""report.json as product.md promises it."""
EVERY_TEXT_WINS = """
def won(task, state):
    return {"score": score(task, state), "success": True}
"""


def misfits(value: Any, expected: Any, path: str = "report") -> list[str]:
    """Keys that are missing or of another type."""
    if not isinstance(expected, dict):
        return [] if isinstance(value, expected) else [f"{path} is {value!r}"]
    found = [f"{path}.{key} is missing" for key in expected if key not in value]
    return found + [fault for key in expected if key in value for fault in misfits(value[key], expected[key], key)]


def holds(tokens: dict[str, Any]) -> bool:
    """sampled = trained + frozen + dropped, each dropped one with a cause, and none drifted."""
    parts = tokens["trained"] + tokens["frozen"] + tokens["dropped"]
    causes = sum(tokens["dropped_by_cause"].values())
    return bool(tokens["sampled"] == parts and tokens["dropped"] == causes and tokens["drifted"] == 0)


def turns_of(project: Any, phase: str = "train") -> list[Any]:
    store = project.store
    return [turn for rollout in store.rollouts() if rollout.phase == phase for turn in store.turns(rollout.id)]


def trained_turn_ids(project: Any) -> set[str]:
    """Ids of the turns of which some token was handed to the loss."""
    store, found = project.store, set()
    for sample in store.trained_samples():
        place = sample.extra_fields["trajectory"]
        path = next(p for p in store.trajectories(sample.extra_fields["rollout_id"]) if p.index == place)
        found |= {span.turn_id for span in path.spans if any(sample.response_mask[span.start : span.end])}
    return found


# What a run writes


@pytest.fixture
def fitted(new_project: Any, command: Any) -> Any:
    """A project after a fit of two steps in which every rollout succeeds; gives it and its report."""
    project = new_project(
        EVERY_TEXT_WINS + "builder.add_node('agent', agent)\nbuilder.set_entry_point('agent')\n",
        decorated="graph = trainable(builder, model=POLICY, tasks='tasks.jsonl', verifier=won)\n",
    )
    done = command("fit", "graph.py", "--json", "--seed", "3", "--set", "checkpoint.every=1")
    assert done.code == 0, done.err
    return project, done


def test_what_a_fit_writes(fitted: Any, policy_folder: Path) -> None:
    """One JSON object on standard output, equal to report.json; metrics, checkpoints, policy and a report to read."""
    project, done = fitted
    report = done.json
    assert misfits(report, REPORT_KEYS) == []
    assert report == project.run.read_report()
    assert (report["trainer"], report["engine"], report["seed"]) == ("local", "local", 3)
    assert report["model"] == {
        "base": str(policy_folder),
        "parameters": 868352,
        "replaces": "ChatOpenAI gpt-4o",
        "trained_parameters": 868352,
        "adapter": None,
    }
    assert report["tasks"] == {"train": 4, "held_out": 3}
    assert report["difference"]["success"] == 0
    assert set(report["baseline"]["by_slice"]) == {"kind"}
    assert holds(report["tokens"])
    assert report["tokens"]["trained"] > 0
    assert 0 < report["logprob_gap"]["max"] < 1e-3
    assert (project.run.path / "report.md").read_text().startswith(f"# {report['run_id']}\n\nNo difference is shown:")
    check_metrics(project.run.metrics())
    assert [step for step, _ in project.run.checkpoint_folders()] == [1, 2]
    check_progress(done.err)
    check_policy(project, policy_folder)
    check_trained_once(project)


def check_metrics(rows: list[dict[str, Any]]) -> None:
    """One line a step, with what product.md promises."""
    assert [(row["step"], row["weight_version"]) for row in rows] == [(1, 1), (2, 2)]
    assert all(row["reward"] is not None and row["wall_s"] > 0 for row in rows)


def check_progress(text: str) -> None:
    """On standard error: each phase and each step."""
    for part in ("baseline: success 1.000 on 3 tasks", "step   1/2  reward ", "step   2/2", "held-out: success 1.000"):
        assert part in text


def check_policy(project: Any, base: Path) -> None:
    """policy/ loads in plain transformers, differs from the base, and says greedily what the engine said."""
    folder = project.run.policy
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder).chat_template
    was = AutoModelForCausalLM.from_pretrained(base).state_dict()
    assert any(not torch.equal(now, was[name]) for name, now in model.state_dict().items())
    for turn in turns_of(project, "held_out"):
        ids = torch.tensor([turn.prompt_ids])
        n = len(turn.response_ids)
        said = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=n)
        assert tuple(said[0, ids.shape[1] :].tolist()) == turn.response_ids


def check_trained_once(project: Any) -> None:
    """Every training rollout is trained once, or has a reason why not."""
    trained = [(s.extra_fields["rollout_id"], s.extra_fields["trajectory"]) for s in project.store.trained_samples()]
    assert len(trained) == len(set(trained))
    dropped = {rollout_id for row in project.run.metrics() for rollout_id in row["dropped"]}
    made = {rollout.id for rollout in project.store.rollouts() if rollout.phase == "train"}
    assert made == dropped | {rollout_id for rollout_id, _ in trained}
    assert not dropped & {rollout_id for rollout_id, _ in trained}


@pytest.mark.slow
def test_an_ended_run_that_is_resumed_gives_its_report_again(fitted: Any, command: Any) -> None:
    """Nothing is made once more, and it says what more steps take; with more steps it goes on from its end."""
    project, first = fitted
    again = command("fit", "--resume", project.run.id, "--json")
    assert again.json == first.json
    assert "has ended; this is its report. More steps: --set trainer.steps=N." in again.err
    more = command("fit", "--resume", project.run.id, "--json", "--set", "trainer.steps=3")
    assert more.code == 0, more.err
    assert [row["step"] for row in project.run.metrics()] == [1, 2, 3]
    assert holds(more.json["tokens"])
    check_trained_once(project)


@pytest.mark.slow
def test_a_run_goes_on_with_its_own_graph_only(fitted: Any, command: Any) -> None:
    """Another file, and another object of the same file, are refused by name."""
    project, _ = fitted
    project.write("other.py", "graph = 1\n")
    for other in ("other.py", "graph.py:agent"):
        done = command("fit", other, "--resume", project.run.id)
        assert done.code == 2
        own = f"{project.folder}/graph.py:builder"
        assert f"--resume goes on with the run's own graph, {own}, and {other} is another. Leave it out." in done.err
    assert command("fit", "graph.py:builder", "--resume", project.run.id).code == 0


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["eval.tasks=2", "eval.repeats=2", "limits.turns=2", "seed=5"])
def test_a_run_goes_on_with_what_its_baseline_was_measured_by(fitted: Any, command: Any, setting: str) -> None:
    """Else the baseline would be measured again, at weights that are trained already."""
    project, first = fitted
    done = command("fit", "--resume", project.run.id, "--set", "trainer.steps=9", "--set", setting)
    assert done.code == 2
    key = setting.partition("=")[0].partition(".")[0]
    assert f"ConfigError: {key} is " in done.err
    assert "its baseline would not be comparable" in done.err
    assert project.run.read_report() == first.json


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    ["trainer.algorithm=rloo", "trainer.adapter=lora", "trainer.lora_rank=2", "sampling.temperature=0.5"],
)
def test_a_run_goes_on_with_what_its_checkpoints_were_made_by(fitted: Any, command: Any, setting: str) -> None:
    """An algorithm is no exception: what the old one decided would stand over the new one's own."""
    project, first = fitted
    done = command("fit", "--resume", project.run.id, "--set", "trainer.steps=9", "--set", setting)
    assert done.code == 2
    assert f"ConfigError: {setting.partition('=')[0]} is " in done.err
    assert "its checkpoints and rollouts were made by that" in done.err
    assert project.run.read_report() == first.json


def test_an_evaluation_is_not_resumed(project: Any, command: Any) -> None:
    """It says what to do instead."""
    assert command("eval", "graph.py").code == 0
    done = command("fit", "--resume", project.run.id)
    assert (done.code, done.err.splitlines()[-1][:67]) == (
        2,
        "ConfigError: --resume goes on with a fit, and that run is an evalua",
    )


def test_a_dry_run_starts_nothing(project: Any, command: Any) -> None:
    """It prints the plan, for people or as JSON, and makes no folder."""
    done = command("fit", "graph.py", "--dry-run", "--json")
    plan = done.json
    assert (plan["steps"], plan["rollouts_per_step"], plan["rollouts"]) == (2, 4, 14)
    assert (plan["train_tasks"], plan["held_out_tasks"]) == (4, 3)
    said = command("fit", "graph.py", "--dry-run").out
    assert said.endswith("Everything fits. Nothing was started (--dry-run).\n")
    assert "rollouts per step: 4\n" in said
    assert not Path("runs").exists()


def test_without_a_learning_rate_no_weight_changes(project: Any, command: Any, policy_folder: Path) -> None:
    """A run that measures noise: everything is done, and the policy comes out bit for bit as it went in."""
    done = command("fit", "graph.py", "--json", "--set", "trainer.learning_rate=0")
    assert done.code == 0, done.err
    now, was = (load_file(folder / "model.safetensors") for folder in (project.run.policy, policy_folder))
    assert all(torch.equal(now[name], weights.float()) for name, weights in was.items())
    assert done.json["tokens"]["trained"] > 0


@pytest.mark.slow
def test_one_seed_gives_the_same_counts(project: Any, command: Any) -> None:
    """Two runs with one seed sample the same tokens before the first update, and one with another does not."""
    arguments = ("fit", "graph.py", "--json", "--set", "trainer.steps=1", "--set", "eval.temperature=1.0", "--seed")
    assert [command(*arguments, seed).code for seed in (1, 1, 2)] == [0, 0, 0]
    first, second, other = (sampled_before_training(run) for run in sorted(project.runs, key=by_start))
    assert first == second != other


def by_start(run: Any) -> float:
    return float((run.path / "config.toml").stat().st_mtime)


def sampled_before_training(run: Any) -> dict[str, tuple[int, ...]]:
    from agenttrain.capture.store import read_store

    store = read_store(run.rollouts)
    before = [rollout.id for rollout in store.rollouts() if rollout.phase in ("baseline", "train")]
    return {turn.id: turn.response_ids for rollout_id in before for turn in store.turns(rollout_id)}


def test_stop_on_alarm_saves_and_ends(new_project: Any, command: Any) -> None:
    """Equal rewards are loud: the first step's checkpoint stands, and the exit code is no success."""
    project = new_project(
        decorated="graph = trainable(builder, model=POLICY, tasks='tasks.jsonl', verifier=lambda task, state: 0)\n"
    )
    done = command("fit", "graph.py", "--stop-on-alarm")
    assert (done.code, done.out) == (1, "")
    assert "loud: All rewards of this step are 0: the policy never gets it right." in done.err
    resume = f"a loud alarm, and --stop-on-alarm was given. Saved; go on with: agenttrain fit --resume {project.run.id}"
    assert done.err.endswith(f"{resume}\n")
    assert [step for step, _ in project.run.checkpoint_folders()] == [1]


# Graphs of many forms

FROZEN_AND_AUXILIARY = """
from langchain_core.language_models.fake_chat_models import FakeListChatModel
critic = FakeListChatModel(responses=["fine", "wrong"])

def summarize(state):
    return {"messages": [model.invoke([("user", "Sum this up: " + state["messages"][0].text)])]}

def criticize(state):
    return {"messages": [critic.invoke(state["messages"])]}

builder.add_node("summarize", summarize)
builder.add_node("agent", agent)
builder.add_node("criticize", criticize)
builder.set_entry_point("summarize")
builder.add_edge("summarize", "agent")
builder.add_edge("agent", "criticize")
builder.add_edge("criticize", "last")
builder.add_node("last", agent)
"""


def test_frozen_and_auxiliary_calls_are_never_trained(new_project: Any, command: Any) -> None:
    """A summary on the same model and the user's own critic: recorded, counted, and absent from the loss."""
    roles = 'frozen=["summarize"], auxiliary=["model:FakeListChatModel"]'
    project = new_project(
        FROZEN_AND_AUXILIARY,
        decorated=f"graph = trainable(builder, model=POLICY, tasks='tasks.jsonl', verifier=score, {roles})\n",
    )
    done = command("fit", "graph.py", "--json")
    assert done.code == 0, done.err
    turns = turns_of(project)
    roles_by_node = {turn.site.node: turn.role for turn in turns}
    assert roles_by_node == {"summarize": "frozen", "agent": "trained", "criticize": "auxiliary", "last": "trained"}
    assert trained_turn_ids(project) <= {turn.id for turn in turns if turn.role == "trained"}
    tokens = done.json["tokens"]
    assert holds(tokens)
    assert tokens["frozen"] == sum(len(turn.response_ids) for turn in turns if turn.role == "frozen") == 48
    assert not any(turn.response_ids for turn in turns if turn.role == "auxiliary")


def test_a_selector_that_matches_no_call_ends_the_run(new_project: Any, command: Any) -> None:
    """After the baseline, with the names seen."""
    new_project(
        decorated="graph = trainable(builder, model=POLICY, tasks='tasks.jsonl', verifier=score, frozen=['model:x'])\n"
    )
    done = command("fit", "graph.py")
    assert done.code == 2
    assert "RoleError: frozen=['model:x'] matched no call. Models seen: ChatOpenAI:gpt-4o." in done.err


PARALLEL = """
from langgraph.graph import START
def left(state):
    return {"messages": [model.invoke([("user", "left " + state["messages"][0].text)])]}
async def right(state):
    return {"messages": [await model.ainvoke([("user", "right " + state["messages"][0].text)])]}
sub = StateGraph(MessagesState)
sub.add_node("inner", right)
sub.set_entry_point("inner")
builder.add_node("left", left)
builder.add_node("right", sub.compile())
builder.add_node("agent", agent)
builder.add_edge(START, "left")
builder.add_edge(START, "right")
builder.add_edge(["left", "right"], "agent")
"""


def test_parallel_branches_async_nodes_and_a_subgraph(new_project: Any, command: Any) -> None:
    """Each call is a trajectory of its own, and each is trained where it was sampled."""
    project = new_project(PARALLEL)
    done = command("fit", "graph.py", "--json")
    assert done.code == 0, done.err
    nodes = [turn.site.node for turn in turns_of(project)]
    assert sorted(set(nodes)) == ["agent", "inner", "left"]
    assert len(nodes) == 3 * 8
    assert holds(done.json["tokens"])
    assert {turn_id.partition("#")[2] for turn_id in trained_turn_ids(project)} == {"0", "1", "2"}
    assert done.json["tokens"]["prefix_breaks"].keys() <= {"other_conversation", "parallel_sibling"}


# Stopping and going on


def started(project: Any, *arguments: str) -> subprocess.Popen[str]:
    """A fit in a process of its own."""
    command = [sys.executable, "-m", "agenttrain", "fit", *arguments]
    return subprocess.Popen(
        command, cwd=project.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    )


def wait_for(condition: Any, process: subprocess.Popen[str], seconds: float = 120) -> None:
    """Poll until something is true, while the process runs."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < deadline
        time.sleep(0.02)


def n_lines(project: Any) -> int:
    return len(project.run.metrics()) if project.runs else 0


CTRL_C = """
import os, signal
from pathlib import Path
from agenttrain import hookimpl
STOP = Path(__file__).parent / "stop"

@hookimpl
def agenttrain_update_done(step_result):
    if os.environ.get("STOP_AFTER") == str(step_result.step):
        STOP.touch()

def interrupted(task, state):
    if STOP.exists():
        STOP.unlink(missing_ok=True)
        os.kill(os.getpid(), signal.SIGINT)
    return score(task, state)

builder.add_node("agent", agent)
builder.set_entry_point("agent")
graph = trainable(builder, model=POLICY, tasks="tasks.jsonl", verifier=interrupted)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("stop_after", "steps"), [(0, 0), (1, 1), (2, 2)])
def test_ctrl_c_in_every_phase(
    new_project: Any, command: Any, monkeypatch: pytest.MonkeyPatch, stop_after: int, steps: int
) -> None:
    """In the baseline, in a step, and in the last evaluation: saved, and finished by the command that is printed."""
    project = new_project(CTRL_C, decorated="")
    monkeypatch.setenv("STOP_AFTER", str(stop_after))
    if not stop_after:
        (project.folder / "stop").touch()
    done = command("fit", "graph.py", "--json")
    assert (done.code, done.json["error"]["type"]) == (130, "RunStopped"), done.err
    assert done.err.endswith(f"stopped by Ctrl-C. Saved; go on with: agenttrain fit --resume {project.run.id}\n")
    assert [step for step, _ in project.run.checkpoint_folders()] == [steps]
    monkeypatch.delenv("STOP_AFTER")
    again = command("fit", "--resume", project.run.id, "--json")
    assert again.code == 0, again.err
    check_resumed(project, again.json, 2)


def test_ctrl_c_in_an_evaluation(new_project: Any, command: Any) -> None:
    """There is nothing to go on with: it says that it was stopped."""
    project = new_project(CTRL_C, decorated="")
    (project.folder / "stop").touch()
    done = command("eval", "graph.py", "--json")
    assert (done.code, done.json) == (130, {"error": {"type": "RunStopped", "message": "Stopped by Ctrl-C."}})
    assert done.err.endswith("Stopped by Ctrl-C.\n")


@pytest.mark.slow
def test_ctrl_c_saves_and_resume_finishes(project: Any, command: Any) -> None:
    """Exit code 130, a checkpoint of the last whole step and the command that goes on; nothing is trained twice."""
    process = started(project, "graph.py", "--set", "trainer.steps=400", "--json")
    wait_for(lambda: n_lines(project) >= 2, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    run, step = project.run, len(project.run.metrics())
    assert (process.returncode, json.loads(out)["error"]["type"]) == (130, "RunStopped"), err
    assert err.endswith(f"stopped by Ctrl-C. Saved; go on with: agenttrain fit --resume {run.id}\n")
    assert run.checkpoint_folders()[-1][0] == step
    done = command("fit", "--resume", run.id, "--json", "--set", f"trainer.steps={step + 1}")
    assert done.code == 0, done.err
    check_resumed(project, done.json, step + 1)


@pytest.mark.slow
def test_a_killed_run_goes_on_from_its_checkpoint(project: Any, command: Any) -> None:
    """SIGKILL past a checkpoint: what came after it is made again, and each step stands and is trained once."""
    process = started(project, "graph.py", "--set", "trainer.steps=400", "--set", "checkpoint.every=2")
    wait_for(lambda: n_lines(project) >= 3 and project.run.checkpoint_folders(), process)
    process.kill()
    process.communicate(timeout=60)
    saved = project.run.checkpoint_folders()[-1][0]
    done = command("fit", "graph.py", "--resume", project.run.path, "--json", "--set", f"trainer.steps={saved + 2}")
    assert done.code == 0, done.err
    check_resumed(project, done.json, saved + 2)


def check_resumed(project: Any, report: dict[str, Any], steps: int) -> None:
    """Each step stands once, nothing is trained twice or lost, and the account holds over both lives."""
    rows = project.run.metrics()
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert {row["life"] for row in rows} <= {0, 1}
    assert misfits(report, REPORT_KEYS) == []
    assert holds(report["tokens"])
    trained = [(s.extra_fields["rollout_id"], s.extra_fields["trajectory"]) for s in project.store.trained_samples()]
    assert len(trained) == len(set(trained))
    by_step = {(r.step, r.task_id, r.sibling) for r in project.store.rollouts() if r.phase == "train"}
    assert {step for step, *_ in by_step} >= set(range(1, steps + 1))


class Talks:
    """The local engine, which has something to say, counts what nobody else does, and draws by itself."""

    takes_seeds = False

    def __init__(self, context: Any) -> None:
        from agenttrain.local.engine import LocalEngine

        self._own, self._said = LocalEngine.from_context(context), ["it was started"]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def update_weights(self, weights: Any, version: int) -> None:
        self._own.update_weights(weights, version)
        self._said.append(f"weights {version} came")

    def stats(self) -> dict[str, float]:
        return {**self._own.stats(), "restarts": 2.0}

    def news(self) -> list[str]:
        said, self._said = self._said, []
        return said


class TalksPlugin:
    @hookimpl
    def agenttrain_register_engines(self, register: Any) -> None:
        register("talks", Talks)


def test_what_an_engine_tells_of_itself_is_reported(tmp_path: Path) -> None:
    """Each news once, as a note at its step; its counters but those of the cost; and how it draws."""
    run = toy_project(tmp_path).fit(plugins={"talks": TalksPlugin()}, engine={"name": "talks"})
    told = [(a["step"], a["severity"], a["message"]) for a in run.report["alarms"] if a["code"] == "engine"]
    assert sorted(told) == [(0, "note", "it was started"), (1, "note", "weights 1 came")]
    assert run.report["seeds"] == "none: the engine draws by itself"
    counts = run.report["engine_counts"]
    assert counts["restarts"] == 2.0
    assert counts["sampled_ids"] >= run.report["tokens"]["sampled"] > 0
    assert not {"cpu_s", "gpus"} & counts.keys()
