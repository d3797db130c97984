"""A policy that answers conversations, and the arms of a run that was named: this one policy, for all of them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field

from agenttrain.capture.served import ServedCalls
from agenttrain.promotion_record import LedgerEntry
from agenttrain.serving.served_policy import ServedPolicy, ServedSource, check_weights, held, let_go, policy_of


@dataclass(frozen=True, slots=True)
class Heard:
    """What is known of a conversation."""

    at: float
    """When it was heard of last, monotonic."""
    trial: str
    """The last canary's that it was noted for; empty: none."""


@dataclass(slots=True, eq=False, kw_only=True)
class Arm:
    """A policy that answers conversations."""

    source: ServedSource
    policy: ServedPolicy
    is_canary: bool = False
    entry: LedgerEntry | None = None
    """The line by which it serves. None: it was named as a run, or is the base of a ledger that promoted nothing."""
    is_broken: bool = False
    """It could not be loaded, or its runs not be begun."""
    is_checked: bool = False
    """Its files were held against the ledger."""
    n_runs: int = 0
    """Under way."""
    heard: OrderedDict[str, Heard] = field(default_factory=OrderedDict)
    """Its conversations, the one heard of last at the end."""

    @property
    def loaded(self) -> ServedCalls | None:
        """What answers. None: it is not loaded yet."""
        return self.policy.calls if self.is_checked or self.entry is None else None

    def calls(self) -> ServedCalls:
        """What answers; blocks until it is loaded.

        Raises:
            PromotionError: it is not what the ledger recorded.
            AgenttrainError: it can't be loaded.
        """
        if not self.is_checked:
            self.check()
        return self.policy.opened()

    def check(self) -> None:
        """Hold its files against the ledger.

        Raises:
            PromotionError: they are others.
        """
        if self.entry is not None and self.entry.weights:
            check_weights(self.source.policy, self.entry)
        self.is_checked = True


class OneRun:
    """The policy of one run answers all."""

    trial = None
    """No canary is ever tried."""

    def __init__(self, source: ServedSource) -> None:
        self.incumbent = self._arm = Arm(source=source, policy=policy_of(source))
        self._is_held = False
        self._lock = threading.Lock()

    def hold(self) -> None:
        """Serve from now on; nothing is loaded yet."""
        with self._lock:
            if not self._is_held:
                self._arm.policy = held(self._arm.policy)
                self._is_held = True

    def close(self) -> None:
        """Serve no more."""
        with self._lock:
            was_held, self._is_held = self._is_held, False
        if was_held:
            let_go(self._arm.policy)

    def follow(self) -> None:
        """A run doesn't change."""

    def arm_for(self, conversation: str) -> Arm:
        """What answers a conversation now."""
        return self._arm

    def begun(self, conversation: str) -> Arm:
        """A run of a graph begins."""
        return self._arm

    def ended(self, conversation: str, arm: Arm, *, is_single: bool) -> None:
        """It has ended."""

    def refuse(self, arm: Arm, error: Exception) -> None:
        """It can't be loaded, or a run of it not be begun."""
        raise error
