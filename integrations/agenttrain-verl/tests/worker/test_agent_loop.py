"""veRL's own worker runs our agent loop for a group: which rows reach TransferQueue, under which keys and tags."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from agenttrain.errors import TrainerError
from agenttrain.records import RolloutRequest, RolloutResult
from verl.utils import tensordict_utils as tu

from agenttrain_verl.agent_loop import KEPT, NAME, REQUESTS, GraphLoop
from agenttrain_verl.emission import RowRules, outputs_of


def group_row(requests: Sequence[RolloutRequest], kept: dict[int, RolloutResult] | None = None) -> Any:
    """A batch of one group, as the driver makes it."""
    columns = {
        "uid": "abc",
        "raw_prompt": [{"role": "user", "content": "t"}],
        "index": 0,
        "agent_name": NAME,
        REQUESTS: list(requests),
        KEPT: kept or {},
    }
    objects = {}
    for name, value in columns.items():
        objects[name] = np.empty(1, dtype=object)
        objects[name][0] = value
    batch = tu.get_tensordict(objects)
    tu.assign_non_tensor_data(batch, "global_steps", 1)
    return batch


async def written(worker: Any, row: Any) -> list[dict[str, Any]]:
    """What one group puts into TransferQueue."""
    worker.queue.puts, worker.queue.tags = [], []
    await worker.generate_sequences(row)
    while len(worker.queue.tags) < 2:
        await asyncio.sleep(0.01)
    return sorted(worker.queue.puts, key=lambda put: put["keys"])


def test_a_group_becomes_rows_of_its_rollouts(desk: Any, verl_worker: Any) -> None:
    """Four sessions, one row each: the samples' own ids, the reward at the last id, and nothing of our columns."""

    async def work() -> tuple[list[dict[str, Any]], list[Any]]:
        host = await desk.host()
        puts = await written(verl_worker, group_row(desk.group(0)))
        return puts, await host.take(1)

    puts, shipped = desk.work(work)
    results = {each.result.request.sibling: each.result for each in shipped}
    assert verl_worker.queue.tags == [("abc", "running"), ("abc", "finished")]
    assert [put["keys"] for put in puts] == [[f"abc_{session}_0"] for session in range(4)]
    for session, put in enumerate(puts):
        (sample,) = results[session].samples
        fields = dict(put["fields"].items())
        assert not [name for name in fields if name.startswith("agenttrain")]
        assert tuple(fields["input_ids"][0].tolist()) == sample.prompt_ids + sample.response_ids
        assert tuple(fields["response_mask"][0].tolist()) == sample.response_mask
        assert fields["rm_scores"][0].sum().item() == pytest.approx(sample.reward_score)
        assert (
            fields["extra_fields"].tolist()[0]["rollout_id"]
            == f"train-1-{results[session].rollout.task_id}-{session}-0"
        )
        assert put["tags"] == [
            {
                "status": "success",
                "prompt_len": len(sample.prompt_ids),
                "response_len": len(sample.response_ids),
                "seq_len": len(sample.prompt_ids + sample.response_ids),
                "global_steps": 1,
                "min_global_steps": 0,
                "max_global_steps": 0,
            }
        ]


def test_what_was_made_before_is_not_made_again(desk: Any, verl_worker: Any) -> None:
    """A kept result gives its rows, and only the others are rolled out."""
    requests = desk.group(0)

    async def work() -> tuple[RolloutResult, list[dict[str, Any]], list[Any]]:
        host = await desk.host()
        kept = await host.roll_out(requests[1])
        assert kept is not None
        await host.take(1)
        return kept, await written(verl_worker, group_row(requests, {1: kept})), await host.take(1)

    kept, puts, shipped = desk.work(work)
    assert [put["keys"] for put in puts] == [["abc_0_0"], ["abc_1_0"], ["abc_2_0"], ["abc_3_0"]]
    assert tuple(dict(puts[1]["fields"].items())["responses"][0].tolist()) == kept.samples[0].response_ids
    assert sorted(each.result.request.sibling for each in shipped) == [0, 2, 3]


def test_a_rollout_that_fails_does_not_fail_its_group(toy: Any, verl_worker: Any) -> None:
    """Broken tools, a broken verifier, an engine that is gone: no row, no error, and veRL goes on."""
    place = toy("break", "no score", "hello")

    async def work() -> tuple[list[dict[str, Any]], list[Any]]:
        host = await place.host()
        requests = [place.group(0)[0], place.group(1)[0], *place.group(2)[:2]]
        puts = await written(verl_worker, group_row(requests))
        return puts, await host.take(1)

    puts, shipped = place.work(work)
    assert verl_worker.queue.tags == [("abc", "running"), ("abc", "finished")]
    assert [put["keys"] for put in puts] == [["abc_2_0"], ["abc_3_0"]]
    assert len(shipped) == 3 + 3 + 2


def test_a_run_that_ends_leaves_no_row_and_no_error_in_verl(toy: Any, verl_worker: Any) -> None:
    place = toy("escape")

    async def work() -> tuple[list[dict[str, Any]], list[Any]]:
        host = await place.host()
        return await written(verl_worker, group_row(place.group(0))), await host.take(1)

    puts, shipped = place.work(work)
    assert puts == []
    assert verl_worker.queue.tags == [("abc", "running"), ("abc", "finished")]
    assert [type(each.error).__name__ for each in shipped if each.error] == ["EscapeError"]


def test_two_trajectories_are_two_rows_of_one_session(summarizing: Any, verl_worker: Any) -> None:
    """Their summary is in neither; all that each row carries finds its rollout again."""

    async def work() -> tuple[list[dict[str, Any]], list[Any]]:
        host = await summarizing.host()
        return await written(verl_worker, group_row(summarizing.group(0))), await host.take(1)

    puts, shipped = summarizing.work(work)
    results = {each.result.request.sibling: each.result for each in shipped if each.result.samples}
    two = [session for session, result in results.items() if len(result.samples) == 2]
    assert two
    by_session = {int(put["keys"][0].split("_")[1]): put for put in puts}
    for session in two:
        put, result = by_session[session], results[session]
        assert put["keys"] == [f"abc_{session}_0", f"abc_{session}_1"]
        rows = dict(put["fields"].items())["extra_fields"].tolist()
        assert [row["rollout_id"] for row in rows] == [result.rollout.id] * 2
        frozen = {turn.index for turn in result.turns if turn.role == "frozen"}
        trained = [turn for row in rows for turn, _ in row["turns"]]
        assert frozen
        assert sorted(trained) == sorted({turn.index for turn in result.turns} - frozen)


@pytest.mark.parametrize("row", [{}, {"session_id": 0}, {REQUESTS: []}])
def test_older_trainers_are_refused_by_name(row: dict[str, Any]) -> None:
    """V0 and fully_async_policy give no session, and take no list of rows."""
    with pytest.raises(TrainerError, match="one_step_off_policy or fully_async_policy"):
        asyncio.run(GraphLoop().run({}, **row))


def test_a_worker_of_another_trainer_is_refused(desk: Any) -> None:
    with pytest.raises(TrainerError, match="No graph is open in this process"):
        asyncio.run(GraphLoop().run({}, session_id=0, **{REQUESTS: desk.group(0)}))


def test_verl_itself_would_fail_a_group_for_what_is_refused(desk: Any, verl_worker: Any) -> None:
    """Why rows are checked here: an empty response, as one example, is an IndexError in veRL, and a failed group."""

    async def work() -> None:
        result = await (await desk.host()).roll_out(desk.group(0)[0])
        assert result is not None
        (output,) = outputs_of(result, RowRules(max_length=1000))
        output.response_ids, output.response_mask, output.response_logprobs = [], [], []
        with pytest.raises(IndexError):
            await verl_worker._agent_loop_postprocess([output], False, uid="u", session_id=0, global_steps=1)

    desk.work(work)
