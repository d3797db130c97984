"""The run, to a trainer whose rollouts are made in other processes: `protocols.Elsewhere` over the run's folder.

What becomes what: rollouts made elsewhere become records of the run, and steps of it, as if they were made here. Knows
nothing of where that is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from agenttrain.capture.store import Begun, SqliteStore, read_store
from agenttrain.earlier_lives import KeptRollouts, describe
from agenttrain.graph.roles import RoleBook
from agenttrain.protocols import GoneOn
from agenttrain.records import RolloutRequest, RolloutResult
from agenttrain.run_folder import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class RunElsewhere:
    """Made by `fit`, asked by a trainer on any of its threads."""

    run: RunFolder
    life: int
    store: SqliteStore
    kept: KeptRollouts
    roles: RoleBook
    note: Callable[[RolloutResult], None]
    """Told of every rollout, those of earlier lives that the run goes on with among them."""
    is_of_these_weights: Callable[[RolloutResult], bool]
    should_stop: Callable[[], bool]

    def go_on(self, requests: Sequence[RolloutRequest]) -> GoneOn:
        """What earlier lives made of a step's requests; asked once for each request, before it is made."""
        gone_on = self.kept.go_on(requests, self.is_of_these_weights)
        for result in gone_on.earlier:
            self.note(result)
        still = {place: replace(request, life=self.life) for place, request in gone_on.open.items()}
        return replace(gone_on, open=still)

    def rolled_out(self, result: RolloutResult, *, is_stored: bool) -> None:
        """A rollout has ended: stored where it is not, and noted."""
        if not is_stored:
            began = result.rollout.started_at
            self.store.put_all_of(Begun(request=result.request, started_at=began), (), result)
        self._ended(result)

    def lost(self, requests: Sequence[RolloutRequest]) -> list[RolloutResult | None]:
        """What the run's folder tells of rollouts whose process has died; those that were under way become aborted."""
        self.store.flush()
        view = read_store(self.run.rollouts)
        ids = {request.rollout_id for request in requests}
        told = {result.rollout.id: result for result in view.results(lambda rollout: rollout.id in ids)}
        for begun in view.unfinished():
            if begun.request.rollout_id in ids:
                told[begun.request.rollout_id] = describe(begun, view, self.store)
        for result in told.values():
            self._ended(result)
        return [told.get(request.rollout_id) for request in requests]

    def _ended(self, result: RolloutResult) -> None:
        for turn in result.turns:
            self.roles.role(turn.site)  # which selectors match anything is asked after the baseline
        self.note(result)

    def check_stop(self) -> None:
        """Raises:
        KeyboardInterrupt: the run is to be saved and to end.
        """
        if self.should_stop():
            raise KeyboardInterrupt
