"""What was put is read back equal, whatever happens to the process that wrote it."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agenttrain.capture.rows import result_rows, rollout_of, turn_row
from agenttrain.capture.store import Intent, SqliteStore, read_store
from agenttrain.errors import CaptureError, RunError
from agenttrain.records import (
    RECORD_VERSION,
    CallSite,
    Reward,
    RewardPart,
    Rollout,
    RolloutRequest,
    RolloutResult,
    RoutedExperts,
    Sample,
    Sampling,
    Task,
    Trajectory,
    Turn,
    TurnSpan,
)
from agenttrain.sample.build import build_samples
from agenttrain.testing import strategies
from agenttrain.trajectory.tree import trajectories

LOGPROBS = st.floats(max_value=0.0, allow_nan=False)
IDS = st.integers(0, 2**31 - 1)


def turn(id: str = "a", rollout_id: str = "r", **more: Any) -> Turn:
    return Turn(
        **{
            "id": id, "rollout_id": rollout_id, "index": 0, "role": "trained", "role_reason": "default",
            "site": CallSite(node="agent", tags=("x", "y"), checkpoint_ns="a:1|agent:2", attempts=(2, 1)),
            "prompt_ids": (1, 2), "response_ids": (3,),
            "response_logprobs": (-0.1,), "weight_versions": (0,), "break_cause": "first_turn",
            "sampling": Sampling(temperature=1.0, max_tokens=9, seed=2**63 - 1, stop_ids=(2,)),
        }
        | more
    )  # fmt: skip


def result(*, rollout_id: str = "r", task: Task | None = None) -> RolloutResult:
    trajectory = Trajectory(
        rollout_id=rollout_id, index=0, prompt_ids=(1, 2), response_ids=(3, 4), response_mask=(1, 0),
        response_logprobs=(-0.1, 0.0), weight_versions=(0, -1), break_cause="first_turn",
        spans=(TurnSpan(turn_id="a", start=0, end=1, trained=True),),
    )  # fmt: skip
    reward = Reward(score=0.5, parts=(RewardPart(name="answer", score=0.5, comment="half"),))
    return RolloutResult(
        request=RolloutRequest(task=task or Task(id="t", input={"messages": ["hi"]}), phase="train", step=1, seed=7),
        rollout=Rollout(
            id=rollout_id, task_id="t", phase="train", step=1, sibling=0, attempt=0, status="completed", reward=reward,
            started_at=1.5,
        ),
        turns=(turn(rollout_id=rollout_id),),
        trajectories=(trajectory,),
        samples=(
            Sample(
                prompt_ids=(1, 2), response_ids=(3, 4), response_mask=(1, 0), response_logprobs=(-0.1, 0.0),
                reward_score=0.5, num_turns=1, metrics={"seconds": 1.0},
                extra_fields={"rollout_id": rollout_id, "reward_extra_info": {"answer": 0.5}},
            ),
        ),
    )  # fmt: skip


def test_a_result_is_read_back_equal(tmp_path: Path) -> None:
    store, written = SqliteStore(tmp_path), result()
    store.put_turn(written.turns[0])
    store.put_result(written)
    store.close()
    view = read_store(tmp_path)
    assert list(view.results()) == [written]
    assert view.rollouts() == (written.rollout,)
    assert view.rollout("r") == written.rollout
    assert view.turns("r") == written.turns
    assert view.trajectories("r") == written.trajectories


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(IDS, LOGPROBS, st.integers(0, 2**31 - 1)), max_size=8), st.lists(IDS, max_size=8))
def test_ids_and_log_probabilities_come_back_exactly(
    tmp_path_factory: pytest.TempPathFactory, sampled: list[tuple[int, float, int]], prompt: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("store")
    ids, logprobs, versions = zip(*sampled, strict=True) if sampled else ((), (), ())
    written = turn(prompt_ids=tuple(prompt), response_ids=ids, response_logprobs=logprobs, weight_versions=versions)
    store = SqliteStore(folder)
    store.put_turn(written)
    store.close()
    (read,) = read_store(folder).turns("r")
    assert read == written
    assert [value.hex() for value in read.response_logprobs] == [value.hex() for value in logprobs]


def test_an_auxiliary_turn_without_ids_or_sampling_is_read_back_equal(tmp_path: Path) -> None:
    written = turn(
        role="auxiliary", prompt_ids=(), response_ids=(), response_logprobs=(), weight_versions=(), sampling=None
    )
    store = SqliteStore(tmp_path)
    store.put_turn(written)
    store.close()
    assert read_store(tmp_path).turns("r") == (written,)


def test_a_call_without_a_turn_is_lost(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    store.put_intent(turn_id="a", rollout_id="r", started_at=1.0)
    store.put_intent(turn_id="b", rollout_id="r", started_at=2.0)
    store.put_turn(turn("a"))
    store.flush()
    assert read_store(tmp_path).lost_calls() == (Intent(turn_id="b", rollout_id="r", started_at=2.0),)
    assert len(read_store(tmp_path).intents()) == 2
    store.close()


def test_an_equal_record_may_be_put_again(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    for _ in range(2):
        store.put_turn(turn())
        store.put_result(result())
        store.put_intent(turn_id="a", rollout_id="r", started_at=1.0)
    store.close()
    assert len(read_store(tmp_path).turns("r")) == 1


def test_a_different_record_under_one_id_is_refused_and_so_is_all_after_it(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    store.put_turn(turn())
    store.flush()
    store.put_turn(turn(response_logprobs=(-0.2,)))
    with pytest.raises(CaptureError, match="a was put into turns twice with different content"):
        store.flush()
    with pytest.raises(CaptureError):
        store.put_turn(turn("b"))
    with pytest.raises(CaptureError):
        store.close()
    assert read_store(tmp_path).turns("r") == (turn(),)


def test_the_files_of_several_processes_are_merged(tmp_path: Path) -> None:
    one, two = SqliteStore(tmp_path), SqliteStore(tmp_path)
    for store, id in ((one, "r1"), (two, "r2")):
        store.put_turn(turn(f"{id}#0", id))
        store.put_result(result(rollout_id=id))
        store.flush()
    view = read_store(tmp_path)
    assert [rollout.id for rollout in view.rollouts()] == ["r1", "r2"]
    assert [each.id for id in ("r1", "r2") for each in view.turns(id)] == ["r1#0", "r2#0"]
    one.close()
    two.close()


def test_a_rollout_that_was_made_again_is_read_from_the_process_that_finished_it_last(tmp_path: Path) -> None:
    """A killed process left a turn and a lost call; the resumed one makes the rollout again under the same id."""
    killed, resumed, other = (SqliteStore(tmp_path) for _ in range(3))
    killed.put_turn(turn("r#0", response_logprobs=(-0.1,)))
    killed.put_intent(turn_id="r#1", rollout_id="r", started_at=1.0)
    killed.flush()
    assert [call.turn_id for call in read_store(tmp_path).lost_calls()] == ["r#1"]
    resumed.put_intent(turn_id="r#0", rollout_id="r", started_at=2.0)
    resumed.put_turn(turn("r#0", response_logprobs=(-0.2,)))
    resumed.put_result(result())
    resumed.flush()
    other.put_intent(turn_id="r#0", rollout_id="r", started_at=3.0)
    other.flush()
    view = read_store(tmp_path)
    assert [each.response_logprobs for each in view.turns("r")] == [(-0.2,)]
    assert [each.response_logprobs for each in next(view.results()).turns] == [(-0.2,)]
    assert view.lost_calls() == ()
    for store in (killed, resumed, other):
        store.close()


def trained(id: str, place: int = 0) -> Sample:
    (sample,) = result(rollout_id=id).samples
    return replace(sample, extra_fields={"rollout_id": id, "trajectory": place})


def test_what_a_step_handed_to_its_loss_is_read_back_equal(tmp_path: Path) -> None:
    store, samples = SqliteStore(tmp_path), [trained("r"), trained("r", 1), trained("s")]
    store.put_trained(1, 0, samples)
    store.close()
    assert read_store(tmp_path).trained_samples() == samples


def test_of_a_step_that_was_made_again_after_a_resume_the_last_time_counts(tmp_path: Path) -> None:
    for life, ids in ((0, ["r", "s"]), (1, ["s"])):
        store = SqliteStore(tmp_path)
        store.put_trained(1, life, [trained(id) for id in ids])
        store.close()
    assert read_store(tmp_path).trained_samples() == [trained("s")]


def test_a_trajectory_that_is_trained_again_in_another_step_fails(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    store.put_trained(1, 0, [trained("r")])
    store.put_trained(2, 0, [trained("r")])
    with pytest.raises(CaptureError, match="r was put into trained twice"):
        store.close()


def test_a_task_is_kept_as_it_was_when_it_was_put(tmp_path: Path) -> None:
    """Graphs change their input in place."""
    messages = ["hi"]
    store = SqliteStore(tmp_path)
    store.put_result(result(task=Task(id="t", input={"messages": messages})))
    messages.append("changed")
    store.close()
    (read,) = read_store(tmp_path).results()
    assert read.request.task.input == {"messages": ["hi"]}


def test_what_json_cant_hold_is_kept_as_its_repr(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    store.put_result(result(task=Task(id="t", input={"when": {1, 2}})))
    store.close()
    (read,) = read_store(tmp_path).results()
    assert read.request.task.input == {"when": "{1, 2}"}


def test_what_was_flushed_survives_kill_9(tmp_path: Path) -> None:
    """The WAL of a killed process is hot: it holds what the file does not."""
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "flushed\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    (path,) = tmp_path.glob("*.db")
    assert path.with_name(path.name + "-wal").stat().st_size > 0
    assert [call.turn_id for call in read_store(tmp_path).lost_calls()] == [str(i) for i in range(100)]


WRITER = textwrap.dedent(
    """
    import sys, time
    from pathlib import Path
    from agenttrain.capture.store import SqliteStore

    store = SqliteStore(Path(sys.argv[1]))
    for i in range(100):
        store.put_intent(turn_id=str(i), rollout_id="r", started_at=float(i))
    store.flush()
    print("flushed", flush=True)
    time.sleep(60)
    """
)

FULL = textwrap.dedent(
    """
    import resource, signal, sys
    from pathlib import Path
    from agenttrain.capture.store import SqliteStore, read_store
    from agenttrain.errors import RunError

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    store = SqliteStore(Path(sys.argv[1]))
    store.put_intent(turn_id="before", rollout_id="r", started_at=0.0)
    store.flush()
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
    for i in range(20_000):
        try:
            store.put_intent(turn_id=str(i), rollout_id="r" * 100, started_at=float(i))
        except RunError:
            break
    for act in (store.flush, lambda: store.put_intent(turn_id="x", rollout_id="r", started_at=0.0), store.close):
        try:
            act()
        except RunError as error:
            print(str(error))
    print(read_store(Path(sys.argv[1])).intents()[0].turn_id)
    """
)


def test_a_full_disk_is_told_at_every_put_and_flush_and_loses_nothing_before(tmp_path: Path) -> None:
    """The size limit of a process stands in for a full disk: SQLite sees a write that fails."""
    told = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=True)
    *errors, first = told.stdout.splitlines()
    assert first == "before"
    assert len(errors) == 3
    assert all("can't be written" in error and "agenttrain fit --resume" in error for error in errors)


def test_a_folder_that_cant_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="can't be made"):
        SqliteStore(tmp_path / "file" / "rollouts")


def test_a_closed_store_refuses_puts_and_may_be_closed_again(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    store.close()
    store.close()
    with pytest.raises(RunError, match="was closed"):
        store.put_turn(turn())


def test_records_of_a_higher_version_are_refused(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    store.close()
    connection = sqlite3.connect(store.path)
    connection.execute(f"PRAGMA user_version={RECORD_VERSION + 1}")
    connection.close()
    with pytest.raises(RunError, match=f"records of version {RECORD_VERSION + 1}, and this agenttrain reads up to"):
        read_store(tmp_path)


def test_a_damaged_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "1-a.db").write_bytes(b"no database at all" * 100)
    with pytest.raises(RunError, match=r"1-a\.db can't be read"):
        read_store(tmp_path)


def test_a_process_that_was_killed_before_its_first_record_left_nothing(tmp_path: Path) -> None:
    (tmp_path / "1-a.db").write_bytes(b"")
    assert read_store(tmp_path).rollouts() == ()


def test_a_missing_folder_and_a_missing_rollout_are_told(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is no folder"):
        read_store(tmp_path / "nowhere")
    store = SqliteStore(tmp_path)
    store.put_result(replace(result(), turns=()))
    store.close()
    with pytest.raises(RunError, match=r"no finished rollout 'x'\. Rollouts there: r"):
        read_store(tmp_path).rollout("x")


def test_a_rollout_that_was_begun_and_not_ended_is_seen(tmp_path: Path) -> None:
    """By its request, with the task as it was; one that any process finished is none."""
    request = RolloutRequest(task=Task(id="t", input={"messages": ["hi"]}), phase="train", step=1, seed=7)
    killed, resumed = SqliteStore(tmp_path), SqliteStore(tmp_path)
    for sibling in range(3):
        killed.put_begun(replace(request, sibling=sibling), started_at=float(9 - sibling))
    killed.flush()
    resumed.put_result(result(rollout_id="train-1-t-1-0"))
    resumed.flush()
    unfinished = read_store(tmp_path).unfinished()
    assert [(each.request.rollout_id, each.started_at) for each in unfinished] == [
        ("train-1-t-0-0", 9.0),
        ("train-1-t-2-0", 7.0),
    ]
    assert unfinished[0].request == request
    killed.close()
    resumed.close()


def test_a_file_that_was_moved_away_leaves_its_number_free(tmp_path: Path) -> None:
    """As the message on a damaged file says to do: the next one comes after all that are there."""
    for _ in range(3):
        SqliteStore(tmp_path).close()
    first, *others = sorted(tmp_path.glob("*.db"))
    first.unlink()
    SqliteStore(tmp_path).close()
    *before, last = sorted(tmp_path.glob("*.db"))
    assert before == others
    assert last.name.startswith("00003-")


def test_the_file_that_was_made_last_counts_whatever_the_clock_said(tmp_path: Path) -> None:
    """Files are numbered; their times and the ids of their processes order nothing."""
    for logprob in (-0.1, -0.2, -0.3):
        store = SqliteStore(tmp_path)
        store.put_turn(turn("r#0", response_logprobs=(logprob,)))
        store.put_result(result())
        store.close()
        os.utime(store.path, (0, 0))
    assert [path.name[:6] for path in read_store(tmp_path).paths()] == ["00000-", "00001-", "00002-"]
    assert read_store(tmp_path).turns("r")[0].response_logprobs == (-0.3,)


@pytest.mark.parametrize("damage", ["overwritten", "cut short"])
def test_a_file_damaged_in_its_middle_is_told(tmp_path: Path, damage: str) -> None:
    """At the first look that reaches it, and by `refuse_damaged` before anything builds on it."""
    store = SqliteStore(tmp_path)
    for i in range(200):
        store.put_result(result(rollout_id=f"r{i}"))
    store.close()
    content = bytearray(store.path.read_bytes())
    middle = len(content) // 2
    store.path.write_bytes(
        content[: middle + 7] if damage == "cut short" else content[:middle] + bytes(len(content) - middle)
    )
    with pytest.raises(RunError, match=f"{store.path.name} can't be read: .* Move the file and its -wal away"):
        read_store(tmp_path).refuse_damaged()
    with pytest.raises(RunError, match=f"{store.path.name} can't be read: "):
        list(read_store(tmp_path).results())


def test_a_whole_file_passes(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    store.put_result(result())
    store.close()
    read_store(tmp_path).refuse_damaged()


def test_what_a_trained_sample_was_worth_is_read_back_equal(tmp_path: Path) -> None:
    """Advantages that are equal, that differ by token, or that were not told; and each sample's staleness."""
    longer = {"response_ids": (3, 4, 5), "response_mask": (1, 0, 1), "response_logprobs": (-0.1, 0.0, -0.2)}
    samples = [replace(trained(id), **longer) for id in "abc"]
    equal, differing = (0.1, 0.0, 0.1), (1 / 3, 0.0, -0.7)
    store = SqliteStore(tmp_path)
    store.put_trained(4, 1, samples[:2], advantages=[equal, differing], staleness=[0, 2])
    store.put_trained(5, 1, samples[2:])
    store.close()
    view = read_store(tmp_path)
    told = [each for id in "abc" for each in view.trained(id)]
    assert [each.advantages for each in told] == [equal, differing, ()]
    assert [(each.step, each.life, each.staleness) for each in told] == [(4, 1, 0), (4, 1, 2), (5, 1, None)]
    assert [each.sample for each in told] == samples


def test_a_turn_is_found_by_its_id_and_by_its_spans(tmp_path: Path) -> None:
    made = replace(result().turns[0], id="r#0", rollout_id="r", span_id="ab" * 8)
    store = SqliteStore(tmp_path)
    store.put_turn(made)
    store.close()
    view = read_store(tmp_path)
    assert view.turn("r#0") == view.turn_of_span("ab" * 8) == made
    assert view.turn("r#1") is view.turn_of_span("") is view.turn_of_span("cd" * 8) is None


# Routed experts


def experts(start: int, end: int) -> RoutedExperts:
    rows = np.arange(start * 6, end * 6, dtype="<u2") * 11
    return RoutedExperts(start=start, n_layers=3, n_chosen=2, data=rows.tobytes())


def routed_result() -> RolloutResult:
    """Two turns and a branch off the first; all tell."""
    turns = (
        turn("a", routed_experts=experts(0, 2)),
        turn("b", index=1, prompt_ids=(1, 2, 3, 4), response_ids=(5,), extends="a", routed_experts=experts(2, 4)),
        turn("c", index=2, prompt_ids=(1, 2, 3, 9), response_ids=(6,), extends="a", routed_experts=experts(2, 4)),
    )
    plain = result()
    paths = trajectories(turns)
    return replace(plain, turns=turns, trajectories=paths, samples=build_samples(plain.rollout, paths))


def put(folder: Path, written: RolloutResult) -> SqliteStore:
    store = SqliteStore(folder)
    for each in written.turns:
        store.put_turn(each)
    store.put_result(written)
    store.close()
    return store


def test_routed_experts_are_read_back_equal_and_are_written_once(tmp_path: Path) -> None:
    """A path's rows are those of its turns, of the branch's history too; only the turns' rows hold any."""
    written = routed_result()
    assert [path.routed_experts for path in written.trajectories] == [experts(0, 4), experts(0, 4)]
    store = put(tmp_path, written)
    view = read_store(tmp_path)
    assert list(view.results()) == [written]
    assert view.trajectories("r") == written.trajectories
    connection = sqlite3.connect(store.path)
    for table in ("trajectories", "samples"):
        assert connection.execute(f"SELECT routed_experts FROM {table}").fetchall() == [(b"",), (b"",)]
    connection.close()


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(strategies.results())
def test_any_result_is_read_back_equal(tmp_path_factory: pytest.TempPathFactory, written: RolloutResult) -> None:
    folder = tmp_path_factory.mktemp("store")
    put(folder, written)
    assert list(read_store(folder).results()) == [written]


def test_experts_that_are_not_those_of_the_turns_are_kept_as_they_are(tmp_path: Path) -> None:
    """Nothing is lost where somebody else made the trajectories, or left them out of the samples."""
    made = routed_result()
    other = replace(made.trajectories[0], routed_experts=replace(experts(1, 5), start=0))
    bare = tuple(replace(sample, routed_experts=None) for sample in made.samples)
    written = replace(made, trajectories=(other, made.trajectories[1]), samples=bare)
    put(tmp_path, written)
    assert list(read_store(tmp_path).results()) == [written]


def test_a_trained_sample_is_kept_without_its_experts(tmp_path: Path) -> None:
    sample = routed_result().samples[0]
    store = SqliteStore(tmp_path)
    store.put_trained(1, 0, [sample])
    store.close()
    assert read_store(tmp_path).trained_samples() == [replace(sample, routed_experts=None)]


def test_a_result_whose_turns_are_missing_is_told(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    store.put_result(routed_result())
    store.close()
    with pytest.raises(CaptureError, match="rollout r takes its routed experts from turns that its file has not"):
        list(read_store(tmp_path).results())


SCHEMA_2 = """
CREATE TABLE begun (rollout_id TEXT PRIMARY KEY, started_at REAL NOT NULL, body TEXT NOT NULL);
CREATE TABLE intents (turn_id TEXT PRIMARY KEY, rollout_id TEXT NOT NULL, started_at REAL NOT NULL);
CREATE INDEX intents_of_rollout ON intents (rollout_id);
CREATE TABLE turns (id TEXT PRIMARY KEY, rollout_id TEXT NOT NULL, body TEXT NOT NULL, prompt_ids BLOB NOT NULL,
    response_ids BLOB NOT NULL, response_logprobs BLOB NOT NULL, weight_versions BLOB NOT NULL);
CREATE INDEX turns_of_rollout ON turns (rollout_id);
CREATE TABLE results (rollout_id TEXT PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE trajectories (rollout_id TEXT NOT NULL, place INTEGER NOT NULL, body TEXT NOT NULL,
    prompt_ids BLOB NOT NULL, response_ids BLOB NOT NULL, response_mask BLOB NOT NULL, response_logprobs BLOB NOT NULL,
    weight_versions BLOB NOT NULL, PRIMARY KEY (rollout_id, place));
CREATE TABLE samples (rollout_id TEXT NOT NULL, place INTEGER NOT NULL, body TEXT NOT NULL, prompt_ids BLOB NOT NULL,
    response_ids BLOB NOT NULL, response_mask BLOB NOT NULL, response_logprobs BLOB NOT NULL,
    PRIMARY KEY (rollout_id, place));
CREATE TABLE trained (rollout_id TEXT NOT NULL, place INTEGER NOT NULL, step INTEGER NOT NULL, life INTEGER NOT NULL,
    body TEXT NOT NULL, prompt_ids BLOB NOT NULL, response_ids BLOB NOT NULL, response_mask BLOB NOT NULL,
    response_logprobs BLOB NOT NULL, staleness INTEGER, advantages BLOB NOT NULL, PRIMARY KEY (rollout_id, place));
"""
"""What agenttrain wrote before it knew routed experts."""


def test_a_reward_of_before_there_were_layers_is_read() -> None:
    """Its parts are outcomes without evidence, and no gate decided it: records before version 5."""
    part = {"name": "answer", "score": 0.5, "weight": 2.0, "comment": "half"}
    body = {"score": 1.0, "parts": [part], "unfinished": 0.0}
    rollout = {
        "id": "r",
        "task_id": "t",
        "phase": "train",
        "step": 1,
        "sibling": 0,
        "attempt": 0,
        "status": "completed",
    }
    assert rollout_of({**rollout, "reward": body}).reward == Reward(
        score=1.0, parts=(RewardPart(name="answer", score=0.5, weight=2.0, comment="half"),)
    )


def test_a_part_is_read_back_with_its_layer(tmp_path: Path) -> None:
    """Kind, evidence and error, and the gate that decided."""
    evidence = {"exit_code": 1, "checks": [{"name": "adds", "passed": False, "reason": "3 != 4"}], "n": [1, None, 0.5]}
    parts = (
        RewardPart(name="gate", score=0.0, weight=0.0, kind="safety", evidence=evidence),
        RewardPart(name="style", score=0.0, weight=0.0, kind="process", error="hung"),
    )
    written = result()
    reward = Reward(score=-1.0, parts=parts, closed="gate")
    written = replace(written, rollout=replace(written.rollout, reward=reward), turns=(), trajectories=(), samples=())
    store = SqliteStore(tmp_path)
    store.put_result(written)
    store.close()
    assert read_store(tmp_path).rollout("r").reward == reward


def test_records_of_version_2_are_read(tmp_path: Path) -> None:
    written = result()
    connection = sqlite3.connect(tmp_path / "00000-1-0a0b0c0d.db")
    connection.executescript(SCHEMA_2 + "PRAGMA user_version=2;")
    n_columns = {"turns": 7, "trajectories": 8, "samples": 7, "results": 2}
    for table, values in [*map(turn_row, written.turns), *result_rows(written)]:
        kept = [as_version_2(each) if isinstance(each, str) else each for each in values[: n_columns[table]]]
        connection.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(kept))})", kept)
    connection.commit()
    connection.close()
    view = read_store(tmp_path)
    assert list(view.results()) == [written]
    assert view.turns("r") == written.turns
    assert view.trajectories("r") == written.trajectories


def as_version_2(text: str) -> str:
    """A body without what version 3 brought; other texts as they are."""
    if not text.startswith("{"):
        return text
    body = json.loads(text)
    body.pop("routed_experts", None)
    if body.get("sampling"):
        del body["sampling"]["experts_from"]
    return json.dumps(body)
