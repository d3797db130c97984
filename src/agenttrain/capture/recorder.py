"""A ModelCall becomes a Turn and a Reply: the recorder answers every model call of one rollout from the engine.

Each call's intent is stored before the engine is asked and its Turn after, so that a lost call is seen. A prompt that
continues an earlier turn is that turn's stored ids and a suffix; what was sampled is never made into ids again. The
seed of a call derives from where it stands in the graph and what it asks, and not from when it came, so that parallel
calls get the same seeds in every run. Thread-safe: parallel branches call from several threads and event loops.

How a user's settings are taken: the temperature is the rollout's, whatever the user's model says. `max_tokens` caps a
call. `stop` texts cut the reply's text and not the ids. `tool_choice="none"` leaves the tools in the prompt (the
conversation stays one) and gives a sampled call back as text. "required", a named tool and a response format are asked
for in the prompt (`instructions`) and can't be forced on a sampled policy: what a reply lacks of them stands in its
Turn. A limit is checked when a call begins, so calls that run in parallel may pass it together. Nothing here knows
rewards or statuses.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NoReturn

from agenttrain.capture import spans
from agenttrain.capture.answers import hash63, prompt_ids_of, read_answer, reply_of, respelled
from agenttrain.capture.auxiliary import answered_turn
from agenttrain.capture.conversations import Conversations, Prompt, hashed
from agenttrain.capture.instructions import missed
from agenttrain.capture.tool_calls import n_misfits, unknown_names
from agenttrain.errors import CaptureError, EngineError, RolloutStop
from agenttrain.protocols import Engine, InPlace, Parsed, Renderer, TurnStore
from agenttrain.records import (
    BreakCause,
    CallSite,
    Generation,
    Ids,
    ModelCall,
    OwnAnswer,
    Reply,
    Respelling,
    Role,
    RolloutRequest,
    Sampling,
    Turn,
)
from agenttrain.telemetry import ids_of

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

GRACE_S: Final = 2.0
"""How long a call that is out of time waits for what the engine had sampled until then."""
ENDED: Final = "aborted: the rollout has ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecorderLimits:
    """What one rollout may use. None: no limit."""

    turns: int | None = None
    """Policy calls, trained and frozen."""
    tokens: int | None = None
    """Sampled ids, trained and frozen."""
    seconds: float | None = None
    """Since the recorder was made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Begun:
    """A call that the engine is being asked."""

    call: ModelCall
    prompt: Prompt
    turn_id: str
    index: int
    prompt_ids: Ids
    sampling: Sampling
    parent: Turn | None
    cause: BreakCause | None
    started_at: float
    span: Span


class Recorder:
    """Answers the model calls of one rollout and keeps a Turn of each.

    Attributes:
        stopped: why the rollout may make no more calls, first one word of turns, tokens, seconds, room, aborted; None
            while it may.
        started_at: Unix seconds.
        lost: calls whose answer was lost while the rollout might go on; one that a stop took away is none.
        unknown_tools: turn id to the names that its calls gave and no tool has, for the turns that gave any.
    """

    def __init__(
        self,
        *,
        request: RolloutRequest,
        engine: Engine,
        renderer: Renderer,
        store: TurnStore,
        role_of: Callable[[CallSite], tuple[Role, str]],
        limits: RecorderLimits,
        tracer: Tracer | None = None,
        captures_content: bool = False,
        model_name: str,
        in_place: InPlace | None = None,
        on_turn: Callable[[Turn], None] | None = None,
    ) -> None:
        """Take what answers the calls.

        Args:
            role_of: who answers a call, and why.
            in_place: what answers in the policy's place. None: the policy answers, by the engine.
            captures_content: whether messages stand on spans.
            on_turn: told of each turn once it is with the store, on the thread that made the call.
        """
        self.request, self.rollout_id = request, request.rollout_id
        self.in_place = in_place
        self._chosen = in_place.name if in_place is not None and in_place.model is not None else ""
        self.stopped: str | None = None
        self._closed = False
        self.lost = 0
        self._engine, self._renderer, self._store, self._limits = engine, renderer, store, limits
        self._role_of, self._model_name, self._on_turn = role_of, model_name, on_turn
        self.unknown_tools: dict[str, tuple[str, ...]] = {}
        self._spans = spans.CallSpans(
            tracer, model=model_name, rollout_id=self.rollout_id, captures_content=captures_content
        )
        self.started_at, self._started = time.time(), time.monotonic()
        self._lock = threading.RLock()
        self._conversations = Conversations()
        self._ordinals: Counter[str] = Counter()
        self._turns: dict[int, Turn] = {}
        self._auxiliary: dict[str, tuple[Turn, Span, tuple[Mapping[str, Any], ...]]] = {}
        self._n_calls = self._n_policy_calls = self._n_sampled = 0

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The recorded turns, in the order their calls began."""
        with self._lock:
            return tuple(self._turns[index] for index in sorted(self._turns))

    @property
    def last_trained_turn(self) -> Turn | None:
        """The trained turn that began last, or the one that stands for such a turn. None: there is none."""
        return next((turn for turn in reversed(self.turns) if "trained" in (turn.role, turn.stands_for)), None)

    @property
    def overrun(self) -> str | None:
        """That the seconds are over, in words. None: they are not."""
        seconds = self._limits.seconds
        return f"seconds: {seconds:g} seconds are over" if seconds is not None and self._elapsed_s >= seconds else None

    def now(self) -> float:
        """Unix seconds by the clock as it stood when the rollout began: setting it meanwhile changes no duration."""
        return self.started_at + self._elapsed_s

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def role(self, site: CallSite) -> tuple[Role, str]:
        return self._role_of(site)

    def answer(self, call: ModelCall) -> Reply:
        begun = self._begin(call)
        future, spelt = self._ask(begun), self._respelled(begun)
        return self._finish(begun, self._wait(begun, future), spelt)

    async def aanswer(self, call: ModelCall) -> Reply:
        begun = self._begin(call)
        future, spelt = self._ask(begun), self._respelled(begun)
        return self._finish(begun, await self._await(begun, future), spelt)

    def auxiliary_began(self, call: ModelCall) -> str:
        """Note a call that another model answers; it holds no ids. In the policy's place it uses the budget."""
        stands_for = call.role if call.role != "auxiliary" else None
        if stands_for is not None:
            with self._lock:
                self._tokens_left()
                self._n_policy_calls += 1
        index, turn_id = self._next_index()
        started_at = self.now()
        chosen = self._chosen if stands_for is not None else ""
        span = self._spans.start_auxiliary(call, turn_id=turn_id, chosen=chosen)
        trace_id, span_id = ids_of(span)
        turn = Turn(
            id=turn_id,
            rollout_id=self.rollout_id,
            index=index,
            role="auxiliary",
            role_reason=call.role_reason,
            site=call.site,
            stands_for=stands_for,
            trace_id=trace_id,
            span_id=span_id,
            started_at=started_at,
        )
        with self._lock:
            self._auxiliary[turn_id] = turn, span, call.tools
        self._store.put_intent(turn_id=turn_id, rollout_id=self.rollout_id, started_at=started_at)
        return turn_id

    def auxiliary_ended(self, turn_id: str, error: BaseException | None, answer: OwnAnswer | None) -> None:
        """Record it; one that failed is recorded as aborted: the graph knows, so no answer was lost."""
        with self._lock:
            began, span, tools = self._auxiliary.pop(turn_id)
        turn = answered_turn(replace(began, ended_at=self.now()), error, answer, tools)
        if turn.stands_for is not None and answer is not None:
            with self._lock:
                self._n_sampled += turn.n_response_tokens or 0
                if unknown := unknown_names(answer.tool_calls, tools):
                    self.unknown_tools[turn.id] = unknown
        self._spans.end_auxiliary(span, turn, error, answer)
        self._keep(turn)

    def stop(self, cause: str) -> None:
        """Let no more calls through; the first cause stays."""
        with self._lock:
            self.stopped = self.stopped or cause

    def close(self) -> None:
        """The rollout has ended: later calls are refused, those in flight leave no turn, the engine's cache may go."""
        with self._lock:
            self._closed = True
        self._engine.release(self.rollout_id)

    # Beginning a call

    def _begin(self, call: ModelCall) -> _Begun:
        """Check the budgets, make prompt ids, seed and intent.

        Raises:
            RolloutStop: nothing may be sampled any more.
            CaptureError: the call belongs to the user's own model, or holds no message.
        """
        if call.role == "auxiliary" or not call.messages:
            raise CaptureError(
                f"A call of {call.site.node or 'no node'} with role {call.role} and {len(call.messages)} messages came "
                "to the policy. It answers trained and frozen calls of at least one message."
            )
        prompt = hashed(call)
        with self._lock:
            tokens_left = self._tokens_left()
            self._n_policy_calls += 1
            parent, cause = self._conversations.begin(prompt, call.site)
        prompt_ids, parent, cause = self._prompt_ids(call, prompt, parent, cause)
        room = self._engine.max_length - len(prompt_ids)
        if room <= 0:
            self._stop(f"room: the prompt has {len(prompt_ids)} ids, the engine takes {self._engine.max_length}")
        return self._register(call, prompt, prompt_ids, parent, cause, min(tokens_left, room, call.max_tokens or room))

    def _tokens_left(self) -> int:
        """How much may still be sampled; ends the rollout when a budget is spent. Hold the lock."""
        limits = self._limits
        if self._closed:
            raise RolloutStop(ENDED)
        if self.stopped is not None:
            raise RolloutStop(self.stopped)
        if limits.turns is not None and self._n_policy_calls >= limits.turns:
            self._stop(f"turns: all {limits.turns} policy calls are used")
        if limits.tokens is not None and self._n_sampled >= limits.tokens:
            self._stop(f"tokens: {self._n_sampled} of {limits.tokens} tokens are sampled")
        if self.overrun is not None:
            self._stop(self.overrun)
        return limits.tokens - self._n_sampled if limits.tokens is not None else self._engine.max_length

    def _prompt_ids(
        self, call: ModelCall, prompt: Prompt, parent: Turn | None, cause: BreakCause | None
    ) -> tuple[Ids, Turn | None, BreakCause | None]:
        """The stored ids of the parent and a suffix where that holds, else the whole conversation rendered anew."""
        ids, broke = prompt_ids_of(self._renderer, call, prompt, parent)
        return (ids, parent, cause) if broke is None else (ids, None, broke)

    def _register(
        self,
        call: ModelCall,
        prompt: Prompt,
        prompt_ids: Ids,
        parent: Turn | None,
        cause: BreakCause | None,
        max_tokens: int,
    ) -> _Begun:
        index, turn_id = self._next_index()
        with self._lock:
            seed = self._seed(call.site, prompt)
        sampling = Sampling(
            temperature=self.request.temperature,
            max_tokens=max_tokens,
            seed=seed,
            stop_ids=self._renderer.stop_ids,
            experts_from=parent.routed_experts.end if parent is not None and parent.routed_experts is not None else 0,
        )
        started_at = self.now()
        self._store.put_intent(turn_id=turn_id, rollout_id=self.rollout_id, started_at=started_at)
        return _Begun(
            call=call,
            prompt=prompt,
            turn_id=turn_id,
            index=index,
            prompt_ids=prompt_ids,
            sampling=sampling,
            parent=parent,
            cause=cause,
            started_at=started_at,
            span=self._spans.start(call, turn_id=turn_id, sampling=sampling),
        )

    def _next_index(self) -> tuple[int, str]:
        with self._lock:
            index, self._n_calls = self._n_calls, self._n_calls + 1
        return index, f"{self.rollout_id}#{index}"

    def _seed(self, site: CallSite, prompt: Prompt) -> int:
        """63 bits from the rollout and the call's identity, the same in every run. Hold the lock.

        Equal prompts at one place are counted: which of two such parallel calls came first makes no difference.
        """
        names = [part.partition(":")[0] for part in site.checkpoint_ns.split("|")]
        identity = json.dumps([names, site.node, site.step, site.path, site.attempt, prompt.digest.hex()])
        ordinal = self._ordinals[identity]
        self._ordinals[identity] += 1
        asks = self.request
        who = [asks.seed, asks.phase, asks.step, asks.task.id, asks.sibling, asks.attempt]
        return hash63(json.dumps([*who, identity, ordinal]))

    # Asking the engine

    def _ask(self, begun: _Begun) -> Future[Generation]:
        try:
            with spans.around(begun.span):
                return self._engine.generate(begun.prompt_ids, begun.sampling, session=self.rollout_id)
        except BaseException as error:
            self._lose(begun, error)

    def _respelled(self, begun: _Begun) -> tuple[Respelling, ...]:
        """Found while the engine works."""
        return respelled(self._renderer, begun.call, begun.prompt, begun.parent)

    def _wait(self, begun: _Begun, future: Future[Generation]) -> Generation:
        try:
            return future.result(self._seconds_left())
        except TimeoutError as error:
            if future.done():
                self._lose(begun, error)
            self._out_of_time()
            return self._remains(begun, future, GRACE_S)
        except BaseException as error:
            future.cancel()
            self._lose(begun, error)

    async def _await(self, begun: _Begun, future: Future[Generation]) -> Generation:
        wrapped = asyncio.wrap_future(future)
        try:
            done, _ = await asyncio.wait((wrapped,), timeout=self._seconds_left())
            if not done:
                self._out_of_time()
                await asyncio.wait((wrapped,), timeout=GRACE_S)
        except BaseException as error:
            wrapped.cancel()
            self._lose(begun, error)
        if not wrapped.cancelled() and wrapped.done():
            wrapped.exception()  # Taken here, so that asyncio does not report it as never retrieved.
        return self._remains(begun, future, 0)

    def _remains(self, begun: _Begun, future: Future[Generation], timeout: float) -> Generation:
        """What the engine has answered by now; a call without an answer is lost."""
        try:
            return future.result(timeout)
        except EngineError as error:
            self._blame_engine()
            self._lose(begun, error)
        except BaseException as error:
            future.cancel()
            self._lose(begun, error)

    def _blame_engine(self) -> None:
        """The time ran out on an engine that could not work: its failure, and no spent budget."""
        with self._lock:
            if self.stopped is not None and self.stopped.startswith("seconds"):
                self.stopped = None

    def _seconds_left(self) -> float | None:
        if self._limits.seconds is None:
            return None
        return max(0.0, self._limits.seconds - self._elapsed_s)

    def _out_of_time(self) -> None:
        self.stop(f"seconds: {self._limits.seconds:g} seconds are over")
        self._engine.release(self.rollout_id)

    def _lose(self, begun: _Begun, error: BaseException) -> NoReturn:
        """Count a call without an answer, and raise what the graph has to see."""
        with self._lock:
            self.lost += self.stopped is None and not self._closed
        self._spans.fail(begun.span, error)
        if self.stopped is not None and isinstance(error, Exception):
            raise RolloutStop(self.stopped) from error
        if isinstance(error, EngineError | CaptureError) or not isinstance(error, Exception):
            raise error
        raise EngineError(
            f"Engine {self._engine.name} failed on turn {begun.turn_id}: {type(error).__name__}: {error}. "
            "The rollout is tried again; if it fails each time, see the engine's log."
        ) from error

    # Ending a call

    def _finish(self, begun: _Begun, generation: Generation, spelt: tuple[Respelling, ...]) -> Reply:
        """Read the answer, record its Turn and give the Reply."""
        if not generation.token_ids and generation.stop_reason != "aborted":
            self._lose(begun, self._answered_nothing(begun))
        if (misfit := _misfit_of_experts(begun, generation)) is not None:
            self._lose(begun, self._told_wrong_experts(begun, misfit))
        try:
            parsed = read_answer(
                self._renderer, begun.call, generation, prompt_ids=begun.prompt_ids, seed=begun.sampling.seed
            )
        except CaptureError as error:
            self._lose(begun, error)
        n_calls = len(parsed.tool_calls) + len(parsed.invalid_tool_calls)
        n_invalid = len(parsed.invalid_tool_calls) + n_misfits(parsed.tool_calls, begun.call.tools)
        turn = replace(self._turn(begun, generation, parsed, n_calls, n_invalid), respelled=spelt)
        with self._lock:
            self._n_sampled += len(turn.response_ids)
            if unknown := unknown_names(parsed.tool_calls, begun.call.tools):
                self.unknown_tools[turn.id] = unknown
            self._conversations.answered(turn, begun.prompt, parsed.text, parsed.tool_calls, parsed.invalid_tool_calls)
        if not self._keep(turn):
            self._lose(begun, RolloutStop(ENDED))
        self._spans.end(begun.span, turn, parsed, n_cached=generation.n_cached_ids)
        if generation.stop_reason == "aborted":
            self._stop("aborted: the engine ended the call")
        return reply_of(turn, parsed, n_cached_ids=generation.n_cached_ids, model_name=self._model_name)

    def _answered_nothing(self, begun: _Begun) -> EngineError:
        return EngineError(
            f"Engine {self._engine.name} answered turn {begun.turn_id} with no ids, though {begun.sampling.max_tokens} "
            "had room. See the engine's log."
        )

    def _told_wrong_experts(self, begun: _Begun, misfit: str) -> EngineError:
        return EngineError(
            f"Engine {self._engine.name} told routed experts of turn {begun.turn_id} {misfit}. The answer can't be "
            "trained and is lost. See the engine's log, or switch off that it tells experts."
        )

    def _turn(self, begun: _Begun, generation: Generation, parsed: Parsed, n_calls: int, n_invalid: int) -> Turn:
        trace_id, span_id = ids_of(begun.span)
        return Turn(
            id=begun.turn_id,
            rollout_id=self.rollout_id,
            index=begun.index,
            role=begun.call.role,
            role_reason=begun.call.role_reason,
            site=begun.call.site,
            prompt_ids=begun.prompt_ids,
            response_ids=generation.token_ids,
            response_logprobs=generation.logprobs,
            weight_versions=generation.weight_versions,
            routed_experts=generation.routed_experts if generation.token_ids else None,
            sampling=begun.sampling,
            stop_reason=generation.stop_reason,
            extends=begun.parent.id if begun.parent else None,
            break_cause=begun.cause,
            n_tool_calls=n_calls,
            n_invalid_tool_calls=n_invalid,
            parse_failed=bool(parsed.invalid_tool_calls),
            missed=missed(begun.call, parsed),
            renderer=self._renderer.identity,
            trace_id=trace_id,
            span_id=span_id,
            started_at=begun.started_at,
            ended_at=self.now(),
        )

    def _keep(self, turn: Turn) -> bool:
        """False after the end: the rollout's record stands, and no trajectory of it would hold this turn."""
        with self._lock:
            if self._closed:
                return False
            self._turns[turn.index] = turn
            self._store.put_turn(turn)
        if self._on_turn is not None:
            self._on_turn(turn)
        return True

    def _stop(self, cause: str) -> NoReturn:
        self.stop(cause)
        raise RolloutStop(self.stopped)


def _misfit_of_experts(begun: _Begun, generation: Generation) -> str | None:
    """How the experts that an engine told differ from the rows that the call lacks, in words. None: they don't."""
    told, parent = generation.routed_experts, begun.parent.routed_experts if begun.parent else None
    if told is None or not generation.token_ids:
        return None
    start, end = begun.sampling.experts_from, len(begun.prompt_ids) + len(generation.token_ids) - 1
    if (told.start, told.end) != (start, end):
        return f"for positions {told.start} to {told.end - 1}, and it was asked for {start} to {end - 1}"
    if parent is not None and (parent.n_layers, parent.n_chosen) != (told.n_layers, told.n_chosen):
        return (
            f"for {told.n_layers} layers of {told.n_chosen}, and the turn before it has {parent.n_layers} layers of "
            f"{parent.n_chosen}"
        )
    return None
