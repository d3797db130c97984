"""A run that was killed goes on as if it had not been: what ended is kept, what was under way is made again."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agenttrain.capture.store import SqliteStore, read_store
from agenttrain.checkpoint_folder import DamagedCheckpoint, read_checkpoint, write_checkpoint
from agenttrain.earlier_lives import UNDER_WAY, KeptRollouts, describe_unfinished, newest_whole
from agenttrain.errors import RunError
from agenttrain.figures import UNDONE
from agenttrain.records import CallSite, Rollout, RolloutRequest, RolloutResult, Status, Task, Turn
from agenttrain.run_folder import RunFolder, new_run

KILLED = """
import itertools, os, signal
N = itertools.count(1)

def scored(task, state):
    if os.environ.get("KILL_AT") == str(next(N)):
        os.kill(os.getpid(), signal.SIGKILL)
    return score(task, state)

builder.add_node("agent", agent)
builder.add_node("again", agent)
builder.set_entry_point("agent")
builder.add_edge("agent", "again")
graph = trainable(builder, model=POLICY, tasks="tasks.jsonl", verifier=scored)
"""
"""Dies at the n-th rollout that is scored: the baseline has 3, each of three steps 4, the last evaluation 3."""
IN_PHASE = {2: ("baseline", 0), 5: ("train", 1), 10: ("train", 2), 14: ("train", 3), 17: ("held_out", 0)}
STEPS = 3
SETTINGS = ("--set", f"trainer.steps={STEPS}", "--set", "checkpoint.every=2", "--set", "engine.process=own")
EXACT = ("--set", "run.deterministic=true", "--set", "trainer.minibatches=2", "--set", "engine.concurrency=2")


def killed(project: Any, at: int, *settings: str) -> None:
    """A fit in a process of its own that dies by SIGKILL, and leaves no process behind."""
    command = [sys.executable, "-m", "agenttrain", "fit", "graph.py", *SETTINGS, *settings]
    done = subprocess.run(command, cwd=project.folder, env=os.environ | {"KILL_AT": str(at)}, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()


def places(rollouts: Any, phase: str, step: int) -> Counter[tuple[str, int]]:
    return Counter((r.task_id, r.sibling) for r in rollouts if (r.phase, r.step) == (phase, step))


def weights(run: RunFolder) -> str:
    return hashlib.sha256((run.policy / "model.safetensors").read_bytes()).hexdigest()


def trained(run: RunFolder) -> list[Any]:
    """Place, ids and log probabilities of all that was handed to the loss in the steps that count."""
    view = read_store(run.rollouts)
    made = {rollout.id: (rollout.step, rollout.task_id, rollout.sibling) for rollout in view.rollouts()}
    samples = view.trained_samples({row["step"]: row["life"] for row in run.metrics()})
    return sorted((*made[s.extra_fields["rollout_id"]], s.response_ids, s.response_logprobs) for s in samples)


def check(project: Any, report: dict[str, Any]) -> None:
    """Steps once, all ended, each training rollout trained once or with a reason, the tokens add up."""
    view, rows = project.store, project.run.metrics()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert view.unfinished() == ()
    handed = [(s.extra_fields["rollout_id"], s.extra_fields["trajectory"]) for s in view.trained_samples()]
    assert len(handed) == len(set(handed))
    counted = {rollout_id for rollout_id, _ in handed} | {rollout_id for row in rows for rollout_id in row["dropped"]}
    of_training = [rollout for rollout in view.rollouts() if rollout.phase == "train"]
    by_place = Counter((r.step, r.task_id, r.sibling) for r in of_training if r.id in counted)
    assert (len(by_place), set(by_place.values())) == (STEPS * 4, {1})
    tokens = report["tokens"]
    assert tokens["sampled"] == tokens["trained"] + tokens["frozen"] + tokens["dropped"] > 0
    assert tokens["sampled"] == sum(rollout.n_sampled_ids for rollout in of_training)
    assert tokens["dropped"] == sum(tokens["dropped_by_cause"].values())
    assert set(tokens["dropped_by_cause"]) <= {"all rewards equal", "status aborted", UNDONE}
    assert tokens["drifted"] == 0


def check_lives(project: Any, report: dict[str, Any]) -> None:
    """Time and cost are those of both lives, and the speed of a step that of what its own life made."""
    first, second = project.run.lives()
    assert (first["life"], second["life"], report["lives"]) == (0, 1, 2)
    assert report["wall_s"]["total"] == pytest.approx(first["wall_s"] + second["wall_s"], abs=1e-3)
    assert report["wall_s"]["evaluate"] == pytest.approx(first["evaluate_s"] + second["evaluate_s"], abs=1e-3)
    assert report["cost"]["cpu_hours"] == pytest.approx((first["cpu_s"] + second["cpu_s"]) / 3600)
    assert 0 < second["evaluate_s"] <= second["wall_s"]
    for row in project.run.metrics():
        made = [r for r in project.store.rollouts() if (r.phase, r.step, r.life) == ("train", row["step"], row["life"])]
        sampled = row["tokens_per_s"] * row["rollout_s"]
        assert sampled == pytest.approx(sum(rollout.n_sampled_ids for rollout in made))


def check_kept(project: Any, at: int) -> None:
    """What had ended in the phase of the kill stands; each of its places that had not was made in the second life."""
    phase, step = IN_PHASE[at]
    made = [rollout for rollout in project.store.rollouts() if rollout.status != "aborted"]
    before = places([rollout for rollout in made if rollout.life == 0], phase, step)
    after = places([rollout for rollout in made if rollout.life == 1], phase, step)
    assert set(before.values()) | set(after.values()) <= {1}
    if (phase, step) != ("train", 2):  # its weights came after the only checkpoint there was
        assert not before.keys() & after.keys()
    cut = [rollout for rollout in project.store.rollouts() if rollout.status == "aborted"]
    assert {rollout.cause for rollout in cut} == {UNDER_WAY}
    assert {(rollout.phase, rollout.step) for rollout in cut} == {(phase, step)}


@pytest.mark.parametrize(
    "at",
    [
        *(pytest.param(at, marks=pytest.mark.slow) for at in (2, 14)),
        *(pytest.param(at, marks=pytest.mark.long) for at in (5, 10, 17)),
    ],
)
def test_a_run_killed_anywhere_ends_as_if_it_had_not_been(new_project: Any, command: Any, at: int) -> None:
    """In the baseline, in each step, in the last evaluation."""
    project = new_project(KILLED, decorated="")
    killed(project, at)
    done = command("fit", "--resume", project.run.id, "--json")
    assert done.code == 0, done.err
    check(project, done.json)
    check_lives(project, done.json)
    check_kept(project, at)


@pytest.fixture
def whole(new_project: Any, command: Any) -> Any:
    """A project in which a deterministic run has ended, and its folder, moved aside."""
    project = new_project(KILLED, decorated="")
    done = command("fit", "graph.py", *SETTINGS, *EXACT, "--json")
    assert done.code == 0, done.err
    shutil.move(project.run.path, project.folder / "whole")
    return project, RunFolder(project.folder / "whole")


@pytest.mark.long
def test_a_deterministic_run_killed_anywhere_ends_in_equal_weights(whole: Any, command: Any) -> None:
    """Bit for bit, and the same ids were trained; also when it is killed a second time."""
    project, uninterrupted = whole
    for at in IN_PHASE:
        killed(project, at, *EXACT)
        done = command("fit", "--resume", project.run.id, "--json")
        assert done.code == 0, done.err
        check(project, done.json)
        assert weights(project.run) == weights(uninterrupted), at
        assert trained(project.run) == trained(uninterrupted), at
        shutil.rmtree(project.run.path)


@pytest.mark.long
def test_a_run_killed_in_each_of_its_lives(whole: Any, command: Any) -> None:
    """Every life gets a little further; the last one ends with the weights of a run that was never stopped."""
    project, uninterrupted = whole
    killed(project, 2, *EXACT)
    for at in (4, 5, 6):
        go_on = [sys.executable, "-m", "agenttrain", "fit", "--resume", project.run.id]
        subprocess.run(go_on, cwd=project.folder, env=os.environ | {"KILL_AT": str(at)}, capture_output=True)
    done = command("fit", "--resume", project.run.id, "--json")
    assert done.code == 0, done.err
    assert done.json["lives"] == 5
    check(project, done.json)
    assert weights(project.run) == weights(uninterrupted)
    assert trained(project.run) == trained(uninterrupted)


def test_a_run_is_worked_on_by_one_process(project: Any, command: Any) -> None:
    """A second one is refused, whoever it is, until the first has ended or died."""
    run = new_run(project.folder / "runs", "desk")
    with run.held(), pytest.raises(RunError, match="is being worked on by another process"), run.held():
        pass
    with run.held():
        pass


@pytest.mark.slow
def test_a_verifier_that_changed_between_two_lives_is_told(new_project: Any) -> None:
    """The baseline that stands was scored by another one, so that no promotion may build on the difference."""
    project = new_project()
    fit = [sys.executable, "-m", "agenttrain", "fit", "--json"]
    done = subprocess.run([*fit, "graph.py", "--set", "trainer.steps=1"], cwd=project.folder, capture_output=True)
    assert done.returncode == 0, done.stderr
    graph = project.folder / "graph.py"
    graph.write_text(graph.read_text().replace("% 5 / 4", "% 3 / 2"))
    go_on = [*fit, "--resume", project.run.id, "--set", "trainer.steps=2"]
    done = subprocess.run(go_on, cwd=project.folder, capture_output=True)
    assert done.returncode == 0, done.stderr
    told = [alarm for alarm in json.loads(done.stdout)["alarms"] if alarm["code"] == "changed_since_begun"]
    assert [alarm["severity"] for alarm in told] == ["loud"]
    assert told[0]["message"].startswith("Not as it was when the run began: graph, verifier. ")


# Checkpoints


@pytest.fixture
def fitted(project: Any, command: Any) -> Any:
    done = command("fit", "graph.py", "--set", "trainer.steps=3", "--set", "checkpoint.every=1")
    assert done.code == 0, done.err
    return project


def flip(file: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_left_for_the_one_before_it(fitted: Any, command: Any) -> None:
    """Said when it goes on and in the report; what came after the older one is made again, and stands once."""
    run = fitted.run
    flip(run.checkpoints / "step-00003" / "weights.safetensors")
    done = command("fit", "--resume", run.id, "--json", "--set", "trainer.steps=4", "--set", "checkpoint.keep=9")
    assert done.code == 0, done.err
    told = "weights.safetensors has other content than was written: some of its bytes have changed. "
    told += "That checkpoint was moved aside; the run went on from step 2, and made again what came after it."
    assert told in done.err
    (alarm,) = [alarm for alarm in done.json["alarms"] if alarm["code"] == "checkpoint_damaged"]
    assert (alarm["severity"], alarm["step"]) == ("note", 2)
    assert told in alarm["message"]
    assert [(row["step"], row["life"]) for row in run.metrics()] == [(1, 0), (2, 0), (3, 1), (4, 1)]
    assert [step for step, _ in run.checkpoint_folders()] == [2, 3, 4]
    assert (run.checkpoints / "step-00003.damaged").is_dir()
    third = [rollout.life for rollout in fitted.store.rollouts() if (rollout.phase, rollout.step) == ("train", 3)]
    assert third == [0, 0, 0, 0]  # sampled from the weights of step 2, which are whole


@pytest.mark.slow
def test_without_a_whole_checkpoint_the_run_does_not_begin_again_in_silence(fitted: Any, command: Any) -> None:
    """Every one is named with its fault, and nothing is touched."""
    run = fitted.run
    for _, folder in run.checkpoint_folders():
        flip(folder / "optimizer.pt")
    rows, report = run.metrics(), run.read_report()
    done = command("fit", "--resume", run.id, "--set", "trainer.steps=4")
    assert done.code == 1
    assert f"RunError: No checkpoint of {run.id} is whole: " in done.err
    assert done.err.count("optimizer.pt has other content than was written") == 2
    assert [step for step, _ in run.checkpoint_folders()] == [2, 3]
    assert (run.metrics(), run.read_report()) == (rows, report)


@pytest.mark.slow
def test_a_damaged_store_is_told_before_anything_is_touched(fitted: Any, command: Any) -> None:
    """With the file moved away the run goes on, and makes again what it needs."""
    run = fitted.run
    (file,) = run.rollouts.glob("*.db")
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))
    done = command("fit", "--resume", run.id, "--set", "trainer.steps=4")
    assert done.code == 1
    assert f"RunError: {file} can't be read: " in done.err
    assert "Move the file and its -wal away to go on with the others" in done.err
    assert run.read_report() is not None
    file.rename(file.with_suffix(".damaged"))
    done = command("fit", "--resume", run.id, "--json", "--set", "trainer.steps=4")
    assert done.code == 0, done.err
    assert (done.json["steps"], done.json["tokens"]["drifted"]) == (4, 0)


def test_the_newest_whole_checkpoint_is_found(tmp_path: Path) -> None:
    """Damaged ones before it are no reason to speak; a second damaged folder of one name is kept too."""
    run = new_run(tmp_path, "desk")
    assert newest_whole(run) == (None, [])
    for _ in range(2):
        for step in (1, 2, 3):
            target = run.checkpoints / f"step-{step:05d}"
            write_checkpoint(target, step=step, life=0, save=lambda folder: (folder / "a").write_bytes(b"abc") and None)
        for step in (1, 3):
            flip(run.checkpoints / f"step-{step:05d}" / "a")
        found, (fault,) = newest_whole(run)
        assert found == read_checkpoint(run.checkpoints / "step-00002")
        assert fault.startswith(f"{run.checkpoints / 'step-00003' / 'a'} has other content")
    assert sorted(path.name for path in run.checkpoints.iterdir()) == [
        "step-00001", "step-00002", "step-00003.damaged", "step-00003.damaged1",
    ]  # fmt: skip
    with pytest.raises(DamagedCheckpoint):
        read_checkpoint(run.checkpoints / "step-00001")


# What is kept


def result(
    sibling: int, status: Status, *, attempt: int = 0, remake: int = 0, life: int = 0, version: int = 0
) -> RolloutResult:
    request = RolloutRequest(
        task=Task(id="t", input={}), phase="train", step=1, sibling=sibling, attempt=attempt, remake=remake, life=life
    )
    id = request.rollout_id
    rollout = Rollout(
        id=id, task_id="t", phase="train", step=1, sibling=sibling, attempt=attempt, remake=remake, life=life,
        status=status,
    )  # fmt: skip
    turn = Turn(
        id=f"{id}#0", rollout_id=id, index=0, role="trained", role_reason="", site=CallSite(), prompt_ids=(1,),
        response_ids=(2,), response_logprobs=(-0.5,), weight_versions=(version,), break_cause="first_turn",
    )  # fmt: skip
    return RolloutResult(request=request, rollout=rollout, turns=(turn,), trajectories=(), samples=())


def of_version_0(seen: RolloutResult) -> bool:
    return seen.turns[0].weight_versions == (0,)


@pytest.mark.parametrize(
    ("made", "kept", "again"),
    [
        ([result(0, "completed")], 0, None),
        ([result(0, "policy_failure")], 0, None),
        ([result(0, "completed", version=1)], None, (0, 0)),
        ([result(0, "environment_failure")], None, (1, 0)),
        ([result(0, "environment_failure", attempt=a) for a in (0, 1, 2)], 2, None),
        ([result(0, "environment_failure"), result(0, "aborted", attempt=1)], None, (1, 0)),
        ([result(0, "environment_failure"), result(0, "completed", attempt=1)], 1, None),
        ([result(0, "aborted")], None, (0, 0)),
        ([result(0, "incomplete")], None, (0, 1)),
        ([result(0, "incomplete", remake=r) for r in (0, 1, 2)], 2, None),
        ([result(0, "aborted"), result(0, "completed", life=1)], 1, None),
        ([result(0, "completed", version=1, life=1), result(0, "completed")], 1, None),
        ([], None, (0, 0)),
    ],
)  # fmt: skip
def test_what_is_kept_and_what_follows(made: list[Any], kept: int | None, again: tuple[int, int] | None) -> None:
    """A usable or final ending stands; failures keep their count; what was cut off begins again with the same seed."""
    request = RolloutRequest(task=Task(id="t", input={}), phase="train", step=1)
    gone_on = KeptRollouts([*reversed(made), result(1, "completed")]).go_on([request], of_version_0)
    assert gone_on.kept == ({} if kept is None else {0: made[kept]})
    assert [(each.attempt, each.remake) for each in gone_on.open.values()] == ([] if again is None else [again])
    assert [each.rollout.status for each in gone_on.earlier] == [
        each.rollout.status for each in made if each.rollout.status != "aborted" and of_version_0(each)
    ]


def test_kept_and_made_results_stand_in_the_order_of_the_requests() -> None:
    """And a place that has been asked for is not kept for a second time."""
    requests = [RolloutRequest(task=Task(id="t", input={}), phase="train", step=1, sibling=i) for i in range(4)]
    kept = KeptRollouts([result(i, "completed") for i in (1, 3)])
    gone_on = kept.go_on(requests, of_version_0)
    assert [request.sibling for request in gone_on.open.values()] == [0, 2]
    completed = gone_on.completed([result(0, "truncated"), result(2, "truncated")])
    assert [(each.request.sibling, each.rollout.status) for each in completed] == [
        (0, "truncated"), (1, "completed"), (2, "truncated"), (3, "completed"),
    ]  # fmt: skip
    assert len(kept.go_on(requests, of_version_0).open) == 4


def test_a_rollout_that_was_under_way_is_told_with_what_it_had(tmp_path: Path) -> None:
    """Aborted, with its turns, its lost call and its tokens, read from one file; telling it twice changes nothing."""
    left = result(0, "completed")
    first = SqliteStore(tmp_path)
    first.put_begun(left.request, started_at=5.0)
    first.put_intent(turn_id=left.turns[0].id, rollout_id=left.rollout.id, started_at=5.0)
    first.put_turn(left.turns[0])
    first.put_intent(turn_id=f"{left.rollout.id}#1", rollout_id=left.rollout.id, started_at=6.0)
    first.close()
    for life, found in ((1, 1), (2, 0)):
        store = SqliteStore(tmp_path)
        assert describe_unfinished(read_store(tmp_path), store) == found, life
        store.close()
    view = read_store(tmp_path)
    (told,) = view.results()
    assert (told.rollout.status, told.rollout.cause, told.rollout.n_sampled_ids) == ("aborted", UNDER_WAY, 1)
    assert told.turns == left.turns
    assert [trajectory.response_ids for trajectory in told.trajectories] == [(2,)]
    assert told.samples == ()
    assert [call.turn_id for call in view.lost_calls()] == [f"{left.rollout.id}#1"]
