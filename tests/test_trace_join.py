"""From a model call's span to its tokens, and what training made of them; and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from agenttrain.capture.store import SqliteStore, read_store
from agenttrain.errors import RunError, SampleError
from agenttrain.figures import UNDONE
from agenttrain.records import (
    CallSite,
    Reward,
    RewardPart,
    Rollout,
    RolloutRequest,
    RolloutResult,
    Sample,
    StepResult,
    Task,
    Turn,
)
from agenttrain.sample.build import build_samples
from agenttrain.trace_join import TraceJoin, trained_by_group
from agenttrain.trajectory.tree import trajectories

STEP_1: Mapping[str, Any] = {"step": 1, "weight_version": 3, "life": 0, "dropped": {}}


def turn(rollout_id: str, index: int, role: str, prompt: tuple[int, ...], response: tuple[int, ...]) -> Turn:
    return Turn(
        id=f"{rollout_id}#{index}",
        rollout_id=rollout_id,
        index=index,
        role=role,  # type: ignore[arg-type]
        role_reason="node: plan",
        site=CallSite(node="plan"),
        prompt_ids=prompt,
        response_ids=response,
        response_logprobs=tuple(-id / 8 for id in response),
        weight_versions=(1,) * len(response),
        extends=f"{rollout_id}#{index - 1}" if index == 1 else None,
        trace_id="ab" * 16,
        span_id=f"{len(rollout_id)}{index}" * 8,
    )


def result(task: str = "t", sibling: int = 0, phase: str = "train") -> RolloutResult:
    """A trained turn of ids 3, 4, a frozen one that goes on from it with id 6, and a call of the user's own model."""
    request = RolloutRequest(task=Task(id=task, input={}), phase=phase, step=1, sibling=sibling)  # type: ignore[arg-type]
    id = request.rollout_id
    turns = (
        turn(id, 0, "trained", (1, 2), (3, 4)),
        turn(id, 1, "frozen", (1, 2, 3, 4, 5), (6,)),
        turn(id, 2, "auxiliary", (), ()),
    )
    rollout = Rollout(
        id=id,
        task_id=task,
        phase=request.phase,
        step=1,
        sibling=sibling,
        attempt=0,
        status="completed",
        reward=Reward(score=1.0, parts=(RewardPart(name="answer", score=1.0),)),
        trace_id="cd" * 16,
        span_id="12" * 8,
    )
    paths = trajectories(turns)
    samples = build_samples(rollout, paths)
    return RolloutResult(request=request, rollout=rollout, turns=turns, trajectories=paths, samples=samples)


def step_of(*results: RolloutResult, advantages: tuple[tuple[float, ...], ...] = ()) -> StepResult:
    """Sampled at version 1, trained at 2, published as 3."""
    return StepResult(
        step=1,
        weight_version=3,
        metrics={},
        trained_rollout_ids=tuple(each.rollout.id for each in results),
        dropped={},
        samples=tuple(sample for each in results for sample in each.samples),
        advantages=advantages,
    )


def joined(
    folder: Path,
    *results: RolloutResult,
    trained: StepResult | None = None,
    steps: tuple[Mapping[str, Any], ...] = (STEP_1,),
) -> TraceJoin:
    store = SqliteStore(folder)
    for each in results:
        for made in each.turns:
            store.put_turn(made)
        store.put_result(each)
    if trained is not None:
        ages = [1] * len(trained.samples)
        store.put_trained(1, 0, trained.samples, advantages=trained.advantages, staleness=ages)
    store.close()
    return TraceJoin(read_store(folder), steps)


def test_from_a_span_to_its_tokens_and_what_training_made_of_them(tmp_path: Path) -> None:
    """By the turn's id or by the span's: range, step, versions, staleness and each token's advantage."""
    made = result()
    join = joined(tmp_path, made, trained=step_of(made, advantages=((0.25, -0.5, 0.0, 0.0),)))
    found = join.of_call(f"{made.rollout.id}#0")
    assert found == join.of_call(made.turns[0].span_id)
    assert found.turn == made.turns[0]
    assert (found.trajectory, found.start, found.end) == (0, 0, 2)
    assert made.trajectories[0].response_ids[found.start : found.end] == found.turn.response_ids
    assert (found.reason, found.step, found.weight_version, found.staleness) == ("", 1, 3, 1)
    assert found.advantages == (0.25, -0.5)


def test_from_a_token_back_to_its_span(tmp_path: Path) -> None:
    """The response is 3 4 (trained), 5 (context), 6 (frozen)."""
    made = result()
    join = joined(tmp_path, made, trained=step_of(made))
    found = [join.of_token(made.rollout.id, 0, position) for position in range(4)]
    assert [each.turn.span_id if each else None for each in found] == [
        made.turns[0].span_id,
        made.turns[0].span_id,
        None,
        made.turns[1].span_id,
    ]


@pytest.mark.parametrize("place", [(0, 4), (0, -1), (1, 0)])
def test_a_token_that_there_is_not(tmp_path: Path, place: tuple[int, int]) -> None:
    made = result()
    with pytest.raises(RunError, match=r"has no token .*Its response tokens: 0:0 to 0:3"):
        joined(tmp_path, made).of_token(made.rollout.id, *place)


def test_an_id_that_no_call_has(tmp_path: Path) -> None:
    join = joined(tmp_path, result())
    for id in ("train-1-t-0-0#9", "00" * 8, ""):
        with pytest.raises(RunError, match="No model call has the id"):
            join.of_call(id)


def test_why_tokens_were_not_trained(tmp_path: Path) -> None:
    """Frozen, the user's own model, an evaluation, the trainer's reason, and a step that was undone."""
    plain, held, equal, undone = result(), result("h", phase="held_out"), result("e"), result("undone")
    steps = ({**STEP_1, "dropped": {equal.rollout.id: "all rewards of its group are equal"}},)
    join = joined(tmp_path, plain, held, equal, undone, steps=steps)
    reasons = [
        join.of_call(id).reason
        for id in (
            plain.turns[1].id,
            plain.turns[2].id,
            held.turns[0].id,
            equal.turns[0].id,
            undone.turns[0].id,
        )
    ]
    assert reasons == [
        "frozen: node: plan",
        "auxiliary: the user's own model answered, and its ids are not known",
        "held_out: evaluations are not trained",
        "dropped: all rewards of its group are equal",
        "dropped: no step that counts was handed it",
    ]


def test_a_step_of_an_earlier_life_that_was_undone_does_not_count(tmp_path: Path) -> None:
    """metrics.jsonl says which life's step counts."""
    made = result()
    join = joined(tmp_path, made, trained=step_of(made), steps=({**STEP_1, "life": 1},))
    found = join.of_call(made.turns[0].id)
    assert (found.step, found.reason) == (None, f"dropped: {UNDONE}")


def test_a_rollout_that_has_not_ended_has_no_place_yet(tmp_path: Path) -> None:
    made = result()
    store = SqliteStore(tmp_path)
    store.put_turn(made.turns[0])
    store.close()
    found = TraceJoin(read_store(tmp_path), ()).of_call(made.turns[0].id)
    assert (found.trajectory, found.reason) == (None, "the call has no ids, or its rollout has not ended")


def test_what_an_update_tells_of_each_rollout() -> None:
    """The mean advantage over trained tokens, the age of the oldest sample, tokens at mask 1; by group."""
    first, second, other = result(), result(sibling=1), result("u")
    credit = ((0.25, 0.75, 0.0, 0.0), (-0.5, -0.5, 0.0, 0.0), (1.0, 1.0, 0.0, 0.0))
    step = step_of(first, second, other, advantages=credit)
    groups = trained_by_group(step, [first, second, other, result("not trained")])
    assert {name: [rollout.rollout_id for rollout in group] for name, group in groups.items()} == {
        "train-1-t": ["train-1-t-0-0", "train-1-t-1-0"],
        "train-1-u": ["train-1-u-0-0"],
    }
    told = groups["train-1-t"][0]
    assert (told.ids, told.n_tokens, told.staleness, told.advantage) == (("cd" * 16, "12" * 8), 2, 1, 0.5)


def test_advantages_that_the_trainer_did_not_tell() -> None:
    ((told,),) = trained_by_group(step_of(result()), [result()]).values()
    assert told.advantage is None


def test_a_sample_newer_than_what_was_trained_is_refused() -> None:
    with pytest.raises(SampleError, match="sampled at weight version 1, and the trainer is at 0"):
        trained_by_group(replace(step_of(result()), weight_version=1), [result()])


# A real run


@pytest.fixture
def traced() -> None:
    """A tracer, so that calls have spans; none is kept."""
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        trace.set_tracer_provider(TracerProvider())


FROZEN_DRAFT = """
builder.add_node("draft", agent)
builder.add_node("agent", agent)
builder.set_entry_point("draft")
builder.add_edge("draft", "agent")
graph = trainable(builder, model=POLICY, tasks="tasks.jsonl", verifier=score, frozen=["draft"])
"""


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
def test_both_ways_agree_over_a_whole_run(new_project: Any, command: Any) -> None:
    """Every sampled token of every rollout leads to its call, and that call's range holds it, with the trained rows'
    own mask and advantages."""
    project = new_project(FROZEN_DRAFT, decorated="")
    assert command("fit", "graph.py", "--set", "trainer.steps=1", "--set", "trainer.tasks_per_step=4").code == 0
    view, rows = project.store, project.run.metrics()
    join = TraceJoin(view, rows)
    handed = {key(sample): sample for sample in view.trained_samples()}
    n_trained = 0
    for made in view.results():
        for path in made.trajectories:
            found = [join.of_token(made.rollout.id, path.index, at) for at in range(len(path.response_ids))]
            for at, call in enumerate(found):
                if call is not None:
                    assert path.response_ids[at] == call.turn.response_ids[at - call.start]
                    assert call == join.of_call(call.turn.span_id)
            mask = tuple(int(call is not None and call.step == 1) for call in found)
            n_trained += sum(mask)
            if (made.rollout.id, path.index) in handed:
                assert mask == handed[made.rollout.id, path.index].response_mask
                (kept,) = {call.advantages for call in found if call is not None and call.step == 1}
                (stored,) = view.trained(made.rollout.id)
                assert kept == tuple(a for a, m in zip(stored.advantages, mask, strict=True) if m)
                assert any(kept)
            else:
                assert not any(mask)
    assert n_trained == rows[0]["tokens_trained"] > 0
    chosen, _ = next(iter(handed))
    check_inspect(command, project.run.id, join.of_call(view.turns(chosen)[-1].id))


def key(sample: Sample) -> tuple[str, int]:
    return sample.extra_fields["rollout_id"], sample.extra_fields["trajectory"]


def check_inspect(command: Any, run: str, found: Any) -> None:
    """`--turn` by both ids, and `--token` back; as text too."""
    shown = command("inspect", run, "--turn", found.turn.span_id, "--json").json
    assert shown == {"call": found.as_dict()}
    rollout, place = found.turn.rollout_id, f"{found.trajectory}:{found.end - 1}"
    assert command("inspect", run, rollout, "--token", place, "--json").json == shown
    said = command("inspect", run, "--turn", found.turn.id, "--logprobs").out
    assert f"turn {found.turn.id}: span {found.turn.span_id} of trace {found.turn.trace_id}\n" in said
    assert "trained in step 1, which published weight version 1; staleness 0\n" in said
    assert f"advantage: {found.advantages[0]:.4f} for each token\n" in said
    assert said.count(" v0 ") == len(found.turn.response_ids)
    frozen = command("inspect", run, "--turn", f"{rollout}#0").out
    assert "not trained: frozen: " in frozen
    for wrong in (("--turn", "a", "--token", "0:0"), (rollout, "--turn", "a"), ("--token", "0:0")):
        assert command("inspect", run, *wrong).err.startswith("ConfigError: --turn takes a RUN alone")
    assert "it takes TRAJECTORY:POSITION" in command("inspect", run, rollout, "--token", "first").err
