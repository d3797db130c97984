import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agenttrain.errors import EscapeError
from agenttrain.pool import RolloutPool
from agenttrain.protocols import Engine
from agenttrain.records import Rollout, RolloutRequest, RolloutResult, Status, Task
from agenttrain.reward.status import MAX_RETRIES

SOON_S = 10.0
"""How long a test waits for what must happen, on a busy machine."""


def request_of(place: int) -> RolloutRequest:
    return RolloutRequest(task=Task(id=f"t{place}", input={}), phase="train", step=1)


def result_of(request: RolloutRequest, status: Status, cause: str = "") -> RolloutResult:
    rollout = Rollout(
        id=request.rollout_id,
        task_id=request.task.id,
        phase=request.phase,
        step=request.step,
        sibling=request.sibling,
        attempt=request.attempt,
        status=status,
        cause=cause,
    )
    return RolloutResult(request=request, rollout=rollout, turns=(), trajectories=(), samples=())


@dataclass
class FakeRunner:
    """Does for each request what a test says; like `rollout.Runner`, each rollout ends once: by itself or abandoned."""

    act: Callable[[RolloutRequest], Status] = lambda request: "completed"
    began: list[RolloutRequest] = field(default_factory=list)
    open: dict[str, RolloutRequest] = field(default_factory=dict)
    n_in_flight: int = 0
    most_in_flight: int = 0
    engines: set[Engine | None] = field(default_factory=set)
    threads: set[threading.Thread] = field(default_factory=set)
    stopped: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, request: RolloutRequest, engine: Engine | None) -> RolloutResult:
        with self.lock:
            self.began.append(request)
            self.open[request.rollout_id] = request
            self.n_in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.n_in_flight)
            self.engines.add(engine)
            self.threads.add(threading.current_thread())
        try:
            status = self.act(request)
        finally:
            with self.lock:
                self.n_in_flight -= 1
        on_time = self.ends(request.rollout_id)
        return result_of(request, status if on_time else "environment_failure", "" if on_time else "late")

    def ends(self, rollout_id: str) -> bool:
        """True for the one caller that ends a rollout."""
        with self.lock:
            return self.open.pop(rollout_id, None) is not None

    def abandon(self, rollout_id: str, cause: str) -> RolloutResult | None:
        request = self.open.get(rollout_id)
        if request is None or not self.ends(rollout_id):
            return None
        return result_of(request, "environment_failure", cause)

    def stop_all(self) -> None:
        self.stopped.set()


@contextmanager
def opened(
    runner: FakeRunner,
    *,
    concurrency: int = 4,
    seconds: float = 60.0,
    grace_s: float = SOON_S,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[RolloutPool]:
    """A pool that polls fast; afterwards every thread that it hired must be gone."""
    before = set(threading.enumerate())
    pool = RolloutPool(
        runner=runner,
        concurrency=concurrency,
        seconds=seconds,
        should_stop=should_stop,
        grace_s=grace_s,
        poll_s=0.01,
    )
    try:
        yield pool
    finally:
        pool.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(SOON_S)
        assert not thread.is_alive()


@settings(max_examples=40, deadline=None)
@given(
    plans=st.lists(st.tuples(st.sampled_from([0.0, 0.001, 0.004]), st.integers(0, 4)), max_size=12),
    concurrency=st.integers(1, 6),
)
def test_results_are_in_the_order_of_the_requests(plans: list[tuple[float, int]], concurrency: int) -> None:
    """Whatever each takes and however often its environment fails: the last attempt stands in its request's place.

    Every attempt is made and told once; a failing one is followed by at most two more, numbered 0, 1, 2.
    """
    requests = [request_of(place) for place in range(len(plans))]
    plan_of = dict(zip([request.task.id for request in requests], plans, strict=True))

    def act(request: RolloutRequest) -> Status:
        seconds, n_failures = plan_of[request.task.id]
        time.sleep(seconds)
        return "environment_failure" if request.attempt < n_failures else "completed"

    runner, told = FakeRunner(act), []
    with opened(runner, concurrency=concurrency) as pool:
        results = pool.run(None, requests, told.append)
    last = [min(n_failures, MAX_RETRIES) for _, n_failures in plans]
    attempts = [
        replace(request, attempt=attempt)
        for request, end in zip(requests, last, strict=True)
        for attempt in range(end + 1)
    ]
    assert [result.request for result in results] == [
        replace(request, attempt=attempt) for request, attempt in zip(requests, last, strict=True)
    ]
    assert [result.rollout.status for result in results] == [
        "environment_failure" if n_failures > MAX_RETRIES else "completed" for _, n_failures in plans
    ]
    expected = Counter(request.rollout_id for request in attempts)
    assert Counter(request.rollout_id for request in runner.began) == expected
    assert Counter(result.rollout.id for result in told) == expected
    assert runner.most_in_flight <= concurrency


def test_no_requests_are_no_results() -> None:
    """Nothing is run and nobody hired."""
    runner = FakeRunner()
    with opened(runner) as pool:
        assert pool.run(None, []) == []
    assert (runner.began, runner.threads) == ([], set())


def test_as_many_as_the_concurrency_run_at_once() -> None:
    """Four rollouts that wait for each other end; each is in a thread of its own."""
    together = threading.Barrier(4, timeout=SOON_S)

    def act(request: RolloutRequest) -> Status:
        together.wait()
        return "completed"

    runner = FakeRunner(act)
    with opened(runner, concurrency=4) as pool:
        pool.run(None, [request_of(place) for place in range(8)])
    assert (runner.most_in_flight, len(runner.threads)) == (4, 4)


def test_threads_last_over_many_calls() -> None:
    """A pool hires no more threads than its concurrency, however often it is used."""
    runner = FakeRunner()
    with opened(runner, concurrency=2) as pool:
        for n in (1, 2, 5):
            assert len(pool.run(None, [request_of(place) for place in range(n)])) == n
    assert len(runner.threads) <= 2


def test_the_engine_is_handed_on() -> None:
    """The pool knows nothing of it; None is the user's own models."""
    runner = FakeRunner()
    with opened(runner) as pool:
        pool.run(None, [request_of(0)])
    assert runner.engines == {None}


def test_a_rollout_that_lost_an_answer_is_made_again_with_the_same_seed() -> None:
    """As a remake of the same attempt, at most twice; after it an environment failure is the next attempt."""

    def act(request: RolloutRequest) -> Status:
        if request.task.id == "t0":
            return "incomplete"
        if request.remake == 1:
            return "environment_failure"
        return "completed" if request.attempt else "aborted"

    told: list[RolloutResult] = []
    with opened(FakeRunner(act)) as pool:
        first, second = pool.run(None, [request_of(0), request_of(1)], told.append)
    assert (first.rollout.status, first.rollout.attempt, first.request.remake) == ("incomplete", 0, 2)
    assert (second.rollout.status, second.rollout.attempt, second.request.remake) == ("completed", 1, 0)
    assert sorted(result.rollout.id for result in told) == [
        "train-1-t0-0-0", "train-1-t0-0-0-m1", "train-1-t0-0-0-m2",
        "train-1-t1-0-0", "train-1-t1-0-0-m1", "train-1-t1-0-1",
    ]  # fmt: skip


def test_a_policy_failure_is_not_tried_again() -> None:
    """Only what its status says."""
    runner = FakeRunner(lambda request: "policy_failure")
    with opened(runner) as pool:
        (result,) = pool.run(None, [request_of(0)])
    assert (result.rollout.status, len(runner.began)) == ("policy_failure", 1)


def test_a_graph_that_does_not_return_is_given_up_and_tried_again() -> None:
    """Its place gets the next attempt, on another thread; what comes back late is thrown away."""
    release = threading.Event()

    def act(request: RolloutRequest) -> Status:
        if request.attempt == 0 and request.task.id == "t0":
            release.wait(SOON_S)
        if request.attempt == 1:
            release.set()
            time.sleep(0.05)
        return "completed"

    told: list[RolloutResult] = []
    with opened(FakeRunner(act), concurrency=1, seconds=0.2, grace_s=0.1) as pool:
        first, second = pool.run(None, [request_of(0), request_of(1)], told.append)
        again = pool.run(None, [request_of(2)], told.append)
    assert (first.rollout.attempt, first.rollout.status, second.rollout.attempt) == (1, "completed", 0)
    assert [result.rollout.id for result in again] == ["train-1-t2-0-0"]
    assert told[0].rollout.cause == "the graph did not return within 0.2 s and 0.1 s of grace"
    assert Counter(result.rollout.id for result in told) == Counter(
        ["train-1-t0-0-0", "train-1-t0-0-1", "train-1-t1-0-0", "train-1-t2-0-0"]
    )


def test_a_graph_that_never_returns_ends_as_an_environment_failure() -> None:
    """After three attempts; its threads go home when the graphs come back after all."""
    release = threading.Event()

    def act(request: RolloutRequest) -> Status:
        release.wait(SOON_S)
        return "completed"

    with opened(FakeRunner(act), concurrency=2, seconds=0.02, grace_s=0.01) as pool:
        (result,) = pool.run(None, [request_of(0)])
        release.set()
    assert (result.rollout.attempt, result.rollout.status) == (2, "environment_failure")


def test_a_stuck_graph_is_given_up_while_others_keep_ending() -> None:
    """It doesn't hold its thread until the last of the others is done."""
    release = threading.Event()

    def act(request: RolloutRequest) -> Status:
        if (request.task.id, request.attempt) == ("t0", 0):
            release.wait(SOON_S)
        time.sleep(0.01)
        return "completed"

    told: list[str] = []
    with opened(FakeRunner(act), concurrency=2, seconds=0.15, grace_s=0.05) as pool:
        pool.run(None, [request_of(place) for place in range(100)], lambda result: told.append(result.rollout.id))
        release.set()
    assert told.index("train-1-t0-0-0") < 90


def test_a_graph_that_comes_back_as_it_is_given_up_keeps_its_own_result() -> None:
    """`abandon` gives None then, and nothing is tried again."""

    class EndsInTime(FakeRunner):
        def abandon(self, rollout_id: str, cause: str) -> RolloutResult | None:
            return None

    def act(request: RolloutRequest) -> Status:
        time.sleep(0.1)
        return "completed"

    with opened(EndsInTime(act), seconds=0.01, grace_s=0.01) as pool:
        (result,) = pool.run(None, [request_of(0)])
    assert (result.rollout.status, result.rollout.attempt) == ("completed", 0)


def test_a_graph_that_comes_back_while_its_record_is_written_leaks_no_thread() -> None:
    """Its thread is free again before the pool knows that it was abandoned: no other is hired for it."""
    release = threading.Event()

    class WritesSlowly(FakeRunner):
        def abandon(self, rollout_id: str, cause: str) -> RolloutResult | None:
            result = super().abandon(rollout_id, cause)
            release.set()
            time.sleep(0.05)
            return result

    def act(request: RolloutRequest) -> Status:
        if request.attempt == 0:
            release.wait(SOON_S)
        return "completed"

    runner = WritesSlowly(act)
    with opened(runner, concurrency=1, seconds=0.15, grace_s=0.05) as pool:
        (result,) = pool.run(None, [request_of(0)])
    assert (result.rollout.attempt, len(runner.threads)) == (1, 1)


def test_ctrl_c_ends_the_run_and_what_is_under_way() -> None:
    """Running rollouts are stopped and have written their record; those that wait are never begun."""
    pressed = threading.Event()
    runner = FakeRunner()

    def act(request: RolloutRequest) -> Status:
        if request.task.id == "t0":
            return "completed"
        assert runner.stopped.wait(SOON_S)
        return "aborted"

    runner.act = act
    with opened(runner, concurrency=2, should_stop=pressed.is_set) as pool:
        with pytest.raises(KeyboardInterrupt):
            pool.run(None, [request_of(place) for place in range(20)], lambda result: pressed.set())
        assert (runner.n_in_flight, runner.open) == (0, {})
        assert len(runner.began) <= 3


def test_ctrl_c_before_the_start_runs_nothing_to_its_end() -> None:
    """A flag that is set already ends the run at once."""
    with opened(FakeRunner(), should_stop=lambda: True) as pool, pytest.raises(KeyboardInterrupt):
        pool.run(None, [request_of(0)])


def test_ctrl_c_waits_no_longer_than_the_grace_for_a_stuck_graph() -> None:
    """A graph that heeds nothing doesn't keep the user waiting."""
    release, pressed = threading.Event(), threading.Event()

    def act(request: RolloutRequest) -> Status:
        pressed.set()
        release.wait(SOON_S)
        return "completed"

    with opened(FakeRunner(act), grace_s=0.05, should_stop=pressed.is_set) as pool:
        with pytest.raises(KeyboardInterrupt):
            pool.run(None, [request_of(0)])
        assert not release.is_set()
        release.set()


def test_a_rollout_that_is_about_to_begin_is_stopped_too() -> None:
    """A thread that has taken its job but is not yet where `stop_all` reaches it does not run on."""
    pressed, stops = threading.Event(), []

    class BeginsSlowly(FakeRunner):
        def stop_all(self) -> None:
            for stop in stops:
                stop.set()

    def act(request: RolloutRequest) -> Status:
        pressed.set()
        time.sleep(0.05)
        stops.append(stop := threading.Event())
        return "aborted" if stop.wait(SOON_S / 2) else "completed"

    runner = BeginsSlowly(act)
    with opened(runner, should_stop=pressed.is_set) as pool:
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            pool.run(None, [request_of(0)])
        assert time.monotonic() - began < SOON_S / 2


def test_an_error_in_a_rollout_ends_the_run() -> None:
    """An escaped call is the run's error, raised as it was; the others are cut off."""
    runner = FakeRunner()

    def act(request: RolloutRequest) -> Status:
        if request.task.id == "t1":
            raise EscapeError("a call got past the gate")
        runner.stopped.wait(SOON_S)
        return "aborted"

    runner.act = act
    with opened(runner, concurrency=2) as pool, pytest.raises(EscapeError, match="a call got past the gate"):
        pool.run(None, [request_of(place) for place in range(20)])
    assert runner.stopped.is_set()
    assert len(runner.began) <= 3


def test_an_error_of_the_listener_ends_the_run() -> None:
    """Such as a full disk, met while a result is noted."""

    def full(result: RolloutResult) -> None:
        raise OSError("no space left")

    with opened(FakeRunner()) as pool, pytest.raises(OSError, match="no space left"):
        pool.run(None, [request_of(place) for place in range(8)], full)


@settings(max_examples=40, deadline=None)
@given(n_requests=st.integers(1, 12), concurrency=st.integers(1, 6), failing=st.integers(0, 11))
def test_a_run_that_is_cut_off_comes_to_its_end(n_requests: int, concurrency: int, failing: int) -> None:
    """Whichever rollout raises, and however many workers are taking jobs just then; the pool can be used again."""

    def act(request: RolloutRequest) -> Status:
        if request.task.id == f"t{failing}":
            raise EscapeError("past the gate")
        return "completed"

    with opened(FakeRunner(act), concurrency=concurrency) as pool:
        if failing < n_requests:
            with pytest.raises(EscapeError):
                pool.run(None, [request_of(place) for place in range(n_requests)])
        (result,) = pool.run(None, [request_of(99)])
    assert result.rollout.id == "train-1-t99-0-0"


def test_who_looks_at_first_attempts_has_none_made_again() -> None:
    """What is made again is for the one who opens the pool to say."""
    runner = FakeRunner(lambda request: "environment_failure")
    with opened(runner) as pool:
        pool.following = lambda request, status: None
        (result,) = pool.run(None, [request_of(0)])
    assert (len(runner.began), result.rollout.attempt) == (1, 0)
