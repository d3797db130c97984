"""The graph as its user runs it: every call is answered by the user's own models, nothing by a policy.

What stands in the policy's places then; each refuses loudly what must not happen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from agenttrain.errors import EngineError
from agenttrain.graph.roles import RoleBook
from agenttrain.protocols import Parsed
from agenttrain.records import CallSite, Generation, Ids, Role, Sampling


class AsIsRoles(RoleBook):
    """A role book in which every call is answered by the user's own model."""

    def role(self, site: CallSite) -> tuple[Role, str]:
        return "auxiliary", "as-is: the user's own models answer"


class NoEngine:
    """Stands where no call goes to the policy."""

    name = "as-is"
    max_length = 0
    weight_version = 0

    def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str) -> Future[Generation]:
        raise EngineError("An as-is rollout asked the policy. Its calls are answered by the user's own models.")

    def release(self, session: str) -> None:
        """Nothing is held."""

    def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        raise EngineError("An as-is rollout has no weights to update.")

    def stats(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None:
        """Nothing is held."""


class NoRenderer:
    """Stands where no message becomes ids."""

    identity = "as-is"
    stop_ids: Ids = ()

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> Ids:
        raise EngineError("An as-is rollout has no tokenizer.")

    def extend(
        self,
        prompt_ids: Ids,
        response_ids: Ids,
        new_messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
    ) -> Ids | None:
        return None

    def parse(self, response_ids: Ids, tools: Sequence[Mapping[str, Any]], prompt_ids: Ids = ()) -> Parsed:
        raise EngineError("An as-is rollout has no tokenizer.")

    def decode(self, ids: Sequence[int]) -> str:
        return ""
