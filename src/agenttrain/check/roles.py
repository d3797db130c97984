"""The roles of a trial: nothing is refused, so that one look finds every model of which nothing was declared.

A model that nothing names is answered by the policy and frozen: the user's own is not asked, and no network is needed.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from agenttrain.errors import RoleError
from agenttrain.graph.roles import Identity, RoleBook, detected_use
from agenttrain.records import CallSite, Role
from agenttrain.trainable import Trainable

UNDECLARED = "undeclared: in a check the policy answers, and it is frozen"
_DECLARED = ("train", "frozen", "auxiliary")


@dataclass(frozen=True, slots=True, kw_only=True)
class UndeclaredModel:
    """A model beside the one that is trained, of which nothing was declared."""

    identity: Identity
    beside: Identity
    """The trained one."""
    node: str | None
    """Of its first call."""
    detected: str | None
    """Why LangChain's own middleware made that call. None: nothing says so."""


class TrialRoles(RoleBook):
    """A role book that notes what it would refuse. Thread-safe; one for all rollouts of a trial."""

    def __init__(self, noted: Trainable | None) -> None:
        self._selectors: Mapping[str, tuple[object, ...]] = (
            {"train": noted.train, "frozen": noted.frozen, "auxiliary": noted.auxiliary} if noted is not None else {}
        )
        super().__init__(**self._selectors)  # type: ignore[arg-type]
        self._alone: dict[Identity, RoleBook] = {}
        self._first_calls: dict[Identity, tuple[str | None, str | None]] = {}
        """Model to the node of its first call, and why LangChain's middleware made it."""
        self._trained: Identity | None = None
        """The first that train= names."""
        self._refuses = False
        self._look = threading.Lock()

    @property
    def refused(self) -> RoleError | None:
        return None

    def role(self, site: CallSite) -> tuple[Role, str]:
        """Who answers a call made there, and why.

        Raises:
            RoleError: a predicate that raised.
        """
        with self._look:
            alone = self._alone.setdefault(site.model_identity, RoleBook(**self._selectors))  # type: ignore[arg-type]
            role, reason = alone.role(site)
            try:
                super().role(site)
            except RoleError:
                self._refuses = True
            if reason.partition(":")[0] in _DECLARED:
                self._trained = self._trained or (site.model_identity if role == "trained" else None)
                return role, reason
            self._first_calls.setdefault(site.model_identity, (site.node, detected_use(site)))
            return ("frozen", UNDECLARED) if self._refuses and site.model_identity != self._one else (role, reason)

    def second_models(self) -> tuple[UndeclaredModel, ...]:
        """The models that a fit would refuse, in the order of their first calls; empty where it would refuse none."""
        with self._look:
            one = self._one
            if not self._refuses or one is None:
                return ()
            return tuple(
                UndeclaredModel(identity=identity, beside=one, node=node, detected=detected)
                for identity, (node, detected) in self._first_calls.items()
                if identity != one
            )

    @property
    def one_model(self) -> Identity | None:
        """The model that is trained: one that train= names, else the first that was called. None: there was none."""
        with self._look:
            return self._one

    @property
    def _one(self) -> Identity | None:
        return self._trained or next(iter(self._first_calls), None)
