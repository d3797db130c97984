"""`agenttrain promote` on a real fit of a tiny model, whose recorded outcomes are rewritten: each rule fails alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from agenttrain.capture.store import Begun, SqliteStore, read_store
from agenttrain.folder_hash import policy_hash
from agenttrain.promotion.ledger import Ledger
from agenttrain.records import Reward, RewardPart, Rollout, Task
from agenttrain.run_folder import RunFolder
from agenttrain.testing import tiny_model, toy_project

pytestmark = pytest.mark.slow

GRAPH = '''
import json
from pathlib import Path

from langchain_openai import ChatOpenAI
from langgraph.graph import MessagesState, StateGraph

from agenttrain import Part, Task, hookimpl, trainable
from agenttrain.promotion.ledger import Ledger

model = ChatOpenAI(model="gpt-4o-mini", api_key="unused", max_tokens=6)


def agent(state: MessagesState) -> dict:
    return {"messages": [model.invoke(state["messages"])]}


def right(task: Task, state: dict) -> float:
    """The share of odd characters; of a case whether it is that of its reference."""
    if task.metadata.get("down"):
        raise RuntimeError("the database is down")
    if "asked" in task.metadata:
        passes = asked_at_most(task.metadata["asked"])
        if not passes and task.metadata.get("then_down"):
            raise RuntimeError("the database went down")
        return passes
    text = repr([m.content for m in state["messages"][1:]])
    share = sum(ord(character) % 2 for character in text) / len(text)
    return share if task.reference is None else float(abs(share - task.reference) < 1e-9)


def asked_at_most(n: int) -> float:
    """1 until it was asked so often in this directory."""
    count = Path("asked.txt")
    before = int(count.read_text()) if count.exists() else 0
    count.write_text(str(before + 1))
    return float(before < n)


def harmless(task: Task, state: dict) -> float:
    return 1.0


@trainable(
    model="model", tasks="tasks.jsonl", verifiers={"right": Part(right), "harmless": Part(harmless, kind="safety")}
)
def graph():
    builder = StateGraph(MessagesState)
    builder.add_node("agent", agent)
    builder.set_entry_point("agent")
    return builder.compile()


@hookimpl
def agenttrain_veto_promotion(promotion):
    """What veto.txt of the current directory says; meanwhile.json is what somebody else writes into the ledger."""
    meanwhile, veto = Path("meanwhile.json"), Path("veto.txt")
    if meanwhile.exists():
        Ledger(Path("promotions") / "toy").append(**json.loads(meanwhile.read_text()))
    return veto.read_text() if veto.exists() else None
'''
N_KINDS, OF_KIND = 4, 8
"""Slices, and held-out tasks of each: so many that a slice of failures is no accident."""

ASKED = {"messages": [{"role": "user", "content": "Say something about cases."}]}

Outcome = Callable[[Task], bool]


def always(task: Task) -> bool:
    return True


def never(task: Task) -> bool:
    return False


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """One step at a high learning rate: the policy answers otherwise than its base."""
    project = toy_project(tmp_path_factory.mktemp("promote") / "toy")
    project.graph.write_text(GRAPH)
    rows = [
        {
            "id": f"toy-{n}",
            "input": {"messages": [{"role": "user", "content": f"Say something about {n}."}]},
            "split": "held_out" if n < N_KINDS * OF_KIND else "train",
            "metadata": {"kind": f"kind-{n % N_KINDS}"},
        }
        for n in range(N_KINDS * OF_KIND + 8)
    ]
    (project.folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return project.fit(trainer={"steps": 1, "tasks_per_step": 8, "group_size": 4, "learning_rate": 0.05}).folder


@dataclass(frozen=True)
class Desk:
    """A directory with runs/, candidates made of one fit, and the commands there."""

    folder: Path
    fitted: RunFolder
    command: Any

    def candidate(
        self,
        name: str = "good",
        *,
        before: Outcome = never,
        after: Outcome = always,
        unsafe: Outcome = never,
        report: dict[str, Any] | None = None,
    ) -> RunFolder:
        """A copy of the fit whose recorded evaluations came to these successes.

        Args:
            before, after: success of a held-out task in the baseline, and after training.
            unsafe: whether the safety gate closed after training.
            report: keys of report.json that are put in place of its own.
        """
        run = RunFolder(self.folder / "runs" / name)
        shutil.copytree(self.fitted.path, run.path)
        shutil.rmtree(run.rollouts)
        tasks = {task.id: task for task in _tasks(run)}
        store = SqliteStore(run.rollouts)
        for result in read_store(self.fitted.rollouts).results():
            rollout, task = result.rollout, tasks.get(result.rollout.task_id)
            if rollout.phase == "baseline":
                rollout = _with(rollout, before(task), closed=False)
            elif rollout.phase == "held_out":
                rollout = _with(rollout, after(task), closed=unsafe(task))
            store.put_all_of(Begun(request=result.request, started_at=0), [], replace(result, rollout=rollout))
        store.flush()
        store.close()
        run.report_json.write_text(json.dumps({**json.loads(run.report_json.read_text()), **(report or {})}))
        return run

    def promote(self, *arguments: object) -> Any:
        return self.command("promote", *arguments, "--json")

    def cases(self, *rows: dict[str, Any]) -> None:
        """The regression set."""
        file = self.folder / "promotions" / "toy" / "cases.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.folder / "promotions" / "toy")

    @property
    def deeds(self) -> list[tuple[str, str]]:
        """(deed, run) of each line of the ledger."""
        return [(entry.deed, entry.run_id) for entry in self.ledger.entries()]


def _tasks(run: RunFolder) -> tuple[Task, ...]:
    from agenttrain.tasks import read_tasks

    return (*read_tasks(run.evaluated_tasks), *read_tasks(run.train_tasks))


def _with(rollout: Rollout, success: bool, *, closed: bool) -> Rollout:
    assert rollout.reward is not None
    parts = [
        RewardPart(name="harmless", score=float(not closed), weight=0.0, kind="safety"),
        RewardPart(name="right", score=float(success)),
    ]
    return replace(rollout, success=success, reward=Reward(score=float(success), parts=tuple(parts)))


def case_of(run: RunFolder, phase: str, task_id: str) -> dict[str, Any]:
    """A case that is passed by whoever answers a held-out task as it was answered in a phase of the fit."""
    task = next(task for task in _tasks(run) if task.id == task_id)
    (rollout,) = [r for r in read_store(run.rollouts).rollouts() if r.phase == phase and r.task_id == task_id]
    assert rollout.reward is not None
    return {"id": f"case-{task_id}", "input": dict(task.input), "reference": rollout.reward.score}


def answered_otherwise(run: RunFolder) -> str:
    """A held-out task that the trained policy answers otherwise than the base."""
    scores: dict[str, dict[str, float]] = {}
    for rollout in read_store(run.rollouts).rollouts():
        if rollout.reward is not None:
            scores.setdefault(rollout.task_id, {})[rollout.phase] = rollout.reward.score
    return next(id for id, of in scores.items() if "held_out" in of and abs(of["baseline"] - of["held_out"]) > 0.01)


@pytest.fixture
def desk(fitted: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any) -> Desk:
    monkeypatch.chdir(tmp_path)
    return Desk(tmp_path, fitted, command)


def failed(done: Any) -> list[str]:
    return [rule["rule"] for rule in done.json["rules"] if not rule["passed"]]


def test_a_policy_that_passes_every_rule_serves(desk: Desk) -> None:
    """The line of the ledger holds what it was decided by; a second time there is nothing to do."""
    run = desk.candidate()
    done = desk.promote("good", "--why", "it is better")
    assert (done.code, failed(done)) == (0, [])
    assert [rule["rule"] for rule in done.json["rules"]] == [
        *("evidence", "difference", "slices", "regression", "safety", "cost", "latency"),
        *("alarms", "logprob_gap", "export", "veto", "replay"),
    ]
    (entry,) = desk.ledger.entries()
    made_by = run.read_config()[1]
    assert (entry.deed, entry.run_id, entry.incumbent, entry.why) == ("promoted", "good", "base", "it is better")
    assert (entry.policy, entry.weights) == (str(run.policy), policy_hash(run.policy))
    assert entry.graph == f"{made_by['graph']}:graph"
    assert {name: entry.hashes[name] for name in made_by["hashes"]} == made_by["hashes"]
    assert len(entry.hashes["configuration"] or "") == 64
    assert entry.versions["torch"] == made_by["versions"]["torch"]
    assert [result.rule for result in entry.results] == [rule["rule"] for rule in done.json["rules"]][:-1]
    assert all(result.passed for result in entry.results)
    assert json.loads((run.path / "promotion.json").read_text()) | {"written": ""} == done.json | {"written": ""}
    again = desk.command("promote", "good")
    assert (again.code, again.out) == (0, "good serves already. Nothing was changed.\n")
    assert len(desk.ledger.entries()) == 1


def test_what_was_accepted_is_not_trained_on_in_its_place(desk: Desk) -> None:
    """Nothing could serve by the ledger any more, nor be gone back to."""
    run = desk.candidate()
    assert desk.promote("good").code == 0
    refused = desk.command("fit", "--resume", "good", "--set", "trainer.steps=2", "--json")
    assert refused.code == 2
    message = refused.json["error"]["message"]
    assert message.startswith("good was accepted to serve (line 1 of its ledger), and to go on with it would replace")
    assert message.endswith(f"agenttrain fit GRAPH --model {run.policy}")
    assert policy_hash(run.policy) == desk.ledger.entries()[0].weights
    assert run.read_report() is not None


def test_one_line_a_rule_and_the_verdict_for_people(desk: Desk) -> None:
    desk.candidate("same", after=never)
    done = desk.command("promote", "same")
    lines = done.out.splitlines()
    assert lines[0] == "same against base (the run's own baseline)"
    assert lines[2].startswith("✓ evidence     ")
    assert lines[3].startswith("✗ difference   success 0.000 to 0.000: +0.000 (95 % interval -0.")
    assert lines[3].endswith(" on 32 tasks)  [lower bound above 0]")
    assert "same does not serve: difference." in lines
    assert lines[-1].startswith("  difference: fit anew")
    assert [line.split()[1] for line in lines if line.startswith("– ")] == ["regression", "cost", "latency"]
    assert "promote same" in done.err


ALONE: list[tuple[str, int, dict[str, Any], list[str]]] = [
    ("difference", 11, {"after": never}, []),
    ("slices", 12, {"before": lambda task: task.metadata["kind"] == "kind-1"}, []),
    ("safety", 14, {"unsafe": lambda task: task.id == "toy-3"}, []),
    ("cost", 15, {}, ["--set", "promotion.max_cost_ratio=0.1"]),
    ("latency", 16, {}, ["--set", "promotion.max_seconds=1e-6"]),
    ("logprob_gap", 18, {"report": {"logprob_gap": {"mean": 0.0, "max": 0.5}}}, []),
    ("alarms", 17, {"report": {"alarms": [{"code": "x", "severity": "loud", "step": 1, "message": "Odd."}]}}, []),
]


@pytest.mark.parametrize(("rule", "code", "made", "arguments"), ALONE, ids=[each[0] for each in ALONE])
def test_each_rule_fails_alone_with_its_own_code(
    rule: str, code: int, made: dict[str, Any], arguments: list[str], desk: Desk
) -> None:
    """Nothing is written to the ledger, and the run keeps what was decided."""
    if rule == "slices":
        made = {**made, "after": lambda task: task.metadata["kind"] != "kind-1"}
    run = desk.candidate(**made)
    done = desk.promote("good", *arguments)
    assert (failed(done), done.code) == ([rule], code)
    assert not desk.ledger.file.exists()
    kept = json.loads((run.path / "promotion.json").read_text())
    assert (kept["deed"], kept["exit_code"], list(kept["next_steps"])) == ("refused", code, [rule])


def without(run: RunFolder, fitted: RunFolder, phase: str) -> None:
    """Take every other task's rollout of a phase out of a run's store; all others succeed."""
    shutil.rmtree(run.rollouts)
    store = SqliteStore(run.rollouts)
    for result in read_store(fitted.rollouts).results():
        rollout = result.rollout
        if rollout.phase == phase and int(rollout.task_id.removeprefix("toy-")) % 2:
            continue
        if rollout.phase != "train":
            rollout = _with(rollout, True, closed=False)
        store.put_all_of(Begun(request=result.request, started_at=0), [], replace(result, rollout=rollout))
    store.flush()
    store.close()


def test_a_baseline_that_its_run_lost_is_no_evidence(desk: Desk) -> None:
    """Half of its rollouts are gone from the store: they would count as failures of the base."""
    without(desk.candidate(), desk.fitted, "baseline")
    done = desk.promote("good")
    assert (failed(done), done.code) == (["difference"], 11)
    figure = next(rule["figure"] for rule in done.json["rules"] if rule["rule"] == "difference")
    assert figure.startswith("success 0.500 to 1.000: +0.500 (95 % interval +0.3")
    assert figure.endswith(" without 16 places that what serves now was not measured in")


def test_an_evaluation_that_its_run_lost_shows_nothing(desk: Desk) -> None:
    """Of a candidate that is an error; what serves is evaluated anew."""
    first = desk.candidate("first")
    assert desk.promote("first").code == 0
    without(first, desk.fitted, "held_out")
    second = desk.candidate("second")
    done = desk.promote("second", "--check-only")
    assert done.json["incumbent"]["from"] == "evaluated anew: its own evaluation lacks 16 rollouts"
    without(second, desk.fitted, "held_out")
    lost = desk.promote("second")
    assert lost.code == 1
    assert "The store of second lacks 16 rollouts of its evaluation" in lost.json["error"]["message"]


def test_a_changed_weight_does_not_serve(desk: Desk) -> None:
    """One number in one matrix, too small to change an answer."""
    from safetensors.numpy import load_file, save_file

    file = desk.candidate().policy / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in sorted(weights) if weights[name].ndim == 2)
    weights[name] = weights[name].copy()
    weights[name][0, 0] += 1e-4
    save_file(weights, file, metadata={"format": "pt"})
    done = desk.promote("good")
    assert (failed(done), done.code) == (["export"], 19)
    assert not desk.ledger.file.exists()


def test_a_plugin_may_veto(desk: Desk) -> None:
    desk.candidate()
    (desk.folder / "veto.txt").write_text("not on a Friday")
    done = desk.promote("good")
    assert (failed(done), done.code) == (["veto"], 20)
    assert done.json["rules"][-1]["figure"] == "graph.py: not on a Friday"


def test_a_case_that_newly_fails_keeps_it_out(desk: Desk) -> None:
    """Both policies really answer: one case is passed by the base alone, one by the candidate alone."""
    desk.candidate()
    task_id = answered_otherwise(desk.fitted)
    desk.cases(case_of(desk.fitted, "baseline", task_id))
    done = desk.promote("good")
    assert (failed(done), done.code) == (["regression"], 13)
    figure = next(rule["figure"] for rule in done.json["rules"] if rule["rule"] == "regression")
    assert figure == f"passes 0 of 1 case, what serves now 1; newly failing 1: case-{task_id}"
    asked = RunFolder(desk.folder / "runs" / done.json["regression"]["run_id"])
    assert asked.read_config()[1]["policy"] == str(desk.folder / "runs" / "good" / "policy")
    desk.cases(case_of(desk.fitted, "held_out", task_id))
    assert desk.promote("good").code == 0


def test_what_fails_its_replay_is_taken_back(desk: Desk) -> None:
    """The case passes twice, in the gate, and fails when what serves is asked."""
    desk.candidate()
    desk.cases({"id": "moody", "input": ASKED, "metadata": {"asked": 2}})
    done = desk.promote("good")
    assert (failed(done), done.code, done.json["deed"]) == (["replay"], 21, "taken_back")
    assert desk.deeds == [("promoted", "good"), ("rolled_back", "base")]
    assert desk.ledger.entries()[-1].why == "replay: passes 0 of 1 case; failing now 1: moody"


def test_what_can_t_be_asked_in_its_replay_is_taken_back_too(desk: Desk) -> None:
    """That is an error, and no pass: nothing serves that was not seen to."""
    run = desk.candidate()
    desk.cases({"id": "moody", "input": ASKED, "metadata": {"asked": 2, "then_down": True}})
    done = desk.promote("good")
    assert done.code == 1
    message = done.json["error"]["message"]
    assert message.startswith("good was taken back, for its replay could not be made: Case 'moody' can't be measured")
    assert "the database went down" in message
    assert desk.deeds == [("promoted", "good"), ("rolled_back", "base")]
    assert json.loads((run.path / "promotion.json").read_text())["deed"] == "taken_back"


def test_what_can_t_be_written_down_is_taken_back(desk: Desk) -> None:
    """Nothing serves whose decision isn't kept, and which was not asked once more."""
    run = desk.candidate()
    (run.path / "promotion.json").mkdir()
    done = desk.promote("good")
    assert done.code == 1
    assert "promotion.json can't be written" in done.json["error"]["message"]
    assert desk.deeds == [("promoted", "good"), ("rolled_back", "base")]
    assert desk.ledger.entries()[-1].why.startswith("the decision could not be kept: ")


def test_a_canary_that_fails_its_replay_is_ended(desk: Desk) -> None:
    desk.candidate()
    desk.cases({"id": "moody", "input": ASKED, "metadata": {"asked": 2}})
    done = desk.command("promote", "good", "--canary")
    assert done.code == 21
    *_, run = sorted((desk.folder / "runs").glob("replay-*"), key=lambda path: path.stat().st_mtime_ns)
    assert done.out.splitlines()[-2:] == [
        "good was taken back: replay. What served before serves again.",
        f"  replay: what served before serves again; what was done on the cases: agenttrain inspect {run.name}.",
    ]
    assert desk.deeds == [("canary", "good"), ("taken_back", "good")]


def test_a_case_that_can_t_be_measured_is_an_error_and_no_pass(desk: Desk) -> None:
    desk.candidate()
    desk.cases({"id": "down", "input": ASKED, "metadata": {"down": True}})
    done = desk.promote("good")
    assert done.code == 1
    assert "Case 'down' can't be measured: " in done.json["error"]["message"]
    assert "the database is down" in done.json["error"]["message"]
    assert not desk.ledger.file.exists()


def test_the_incumbent_is_what_was_promoted(desk: Desk) -> None:
    """Its own evaluation is taken where it fits; a policy that is no better does not take its place."""
    desk.candidate("first")
    assert desk.promote("first").code == 0
    desk.candidate("second")
    done = desk.promote("second")
    assert (failed(done), done.code) == (["difference"], 11)
    assert done.json["incumbent"] == {"run_id": "first", "evaluation": "first", "from": "its own run"}
    assert desk.deeds == [("promoted", "first")]


def test_an_incumbent_of_other_tasks_is_evaluated_anew(desk: Desk) -> None:
    """On the candidate's tasks, in a run of its own: really, so that it fails all that no answer solves."""
    first = desk.candidate("first")
    assert desk.promote("first").code == 0
    rows = first.evaluated_tasks.read_text().replace("Say something about 3.", "Say nothing about 3.")
    first.evaluated_tasks.write_text(rows)
    desk.candidate("second")
    done = desk.promote("second")
    assert done.code == 0
    assert done.json["incumbent"]["from"] == "evaluated anew: its own evaluation had other tasks"
    made = RunFolder(desk.folder / "runs" / done.json["incumbent"]["evaluation"])
    assert made.read_config()[1]["policy"] == str(first.policy)
    assert len(read_store(made.rollouts).rollouts()) == N_KINDS * OF_KIND
    assert desk.deeds == [("promoted", "first"), ("promoted", "second")]


def test_check_only_changes_nothing(desk: Desk) -> None:
    desk.candidate()
    done = desk.command("promote", "good", "--check-only")
    assert done.code == 0
    assert done.out.endswith("Every rule holds: agenttrain promote good lets it serve.\n")
    assert not desk.ledger.file.exists()


def test_a_canary_comes_first_and_then_serves(desk: Desk) -> None:
    """Meanwhile no other run may be promoted; with its name the canary alone is ended."""
    for name in ("first", "second"):
        desk.candidate(name)
    done = desk.promote("first", "--canary", "0.25")
    assert (done.code, done.json["deed"], done.json["share"]) == (0, "canary", 0.25)
    assert "canary.share" not in done.err
    refused = desk.promote("second")
    assert refused.code == 2
    assert "first is a canary: 25 % of the conversations try it." in refused.json["error"]["message"]
    status = desk.promote("--status").json
    assert (status["serving"], status["canary"]["run_id"]) == ({"run_id": "base"}, "first")
    assert status["canary"]["of_canary"] == {"conversations": 0, "outcomes": 0, "successes": 0}
    assert desk.promote("first", "--rollback").json["serving"] == "base"
    assert desk.promote("first", "--canary").json["share"] == 0.1
    done = desk.promote("first")
    assert done.code == 0
    assert done.json["notes"] == ["first was taken back before, line 2 of the ledger: by hand"]
    assert desk.deeds == [("canary", "first"), ("taken_back", "first"), ("canary", "first"), ("promoted", "first")]


def test_what_was_accepted_before_serves_again(desk: Desk) -> None:
    """First the run, then the base; and then there is nothing to go back from."""
    desk.candidate("first", after=lambda task: task.metadata["kind"] != "kind-0")
    desk.candidate("second")
    assert [desk.promote(name).code for name in ("first", "second")] == [0, 0]
    back = desk.promote("--rollback", "--why", "complaints")
    assert (back.code, back.json["serving"]) == (0, "first")
    assert desk.ledger.entries()[-1].why == "complaints"
    assert desk.ledger.entries()[-1].weights == desk.ledger.entries()[0].weights
    base = desk.command("promote", "--rollback")
    assert base.out.splitlines()[-1] == "The base serves."
    assert desk.ledger.entries()[-1].policy == str(desk.fitted.path.parents[1] / "model")
    of_second = "second was taken back before, line 3 of the ledger: complaints"
    assert desk.promote("second", "--check-only").json["notes"] == [of_second]
    nothing = desk.promote("--rollback")
    assert nothing.code == 2
    assert "there is nothing to go back from" in nothing.json["error"]["message"]


def test_a_base_that_was_gone_back_to_is_the_incumbent(desk: Desk) -> None:
    """Also where the candidate was trained from another one; its own baseline is of the wrong policy then."""
    desk.candidate("good")
    graph = f"{desk.fitted.read_config()[1]['graph']}:graph"
    other = tiny_model(desk.folder / "other", seed=5)
    line = {"graph": graph, "run_id": "base", "policy": other, "why": "complaints"}
    desk.ledger.append("rolled_back", weights=policy_hash(other), **line)
    done = desk.promote("good", "--check-only")
    assert done.code == 0
    because = "it is another base than the candidate was trained from"
    assert done.json["incumbent"]["from"] == f"evaluated anew: {because}"
    made = RunFolder(desk.folder / "runs" / done.json["incumbent"]["evaluation"])
    assert made.read_config()[1]["policy"] == str(other)
    shutil.copytree(desk.fitted.path.parents[1] / "model", other, dirs_exist_ok=True)
    changed = desk.promote("good", "--check-only")
    assert changed.code == 1
    assert "The base was accepted to serve by line 1" in changed.json["error"]["message"]
    assert "is not as it was accepted" in changed.json["error"]["message"]
    desk.ledger.append("rolled_back", weights=policy_hash(other), **line)
    assert desk.promote("good", "--check-only").json["incumbent"]["from"] == "the run's own baseline"


def test_a_project_that_was_moved_goes_back_to_its_base(desk: Desk) -> None:
    """The run's config.toml names the base where it stood."""
    run = desk.candidate()
    there, here = desk.fitted.path.parents[1], desk.folder / "toy"
    shutil.copytree(there, here, ignore=shutil.ignore_patterns("runs"))
    config = run.path / "config.toml"
    config.write_text(config.read_text().replace(str(there), "/gone/toy"))
    assert desk.promote("good", here / "graph.py").code == 0
    assert desk.promote("--rollback").json["serving"] == "base"
    assert desk.ledger.entries()[-1].policy == str(here / "model")


def test_what_is_not_as_it_was_accepted_does_not_serve_again(desk: Desk) -> None:
    """Nor is anything held against it."""
    first = desk.candidate("first", after=lambda task: task.metadata["kind"] != "kind-0")
    desk.candidate("second")
    assert [desk.promote(name).code for name in ("first", "second")] == [0, 0]
    template = first.policy / "tokenizer_config.json"
    template.write_text(template.read_text() + " ")
    refused = desk.promote("--rollback")
    assert refused.code == 2
    assert "is not as it was accepted" in refused.json["error"]["message"]
    shutil.rmtree(first.policy)
    assert "isn't there any more" in desk.promote("--rollback").json["error"]["message"]
    assert desk.deeds == [("promoted", "first"), ("promoted", "second")]
    shutil.rmtree(desk.folder / "runs" / "second" / "policy")
    desk.candidate("third")
    done = desk.promote("third")
    assert (done.code, "agenttrain promote --rollback" in done.json["error"]["message"]) == (1, True)


def test_two_that_pass_at_once_do_not_both_win(desk: Desk) -> None:
    """While the gate is at work somebody else promotes: what was decided is decided no more."""
    run = desk.candidate()
    graph = f"{run.read_config()[1]['graph']}:graph"
    line = {"deed": "promoted", "graph": graph, "run_id": "other", "policy": "", "weights": "", "why": "faster"}
    (desk.folder / "meanwhile.json").write_text(json.dumps(line))
    done = desk.promote("good")
    assert done.code == 1
    assert "has grown meanwhile" in done.json["error"]["message"]
    assert desk.deeds == [("promoted", "other")]


def test_a_graph_that_was_moved_is_named_and_one_that_changed_is_no_evidence(desk: Desk) -> None:
    """Today's rules count, whatever the run was made with."""
    desk.candidate()
    moved = desk.folder / "moved" / "toy"
    shutil.copytree(desk.fitted.path.parents[1], moved, ignore=shutil.ignore_patterns("runs"))
    with (moved / "agenttrain.toml").open("a") as file:
        file.write("[promotion]\nmin_difference = 0.99\n")
    done = desk.promote("good", moved / "graph.py", "--check-only")
    assert (failed(done), done.code) == (["difference"], 11)
    assert done.json["notes"] == [
        f"promotion.min_difference = 0.99, from {moved / 'agenttrain.toml'} (the run was made with 0.0)"
    ]
    with (moved / "graph.py").open("a") as file:
        file.write("# one more line\n")
    with (moved / "tasks.jsonl").open("a") as file:
        file.write('{"id": "new", "input": {"messages": []}, "split": "train"}\n')
    done = desk.promote("good", moved / "graph.py", "--check-only", "--set", "promotion.min_difference=0.5")
    figure = (
        "not as it was when the run was made: graph.py or what it imports, the tasks (written since: graph.py, "
        "tasks.jsonl)"
    )
    assert (done.json["rules"][0]["figure"], done.code) == (figure, 10)
    assert {rule["figure"] for rule in done.json["rules"][1:]} == {"not checked: the evidence does not hold"}
    assert list(done.json["next_steps"]) == ["evidence"]
    assert "Nothing else is checked." in done.err.replace("\n", " ")


def test_a_project_that_was_copied_is_promoted_with_the_graph_of_its_ledger(desk: Desk) -> None:
    """The run's config.toml names the one that it was copied from, which still stands."""
    desk.candidate()
    desk.candidate("next")
    copy = desk.folder / "toy"
    shutil.copytree(desk.fitted.path.parents[1], copy, ignore=shutil.ignore_patterns("runs"))
    assert desk.promote("good", copy / "graph.py").code == 0
    done = desk.promote("next")
    assert (done.code, f"agenttrain promote next {copy}/graph.py:graph." in done.json["error"]["message"]) == (2, True)
    assert desk.promote("next", f"{copy}/graph.py:graph", "--check-only").code == 11


def test_a_run_that_has_not_ended_shows_nothing(desk: Desk) -> None:
    desk.candidate().report_json.unlink()
    done = desk.promote("good")
    assert done.code == 10
    assert done.json["rules"][0]["figure"] == "the run has not ended"
    assert {rule["figure"] for rule in done.json["rules"][1:]} == {"not checked: the run has not ended"}
    assert len(done.json["rules"]) == 11


def test_what_is_no_candidate_is_refused(desk: Desk) -> None:
    desk.candidate()
    evaluated = desk.command("eval", desk.fitted.path.parents[1] / "graph.py", "--set", "eval.tasks=1", "--json")
    refused = desk.promote(evaluated.json["run_id"]).json["error"]["message"]
    assert refused.endswith(" is no fit and has no policy. Name the run of a fit. Newest fits there: good.")
    for arguments, said in (
        (["good", "--set", "trainer.steps=3"], "has no say in a promotion"),
        (["good", "--set", "promotion.slice_loss=2"], "promotion.slice_loss in --set is 2"),
        (["good", "--canary=much"], "--canary is 'much'"),
        (
            ["good", "--canary", "0.9"],
            "--canary is 0.9, and the share of the conversations is above 0 and at most 0.5.",
        ),
        (["good", "--canary", "30"], "at most 0.5. For 30 % write --canary 0.3."),
        (["good", "--status", "--rollback"], "--rollback and --status are two things to do"),
        ([], "promote takes a run"),
        (["--rollback"], "nothing to go back from"),
    ):
        done = desk.promote(*arguments)
        assert done.code == 2
        assert said in done.json["error"]["message"]
    assert desk.command("promote", "--status").out == "Nothing was promoted here: the base serves.\n"
    assert not (desk.folder / "promotions").exists()
