"""The run, to a trainer whose rollouts are made in other processes: `protocols.Elsewhere` over the run's folder.

What becomes what: rollouts made elsewhere become records of the run, and steps of it, as if they were made here. Knows
nothing of where that is.
"""

from __future__ import annotations

import time
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
        for turn in result.turns:
            self.roles.role(turn.site)  # which selectors match anything is asked after the baseline
        self.note(result)

    def lost(self, requests: Sequence[RolloutRequest]) -> list[RolloutResult]:
        """Tell rollouts as aborted, with the turns that stand in the run's folder."""
        self.store.flush()
        view = read_store(self.run.rollouts)
        begun_by_id = {begun.request.rollout_id: begun for begun in view.unfinished()}
        results = []
        for request in requests:
            begun = begun_by_id.get(request.rollout_id, Begun(request=request, started_at=time.time()))
            results.append(describe(begun, view, self.store))
            self.note(results[-1])
        return results

    def check_stop(self) -> None:
        """Raises:
        KeyboardInterrupt: the run is to be saved and to end.
        """
        if self.should_stop():
            raise KeyboardInterrupt
