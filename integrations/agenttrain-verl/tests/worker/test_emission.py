"""What may be handed to veRL, and that veRL takes it as it was meant."""

from __future__ import annotations

import asyncio
import copy
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from agenttrain.records import (
    CallSite,
    Reward,
    RewardPart,
    Role,
    Rollout,
    RolloutRequest,
    RolloutResult,
    RoutedExperts,
    Status,
    Task,
    Turn,
)
from agenttrain.reward.status import is_rewarded
from agenttrain.sample.agent_loop_output import FIELDS
from agenttrain.sample.build import build_samples
from agenttrain.testing import strategies
from agenttrain.trajectory.tree import trajectories
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agenttrain_verl.emission import EmissionError, RowRules, outputs_of, refusal

RULES = RowRules(max_length=100)
WITH_EXPERTS = RowRules(max_length=100, with_experts=True)
REQUEST = RolloutRequest(task=Task(id="t", input={}), phase="train", step=3, sibling=1)


def turn(index: int, role: Role = "trained", *, version: int = 2, experts: bool = False, n_layers: int = 1) -> Turn:
    """Two ids after a prompt of three, of a conversation of its own."""
    return Turn(
        id=f"{REQUEST.rollout_id}#{index}",
        rollout_id=REQUEST.rollout_id,
        index=index,
        role=role,
        role_reason="",
        site=CallSite(node="agent", model_class="ChatOpenAI", model_name="m"),
        prompt_ids=(10 + index, 5, 6),
        response_ids=(7, 2),
        response_logprobs=(-0.5, -0.25),
        weight_versions=(version, version),
        routed_experts=RoutedExperts(start=0, n_layers=n_layers, n_chosen=1, data=bytes(8 * n_layers))
        if experts
        else None,
        break_cause="first_turn" if index == 0 else "other_conversation",
    )


def result(*turns: Turn, status: Status = "completed", score: float = 0.75) -> RolloutResult:
    reward = Reward(score=score, parts=(RewardPart(name="answered", score=score),)) if is_rewarded(status) else None
    rollout = Rollout(
        id=REQUEST.rollout_id,
        task_id="t",
        phase="train",
        step=3,
        sibling=1,
        attempt=0,
        status=status,
        reward=reward,
        started_at=1.0,
        ended_at=3.5,
    )
    paths = trajectories(turns)
    samples = build_samples(rollout, paths)
    return RolloutResult(request=REQUEST, rollout=rollout, turns=turns, trajectories=paths, samples=samples)


def broken(made: RolloutResult, row: int = -1, **fields: Any) -> RolloutResult:
    """The same with fields of one row set, past what a Sample checks of itself."""
    samples = list(made.samples)
    samples[row] = copy.copy(samples[row])
    for name, value in fields.items():
        object.__setattr__(samples[row], name, value)
    return replace(made, samples=tuple(samples))


def extra(made: RolloutResult, row: int = -1, **fields: Any) -> RolloutResult:
    """The same with extra fields of one row set; None takes one away."""
    own = {name: value for name, value in {**made.samples[row].extra_fields, **fields}.items() if value is not None}
    return broken(made, row, extra_fields=own)


def test_a_row_has_every_field_and_finds_its_rollout_again() -> None:
    (output,) = outputs_of(result(turn(0)), RULES)
    assert json.loads(output.model_dump_json(exclude_unset=True)) == {
        "prompt_ids": [10, 5, 6],
        "response_ids": [7, 2],
        "response_mask": [1, 1],
        "response_logprobs": [-0.5, -0.25],
        "reward_score": 0.75,
        "num_turns": 1,
        "metrics": {},
        "extra_fields": {
            "rollout_id": "train-3-t-1-0",
            "task_id": "t",
            "trajectory": 0,
            "group_id": "train-3-t",
            "min_global_steps": 2,
            "max_global_steps": 2,
            "reward_extra_info": {"answered": 0.75},
            "status": "completed",
            "turns": [[0, 2]],
            "metrics": {"seconds": 2.5, "n_tool_calls": 0.0, "n_invalid_tool_calls": 0.0},
        },
    }
    assert set(type(output).model_fields) == set(FIELDS)


def test_only_what_is_trained_has_a_row() -> None:
    """A summary that is frozen has none, wherever it stands; each row tells whose turns it trains."""
    outputs = outputs_of(result(turn(0), turn(1, version=4), turn(2, "frozen")), RULES)
    assert [output.prompt_ids[0] for output in outputs] == [10, 11]
    assert [output.extra_fields["turns"] for output in outputs] == [[(0, 2)], [(1, 2)]]
    assert [output.extra_fields["min_global_steps"] for output in outputs] == [2, 4]


@pytest.mark.parametrize("status", ["environment_failure", "aborted", "incomplete"])
def test_a_rollout_that_may_not_be_trained_has_no_rows(status: Status) -> None:
    made = result(turn(0), status=status)
    assert (outputs_of(made, RULES), refusal(made, RULES)) == ([], "")


def test_a_rollout_that_a_plugin_kept_out_has_no_rows() -> None:
    made = replace(result(turn(0)), samples=())
    assert (outputs_of(made, RULES), refusal(made, RULES)) == ([], "")


TWO = result(turn(0), turn(1))
MOE = result(turn(0, experts=True), turn(1, experts=True))
SHORT = replace(MOE.samples[1].routed_experts, data=bytes(6)) if MOE.samples[1].routed_experts else None


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (broken(TWO, response_mask=(1,)), "response_mask has 1 entries for 2 response_ids"),
        (broken(TWO, 0, response_logprobs=(-0.5,)), "response_logprobs has 1 entries for 2 response_ids"),
        (broken(TWO, response_ids=(), response_mask=(), response_logprobs=()), "response_ids is empty"),
        (broken(TWO, prompt_ids=()), "prompt_ids is empty"),
        (broken(TWO, response_mask=(0, 0), response_logprobs=(0.0, 0.0)), "response_mask has no 1"),
        (broken(TWO, 0, response_mask=(0, 0), response_logprobs=(0.0, 0.0)), "response_mask has no 1"),
        (broken(TWO, response_mask=(1, 2)), "response_mask holds 2"),
        (broken(TWO, response_mask=(1, 0)), "response_logprobs[1] is -0.25 where response_mask is 0"),
        (broken(TWO, response_logprobs=(-0.5, math.nan)), "response_logprobs[1] is nan"),
        (broken(TWO, response_logprobs=(-math.inf, -0.1)), "response_logprobs[0] is -inf"),
        (broken(TWO, prompt_ids=(1,) * 99), "are 101 ids, and the policy has 100 positions"),
        (broken(TWO, response_ids=(7, -1)), "an id is negative"),
        (broken(broken(TWO, 0, reward_score=math.nan), 1, reward_score=math.nan), "reward_score is nan"),
        (broken(broken(TWO, 0, reward_score=1e39), 1, reward_score=1e39), "reward_score is 1e+39"),
        (broken(TWO, reward_score=0.5), "reward_score differs between its rows: [0.5, 0.75]"),
        (extra(TWO, reward_extra_info=None), "'reward_extra_info'] is missing"),
        (extra(TWO, min_global_steps=None), "'min_global_steps'] is None"),
        (extra(TWO, max_global_steps=2.0), "'max_global_steps'] is 2.0"),
        (extra(TWO, max_global_steps=1), "'min_global_steps'] is 2, after 'max_global_steps', 1"),
        (extra(TWO, rollout_id="another"), "'rollout_id'] is 'another' for 'train-3-t-1-0'"),
        (extra(TWO, group_id="another"), "'group_id'] is 'another' for 'train-3-t'"),
        (extra(TWO, trajectory=0), "is [0, 0]; trajectories with trained tokens: [0, 1]"),
        (replace(TWO, samples=TWO.samples[:1]), "is [0]; trajectories with trained tokens: [0, 1]"),
        (replace(TWO, samples=TWO.samples[::-1]), "is [1, 0]; trajectories with trained tokens: [0, 1]"),
        (
            replace(TWO, rollout=replace(TWO.rollout, status="incomplete")),
            "samples has 2 entries for a rollout with st",
        ),
        (replace(TWO, rollout=replace(TWO.rollout, reward=None)), "status completed and no reward"),
    ],
)
def test_what_can_be_no_row_is_refused_by_name(made: RolloutResult, words: str) -> None:
    with pytest.raises(EmissionError, match=r"\(rollout train-3-t-1-0[,)]") as caught:
        outputs_of(made, RULES)
    assert words in str(caught.value)
    assert refusal(made, RULES) == str(caught.value)


def test_a_log_probability_of_zero_is_one() -> None:
    """A token that was certain: both zeros are as sampled, and neither is an invented one."""
    (output,) = outputs_of(broken(result(turn(0)), response_logprobs=(0.0, -0.0)), RULES)
    assert [math.copysign(1, logprob) for logprob in output.response_logprobs] == [1.0, -1.0]


def test_routed_experts_are_in_all_rows_of_a_run_or_in_none() -> None:
    assert [output.routed_experts is None for output in outputs_of(MOE, RULES)] == [True, True]
    assert [output.routed_experts.shape for output in outputs_of(MOE, WITH_EXPERTS)] == [(5, 1, 1), (5, 1, 1)]
    assert "routed_experts" not in outputs_of(MOE, RULES)[0].model_fields_set


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (result(turn(0, experts=True), turn(1)), "routed_experts is not known of all ids"),
        (broken(MOE, routed_experts=None), "routed_experts is not known of all ids"),
        (broken(MOE, routed_experts=SHORT), "routed_experts has rows of positions 0 to 2 for 0 to 3"),
        (
            result(turn(0, experts=True), turn(1, experts=True, n_layers=2)),
            "layers and chosen experts [(1, 1), (2, 1)]",
        ),
    ],
)
def test_a_trainer_that_replays_them_gets_no_row_without(made: RolloutResult, words: str) -> None:
    assert words in refusal(made, WITH_EXPERTS)
    assert len(outputs_of(made, RULES)) == 2


# ── the same through veRL's own code ─────────────────────────────────────────────────────────────────────────────────


def written_by_verl(worker: Any, outputs: Sequence[Any]) -> dict[str, Any]:
    """What veRL's worker puts into TransferQueue for one session."""
    before = len(worker.queue.puts)
    row = {"uid": "u", "session_id": 5, "global_steps": 3, "raw_prompt": [], "agenttrain_requests": [REQUEST]}
    asyncio.run(worker._agent_loop_postprocess(list(outputs), False, **row))
    (put,) = worker.queue.puts[before:]
    return put


@given(made=strategies.results(), with_experts=st.booleans())
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
def test_verl_keeps_what_it_is_given(verl_worker: Any, made: RolloutResult, with_experts: bool) -> None:
    """Whatever a rollout left: either it has no rows, or veRL's rows hold the samples' very numbers."""
    rules = RowRules(max_length=1000, with_experts=with_experts)
    if refusal(made, rules):
        assert with_experts
        assert any(sample.routed_experts is None for sample in made.samples)
        return
    outputs = outputs_of(made, rules)
    assert len(outputs) == len(made.samples)
    if not outputs:
        return
    put = written_by_verl(verl_worker, outputs)
    assert put["keys"] == [f"u_5_{n}" for n in range(len(outputs))]
    fields = dict(put["fields"].items())
    assert ("routed_experts" in fields) == with_experts
    assert "agenttrain_requests" not in fields
    columns = {name: fields[name].unbind() for name in ("prompts", "responses", "response_mask", "rollout_log_probs")}
    for n, sample in enumerate(made.samples):
        assert tuple(columns["prompts"][n].tolist()) == sample.prompt_ids
        assert tuple(columns["responses"][n].tolist()) == sample.response_ids
        assert tuple(columns["response_mask"][n].tolist()) == sample.response_mask
        assert torch.equal(columns["rollout_log_probs"][n], torch.tensor(sample.response_logprobs))
        assert fields["rm_scores"].unbind()[n].tolist() == [0.0] * (len(sample.response_ids) - 1) + [
            pytest.approx(sample.reward_score)
        ]
        assert fields["extra_fields"].tolist()[n]["rollout_id"] == made.rollout.id
        tag = put["tags"][n]
        assert (tag["min_global_steps"], tag["max_global_steps"]) == (
            sample.extra_fields["min_global_steps"],
            sample.extra_fields["max_global_steps"],
        )
