"""veRL's client of its servers, for whole turns: what an abort broke off is gone on with.

What becomes what: one turn becomes one call, and one more for each time that new weights broke it off; their outputs
become one TokenOutput that keeps the version of each token and the routed experts. veRL's own FullyAsyncLLMServerClient
(workers/rollout/llm_server.py, 0.9.1) does the same, but loses what the server said of versions and sleeps a second
after each abort.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from agenttrain.errors import AgenttrainError, EngineError
from agenttrain.records import RoutedExperts
from ray.exceptions import RayActorError
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from agenttrain_verl.ray_errors import own_error

ABORTED: Final = ("aborted", "abort")
"""As an EngineServer says it, and as SGLang does."""
LIMITS: Final = ("max_tokens", "max_new_tokens")
FIRST_WAIT_S: Final = 0.02
LONGEST_WAIT_S: Final = 1.0
"""Between two calls of which the first brought nothing: a server that is left alone rejects them at once."""
DEAD_FOR_S: Final = 30.0
"""How long a turn waits whose server has died. The run ends by it long before, and a rollout that waits is made again
when the run goes on; one that was told would count as failed."""
NO_SERVER = "No available servers in load balancer"
"""What veRL's router raises while none serves (workers/rollout/router.py, 0.9.1)."""


@dataclass(slots=True, eq=False)
class _Turn:
    """One turn under way."""

    prompt_ids: list[int]
    params: Mapping[str, Any]
    parts: list[TokenOutput] = field(default_factory=list)
    is_ended: bool = False
    """Its rollout has ended: what is there is its answer."""

    @property
    def token_ids(self) -> list[int]:
        return [token for part in self.parts for token in part.token_ids]

    def next_params(self) -> dict[str, Any]:
        """What the next call asks for: what is left of the budget, and what has to be known to go on."""
        params, n = dict(self.params), len(self.token_ids)
        for limit in LIMITS:
            if params.get(limit) is not None:
                params[limit] -= n
        if n and "seed" in params:
            params["n_drawn"] = params.get("n_drawn", 0) + n
        if "experts_from" in params and (known := _joined_experts(self.parts)) is not None:
            params["experts_from"] = known.end
        return params


class TurnClient(LLMServerClient):  # type: ignore[misc]
    """An LLMServerClient whose every answer is a whole turn, and whose every failure is an AgenttrainError."""

    def __init__(self, config: Any, load_balancer_handle: Any = None, **kwargs: Any) -> None:
        super().__init__(config, load_balancer_handle, **kwargs)
        self._turns: dict[str, list[_Turn]] = {}
        """Under way, by request id."""

    async def generate(
        self, request_id: str, *, prompt_ids: Any, sampling_params: Mapping[str, Any], **kwargs: Any
    ) -> TokenOutput:
        """Sample a turn.

        Args:
            request_id: the rollout's: its turns go to one server.
            prompt_ids: [P]
            sampling_params: handed to the server as they are; after an abort with what is left of the budget.

        Returns:
            The output, with extra_fields of an EngineServer (`engine_server.token_output`): a version for each token
            also where the server told one for all of them. Its stop_reason is "aborted" where `end` was called.

        Raises:
            EngineError: the server answered nothing, or its process has died.
        """
        turn = _Turn(list(prompt_ids), sampling_params)
        self._turns.setdefault(request_id, []).append(turn)
        try:
            await self._sample(request_id, turn, kwargs)
        except asyncio.CancelledError:
            if not turn.is_ended:
                raise
        finally:
            self._forget(request_id, turn)
        return joined(turn.parts)

    async def end(self, request_id: str) -> None:
        """The rollout has ended: its turns under way end as aborted, and its server may forget it."""
        for turn in self._turns.get(request_id, []):
            turn.is_ended = True
        server_id, server = await self._server_of(request_id)
        try:
            release = getattr(server, "release", None)
            if release is not None:  # veRL's own servers have none
                await release.remote(request_id)
        except Exception as error:
            raise own_error(error, where=f"the replica {server_id}") from error
        finally:
            self._release_server(server_id, request_id=request_id)

    async def _sample(self, request_id: str, turn: _Turn, kwargs: dict[str, Any]) -> None:
        wait_s = FIRST_WAIT_S
        while not turn.is_ended:
            part = await self._part(request_id, turn, kwargs)
            if part is not None:
                turn.parts.append(_as_ours(part))
                if part.stop_reason not in ABORTED or _is_full(turn):
                    return
            if part is None or not part.token_ids:
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    async def _part(self, request_id: str, turn: _Turn, kwargs: dict[str, Any]) -> TokenOutput | None:
        """One server's answer. None: no server serves just now."""
        try:
            return await super().generate(
                request_id,
                prompt_ids=turn.prompt_ids + turn.token_ids,
                sampling_params=turn.next_params(),
                **kwargs,
            )
        except AgenttrainError:
            raise
        except Exception as error:
            if NO_SERVER in str(error):
                return None
            if isinstance(error, RayActorError) and await _ended_within(turn, DEAD_FOR_S):
                return None
            raise own_error(error, where=f"the replica that answers {request_id}") from error

    async def _server_of(self, request_id: str) -> tuple[str, Any]:
        try:
            server_id, server = await self._acquire_server(request_id)
        except Exception as error:
            raise own_error(error, where="veRL's load balancer") from error
        return server_id, server

    def _forget(self, request_id: str, turn: _Turn) -> None:
        turns = self._turns[request_id]
        turns.remove(turn)
        if not turns:
            del self._turns[request_id]


def joined(parts: list[TokenOutput]) -> TokenOutput:
    """The outputs of one turn's calls, in their order, as one."""
    if not parts:
        return TokenOutput(
            token_ids=[], log_probs=[], stop_reason="aborted", extra_fields=_extra([], None, 0, "aborted")
        )
    last = parts[-1]
    versions = [version for part in parts for version in part.extra_fields["weight_versions"]]
    log_probs = [part.log_probs for part in parts]
    cached = parts[0].extra_fields.get("num_cached_tokens") or 0
    return TokenOutput(
        token_ids=[token for part in parts for token in part.token_ids],
        log_probs=None if None in log_probs else [value for part in log_probs for value in part or ()],
        routed_experts=_joined_experts(parts) if _tells_ours(parts) else _joined_rows(parts),
        stop_reason=last.stop_reason,
        num_preempted=last.num_preempted,
        extra_fields={
            **last.extra_fields,
            **_extra(versions, last.extra_fields.get("global_steps"), cached, last.stop_reason),
        },
    )


def _extra(versions: list[int], newest: int | None, n_cached: int, stop_reason: str | None) -> dict[str, Any]:
    known = versions or ([] if newest is None else [newest])
    return {
        "global_steps": newest,
        "min_global_steps": min(known, default=None),
        "max_global_steps": max(known, default=None),
        "weight_versions": versions,
        "num_cached_tokens": n_cached,
        "stop_reason": stop_reason,
    }


def _as_ours(part: TokenOutput) -> TokenOutput:
    """The same with a version for each token: a stock server tells one for the whole call."""
    extra = part.extra_fields
    if "weight_versions" in extra:
        return part
    version = extra.get("global_steps") or 0
    told = {**extra, "global_steps": version, "weight_versions": [version] * len(part.token_ids)}
    return part.model_copy(update={"extra_fields": told})


async def _ended_within(turn: _Turn, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not turn.is_ended and time.monotonic() < until:
        await asyncio.sleep(FIRST_WAIT_S)
    return turn.is_ended


def _is_full(turn: _Turn) -> bool:
    """Whether an abort came just as the budget was spent; the turn has ended by its length then."""
    limits = [turn.params[limit] for limit in LIMITS if turn.params.get(limit) is not None]
    if not limits or len(turn.token_ids) < min(limits):
        return False
    turn.parts[-1] = turn.parts[-1].model_copy(update={"stop_reason": "length"})
    return True


def _tells_ours(parts: list[TokenOutput]) -> bool:
    return any(isinstance(part.routed_experts, RoutedExperts) for part in parts)


def _joined_experts(parts: list[TokenOutput]) -> RoutedExperts | None:
    """Of parts that sampled something, as an EngineServer tells them. None: one of them told none.

    Raises:
        EngineError: a part does not begin where the one before ends.
    """
    told = [part.routed_experts for part in parts if part.token_ids]
    if not told or not all(isinstance(each, RoutedExperts) for each in told):
        return None
    whole: RoutedExperts = told[0]
    for part in told[1:]:
        if (whole.end, whole.n_layers, whole.n_chosen) != (part.start, part.n_layers, part.n_chosen):
            raise EngineError(
                f"Routed experts of positions up to {whole.end - 1} are followed by those from {part.start} on. A "
                "server must tell them from `experts_from` on."
            )
        whole = replace(whole, data=whole.data + part.data)
    return whole


def _joined_rows(parts: list[TokenOutput]) -> Any:
    """Of parts as a stock server tells them, [ids of prompt and response but the last, layers, chosen] each.

    A later part tells those of the earlier ones again, from other weights: they stay as they were.
    """
    told = [part for part in parts if part.token_ids]
    if not told or any(part.routed_experts is None for part in told):
        return None
    rows = [told[0].routed_experts, *(part.routed_experts[-len(part.token_ids) :] for part in told[1:])]
    return np.concatenate([np.asarray(each) for each in rows])
