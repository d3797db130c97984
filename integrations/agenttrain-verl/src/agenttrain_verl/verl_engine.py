"""protocols.Engine over veRL's servers: what the rollouts of a worker ask.

Any thread may ask; the call is made on the loop that veRL's client belongs to. Invariants: a Generation has as many log
probabilities and versions as ids, and no more ids than were asked for, which veRL does not check; whatever happens, a
call's future is done in the end. New weights come to the servers from the trainer, never through here.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from agenttrain import telemetry
from agenttrain.errors import AgenttrainError, EngineError
from agenttrain.records import Generation, Ids, RoutedExperts, Sampling, StopReason
from verl.workers.rollout.replica import TokenOutput

from agenttrain_verl.turn_client import TurnClient

STOP_REASONS: Final[Mapping[str, StopReason]] = {
    "stop": "stop",
    "length": "length",
    "aborted": "aborted",
    "abort": "aborted",
}
"""Of EngineServer and of SGLang, to ours."""
COUNTED = ("sampled_ids", "prefilled_ids", "cached_ids", "calls", "aborted")


@dataclass(slots=True, eq=False)
class _Call:
    session: str
    prompt_ids: Ids
    sampling: Sampling
    future: Future[Generation]
    task: asyncio.Task[Generation] | None = None
    is_ended: bool = False


class VerlEngine:
    """protocols.Engine over a TurnClient."""

    def __init__(
        self,
        client: TurnClient,
        loop: asyncio.AbstractEventLoop,
        *,
        name: str,
        max_length: int,
        takes_seeds: bool | None = None,
        stock: bool = False,
    ) -> None:
        """Begin with no call.

        Args:
            loop: running, on another thread than those that will wait for answers.
            name: of the engine that the servers hold.
            max_length: positions of the servers' engine.
            stock: the servers are veRL's own SGLang servers, which take fewer settings and say less.
        """
        self.name, self.max_length, self.takes_seeds = name, max_length, takes_seeds
        self.weight_version = 0
        """The newest that an answer was sampled from."""
        self._client, self._loop, self._stock = client, loop, stock
        self._calls: set[_Call] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        self._counts = dict.fromkeys(COUNTED, 0.0)

    # ── any thread ───────────────────────────────────────────────────────────────────────────────────────────────

    def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str) -> Future[Generation]:
        """Sample a response.

        Raises:
            EngineError: the prompt is empty or leaves no room, or the engine is closed.
        """
        self._check(prompt_ids, sampling, session)
        future: Future[Generation] = Future()
        future.set_running_or_notify_cancel()
        call = _Call(session, tuple(prompt_ids), sampling, future)
        with self._lock:
            self._check_open()
            self._calls.add(call)
        self._soon(self._begin, call)
        return future

    def release(self, session: str) -> None:
        """The rollout has ended: its calls in flight end as aborted."""
        with self._lock:
            if self._is_closed:
                return
        self._soon(self._end_session, session)

    def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Raises:
        EngineError: always; veRL's trainer sends weights to the servers itself.
        """
        raise EngineError("The servers of veRL take weights from its trainer. Nothing else may publish any.")

    def stats(self) -> Mapping[str, float]:
        """Counters of what was asked through here; the servers' own are theirs to tell."""
        self._check_open()
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        """Calls in flight end as aborted; the servers go on. Safe to call twice."""
        with self._lock:
            self._is_closed = True
            sessions = {call.session for call in self._calls}
        for session in sessions:
            self._soon(self._end_session, session)

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineError("The engine over veRL's servers is closed. Open a new one to generate.")

    def _check(self, prompt_ids: Ids, sampling: Sampling, session: str) -> None:
        """What a stock server would cut short without a word, or die of."""
        self._check_open()
        n = len(prompt_ids)
        if n == 0:
            raise EngineError(f"The prompt of session {session} is empty. Give at least one id.")
        if sampling.max_tokens < 1:
            raise EngineError(f"max_tokens is {sampling.max_tokens} in session {session}. Ask for at least 1.")
        if n + sampling.max_tokens > self.max_length:
            raise EngineError(
                f"Session {session} asks for {n} prompt ids and {sampling.max_tokens} new ones, and the servers take "
                f"{self.max_length} together. Lower limits.tokens, or shorten the prompt."
            )

    def _soon(self, function: Any, *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed, and the worker with it
            with self._lock:
                left, self._calls = self._calls, set()
            for call in left:
                call.future.set_exception(EngineError("The loop that veRL's client belongs to is closed."))

    # ── on the loop ──────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, call: _Call) -> None:
        call.task = self._loop.create_task(self._answered(call))
        call.task.add_done_callback(lambda task: self._done(call, task))

    def _end_session(self, session: str) -> None:
        for call in self._calls_of(session):
            call.is_ended = True
            if self._stock and call.task is not None:  # its servers know no rollouts: what was sampled is lost
                call.task.cancel()
        if not self._stock:
            self._loop.create_task(self._told_of_end(session))

    async def _told_of_end(self, session: str) -> None:
        """A server that can't be told has ended the session's calls by its own end."""
        try:
            await self._client.end(session)
        except AgenttrainError:
            for call in self._calls_of(session):
                if call.is_ended and call.task is not None:
                    call.task.cancel()

    def _calls_of(self, session: str) -> list[_Call]:
        """Under way; other threads add to them meanwhile."""
        with self._lock:
            return [call for call in self._calls if call.session == session]

    async def _answered(self, call: _Call) -> Generation:
        params = stock_params(call.sampling) if self._stock else own_params(call.sampling, session=call.session)
        output = await self._client.generate(call.session, prompt_ids=list(call.prompt_ids), sampling_params=params)
        return generation_of(output, prompt_ids=call.prompt_ids, sampling=call.sampling)

    def _done(self, call: _Call, task: asyncio.Task[Generation]) -> None:
        """However a call's task ended, its future is done now."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._forget(call)
            call.future.set_exception(_as_engine_error(error, call.session))
            return
        if task.cancelled():
            generation = Generation(token_ids=(), logprobs=(), weight_versions=(), stop_reason="aborted")
        else:
            generation = task.result()
        self._forget(call)
        self._count(call, generation)
        call.future.set_result(generation)

    def _forget(self, call: _Call) -> None:
        with self._lock:
            self._calls.discard(call)

    def _count(self, call: _Call, generation: Generation) -> None:
        with self._lock:
            counts = self._counts
            counts["calls"] += 1
            counts["aborted"] += generation.stop_reason == "aborted"
            counts["sampled_ids"] += len(generation.token_ids)
            counts["cached_ids"] += generation.n_cached_ids
            counts["prefilled_ids"] += len(call.prompt_ids) - generation.n_cached_ids
            self.weight_version = max((self.weight_version, *generation.weight_versions))


def own_params(sampling: Sampling, *, session: str) -> dict[str, Any]:
    """Sampling parameters for an EngineServer."""
    return {
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_tokens,
        "stop_token_ids": list(sampling.stop_ids),
        "seed": sampling.seed,
        "experts_from": sampling.experts_from,
        "session": session,
        **({"trace": telemetry.trace_context()} if telemetry.is_recording() else {}),
    }


def stock_params(sampling: Sampling) -> dict[str, Any]:
    """Sampling parameters for veRL's SGLang server: its own names, everything that bends the distribution off."""
    return {
        "temperature": sampling.temperature,
        "max_new_tokens": sampling.max_tokens,
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": not sampling.stop_ids,
        "top_p": 1.0,
        "top_k": 1 if sampling.temperature == 0 else -1,
        "repetition_penalty": 1.0,
        "logprobs": True,
    }


def generation_of(output: TokenOutput, *, prompt_ids: Ids, sampling: Sampling) -> Generation:
    """veRL's record as ours.

    Raises:
        EngineError: lengths that don't fit, or a stop reason that is not known.
    """
    n = len(output.token_ids)
    log_probs, versions = output.log_probs or [], output.extra_fields.get("weight_versions", ())
    if not len(log_probs) == len(versions) == n:
        raise EngineError(
            f"A server answered {n} ids with {len(log_probs)} log probabilities and {len(versions)} weight versions. "
            "All three must have one length."
        )
    if n > sampling.max_tokens:
        raise EngineError(f"A server answered {n} ids where {sampling.max_tokens} were asked for.")
    reason = STOP_REASONS.get(output.stop_reason or "")
    if reason is None:
        raise EngineError(f"A server ended an answer with {output.stop_reason!r}; known: {', '.join(STOP_REASONS)}.")
    return Generation(
        token_ids=tuple(output.token_ids),
        logprobs=tuple(float(value) for value in log_probs),
        weight_versions=tuple(versions),
        stop_reason=reason,
        n_cached_ids=int(output.extra_fields.get("num_cached_tokens") or 0),
        routed_experts=experts_of(output.routed_experts, n_read=len(prompt_ids) + n - 1, start=sampling.experts_from),
    )


def experts_of(told: Any, *, n_read: int, start: int) -> RoutedExperts | None:
    """Routed experts as we keep them.

    Args:
        told: as an EngineServer tells them; or a stock server's array [ids, layers, chosen] of the whole sequence.
        n_read: ids that were read: all of prompt and response but the last.
        start: first position that is asked for.

    Raises:
        EngineError: an array that is no such thing.
    """
    if told is None or isinstance(told, RoutedExperts):
        return told
    rows = np.asarray(told)
    if rows.ndim != 3 or len(rows) not in (n_read, n_read + 1):
        raise EngineError(
            f"A server told routed experts of shape {list(rows.shape)}; [{n_read}, layers, chosen] were expected."
        )
    if rows.size and not 0 <= rows.min() <= rows.max() < 1 << 16:
        raise EngineError(f"A server told experts numbered {rows.min()} to {rows.max()}; 0 to 65535 can be kept.")
    return RoutedExperts(
        start=start,
        n_layers=rows.shape[1],
        n_chosen=rows.shape[2],
        data=rows[start:n_read].astype("<u2").tobytes(),
    )


def _as_engine_error(error: BaseException, session: str) -> AgenttrainError:
    if isinstance(error, AgenttrainError):
        return error
    failed = EngineError(f"A call of session {session} failed: {type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed
