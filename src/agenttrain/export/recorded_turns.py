"""The evaluation of a run after training becomes turns that its policy must answer again.

They are spread over the tasks, and over the places of a conversation. Knows what the engine answered, and loads no
model.
"""

from __future__ import annotations

from dataclasses import dataclass

from agenttrain.capture.store import StoreView, read_store
from agenttrain.errors import RunError
from agenttrain.promotion.fixed_set import FixedTurn, spread
from agenttrain.promotion.summary import last_attempts
from agenttrain.records import Rollout, Turn
from agenttrain.run_folder import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTurn:
    """An answer as the evaluation has it."""

    turn: FixedTurn
    """Its log probabilities are at `temperature`, at 1 if that is 0."""
    temperature: float
    """0 is greedy."""
    max_tokens: int
    """That the answer might have had."""


def recorded_turns(run: RunFolder, n_turns: int) -> tuple[RecordedTurn, ...]:
    """At most n_turns turns of a fit's held-out evaluation after training, the same ones each time.

    Raises:
        RunError: it has none, or a file of the store is damaged.
    """
    view = read_store(run.rollouts)
    counted = last_attempts(rollout for rollout in view.rollouts() if rollout.phase == "held_out")
    rollouts = sorted(counted, key=lambda rollout: (rollout.task_id, rollout.sibling))
    taken: list[RecordedTurn] = []
    by_rollout = [
        (rollout, turns)
        for rollout in (rollouts[i] for i in spread(len(rollouts), n_turns))
        if (turns := _answered(view, rollout))
    ]
    longest = max((len(turns) for _, turns in by_rollout), default=0)
    for round in range(longest):
        for n, (rollout, turns) in enumerate(by_rollout):
            if round < len(turns):
                taken.append(_recorded(rollout, turns[(round + n) % len(turns)]))
    if not taken:
        raise RunError(
            f"Run {run.id} recorded no turn of its policy after training: it has not ended, or was an evaluation. "
            f"agenttrain fit --resume {run.id} ends a fit."
        )
    return tuple(taken[:n_turns])


def _answered(view: StoreView, rollout: Rollout) -> list[Turn]:
    """The turns that the policy answered and nobody cut off."""
    return [turn for turn in view.turns(rollout.id) if turn.response_ids and turn.stop_reason != "aborted"]


def _recorded(rollout: Rollout, turn: Turn) -> RecordedTurn:
    sampling = turn.sampling
    return RecordedTurn(
        turn=FixedTurn(
            name=f"{rollout.task_id}, turn {turn.index}",
            prompt_ids=turn.prompt_ids,
            response_ids=turn.response_ids,
            logprobs=turn.response_logprobs,
        ),
        temperature=sampling.temperature if sampling is not None else 0.0,
        max_tokens=sampling.max_tokens if sampling is not None else len(turn.response_ids),
    )
