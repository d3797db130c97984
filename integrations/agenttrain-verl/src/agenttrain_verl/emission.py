"""What may be handed to veRL: a RolloutResult becomes AgentLoopOutputs, one for each of its Samples.

veRL checks next to nothing of what an agent loop gives it: a row that is wrong fails the whole group, or is trained on
wrong numbers. So a result that can't be one of its rows is refused here, by name, and becomes a rollout that is dropped
with that reason. Invariants of what passes: every row has a trained token, a reward, and whole numbers of the weights'
versions; all rows of a run have the same columns (TransferQueue gives a trainer only the columns that every row of its
batch has, in silence; transfer_queue 0.1.11, controller.py, kv_retrieve_meta). Which rollouts teach is not known here.

Source: verl 0.9.1, verl/trainer/ppo/v1/agent_loop_tq.py, AgentLoopWorkerTQ._agent_loop_postprocess.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from agenttrain.errors import SampleError
from agenttrain.records import RolloutResult, Sample
from agenttrain.sample.agent_loop_output import as_agent_loop_output
from agenttrain.sample.build import may_be_trained
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

from agenttrain_verl.rows import TURNS

FLOAT32_MAX: Final = 3.4028234663852886e38
"""veRL keeps rewards and log probabilities in 32 bits."""


class EmissionError(SampleError):
    """A rollout that can't be handed to veRL, by its id, its trajectory and the field at fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRules:
    """What all rows of a run keep to."""

    max_length: int
    """Ids that a row may have, prompt and response together: the policy's positions."""
    with_experts: bool = False
    """Whether the trainer replays routed experts: then every row has them, else none has."""


def outputs_of(result: RolloutResult, rules: RowRules) -> list[AgentLoopOutput]:
    """One AgentLoopOutput for each of the samples, in their order.

    Returns:
        Empty when the rollout may not be trained: veRL goes on with its siblings.

    Raises:
        EmissionError: the result can't be a rollout of veRL's.
    """
    check(result, rules)
    turns = _turns_by_trajectory(result)
    return [AgentLoopOutput(**as_agent_loop_output(_as_row(sample, turns, rules))) for sample in result.samples]


def refusal(result: RolloutResult, rules: RowRules) -> str:
    """Why `outputs_of` would refuse a result; empty when it would not."""
    try:
        check(result, rules)
    except EmissionError as error:
        return str(error)
    return ""


def check(result: RolloutResult, rules: RowRules) -> None:
    """Hold a result against what veRL takes for granted.

    Raises:
        EmissionError: naming the first fault.
    """
    id = result.rollout.id
    for fault in _faults_of_rollout(result, rules):
        raise EmissionError(f"{fault} (rollout {id}). It can't be trained.")
    for sample in result.samples:
        for fault in _faults_of_row(sample, rules):
            place = sample.extra_fields.get("trajectory")
            raise EmissionError(f"{fault} (rollout {id}, trajectory {place}). It can't be trained.")


def _as_row(sample: Sample, turns: Mapping[int, list[tuple[int, int]]], rules: RowRules) -> Sample:
    """The sample with what its row must also say, and without what no row has."""
    extra_fields = {**sample.extra_fields, TURNS: turns[sample.extra_fields["trajectory"]]}
    experts = sample.routed_experts if rules.with_experts else None
    return replace(sample, extra_fields=extra_fields, routed_experts=experts)


def _turns_by_trajectory(result: RolloutResult) -> dict[int, list[tuple[int, int]]]:
    """Trajectory to (index of a turn, its trained tokens), by position."""
    index_by_turn = {turn.id: turn.index for turn in result.turns}
    return {
        trajectory.index: [
            (index_by_turn[span.turn_id], span.end - span.start) for span in trajectory.spans if span.trained
        ]
        for trajectory in result.trajectories
    }


def _faults_of_rollout(result: RolloutResult, rules: RowRules) -> Iterator[str]:
    """What is wrong with the rows together. A rollout without rows is never wrong."""
    rollout, samples = result.rollout, result.samples
    if not samples:
        return
    if not may_be_trained(rollout):
        has = "a reward" if rollout.reward is not None else "no reward"
        yield f"samples has {len(samples)} entries for a rollout with status {rollout.status} and {has}"
    for name in ("rollout_id", "group_id"):
        own = rollout.id if name == "rollout_id" else rollout.group_id
        if others := {sample.extra_fields.get(name) for sample in samples} - {own}:
            yield f"extra_fields[{name!r}] is {others.pop()!r} for {own!r}"
    places, known = [sample.extra_fields.get("trajectory") for sample in samples], _taught(result)
    if places != known:
        yield f"extra_fields['trajectory'] of its rows is {places}; trajectories with trained tokens: {known}"
    scores = {sample.reward_score for sample in samples}
    if len(scores) > 1 and not any(map(math.isnan, scores)):
        yield f"reward_score differs between its rows: {sorted(scores)}"
    known_experts = [sample.routed_experts for sample in samples if sample.routed_experts is not None]
    shapes = {(experts.n_layers, experts.n_chosen) for experts in known_experts}
    if rules.with_experts and len(shapes) > 1:
        yield f"routed_experts has layers and chosen experts {sorted(shapes)} in its rows, and must have one shape"


def _taught(result: RolloutResult) -> list[int]:
    """The trajectories that have a row: those with a trained token."""
    return [trajectory.index for trajectory in result.trajectories if any(trajectory.response_mask)]


def _faults_of_row(sample: Sample, rules: RowRules) -> Iterator[str]:
    """What is wrong with one row, the plainest first: a later check may rest on those before it."""
    n_prompt, n = len(sample.prompt_ids), len(sample.response_ids)
    if not n_prompt:
        yield "prompt_ids is empty, and the first response id needs one before it"
    if not n:
        yield "response_ids is empty, and a row needs at least one sampled id"
    for name in ("response_mask", "response_logprobs"):
        if len(getattr(sample, name)) != n:
            yield f"{name} has {len(getattr(sample, name))} entries for {n} response_ids"
    if n_prompt + n > rules.max_length:
        yield f"prompt_ids and response_ids are {n_prompt + n} ids, and the policy has {rules.max_length} positions"
    if min(*sample.prompt_ids, *sample.response_ids) < 0:
        yield "an id is negative"
    yield from _faults_of_mask(sample)
    yield from _faults_of_reward(sample)
    yield from _faults_of_versions(sample.extra_fields)
    yield from _faults_of_experts(sample, rules)


def _faults_of_mask(sample: Sample) -> Iterator[str]:
    if not set(sample.response_mask) <= {0, 1}:
        yield f"response_mask holds {sorted(set(sample.response_mask) - {0, 1})[0]!r}; accepted: 0 and 1"
    if not any(sample.response_mask):
        # verl 0.9.1, trainer/ppo/v1/utils.py: it reads the advantage at the first 1 of the last row's mask, and takes
        # 0 for the whole rollout where there is none.
        yield "response_mask has no 1, and every row needs a trained id"
    for at, (logprob, trained) in enumerate(zip(sample.response_logprobs, sample.response_mask, strict=True)):
        if not _fits(logprob):
            yield f"response_logprobs[{at}] is {logprob!r}, and must be a finite number"
        if not trained and logprob:
            yield f"response_logprobs[{at}] is {logprob!r} where response_mask is 0, and must be 0.0"


def _faults_of_reward(sample: Sample) -> Iterator[str]:
    if not isinstance(sample.reward_score, float | int) or not _fits(sample.reward_score):
        yield f"reward_score is {sample.reward_score!r}, and must be a finite number"
    # verl 0.9.1, agent_loop_tq.py:175: KeyError where the last of several rows has a reward and not this.
    if not isinstance(sample.extra_fields.get("reward_extra_info"), Mapping):
        yield "extra_fields['reward_extra_info'] is missing; it maps the reward's parts to their scores"


def _faults_of_versions(extra_fields: Mapping[str, Any]) -> Iterator[str]:
    """verl 0.9.1, trainer_base.py:1897 makes an array of integers of both: None fails there."""
    first, last = (extra_fields.get(name) for name in ("min_global_steps", "max_global_steps"))
    for name, version in (("min_global_steps", first), ("max_global_steps", last)):
        if type(version) is not int or version < 0:
            yield f"extra_fields[{name!r}] is {version!r}, and must be the version of weights, from 0"
            return
    if first > last:  # type: ignore[operator]
        yield f"extra_fields['min_global_steps'] is {first}, after 'max_global_steps', {last}"


def _faults_of_experts(sample: Sample, rules: RowRules) -> Iterator[str]:
    if not rules.with_experts:
        return
    experts, n_read = sample.routed_experts, len(sample.prompt_ids) + len(sample.response_ids) - 1
    if experts is None:
        yield "routed_experts is not known of all ids, and the trainer replays them"
    elif (experts.start, experts.end) != (0, n_read):
        yield f"routed_experts has rows of positions {experts.start} to {experts.end - 1} for 0 to {n_read - 1}"


def _fits(number: float) -> bool:
    return abs(number) <= FLOAT32_MAX  # False for NaN, too
