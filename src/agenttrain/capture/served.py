"""A ModelCall becomes a Reply outside of any rollout: a trained policy serves.

Prompts are made as in a rollout: a call that continues an answer of the last `KEPT` ones is that answer's stored ids
and a suffix, anything else the whole conversation rendered. The user's own temperature holds, or that of the run's
evaluation where the user's model says none. Nothing is stored, nothing is limited but the length of an answer.
Thread-safe; calls that come together share the engine's batch.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
import uuid
import warnings
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NoReturn

from agenttrain.capture.answers import prompt_ids_of, read_answer, reply_of
from agenttrain.capture.conversations import Prompt, hashed, left_behind
from agenttrain.capture.instructions import missed
from agenttrain.capture.spans import CallSpans
from agenttrain.capture.tool_calls import n_misfits
from agenttrain.errors import CaptureError, EngineError, NoRoomError
from agenttrain.protocols import Engine, Parsed, Renderer
from agenttrain.records import Generation, Ids, ModelCall, Reply, Sampling, Turn
from agenttrain.serving_mark import serving_here
from agenttrain.telemetry import names

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

KEPT: Final = 1024
"""Answers whose ids are kept for the calls that continue them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A call that the engine is being asked."""

    call: ModelCall
    prompt: Prompt
    id: str
    prompt_ids: Ids
    sampling: Sampling
    parent: Turn | None
    future: Future[Generation]
    spans: CallSpans
    span: Span
    started_at: float


class ServedCalls:
    """Answers the calls of every graph that one policy serves."""

    def __init__(
        self,
        *,
        engine: Engine,
        renderer: Renderer,
        temperature: float,
        max_tokens: int,
        model_name: str,
        tracer: Tracer | None = None,
    ) -> None:
        """Take what answers.

        Args:
            temperature: where the user's model says none.
            max_tokens: of one answer, where the user's model says none.
        """
        self._engine, self._renderer = engine, renderer
        self._temperature, self._max_tokens = temperature, max_tokens
        self._model_name, self._tracer = model_name, tracer
        self._turns: OrderedDict[tuple[bytes, bytes, bytes], Turn] = OrderedDict()
        """(conversation after an answer, tools, instruction) to the turn that answered, the latest last."""
        self._warned: set[str] = set()
        self._lock = threading.Lock()

    def answer(self, call: ModelCall) -> Reply:
        """Blocks until the policy has answered.

        Raises:
            NoRoomError: the prompt leaves no room for an answer.
            EngineError: the engine answered nothing.
            CaptureError: the call holds no message, or its answer can't be read.
        """
        asked = self._ask(call)
        try:
            generation = asked.future.result()
        except BaseException as error:
            self._fail(asked, error)
        return self._finish(asked, generation)

    async def aanswer(self, call: ModelCall) -> Reply:
        """The same without blocking the event loop."""
        asked = self._ask(call)
        try:
            generation = await asyncio.wrap_future(asked.future)
        except BaseException as error:
            self._fail(asked, error)
        return self._finish(asked, generation)

    def check(self) -> None:
        """Find out whether calls are answered; blocks until the engine is ready.

        Raises:
            EngineError: it has failed and will answer none.
        """
        self._engine.stats()

    def _ask(self, call: ModelCall) -> _Asked:
        if not call.messages:
            raise CaptureError("A call came without a message, and a policy answers at least one. Give it a question.")
        self._warn(call.unsupported)
        prompt, turn_id, started_at = hashed(call), f"served-{uuid.uuid4().hex}", time.time()
        parent = self._parent(prompt)
        prompt_ids, broke = prompt_ids_of(self._renderer, call, prompt, parent)
        sampling = self._sampling(call, self._room(prompt_ids))
        spans = CallSpans(self._tracer, model=self._model_name, rollout_id="")
        span = spans.start(call, turn_id=turn_id, sampling=sampling)
        _mark(span)
        try:
            future = self._engine.generate(prompt_ids, sampling, session=turn_id)
        except BaseException as error:
            spans.fail(span, error)
            raise
        return _Asked(
            call=call,
            prompt=prompt,
            id=turn_id,
            prompt_ids=prompt_ids,
            sampling=sampling,
            parent=parent if broke is None else None,
            future=future,
            spans=spans,
            span=span,
            started_at=started_at,
        )

    def _room(self, prompt_ids: Ids) -> int:
        room = self._engine.max_length - len(prompt_ids)
        if room <= 0:
            raise NoRoomError(
                f"The prompt has {len(prompt_ids)} ids, and the policy takes {self._engine.max_length} with its "
                "answer. Shorten the conversation."
            )
        return room

    def _sampling(self, call: ModelCall, room: int) -> Sampling:
        return Sampling(
            temperature=self._temperature if call.temperature is None else call.temperature,
            max_tokens=min(room, call.max_tokens or self._max_tokens),
            seed=secrets.randbits(63),
            stop_ids=self._renderer.stop_ids,
        )

    def _warn(self, unsupported: tuple[str, ...]) -> None:
        for setting in unsupported:
            with self._lock:
                is_new = setting not in self._warned
                self._warned.add(setting)
            if is_new:
                warnings.warn(
                    f"Your model asks for {setting}, and a policy that was trained without it draws from all tokens: "
                    "it has no effect. Set the temperature instead, 0 for the likeliest token.",
                    stacklevel=2,
                )

    def _parent(self, prompt: Prompt) -> Turn | None:
        if prompt.known is None:
            return None
        with self._lock:
            return self._turns.get((prompt.known, prompt.tools, prompt.instruction))

    def _finish(self, asked: _Asked, generation: Generation) -> Reply:
        if generation.stop_reason == "aborted" or not generation.token_ids:
            self._fail(asked, EngineError(f"Engine {self._engine.name} ended a call before it was answered."))
        try:
            parsed = read_answer(
                self._renderer, asked.call, generation, prompt_ids=asked.prompt_ids, seed=asked.sampling.seed
            )
        except CaptureError as error:
            self._fail(asked, error)
        self._engine.release(asked.id)
        turn = self._turn(asked, generation, parsed)
        self._keep(turn, asked.prompt, parsed)
        asked.spans.end(asked.span, turn, parsed, n_cached=generation.n_cached_ids)
        return reply_of(turn, parsed, n_cached_ids=generation.n_cached_ids, model_name=self._model_name)

    def _turn(self, asked: _Asked, generation: Generation, parsed: Parsed) -> Turn:
        call, n_broken = asked.call, len(parsed.invalid_tool_calls)
        return Turn(
            id=asked.id,
            rollout_id="",
            index=0,
            role=call.role,
            role_reason=call.role_reason,
            site=call.site,
            prompt_ids=asked.prompt_ids,
            response_ids=generation.token_ids,
            response_logprobs=generation.logprobs,
            weight_versions=generation.weight_versions,
            sampling=asked.sampling,
            stop_reason=generation.stop_reason,
            extends=asked.parent.id if asked.parent else None,
            n_tool_calls=len(parsed.tool_calls) + n_broken,
            n_invalid_tool_calls=n_broken + n_misfits(parsed.tool_calls, call.tools),
            parse_failed=n_broken > 0,
            missed=missed(call, parsed),
            renderer=self._renderer.identity,
            started_at=asked.started_at,
            ended_at=time.time(),
        )

    def _keep(self, turn: Turn, prompt: Prompt, parsed: Parsed) -> None:
        with self._lock:
            for digest in left_behind(prompt, parsed.text, parsed.tool_calls, parsed.invalid_tool_calls):
                self._turns[digest, prompt.tools, prompt.instruction] = turn
                self._turns.move_to_end((digest, prompt.tools, prompt.instruction))
            while len(self._turns) > KEPT:
                self._turns.popitem(last=False)

    def _fail(self, asked: _Asked, error: BaseException) -> NoReturn:
        """Give the call up: a consumer that has gone away needs no more tokens."""
        self._engine.release(asked.id)
        asked.spans.fail(asked.span, error)
        if isinstance(error, EngineError | CaptureError) or not isinstance(error, Exception):
            raise error
        raise EngineError(
            f"Engine {self._engine.name} failed while it served: {type(error).__name__}: {error}. See its log."
        ) from error


def _mark(span: Span) -> None:
    """Who answers, on a call's span."""
    served = serving_here() if span.is_recording() else None
    if served is not None:
        span.set_attributes(
            {
                names.RUN_ID: served.run_id,
                names.CANARY: served.is_canary,
                names.CONVERSATION_ID: served.conversation,
            }
        )
