"""A canary under way: its outcomes beside the incumbent's, and the way back once it is shown to do worse.

Invariant: a canary that is shown to do worse is taken back by one line of the ledger, whichever of the processes that
count its outcomes comes to it first, and by the next outcome if that process was killed before it wrote the line.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any, Final

from agenttrain.config import CanaryTable
from agenttrain.errors import PromotionError
from agenttrain.promotion.canary import Look, draws_canary, next_look
from agenttrain.promotion.ledger import Ledger, canary_now
from agenttrain.promotion.outcomes import Arm, Outcomes, Source
from agenttrain.promotion_record import LedgerEntry
from agenttrain.serving.served_policy import source_of_entry

_log = logging.getLogger(__name__)
FULL_MARKS: Final = 1 - 1e-9
"""A number is a success from here on, as a single 0/1 verifier's is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryTrial:
    """One canary of a ledger, while it is tried."""

    ledger: Ledger
    outcomes: Outcomes
    entry: LedgerEntry
    """The line that began it."""
    table: CanaryTable
    """[canary] of its run."""

    @property
    def id(self) -> str:
        return self.entry.hash

    @property
    def share(self) -> float:
        return self.table.share if self.entry.share is None else self.entry.share

    def draws(self, conversation: str) -> bool:
        """Whether a new conversation is the canary's."""
        return draws_canary(conversation, salt=self.id, share=self.share)

    def answered(self, conversation: str, arm: Arm) -> None:
        """Note who began to answer a conversation.

        Raises:
            PromotionError: it can't be written.
        """
        self.outcomes.answered(self.id, conversation, arm)

    def disowned(self, conversations: list[str]) -> None:
        """Count these for nobody: they began with the canary, and the incumbent answers them."""
        try:
            self.outcomes.disown(self.id, conversations)
        except PromotionError as error:
            _log.error("%s", error)

    def record(
        self, conversation: str, success: bool | float | None, *, source: Source = "told", why: str = ""
    ) -> bool:
        """Count how a conversation went, and take the canary back if that shows it to do worse.

        Returns:
            Whether it counts: not where nothing is known, nor for a conversation that was not begun to be answered
            while the canary is tried.

        Raises:
            PromotionError: it can't be written, or `success` is neither a bool nor a number.
        """
        if success is None:
            return False
        passed = is_success(success)
        arm = self.outcomes.arm_of(self.id, conversation)
        if arm is None or arm == "before":
            return False
        self.outcomes.record(self.id, conversation, passed, is_canary=arm == "canary", source=source, why=why)
        look = self.outcomes.look(self.id, min_outcomes=self.table.min_outcomes, false_alarm=self.table.false_alarm)
        if look is not None:
            self._take_back(look)
        return True

    def describe(self) -> dict[str, Any]:
        """How it does, as JSON takes it."""
        canary, incumbent = self.outcomes.counts(self.id)
        n_canary, n_incumbent = self.outcomes.conversations(self.id)
        return {
            "run_id": self.entry.run_id,
            "since": self.entry.at,
            "share": self.share,
            "tools": self.table.tools,
            "conversations": {"canary": n_canary, "incumbent": n_incumbent},
            "outcomes": {
                "canary": {"n": canary.n, "successes": canary.n_success},
                "incumbent": {"n": incumbent.n, "successes": incumbent.n_success},
            },
            "next_look": next_look(canary.n, min_outcomes=self.table.min_outcomes),
        }

    def _take_back(self, look: Look) -> None:
        """Write the line, unless the canary has ended meanwhile."""
        entries = self.ledger.entries()
        if not self._is_on(entries):
            return
        why = f"Taken back by itself: the canary {look}."
        try:
            self.ledger.take_back(self.entry, why=why, decided_on=entries)
        except PromotionError:
            if self._is_on(self.ledger.entries()):
                raise
            return
        _log.warning("%s: %s", self.entry.run_id, why)

    def _is_on(self, entries: tuple[LedgerEntry, ...]) -> bool:
        now = canary_now(entries)
        return now is not None and now.hash == self.id


def is_success(said: bool | float) -> bool:
    """What somebody said of a conversation, as a success or none.

    Raises:
        PromotionError: it is neither a bool nor a number.

    Example: 1.0 -> True, 0.9 -> False
    """
    try:
        number = math.nan if isinstance(said, str | bytes) else float(said)
    except (TypeError, ValueError):
        number = math.nan
    if math.isnan(number):
        raise PromotionError(
            f"How a conversation went is {said!r}, which is neither a bool nor a number. Say True, False, a number (a "
            "success from 1 on), or None where it isn't known."
        )
    return number >= FULL_MARKS


def trial_of(ledger: Ledger, outcomes: Outcomes, entries: tuple[LedgerEntry, ...]) -> CanaryTrial | None:
    """The canary under way. None: there is none.

    Raises:
        RunError: its run is gone.
    """
    entry = canary_now(entries)
    if entry is None:
        return None
    table = source_of_entry(entry, entries).config.canary
    return CanaryTrial(ledger=ledger, outcomes=outcomes, entry=entry, table=table)
