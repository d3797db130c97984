"""What every engine keeps to, as tests: subclass `EngineContract` in pytest and give the engine as a fixture.

The checks see an engine from outside, by ids and log probabilities alone, so they hold for one in this process, in
another, or on another machine. That log probabilities are those of the distribution is checked by sampling: what was
seen often must be likely, the likelihoods of all that was seen must add up, and another temperature must bend them as
it should.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from agenttrain.errors import EngineError
from agenttrain.protocols import Engine
from agenttrain.records import Generation, Ids, Sampling

TOLERANCE = 2e-3
"""Between two log probabilities of one id in one place."""
SIGMAS = 6.0
"""How far a frequency may lie from its probability, in standard deviations."""

LONG = 400
"""Positions of a call that is to be still in flight when it is ended."""


class EngineContract:
    """Subclass it, and give `engine`; pytest does the rest.

    Attributes to set where yours differs:
        n_vocabulary: ids go from 0 up to it.
        takes_seeds: equal (prompt, seed) give equal ids. False for engines that draw by themselves.
        n_draws: one-token answers that the distribution is judged by.
        timeout_s: how long any one answer may take.
    """

    n_vocabulary: int = 320
    takes_seeds: bool = True
    n_draws: int = 600
    timeout_s: float = 120.0

    @pytest.fixture
    def engine(self) -> Engine | Iterator[Engine]:
        """The engine under test, ready and closed afterwards."""
        pytest.fail(f"{type(self).__name__} has no fixture `engine`. Write one that yields an engine and closes it.")

    @pytest.fixture
    def prompt(self) -> Ids:
        """[P] ids to begin with, under n_vocabulary."""
        return tuple(i % self.n_vocabulary for i in (5, 9, 13, 17))

    @pytest.fixture
    def new_weights(self) -> Sequence[tuple[str, Any]]:
        """(Hugging Face name, tensor) pairs that the engine takes and that change its answers; empty: it has none."""
        return ()

    # ── an answer ────────────────────────────────────────────────────────────────────────────────────────────────

    def test_it_says_what_it_is(self, engine: Engine) -> None:
        """A name, room for a prompt and a response, and a version of its weights."""
        assert isinstance(engine, Engine)
        assert engine.name
        assert isinstance(engine.name, str)
        assert engine.max_length > 1
        assert engine.weight_version >= 0

    @pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
    def test_an_answer_has_ids_log_probabilities_and_versions(
        self, engine: Engine, prompt: Ids, temperature: float
    ) -> None:
        """One of each per sampled id, all of the vocabulary and of the weights of now."""
        answer = self._answer(engine, prompt, temperature=temperature, max_tokens=12)
        assert 1 <= len(answer.token_ids) <= 12
        assert all(0 <= id < self.n_vocabulary for id in answer.token_ids)
        assert all(math.isfinite(logprob) and logprob <= 1e-6 for logprob in answer.logprobs)
        assert set(answer.weight_versions) == {engine.weight_version}
        assert 0 <= answer.n_cached_ids <= len(prompt)

    def test_without_a_stop_id_it_goes_on_to_max_tokens(self, engine: Engine, prompt: Ids) -> None:
        """And says that its length ended it."""
        for n in (1, 7):
            answer = self._answer(engine, prompt, max_tokens=n)
            assert (len(answer.token_ids), answer.stop_reason) == (n, "length")

    def test_a_stop_id_ends_the_answer_and_stands_in_it(self, engine: Engine, prompt: Ids) -> None:
        """The first of the stop ids that is sampled; nothing comes after it."""
        free = self._answer(engine, prompt, temperature=0.0, max_tokens=12)
        stop = free.token_ids[-1]
        stopped = self._answer(engine, prompt, temperature=0.0, max_tokens=12, stop_ids=(stop,))
        assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
        assert stopped.stop_reason == "stop"
        any_id = self._answer(engine, prompt, max_tokens=12, stop_ids=tuple(range(self.n_vocabulary)))
        assert (len(any_id.token_ids), any_id.stop_reason) == (1, "stop")

    def test_the_longest_that_fits_is_answered(self, engine: Engine, prompt: Ids) -> None:
        """Prompt and response may fill every position."""
        longest = (prompt * (engine.max_length // len(prompt) + 1))[: engine.max_length - 3]
        assert len(self._answer(engine, longest, max_tokens=3).token_ids) == 3

    # ── the distribution ─────────────────────────────────────────────────────────────────────────────────────────

    def test_log_probabilities_are_those_of_what_is_sampled(self, engine: Engine, prompt: Ids) -> None:
        """An id has one log probability, is drawn as often as that says, and all of them add up to 1."""
        drawn = self._drawn(engine, prompt, 1.0)
        n = sum(count for count, _ in drawn.values())
        for id, (count, logprob) in drawn.items():
            probability = math.exp(logprob)
            spread = math.sqrt(n * probability * (1 - min(1.0, probability))) + 1.0
            assert abs(count - n * probability) <= SIGMAS * spread, (
                f"id {id}: {count} of {n} draws, p {probability:.4f}"
            )
        seen = math.fsum(math.exp(logprob) for _, logprob in drawn.values())
        once = sum(count == 1 for count, _ in drawn.values())
        unseen = once / n  # Good and Turing's estimate of what was not drawn
        assert seen <= 1 + TOLERANCE, f"the probabilities of the ids that were drawn add up to {seen:.4f}"
        assert seen + unseen == pytest.approx(1.0, abs=SIGMAS * math.sqrt(max(once, 4)) / n)

    def test_log_probabilities_are_at_the_sampling_temperature(self, engine: Engine, prompt: Ids) -> None:
        """Differences between ids grow by 1 / temperature; greedy answers are at temperature 1."""
        warm, cool = self._drawn(engine, prompt, 1.0), self._drawn(engine, prompt, 0.5)
        both = sorted(warm.keys() & cool.keys(), key=lambda id: -warm[id][0])[:8]
        assert both, "nothing was drawn at both temperatures"
        for first, second in itertools.pairwise(both):
            expected = (warm[first][1] - warm[second][1]) / 0.5
            assert cool[first][1] - cool[second][1] == pytest.approx(expected, abs=10 * TOLERANCE)
        greedy = self._answer(engine, prompt, temperature=0.0, max_tokens=1)
        assert greedy.logprobs[0] >= max(logprob for _, logprob in warm.values()) - TOLERANCE
        if greedy.token_ids[0] in warm:
            assert greedy.logprobs[0] == pytest.approx(warm[greedy.token_ids[0]][1], abs=TOLERANCE)

    def test_what_was_sampled_stands_in_the_next_prompt(self, engine: Engine, prompt: Ids) -> None:
        """Greedy, a prompt that holds the first ids of an answer gives the rest of it, with its log probabilities."""
        whole = self._answer(engine, prompt, temperature=0.0, max_tokens=8, session="whole")
        rest = self._answer(engine, prompt + whole.token_ids[:3], temperature=0.0, max_tokens=5, session="whole")
        assert rest.token_ids == whole.token_ids[3:]
        assert rest.logprobs == pytest.approx(whole.logprobs[3:], abs=TOLERANCE)

    def test_experts_are_of_the_positions_that_were_asked_for(self, engine: Engine, prompt: Ids) -> None:
        """Where an engine tells them: to the last id but one, and the same whether they are asked for anew or not."""
        whole = self._answer(engine, prompt, temperature=0.0, max_tokens=8, session="experts")
        if whole.routed_experts is None:
            pytest.skip(f"{engine.name} tells no routed experts")
        n_read = len(prompt) + len(whole.token_ids) - 1
        assert (whole.routed_experts.start, whole.routed_experts.end) == (0, n_read)
        start, longer = len(prompt) + 2, prompt + whole.token_ids[:3]
        asked = {"max_tokens": len(whole.token_ids) - 3, "experts_from": start}
        rest = self._answer(engine, longer, temperature=0.0, session="experts", **asked)
        assert rest.routed_experts is not None
        assert (rest.routed_experts.start, rest.routed_experts.end) == (start, n_read)
        assert rest.routed_experts.data == whole.routed_experts.data[start * whole.routed_experts.row_bytes :]

    # ── the same again ───────────────────────────────────────────────────────────────────────────────────────────

    def test_greedy_is_the_same_twice(self, engine: Engine, prompt: Ids) -> None:
        """Whatever the seed is."""
        first = self._answer(engine, prompt, temperature=0.0, max_tokens=8, seed=1)
        second = self._answer(engine, prompt, temperature=0.0, max_tokens=8, seed=2)
        assert first.token_ids == second.token_ids

    def test_a_seed_decides_what_is_drawn(self, engine: Engine, prompt: Ids) -> None:
        """Equal seeds give equal ids where the engine takes seeds; different ones differ somewhere in any case."""
        answers = [self._answer(engine, prompt, max_tokens=8, seed=seed) for seed in range(8)]
        assert len({answer.token_ids for answer in answers}) > 1
        if self.takes_seeds:
            again = [self._answer(engine, prompt, max_tokens=8, seed=seed) for seed in range(8)]
            assert [answer.token_ids for answer in again] == [answer.token_ids for answer in answers]

    def test_any_thread_may_ask(self, engine: Engine, prompt: Ids) -> None:
        """Sixteen calls from eight threads are answered as each would be alone."""
        n = self.n_vocabulary
        prompts = [(*prompt, i % n, (3 * i) % n) for i in range(16)]
        alone = [self._answer(engine, p, temperature=0.0, max_tokens=6, session="alone") for p in prompts]
        barrier = threading.Barrier(8)

        def ask(i: int) -> Generation:
            if i < 8:
                barrier.wait(self.timeout_s)
            return self._answer(engine, prompts[i], temperature=0.0, max_tokens=6, session=f"thread {i}")

        with ThreadPoolExecutor(8) as threads:
            together = list(threads.map(ask, range(16)))
        assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]

    # ── what ends ────────────────────────────────────────────────────────────────────────────────────────────────

    def test_release_ends_the_calls_of_its_session_only(self, engine: Engine, prompt: Ids) -> None:
        """As aborted, with what they had; another session's call goes on, and so does the engine."""
        room = min(engine.max_length, LONG) - len(prompt)
        asked = [self._ask(engine, prompt, max_tokens=room, seed=i, session="ended") for i in range(4)]
        other = self._ask(engine, prompt, max_tokens=min(room, 20), session="other")
        running = [future for future in asked if not future.done()]
        engine.release("ended")
        ended = [future.result(self.timeout_s) for future in running]
        assert not running or any(answer.stop_reason == "aborted" for answer in ended)
        assert all(len(answer.token_ids) < room for answer in ended if answer.stop_reason == "aborted")
        assert other.result(self.timeout_s).stop_reason == "length"
        engine.release("nobody's")
        assert len(self._answer(engine, prompt, max_tokens=3, session="ended").token_ids) == 3

    def test_new_weights_answer_the_next_call(self, engine: Engine, prompt: Ids, new_weights: Any) -> None:
        """Under the version they came with; an id's log probability is another one then."""
        version = engine.weight_version + 3
        before = self._answer(engine, prompt, temperature=0.0, max_tokens=6, session="s")
        engine.update_weights(iter(new_weights), version)
        after = self._answer(engine, prompt, temperature=0.0, max_tokens=6, session="s")
        assert engine.weight_version == version
        assert set(after.weight_versions) == {version}
        assert not new_weights or after.logprobs != before.logprobs

    def test_a_call_that_can_not_be_answered_fails_with_an_engine_error(self, engine: Engine, prompt: Ids) -> None:
        """At once or in the future; the calls after it are answered."""
        n, room = self.n_vocabulary, engine.max_length
        wrong: list[tuple[Ids, int]] = [
            ((), 4),
            ((*prompt, n), 4),
            ((*prompt, -1), 4),
            ((prompt * room)[:room], 1),
            (prompt, room),
            (prompt, 0),
        ]
        for ids, max_tokens in wrong:
            with pytest.raises(EngineError):
                self._answer(engine, ids, max_tokens=max_tokens)
        assert len(self._answer(engine, prompt, max_tokens=2).token_ids) == 2

    def test_stats_count_what_was_sampled(self, engine: Engine, prompt: Ids) -> None:
        """Numbers by name, `sampled_ids` among them."""
        before = engine.stats()["sampled_ids"]
        n = sum(len(self._answer(engine, prompt, max_tokens=5, seed=i).token_ids) for i in range(3))
        stats = engine.stats()
        assert stats["sampled_ids"] - before == n
        assert all(isinstance(value, int | float) for value in stats.values())

    def test_close_ends_calls_in_flight_and_may_be_called_twice(self, engine: Engine, prompt: Ids) -> None:
        """A call after it fails with an EngineError, and hangs nobody."""
        room = min(engine.max_length, LONG) - len(prompt)
        asked = [self._ask(engine, prompt, max_tokens=room, seed=i) for i in range(4)]
        engine.close()
        engine.close()
        for future in asked:
            error = future.exception(self.timeout_s)
            assert error is None or isinstance(error, EngineError)
        with pytest.raises(EngineError):
            self._answer(engine, prompt)

    # ── how it is asked ──────────────────────────────────────────────────────────────────────────────────────────

    def _ask(
        self,
        engine: Engine,
        prompt: Ids,
        *,
        temperature: float = 1.0,
        max_tokens: int = 4,
        seed: int = 0,
        stop_ids: Ids = (),
        experts_from: int = 0,
        session: str = "contract",
    ) -> Future[Generation]:
        sampling = Sampling(
            temperature=temperature, max_tokens=max_tokens, seed=seed, stop_ids=stop_ids, experts_from=experts_from
        )
        return engine.generate(prompt, sampling, session=session)

    def _answer(self, engine: Engine, prompt: Ids, **how: Any) -> Generation:
        return self._ask(engine, prompt, **how).result(self.timeout_s)

    def _drawn(self, engine: Engine, prompt: Ids, temperature: float) -> dict[int, tuple[int, float]]:
        """Id to (how often it was drawn, its log probability), over many one-token answers."""
        asked = [
            self._ask(engine, prompt, temperature=temperature, max_tokens=1, seed=seed, session=f"draw {seed % 32}")
            for seed in range(self.n_draws)
        ]
        counts: Counter[int] = Counter()
        logprobs: dict[int, float] = {}
        for future in asked:
            answer = future.result(self.timeout_s)
            (id,), (logprob,) = answer.token_ids, answer.logprobs
            counts[id] += 1
            assert logprobs.setdefault(id, logprob) == pytest.approx(logprob, abs=TOLERANCE), f"id {id}: two values"
        for session in range(32):
            engine.release(f"draw {session}")
        return {id: (count, logprobs[id]) for id, count in counts.items()}
