"""Token ids to sampled ids: the embedded engine, on a thread of its own.

Calls arrive by a thread-safe queue and join between two decode steps; one forward pass answers all of them. What a
rollout has read stays in its row of the KV cache, so the next turn reads only what is new, and rollouts that begin
alike copy what another has read. Invariants: a cached key was computed by the weights of now; the last sampled id is
never in the cache; a call's ids depend on its own prompt and seed, not on who shares its batch (up to about 1e-6 in
the logits). Knows nothing of messages, tools or rewards.

The thread uses `threads` operation threads (1 by default: the rollouts' Python needs the other core). While an engine
is open `sys.setswitchinterval` is lowered: a torch call gives up the GIL at each operation, and would wait 5 ms for it
behind every busy Python thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import torch

from agenttrain.errors import AgenttrainError, EngineError
from agenttrain.local import policy
from agenttrain.local.cache_trial import cached_passes
from agenttrain.local.cached_passes import CachedPasses
from agenttrain.local.draw import draw
from agenttrain.local.kv_cache import block_hashes
from agenttrain.local.seating import Call, Seated, alike, seat
from agenttrain.memory import whole_bytes
from agenttrain.records import Generation, Ids, Sampling, StopReason
from agenttrain.switching import lower_switch_interval, restore_switch_interval

if TYPE_CHECKING:
    from agenttrain.protocols import EngineContext

COMPANY_S = 0.002
"""How long an idle engine waits for more calls."""
MAX_ROWS = 512
"""Calls in one forward pass."""
PREFILL_IDS = 4096
"""Ids, padding included, in one prefill pass; a longer prompt is read in chunks."""


@dataclass(frozen=True, slots=True)
class Release:
    session: str


@dataclass(frozen=True, slots=True)
class Update:
    weights: dict[str, torch.Tensor]
    version: int
    done: Future[None]


class LocalEngine:
    """protocols.Engine over one Hugging Face folder, on the CPU or on CUDA."""

    name = "local"
    takes_seeds = True

    def __init__(
        self,
        folder: str | Path,
        *,
        weights_from: Path | None = None,
        device: torch.device | None = None,
        kv_bytes: int | None = None,
        threads: int = 1,
        weight_version: int = 0,
        one_at_a_time: bool = False,
    ) -> None:
        """Load the model, test its cache, start the thread.

        Args:
            one_at_a_time: answer each call alone and from an empty row, so that the order of arrival changes no bit.
            kv_bytes: memory the KV cache may grow to. None: a quarter of the machine's or its container's, or 60 % of
                the GPU's free.
            threads: operation threads of the CPU.

        Raises:
            ModelError: the folder can't be loaded.
        """
        self.device = device or policy.choose_device()
        self.model = policy.load_model(folder, device=self.device, weights_from=weights_from)
        self.max_length = policy.max_length(self.model.config)
        self.weight_version = weight_version
        self._logits = policy.Logits(self.model)
        self._passes, self.kv_cache_reason = cached_passes(
            self._logits,
            device=self.device,
            budget_bytes=kv_bytes or default_kv_bytes(self.device),
            max_length=self.max_length,
        )
        """None, and why: every token recomputes its whole prefix, correct and slow."""
        self.kv_cache = self._passes is not None
        """Whether keys and values are kept."""
        self._n_vocabulary = policy.vocabulary_size(self.model)
        self._threads = threads
        self._alone = one_at_a_time
        self._max_rows = 1 if one_at_a_time else MAX_ROWS
        self._inbox: SimpleQueue[Call | Release | Update | None] = SimpleQueue()
        self._waiting: list[Call] = []
        self._running: list[Call] = []
        self._sessions: set[str] = set()
        self._open: set[Call] = set()
        """Every call that has arrived and not ended."""
        self._failure: BaseException | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._counts: dict[str, float] = dict.fromkeys(
            ("sampled_ids", "prefilled_ids", "cached_ids", "decode_steps", "decode_rows", "busy_s"), 0.0
        )
        lower_switch_interval()
        self._thread = threading.Thread(target=self._main, name="agenttrain-engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_context(cls, context: EngineContext) -> LocalEngine:
        """The engine that `engine.name = "local"` means."""
        return cls(context.model, weights_from=context.weights_from, one_at_a_time=context.config.run.deterministic)

    # ── any thread ───────────────────────────────────────────────────────────────────────────────────────────────

    def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str) -> Future[Generation]:
        """Sample a response; the future is already running and can't be cancelled, `release` ends it.

        Raises:
            EngineError: the prompt is empty, holds an id outside the vocabulary or leaves no room; or the engine has
                failed or is closed.
        """
        self._check_open()
        self._check_prompt(prompt_ids, sampling, session)
        future: Future[Generation] = Future()
        future.set_running_or_notify_cancel()
        prompt = list(prompt_ids)
        call = Call(
            prompt=prompt,
            sampling=sampling,
            session=session,
            future=future,
            stop_ids=frozenset(sampling.stop_ids),
            hashes=block_hashes(prompt) if self.kv_cache else [],
        )
        with self._lock:
            self._check_open()
            self._inbox.put(call)
        return future

    def release(self, session: str) -> None:
        """The rollout has ended: its rows are free, its calls in flight end as aborted."""
        with self._lock:
            if not self._closed and self._failure is None:
                self._inbox.put(Release(session))

    def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Take new weights between two decode steps; returns when the next token is sampled from them.

        Calls in flight go on with the new weights, and read their ids again: no key of older weights is kept.

        Raises:
            EngineError: a name or shape that the model has not (nothing is taken), or the engine has failed or is
                closed.
        """
        update = Update({name: tensor.detach() for name, tensor in weights}, version, Future())
        with self._lock:
            self._check_open()
            self._inbox.put(update)
        update.done.result()

    def stats(self) -> Mapping[str, float]:
        """Counters since the start, and the GPUs held; the mean batch width is decode_rows / decode_steps.

        Raises:
            EngineError: the engine has failed or is closed.
        """
        self._check_open()
        return {**self._counts, "gpus": float(self.device.type == "cuda")}

    def close(self) -> None:
        """End the thread and free the memory; calls in flight end as aborted. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._inbox.put(None)
        self._thread.join()
        self._passes = None
        restore_switch_interval()

    def _check_open(self) -> None:
        if self._failure is not None:
            raise EngineError(f"The local engine has failed: {self._failure!r}. Start a new one.") from self._failure
        if self._closed:
            raise EngineError("The local engine is closed. Open a new one to generate or to publish weights.")

    def _check_prompt(self, prompt_ids: Ids, sampling: Sampling, session: str) -> None:
        n = len(prompt_ids)
        if n == 0:
            raise EngineError(f"The prompt of session {session} is empty. Give at least one id.")
        if sampling.max_tokens < 1:
            raise EngineError(f"max_tokens is {sampling.max_tokens} in session {session}. Ask for at least 1.")
        if n + sampling.max_tokens > self.max_length:
            raise EngineError(
                f"Session {session} asks for {n} prompt ids and {sampling.max_tokens} new ones, and the model takes "
                f"{self.max_length} together. Lower limits.tokens, or shorten the prompt."
            )
        if min(prompt_ids) < 0 or max(prompt_ids) >= self._n_vocabulary:
            bad = next(i for i in prompt_ids if not 0 <= i < self._n_vocabulary)
            raise EngineError(
                f"The prompt of session {session} holds id {bad}, and the model's vocabulary has {self._n_vocabulary} "
                "ids. Use the tokenizer of the model's own folder."
            )

    # ── the engine's thread ──────────────────────────────────────────────────────────────────────────────────────

    def _main(self) -> None:
        try:
            if self.device.type == "cpu":
                torch.set_num_threads(self._threads)
            with torch.inference_mode():
                while self._receive():
                    began = time.perf_counter()
                    self._admit()
                    if self._running:
                        self._decode()
                    self._counts["busy_s"] += time.perf_counter() - began
            self._end_all(self._abort)
        except BaseException as error:
            with self._lock:
                self._failure = error
            self._end_all(self._fail)

    def _receive(self) -> bool:
        """Take all that has arrived; waits when there is nothing to do. False: the engine is to close."""
        if not self._running and not self._waiting:
            if not self._take(self._inbox.get()):
                return False
            if not self._wait_for_company():
                return False
        while True:
            try:
                item = self._inbox.get_nowait()
            except Empty:
                return True
            if not self._take(item):
                return False

    def _wait_for_company(self) -> bool:
        until = time.perf_counter() + COMPANY_S
        while self._waiting and len(self._waiting) < len(self._sessions):
            try:
                item = self._inbox.get(timeout=max(0.0, until - time.perf_counter()))
            except Empty:
                break
            if not self._take(item):
                return False
        return True

    def _take(self, item: Call | Release | Update | None) -> bool:
        match item:
            case None:
                return False
            case Call():
                self._sessions.add(item.session)
                self._open.add(item)
                self._waiting.append(item)
            case Release():
                self._release(item.session)
            case Update():
                self._update(item)
        return True

    def _release(self, session: str) -> None:
        self._sessions.discard(session)
        for call in [call for call in self._open if call.session == session]:
            self._abort(call)
        if self._passes is not None:
            self._passes.rows.free(session)

    def _update(self, update: Update) -> None:
        try:
            policy.load_weights(self.model, update.weights, where=f"weight version {update.version}")
        except AgenttrainError as error:
            update.done.set_exception(EngineError(str(error)))
            return
        except BaseException as error:
            update.done.set_exception(EngineError(f"The local engine failed on new weights: {error!r}"))
            raise
        self.weight_version = update.version
        if self._passes is not None:
            for call in self._running:
                if call.row is not None:
                    call.row.call = None
                call.row, call.hashes = None, block_hashes(call.to_read)
            self._passes.rows.forget()
            self._waiting, self._running = self._running + self._waiting, []
        update.done.set_result(None)

    # ── joining ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _admit(self) -> None:
        """Let waiting calls join: each gets a row, reads what the cache lacks and samples one id."""
        passes = self._passes
        if passes is None:
            while self._waiting and len(self._running) < self._max_rows:
                self._running.append(self._waiting.pop(0))
            return
        while self._waiting:
            most = self._max_rows - len(self._running)
            joining, self._waiting = seat(self._waiting, passes.rows, most=most, alone=self._alone)
            if not joining:
                return
            self._counts["cached_ids"] += sum(each.start for each in joining)
            for group in alike(joining, PREFILL_IDS):
                self._prefill(passes, group)

    def _prefill(self, passes: CachedPasses, group: Sequence[Seated]) -> None:
        """Read what each call's row lacks, then sample one id for each."""
        rows, starts = [each.row for each in group], [each.start for each in group]
        ids = [each.call.to_read for each in group]
        chunk = max(1, PREFILL_IDS // len(group))
        n_chunks = max(-(-(len(row) - start) // chunk) for row, start in zip(ids, starts, strict=True))
        for i in range(n_chunks):
            parts = [row[start + i * chunk : start + (i + 1) * chunk] for row, start in zip(ids, starts, strict=True)]
            logits = passes.prefill(rows, parts, [start + i * chunk for start in starts])
        self._counts["prefilled_ids"] += sum(each.n_missing for each in group)
        for each, row_ids in zip(group, ids, strict=True):
            each.row.ids = row_ids
            passes.rows.index(each.row, each.call.hashes)
        calls = [each.call for each in group]
        self._running += calls
        self._sample(calls, logits)

    # ── decoding ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _decode(self) -> None:
        if self._passes is None:
            self._sample(list(self._running), self._recomputed(self._running))
        else:
            self._decode_cached(self._passes)
        self._counts["decode_steps"] += 1

    def _decode_cached(self, passes: CachedPasses) -> None:
        """One more id for every running call, from the front rows."""
        rows = passes.rows
        end = 1 + max(call.n_held for call in self._running)
        rows.ensure_length(end)
        rows.gather_front()
        front = rows.rows[: rows.n_front]
        ids, places = [], []
        for row in front:
            if row.call is not None:
                ids.append(row.call.out[-1])
                places.append(row.call.n_held)
            else:
                # An idle row takes part too: what it writes is behind what it holds, or that end is given up.
                place = min(len(row.ids), end - 1)
                del row.ids[place:]
                ids.append(0)
                places.append(place)
        busy = [i for i, row in enumerate(front) if row.call is not None]
        logits = passes.decode(ids, places, wanted=busy)
        calls = [front[i].call for i in busy]
        self._counts["decode_rows"] += len(calls)
        self._sample(calls, logits)

    def _recomputed(self, calls: Sequence[Call]) -> torch.Tensor:
        """Logits [B, V] at the end of each call's ids, without a cache."""
        ids, attention_mask = policy.padded([call.to_read for call in calls], self.device)
        last = attention_mask.sum(dim=1) - 1
        flat = torch.arange(len(calls), device=self.device) * ids.shape[1] + last
        self._counts["decode_rows"] += len(calls)
        self._counts["prefilled_ids"] += sum(len(call.to_read) for call in calls)
        return self._logits.at(flat, ids, attention_mask=attention_mask, use_cache=False)

    def _sample(self, calls: Sequence[Call], logits: torch.Tensor) -> None:
        """Draw one id for each call, and end those that are through."""
        ids, logprobs = draw(
            logits,
            temperatures=[call.sampling.temperature for call in calls],
            seeds=[call.sampling.seed for call in calls],
            positions=[call.sampling.n_drawn + len(call.out) for call in calls],
        )
        self._counts["sampled_ids"] += len(calls)
        for call, token, logprob in zip(calls, ids, logprobs, strict=True):
            call.out.append(token)
            call.logprobs.append(logprob)
            call.versions.append(self.weight_version)
            if token in call.stop_ids:
                self._end(call, "stop")
            elif len(call.out) == call.sampling.max_tokens:
                self._end(call, "length")

    # ── ending ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _end(self, call: Call, reason: StopReason) -> None:
        self._leave(call)
        call.future.set_result(
            Generation(
                token_ids=tuple(call.out),
                logprobs=tuple(call.logprobs),
                weight_versions=tuple(call.versions),
                stop_reason=reason,
                n_cached_ids=call.n_cached or 0,
            )
        )

    def _leave(self, call: Call) -> None:
        self._open.discard(call)
        for calls in (self._running, self._waiting):
            if call in calls:
                calls.remove(call)
        if call.row is not None:
            call.row.ids = call.to_read[: call.n_held]
            call.row.call, call.row = None, None

    def _abort(self, call: Call) -> None:
        self._end(call, "aborted")

    def _fail(self, call: Call) -> None:
        call.future.set_exception(EngineError(f"The local engine failed while it answered: {self._failure!r}"))

    def _end_all(self, end: Callable[[Call], None]) -> None:
        """End every call and refuse every update that is left, those still in the inbox too."""
        left = [*self._open]
        while True:
            try:
                item = self._inbox.get_nowait()
            except Empty:
                break
            if isinstance(item, Call):
                left.append(item)
            elif isinstance(item, Update):
                item.done.set_exception(EngineError("The local engine ended before it took the new weights."))
        for call in left:
            if not call.future.done():
                end(call)
        self._open, self._running, self._waiting = set(), [], []


def default_kv_bytes(device: torch.device) -> int:
    """Memory that the KV cache may grow to where nothing is said."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * 0.6)
    return whole_bytes() // 4
