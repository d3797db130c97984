"""Many rollouts at once: each in flight has a thread of its own, so that sync nodes, async nodes and blocking calls
all batch in the engine.

Requests go in, results come out in the order of the requests. What `following` says is made again, such as an
environment failure; a graph that does not return is given up. Nothing here knows what a rollout does.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from agenttrain.protocols import Engine, OnDone
from agenttrain.records import RolloutRequest, RolloutResult, Status
from agenttrain.reward.status import following

GRACE_S = 10.0
"""How long past its seconds a graph may take to come back before it is given up."""
POLL_S = 0.5


class RunsRollouts(Protocol):
    """What the pool calls; `rollout.Runner` is it."""

    def run(self, request: RolloutRequest, engine: Engine | None) -> RolloutResult: ...

    def abandon(self, rollout_id: str, cause: str) -> RolloutResult | None: ...

    def stop_all(self) -> None: ...


@dataclass(slots=True)
class _Job:
    place: int
    request: RolloutRequest
    engine: Engine | None
    done: queue.SimpleQueue[tuple[_Job, RolloutResult | BaseException]]
    started: float | None = None
    settled: bool = False
    """Its result has been taken; a late one is thrown away."""
    returned: bool = False
    """Its worker has come back from the runner."""
    given_up: bool = False
    """Its worker was stuck and has been replaced: it goes home when it comes back."""
    cut_off: bool = False
    """The run has ended without it: a worker that takes it leaves it undone."""


@dataclass(slots=True)
class _Lookout:
    """When it was last asked which graphs are stuck: also while results keep coming."""

    every_s: float
    _at: float = 0.0

    def is_due(self) -> bool:
        now = time.monotonic()
        if now - self._at < self.every_s:
            return False
        self._at = now
        return True


@dataclass(slots=True)
class RolloutPool:
    """Worker threads that last over many calls of `run`, which several threads may make at once."""

    runner: RunsRollouts
    concurrency: int
    seconds: float
    """limits.seconds of one rollout."""
    should_stop: Callable[[], bool] = lambda: False
    """Asked at every result and poll: True ends `run` with KeyboardInterrupt."""
    following: Callable[[RolloutRequest, Status], RolloutRequest | None] = following
    """Which request a place gets after one that ended so. None: it stands."""
    grace_s: float = GRACE_S
    poll_s: float = POLL_S
    _waiting: queue.SimpleQueue[_Job | None] = field(default_factory=queue.SimpleQueue)
    _n_workers: int = 0
    _n_wanted: int = 0
    """Rollouts of all calls of `run` that are under way."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Over the counts, and over started, returned, given_up and cut_off of the jobs, which workers and `run` both look
    at."""

    def run(
        self, engine: Engine | None, requests: Sequence[RolloutRequest], on_done: OnDone | None = None
    ) -> list[RolloutResult]:
        """Make the rollouts; blocks until all have ended.

        Args:
            on_done: called in this thread with every result, those that are made again included.

        Returns:
            [len(requests)] the last one made of each, in the order of the requests.

        Raises:
            AgenttrainError: what ended the run, such as an escaped call; rollouts under way are cut off.
            KeyboardInterrupt: the same.
        """
        with self._wanted(len(requests)):
            return self._run(engine, requests, on_done)

    def _run(
        self, engine: Engine | None, requests: Sequence[RolloutRequest], on_done: OnDone | None
    ) -> list[RolloutResult]:
        done: queue.SimpleQueue[tuple[_Job, RolloutResult | BaseException]] = queue.SimpleQueue()
        open_jobs = {
            place: self._start(_Job(place=place, request=request, engine=engine, done=done))
            for place, request in enumerate(requests)
        }
        results: dict[int, RolloutResult] = {}
        look = _Lookout(every_s=self.poll_s)
        try:
            while open_jobs:
                for job, result in self._next(done, open_jobs, look):
                    if on_done is not None:
                        on_done(result)
                    again = self.following(job.request, result.rollout.status)
                    if again is not None:
                        open_jobs[job.place] = self._start(
                            _Job(place=job.place, request=again, engine=engine, done=done)
                        )
                    else:
                        results[job.place] = result
                        del open_jobs[job.place]
        except BaseException:
            self._cut_off(open_jobs)
            raise
        return [results[place] for place in range(len(requests))]

    def close(self) -> None:
        """Send the idle workers home; one that is stuck in a graph stays behind as a daemon."""
        for _ in range(self._n_workers):
            self._waiting.put(None)
        self._n_workers = 0

    @contextmanager
    def _wanted(self, n: int) -> Iterator[None]:
        """Workers for n more rollouts, as far as may run at once."""
        with self._lock:
            self._n_wanted += n
            self._hire(min(self.concurrency, self._n_wanted))
        try:
            yield
        finally:
            with self._lock:
                self._n_wanted -= n

    def _start(self, job: _Job) -> _Job:
        self._waiting.put(job)
        return job

    def _next(
        self,
        done: queue.SimpleQueue[tuple[_Job, RolloutResult | BaseException]],
        open_jobs: dict[int, _Job],
        look: _Lookout,
    ) -> list[tuple[_Job, RolloutResult]]:
        """The results that have come, or those of graphs given up."""
        if self.should_stop():
            raise KeyboardInterrupt
        if look.is_due():
            given_up = self._give_up_stuck(open_jobs)
            if given_up:
                return given_up
        try:
            job, outcome = done.get(timeout=self.poll_s)
        except queue.Empty:
            return []
        if job.settled:
            return []
        if isinstance(outcome, BaseException):
            raise outcome
        job.settled = True
        return [(job, outcome)]

    def _give_up_stuck(self, open_jobs: dict[int, _Job]) -> list[tuple[_Job, RolloutResult]]:
        limit = self.seconds + self.grace_s
        given_up = []
        for job in open_jobs.values():
            if job.started is not None and not job.settled and time.monotonic() - job.started > limit:
                cause = f"the graph did not return within {self.seconds:g} s and {self.grace_s:g} s of grace"
                result = self.runner.abandon(job.request.rollout_id, cause)
                if result is not None:
                    job.settled = True
                    self._replace_worker(job)
                    given_up.append((job, result))
        return given_up

    def _replace_worker(self, job: _Job) -> None:
        """Hire another worker for the one that is stuck, unless it has come back meanwhile."""
        with self._lock:
            job.given_up = not job.returned
            if job.given_up:
                self._n_workers -= 1
                self._hire(self._n_workers + 1)

    def _cut_off(self, open_jobs: dict[int, _Job]) -> None:
        """Leave undone what waits, stop what runs, and wait a moment for it to write its record."""
        with self._lock:
            for job in open_jobs.values():
                job.cut_off = True
        running = [job for job in open_jobs.values() if job.started is not None and not job.settled]
        self.runner.stop_all()
        deadline = time.monotonic() + self.grace_s
        while any(not job.returned for job in running) and time.monotonic() < deadline:
            time.sleep(min(0.1, self.poll_s))
            self.runner.stop_all()  # a rollout that was only about to begin was not there to be stopped

    def _hire(self, n_workers: int) -> None:
        while self._n_workers < n_workers:
            threading.Thread(target=self._work, name="agenttrain-rollout", daemon=True).start()
            self._n_workers += 1

    def _work(self) -> None:
        while (job := self._waiting.get()) is not None:
            with self._lock:
                if job.cut_off:
                    continue
                job.started = time.monotonic()
            try:
                outcome: RolloutResult | BaseException = self.runner.run(job.request, job.engine)
            except BaseException as error:
                outcome = error
            job.done.put((job, outcome))
            with self._lock:
                job.returned = True
                if job.given_up:
                    return
