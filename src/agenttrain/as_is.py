"""No policy answers: the user's own models do, as the user runs the graph, or a chat model in the policy's place.

What stands where a policy's engine, renderer and roles do; each refuses loudly what must not happen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from agenttrain.errors import EngineError, RoleError
from agenttrain.graph.roles import RoleBook
from agenttrain.protocols import InPlace, Parsed
from agenttrain.records import CallSite, Generation, Ids, Role, Sampling

AS_IS = InPlace(name="as-is")
"""Each call's own model answers."""
REASON = "as-is: the user's own models answer"


class AsIsRoles(RoleBook):
    """A role book that tells which calls the policy would have got, and refuses nothing."""

    def role(self, site: CallSite) -> tuple[Role, str]:
        try:
            role, reason = super().role(site)
        except RoleError:  # a second model, of which nothing is declared: its own answers here too
            return "trained", REASON
        return (role, reason) if role == "auxiliary" else (role, REASON)

    @property
    def refused(self) -> RoleError | None:
        return None

    def unmatched(self) -> list[str]:
        return []


class NoEngine:
    """Stands where no call goes to the policy."""

    name = "as-is"
    max_length = 0
    weight_version = 0

    def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str) -> Future[Generation]:
        raise EngineError("A rollout without a policy asked it. Its calls are answered by other models.")

    def release(self, session: str) -> None:
        """Nothing is held."""

    def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        raise EngineError("A rollout without a policy has no weights to update.")

    def stats(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None:
        """Nothing is held."""


class NoRenderer:
    """Stands where no message becomes ids."""

    identity = "as-is"
    stop_ids: Ids = ()

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> Ids:
        raise EngineError("A rollout without a policy has no tokenizer.")

    def extend(
        self,
        prompt_ids: Ids,
        response_ids: Ids,
        new_messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
    ) -> Ids | None:
        return None

    def parse(self, response_ids: Ids, tools: Sequence[Mapping[str, Any]], prompt_ids: Ids = ()) -> Parsed:
        raise EngineError("A rollout without a policy has no tokenizer.")

    def decode(self, ids: Sequence[int]) -> str:
        return ""
