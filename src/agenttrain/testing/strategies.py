"""Hypothesis strategies of the records: whole ones, whose parts fit together.

Example:
    @given(trajectories())
    def test_mine(trajectory): ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from agenttrain.records import (
    CallSite,
    Credit,
    Generation,
    Ids,
    PartKind,
    Reward,
    RewardPart,
    Role,
    Rollout,
    RolloutRequest,
    RolloutResult,
    RoutedExperts,
    Sample,
    Sampling,
    Status,
    Task,
    Trajectory,
    Turn,
)
from agenttrain.reward.status import is_rewarded
from agenttrain.sample.build import build_samples
from agenttrain.trajectory.tree import trajectories as paths_of

N_VOCABULARY = 320
names = st.text("abcdefghij-_0123456789", min_size=1, max_size=8)
"""Names and ids of records."""


def token_ids(*, min_size: int = 0, max_size: int = 12) -> SearchStrategy[Ids]:
    """[n] ids under N_VOCABULARY."""
    return st.lists(st.integers(0, N_VOCABULARY - 1), min_size=min_size, max_size=max_size).map(tuple)


def logprobs(n: int) -> SearchStrategy[tuple[float, ...]]:
    """[n] natural logarithms of probabilities."""
    return st.lists(st.floats(-30.0, 0.0), min_size=n, max_size=n).map(tuple)


def call_sites() -> SearchStrategy[CallSite]:
    """Places in a graph."""
    return st.builds(
        CallSite,
        node=st.none() | names,
        step=st.none() | st.integers(1, 30),
        task_id=st.none() | names,
        attempt=st.integers(1, 3),
        tags=st.lists(names, max_size=2).map(tuple),
        model_class=st.just("ChatOpenAI"),
        model_name=names,
    )


@st.composite
def generations(draw: st.DrawFn) -> Generation:
    """What an engine may answer."""
    ids = draw(token_ids(min_size=1))
    return Generation(
        token_ids=ids,
        logprobs=draw(logprobs(len(ids))),
        weight_versions=(draw(st.integers(0, 9)),) * len(ids),
        stop_reason=draw(st.sampled_from(("stop", "length", "aborted"))),
    )


@st.composite
def turns(draw: st.DrawFn, *, rollout_id: str = "rollout", index: int = 0, role: Role | None = None) -> Turn:
    """One call that began a trajectory; an auxiliary one holds no ids.

    Args:
        role: None: any.
    """
    roles: tuple[Role, ...] = (role,) if role else get_args(Role)
    chosen = draw(st.sampled_from(roles))
    common: dict[str, Any] = {
        "id": f"{rollout_id}#{index}",
        "rollout_id": rollout_id,
        "index": index,
        "role": chosen,
        "role_reason": draw(names),
        "site": draw(call_sites()),
    }
    if chosen == "auxiliary":
        return Turn(**common)
    answer = draw(generations())
    return Turn(
        **common,
        prompt_ids=draw(token_ids(min_size=1)),
        response_ids=answer.token_ids,
        response_logprobs=answer.logprobs,
        weight_versions=answer.weight_versions,
        sampling=Sampling(temperature=1.0, max_tokens=12, seed=draw(st.integers(0, 2**63 - 1)), stop_ids=(2,)),
        stop_reason=answer.stop_reason,
        break_cause="first_turn" if index == 0 else "other_conversation",
    )


@st.composite
def conversations(draw: st.DrawFn, *, rollout_id: str = "rollout", max_turns: int = 5) -> tuple[Turn, ...]:
    """The turns of one rollout, one after the other; some extend the one before, others begin anew."""
    made: list[Turn] = []
    answered: tuple[Role, ...] = ("trained", "frozen")
    for index in range(draw(st.integers(1, max_turns))):
        turn = draw(turns(rollout_id=rollout_id, index=index, role=draw(st.sampled_from(answered))))
        extends: bool = draw(st.booleans())
        if made and extends:
            last = made[-1]
            prompt = (*last.prompt_ids, *last.response_ids, *draw(token_ids(min_size=1, max_size=4)))
            turn = _extending(turn, last, prompt)
        made.append(turn)
    return _telling(draw, made)


def trajectories(*, max_turns: int = 5) -> SearchStrategy[Trajectory]:
    """Root-to-leaf paths, made from turns as a rollout makes them."""
    return conversations(max_turns=max_turns).map(paths_of).filter(bool).flatmap(st.sampled_from)


@st.composite
def rewards(draw: st.DrawFn) -> Reward:
    """A sum of one to three verifiers' parts, with credit by node and turn or without."""
    evidence = st.fixed_dictionaries(
        {}, optional={"exit_code": st.integers(-1, 255), "output": st.text(max_size=5), "tampering": st.lists(names)}
    )
    part = st.builds(
        RewardPart,
        name=names,
        score=st.floats(-2, 2),
        weight=st.floats(0, 2),
        kind=st.sampled_from(get_args(PartKind)),
        evidence=evidence,
        error=st.sampled_from(("", "it hung")),
    )
    parts = draw(st.lists(part, min_size=1, max_size=3))
    numbers = st.floats(-2, 2)
    by_node, by_turn = (
        st.dictionaries(names, numbers, max_size=2),
        st.dictionaries(st.integers(0, 4), numbers, max_size=2),
    )
    credit = draw(st.none() | st.builds(Credit, by_node=by_node, by_turn=by_turn))
    total = sum(part.weight * part.score for part in parts)
    closed = draw(st.sampled_from(("", *(part.name for part in parts if part.is_closed))))
    return Reward(score=total, parts=tuple(parts), credit=credit, closed=closed)


@st.composite
def rollouts(draw: st.DrawFn, *, request: RolloutRequest | None = None) -> Rollout:
    """How one execution of a graph may have ended; a reward stands exactly where its status gives one.

    Args:
        request: that it answers. None: any.
    """
    asked = request or draw(requests())
    status: Status = draw(st.sampled_from(get_args(Status)))
    reward = draw(rewards()) if is_rewarded(status) else None
    return Rollout(
        id=asked.rollout_id,
        task_id=asked.task.id,
        phase=asked.phase,
        step=asked.step,
        sibling=asked.sibling,
        attempt=asked.attempt,
        status=status,
        cause="" if status == "completed" else draw(names),
        reward=reward,
        success=status == "completed" and draw(st.booleans()),
        n_turns=draw(st.integers(0, 9)),
        started_at=1.0,
        ended_at=1.0 + draw(st.floats(0, 100)),
    )


def requests() -> SearchStrategy[RolloutRequest]:
    """Rollouts that may be asked for."""
    return st.builds(
        RolloutRequest,
        task=st.builds(Task, id=names, input=st.just({})),
        phase=st.just("train"),
        step=st.integers(1, 50),
        sibling=st.integers(0, 15),
        attempt=st.integers(0, 2),
        seed=st.integers(0, 2**63 - 1),
    )


@st.composite
def results(draw: st.DrawFn) -> RolloutResult:
    """All that one rollout leaves: turns, the paths they make, and the samples of those."""
    request = draw(requests())
    rollout = draw(rollouts(request=request))
    made = draw(conversations(rollout_id=rollout.id))
    paths = paths_of(made)
    return RolloutResult(
        request=request, rollout=rollout, turns=made, trajectories=paths, samples=build_samples(rollout, paths)
    )


def samples() -> SearchStrategy[Sample]:
    """Training rows, as a rollout makes them."""
    return results().map(lambda result: result.samples).filter(bool).flatmap(st.sampled_from)


def _telling(draw: st.DrawFn, made: Sequence[Turn]) -> tuple[Turn, ...]:
    """The turns as they are where the engine tells experts: of all of them, of some, or of none."""
    n_layers, n_chosen, tells = draw(st.tuples(st.integers(1, 3), st.integers(1, 2), st.sampled_from((0, 1, 2))))
    by_id: dict[str, Turn] = {}
    for turn in made:
        if tells == 2 or (tells == 1 and draw(st.booleans())):
            parent = by_id[turn.extends].routed_experts if turn.extends else None
            start, end = parent.end if parent else 0, len(turn.prompt_ids) + len(turn.response_ids) - 1
            n = 2 * (end - start) * n_layers * n_chosen
            data = draw(st.binary(min_size=n, max_size=n))
            experts = RoutedExperts(start=start, n_layers=n_layers, n_chosen=n_chosen, data=data)
            turn = replace(turn, routed_experts=experts)
        by_id[turn.id] = turn
    return tuple(by_id.values())


def _extending(turn: Turn, last: Turn, prompt_ids: Ids) -> Turn:
    return replace(turn, prompt_ids=prompt_ids, extends=last.id, break_cause=None)
