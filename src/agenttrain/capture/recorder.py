"""A ModelCall becomes a Turn and a Reply: the recorder answers every model call of one rollout from the engine.

Each call's intent is stored before the engine is asked and its Turn after, so that a lost call is seen. A prompt that
continues an earlier turn is that turn's stored ids and a suffix; what was sampled is never made into ids again. The
seed of a call derives from where it stands in the graph and what it asks, and not from when it came, so that parallel
calls get the same seeds in every run. Thread-safe: parallel branches call from several threads and event loops.

How a user's settings are taken: the temperature is the rollout's, whatever the user's model says. `max_tokens` caps a
call. `stop` texts cut the reply's text and not the ids. `tool_choice="none"` leaves the tools in the prompt (the
conversation stays one) and gives a sampled call back as text. "required" and a named tool can't be forced on a sampled
policy: a reply without such a call counts in `n_choices_missed`. A limit is checked when a call begins, so calls that
run in parallel may pass it together. Nothing here knows rewards or statuses.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from agenttrain.capture import spans
from agenttrain.capture.conversations import Conversations, Prompt, hashed
from agenttrain.capture.tool_calls import n_misfits
from agenttrain.errors import CaptureError, EngineError, RolloutStop
from agenttrain.protocols import Engine, Parsed, Renderer, TurnStore
from agenttrain.records import (
    BreakCause,
    CallSite,
    Generation,
    Ids,
    InvalidCall,
    ModelCall,
    ParsedCall,
    Reply,
    Role,
    RolloutRequest,
    Sampling,
    Turn,
)

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

CallT = TypeVar("CallT", ParsedCall, InvalidCall)
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
        lost: calls whose answer was lost while the rollout might go on; one that a stop took away is none.
        n_tool_calls: tool calls that were sampled, readable or not.
        n_invalid_tool_calls: those of them that can't be read, name no tool or break its schema.
        n_choices_missed: replies without the call that `tool_choice` asked for.
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
        model_name: str,
        on_turn: Callable[[Turn], None] | None = None,
    ) -> None:
        """Take what answers the calls.

        Args:
            role_of: who answers a call, and why.
            on_turn: told of each turn once it is with the store, on the thread that made the call.
        """
        self.request, self.rollout_id = request, request.rollout_id
        self.stopped: str | None = None
        self._closed = False
        self.lost = self.n_tool_calls = self.n_invalid_tool_calls = self.n_choices_missed = 0
        self._engine, self._renderer, self._store, self._limits = engine, renderer, store, limits
        self._role_of, self._model_name, self._on_turn = role_of, model_name, on_turn
        self._spans = spans.CallSpans(tracer, model=model_name)
        self._started = time.monotonic()
        self._lock = threading.RLock()
        self._conversations = Conversations()
        self._ordinals: Counter[str] = Counter()
        self._turns: dict[int, Turn] = {}
        self._auxiliary: dict[str, Turn] = {}
        self._n_calls = self._n_policy_calls = self._n_sampled = 0

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The recorded turns, in the order their calls began."""
        with self._lock:
            return tuple(self._turns[index] for index in sorted(self._turns))

    @property
    def last_trained_turn(self) -> Turn | None:
        """The trained turn that began last. None: there is none."""
        return next((turn for turn in reversed(self.turns) if turn.role == "trained"), None)

    def role(self, site: CallSite) -> tuple[Role, str]:
        return self._role_of(site)

    def answer(self, call: ModelCall) -> Reply:
        begun = self._begin(call)
        return self._finish(begun, self._wait(begun, self._ask(begun)))

    async def aanswer(self, call: ModelCall) -> Reply:
        begun = self._begin(call)
        return self._finish(begun, await self._await(begun, self._ask(begun)))

    def auxiliary_began(self, call: ModelCall) -> str:
        """Note a call that the user's own model answers; it uses no budget and holds no ids."""
        index, turn_id = self._next_index()
        started_at = time.time()
        turn = Turn(
            id=turn_id,
            rollout_id=self.rollout_id,
            index=index,
            role="auxiliary",
            role_reason=call.role_reason,
            site=call.site,
            started_at=started_at,
        )
        with self._lock:
            self._auxiliary[turn_id] = turn
        self._store.put_intent(turn_id=turn_id, rollout_id=self.rollout_id, started_at=started_at)
        return turn_id

    def auxiliary_ended(self, turn_id: str, error: BaseException | None) -> None:
        """Record it; one that failed is recorded as aborted: the graph knows, so no answer was lost."""
        with self._lock:
            began = self._auxiliary.pop(turn_id)
        self._keep(replace(began, ended_at=time.time(), stop_reason="stop" if error is None else "aborted"))

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
        if limits.seconds is not None and time.monotonic() - self._started >= limits.seconds:
            self._stop(f"seconds: {limits.seconds:g} seconds are over")
        return limits.tokens - self._n_sampled if limits.tokens is not None else self._engine.max_length

    def _prompt_ids(
        self, call: ModelCall, prompt: Prompt, parent: Turn | None, cause: BreakCause | None
    ) -> tuple[Ids, Turn | None, BreakCause | None]:
        """The stored ids of the parent and a suffix where that holds, else the whole conversation rendered anew."""
        if parent is None:
            return self._renderer.render(call.messages, call.tools), None, cause
        new = call.messages[prompt.n_known :]
        ids = self._renderer.extend(parent.prompt_ids, parent.response_ids, new, call.tools)
        stored = parent.prompt_ids + parent.response_ids
        if ids is not None and ids[: len(stored)] == stored:
            return ids, parent, None
        broke: BreakCause = "truncated_turn" if parent.stop_reason == "length" else "template"
        return self._renderer.render(call.messages, call.tools), None, broke

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
        )
        started_at = time.time()
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
            span=self._spans.start(turn_id=turn_id, role=call.role, sampling=sampling),
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
            return self._engine.generate(begun.prompt_ids, begun.sampling, session=self.rollout_id)
        except BaseException as error:
            self._lose(begun, error)

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
        except BaseException as error:
            future.cancel()
            self._lose(begun, error)

    def _seconds_left(self) -> float | None:
        if self._limits.seconds is None:
            return None
        return max(0.0, self._limits.seconds - (time.monotonic() - self._started))

    def _out_of_time(self) -> None:
        self.stop(f"seconds: {self._limits.seconds:g} seconds are over")
        self._engine.release(self.rollout_id)

    def _lose(self, begun: _Begun, error: BaseException) -> NoReturn:
        """Count a call without an answer, and raise what the graph has to see."""
        with self._lock:
            self.lost += self.stopped is None and not self._closed
        spans.fail(begun.span, error)
        if self.stopped is not None and isinstance(error, Exception):
            raise RolloutStop(self.stopped) from error
        if isinstance(error, EngineError) or not isinstance(error, Exception):
            raise error
        raise EngineError(
            f"Engine {self._engine.name} failed on turn {begun.turn_id}: {type(error).__name__}: {error}. "
            "The rollout is tried again; if it fails each time, see the engine's log."
        ) from error

    # Ending a call

    def _finish(self, begun: _Begun, generation: Generation) -> Reply:
        """Read the answer, record its Turn and give the Reply."""
        if not generation.token_ids and generation.stop_reason != "aborted":
            self._lose(begun, self._answered_nothing(begun))
        parsed = self._parse(begun, generation)
        n_calls = len(parsed.tool_calls) + len(parsed.invalid_tool_calls)
        n_invalid = len(parsed.invalid_tool_calls) + n_misfits(parsed.tool_calls, begun.call.tools)
        turn = self._turn(begun, generation, n_calls, n_invalid, parse_failed=bool(parsed.invalid_tool_calls))
        with self._lock:
            self._n_sampled += len(turn.response_ids)
            self.n_tool_calls += n_calls
            self.n_invalid_tool_calls += n_invalid
            self.n_choices_missed += not _chosen(begun.call.tool_choice, parsed)
            self._conversations.answered(turn, begun.prompt, parsed.text, parsed.tool_calls, parsed.invalid_tool_calls)
        if not self._keep(turn):
            self._lose(begun, RolloutStop(ENDED))
        spans.end(begun.span, turn, self._model_name)
        if generation.stop_reason == "aborted":
            self._stop("aborted: the engine ended the call")
        return self._reply(turn, parsed, generation)

    def _answered_nothing(self, begun: _Begun) -> EngineError:
        return EngineError(
            f"Engine {self._engine.name} answered turn {begun.turn_id} with no ids, though {begun.sampling.max_tokens} "
            "had room. See the engine's log."
        )

    def _parse(self, begun: _Begun, generation: Generation) -> Parsed:
        call, ids = begun.call, generation.token_ids
        if call.tool_choice == "none":
            end = len(ids) - (1 if ids and ids[-1] in self._renderer.stop_ids else 0)
            parsed = Parsed(text=self._renderer.decode(ids[:end]), reasoning=None, tool_calls=(), invalid_tool_calls=())
        else:
            parsed = self._renderer.parse(ids, call.tools, begun.prompt_ids)
        seed = begun.sampling.seed
        return replace(
            parsed,
            text=_cut(parsed.text, call.stop),
            tool_calls=tuple(_named(each, seed, i) for i, each in enumerate(_allowed(parsed.tool_calls, call))),
            invalid_tool_calls=tuple(_named(each, seed, -1 - i) for i, each in enumerate(parsed.invalid_tool_calls)),
        )

    def _turn(self, begun: _Begun, generation: Generation, n_calls: int, n_invalid: int, *, parse_failed: bool) -> Turn:
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
            sampling=begun.sampling,
            stop_reason=generation.stop_reason,
            extends=begun.parent.id if begun.parent else None,
            break_cause=begun.cause,
            n_tool_calls=n_calls,
            n_invalid_tool_calls=n_invalid,
            parse_failed=parse_failed,
            renderer=self._renderer.identity,
            started_at=begun.started_at,
            ended_at=time.time(),
        )

    def _reply(self, turn: Turn, parsed: Parsed, generation: Generation) -> Reply:
        return Reply(
            call_id=turn.id,
            text=parsed.text,
            reasoning=parsed.reasoning,
            tool_calls=parsed.tool_calls,
            invalid_tool_calls=parsed.invalid_tool_calls,
            stop_reason=turn.stop_reason,
            n_prompt_ids=len(turn.prompt_ids),
            n_response_ids=len(turn.response_ids),
            n_cached_ids=generation.n_cached_ids,
            model=self._model_name,
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


def hash63(text: str) -> int:
    """63 bits of a text, the same in every process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def _named(call: CallT, seed: int, place: int) -> CallT:
    """The call with an id that is unique in the rollout and the same in every run; one the format carries stays."""
    return replace(call, id=f"call_{hash63(f'{seed} {place}'):016x}"[:13]) if call.id.startswith("call_") else call


def _allowed(calls: tuple[ParsedCall, ...], call: ModelCall) -> tuple[ParsedCall, ...]:
    """The first one only where the user's model was told `parallel_tool_calls=False`."""
    return calls[:1] if call.parallel_tool_calls is False else calls


def _cut(text: str, stops: tuple[str, ...]) -> str:
    """The text before the first stop text."""
    return text[: min((at for stop in stops if stop and (at := text.find(stop)) >= 0), default=len(text))]


def _chosen(choice: Any, parsed: Parsed) -> bool:
    """Whether a reply holds the call that was asked for; True when none was."""
    if choice in (None, "auto", "none"):
        return True
    names = {call.name for call in parsed.tool_calls}
    wanted = choice.get("function", {}).get("name") if isinstance(choice, dict) else None
    return wanted in names if wanted else bool(names)
