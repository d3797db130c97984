"""What the earlier lives of a run left becomes what the next one goes on with.

A rollout is kept when the way it ended stands and it was sampled from the weights that the run goes on with. One that
was under way when a life ended is told as aborted, and is made again with the same seed. Which weights those are is
known to the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from agenttrain.capture.store import Begun, SqliteStore, StoreView
from agenttrain.checkpoint_folder import Checkpoint, DamagedCheckpoint, read_checkpoint
from agenttrain.errors import RunError
from agenttrain.protocols import GoneOn
from agenttrain.records import Phase, Rollout, RolloutRequest, RolloutResult
from agenttrain.reward.status import following
from agenttrain.run_folder import RunFolder
from agenttrain.trajectory.tree import trajectories

UNDER_WAY = "the process ended while it was under way"
Place = tuple[Phase, int, str, int]
"""Phase, step, task and sibling."""


class KeptRollouts:
    """The ended rollouts of earlier lives by place; each place is asked for once."""

    def __init__(self, results: Sequence[RolloutResult] = ()) -> None:
        self._by_place: dict[Place, list[RolloutResult]] = {}
        for result in results:
            self._by_place.setdefault(_place(result.request), []).append(result)

    def go_on(self, requests: Sequence[RolloutRequest], stands: Callable[[RolloutResult], bool]) -> GoneOn:
        """What of these requests is done, and what is still to be made.

        Args:
            stands: whether a result is of the weights that the requests are for.
        """
        kept: dict[int, RolloutResult] = {}
        still: dict[int, RolloutRequest] = {}
        earlier: list[RolloutResult] = []
        for position, request in enumerate(requests):
            made = sorted(filter(stands, self._by_place.pop(_place(request), [])), key=_order)
            earlier += [result for result in made if result.rollout.status != "aborted"]
            again = _again(request, made[-1].rollout) if made else request
            if again is None:
                kept[position] = made[-1]
            else:
                still[position] = again
        return GoneOn(kept=kept, open=still, earlier=tuple(earlier))


def kept_rollouts(view: StoreView, after_step: int) -> KeptRollouts:
    """Those that a run which goes on after a step may still ask for."""
    return KeptRollouts(list(view.results(lambda rollout: rollout.phase != "train" or rollout.step > after_step)))


def describe_unfinished(view: StoreView, store: SqliteStore) -> int:
    """Put a result for each rollout that was under way when its process ended: aborted, with the turns it had.

    Returns:
        How many there were.
    """
    unfinished = view.unfinished()
    for begun in unfinished:
        describe(begun, view, store)
    store.flush()
    return len(unfinished)


def newest_whole(run: RunFolder) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is as it was written, and what is wrong with newer ones; those are moved aside.

    Returns:
        None where there is no checkpoint at all.

    Raises:
        RunError: none of those there are is whole, or one is of a newer format.
    """
    faults: list[str] = []
    for _, folder in reversed(run.checkpoint_folders()):
        try:
            checkpoint = read_checkpoint(folder)
        except DamagedCheckpoint as error:
            faults.append(str(error))
            continue
        for damaged in run.checkpoint_folders():
            if damaged[0] > checkpoint.step:
                _move_aside(damaged[1])
        return checkpoint, faults
    if faults:
        raise RunError(
            f"No checkpoint of {run.id} is whole: {' '.join(faults)} Put {run.checkpoints} back from a copy, or remove "
            "that folder's content to train again from step 1 with the baseline that stands."
        )
    return None, []


def _move_aside(folder: Path) -> None:
    """To a name that is no checkpoint's, with what was moved there before."""
    number = sum(1 for _ in folder.parent.glob(f"{folder.name}.damaged*"))
    folder.rename(folder.with_name(f"{folder.name}.damaged{number or ''}"))


def _again(request: RolloutRequest, last: Rollout) -> RolloutRequest | None:
    """The request that follows the last rollout of a place; one that was cut off begins again as it was."""
    if last.status == "aborted":
        return replace(request, attempt=last.attempt)
    return following(replace(request, attempt=last.attempt, remake=last.remake), last.status)


def describe(begun: Begun, view: StoreView, store: SqliteStore) -> RolloutResult:
    """Put the result of a rollout whose process died: aborted, with the turns it had.

    A rollout is read from one file: its calls and turns are put again beside the result.
    """
    request = begun.request
    turns = view.turns(request.rollout_id)
    policy_turns = [turn for turn in turns if turn.role != "auxiliary"]
    rollout = Rollout(
        id=request.rollout_id,
        task_id=request.task.id,
        phase=request.phase,
        step=request.step,
        sibling=request.sibling,
        attempt=request.attempt,
        remake=request.remake,
        life=request.life,
        status="aborted",
        cause=UNDER_WAY,
        n_turns=len(policy_turns),
        n_tool_calls=sum(turn.n_tool_calls for turn in policy_turns),
        n_invalid_tool_calls=sum(turn.n_invalid_tool_calls for turn in policy_turns),
        n_sampled_ids=sum(len(turn.response_ids) for turn in policy_turns),
        n_prompt_ids=sum(len(turn.prompt_ids) for turn in policy_turns),
        started_at=begun.started_at,
        ended_at=max((turn.ended_at for turn in turns), default=begun.started_at),
    )
    result = RolloutResult(request=request, rollout=rollout, turns=turns, trajectories=trajectories(turns), samples=())
    store.put_all_of(begun, view.intents_of(request.rollout_id), result)
    return result


def _place(request: RolloutRequest) -> Place:
    return request.phase, request.step, request.task.id, request.sibling


def _order(result: RolloutResult) -> tuple[int, int, int]:
    rollout = result.rollout
    return rollout.life, rollout.attempt, rollout.remake
