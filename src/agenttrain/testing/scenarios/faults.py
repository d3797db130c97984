"""Engines, stores and graphs that fail: a lost answer is seen, nothing is invented, what was written is read back."""

from __future__ import annotations

import copy
import threading
import time
from dataclasses import replace

import pytest

from agenttrain.capture.store import SqliteStore, read_store
from agenttrain.errors import CaptureError, EngineError, RolloutStop, SampleError
from agenttrain.records import Generation, Ids, RolloutRequest, RoutedExperts, Sampling, Task
from agenttrain.testing.scenarios.base import ScenarioBase
from agenttrain.testing.scenarios.world import World, asks, handed_back, site, user


def _rows(start: int, end: int, *, n_layers: int = 2) -> RoutedExperts:
    data = bytes(i % 251 for i in range(2 * n_layers * (end - start)))
    return RoutedExperts(start=start, n_layers=n_layers, n_chosen=1, data=data)


def _told(prompt_ids: Ids, ids: Ids, sampling: Sampling) -> RoutedExperts:
    return _rows(sampling.experts_from, len(prompt_ids) + len(ids) - 1)


class FaultScenarios(ScenarioBase):
    """T10, T18 to T21 and T27."""

    # ── T10 ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def test_t10_after_a_lost_answer_a_rollout_goes_on_and_is_not_trained(self, world: World) -> None:
        """The graph may catch the error and ask something else; its record is incomplete all the same."""
        recorder = world.open()
        world.speaker.lines += [OSError("connection reset"), world.ids("Yes.")]
        with pytest.raises(EngineError, match="speaker failed on turn train-1-t-0-0#0: OSError: connection reset"):
            recorder.answer(asks(self.questions(world)))
        recorder.answer(asks(self.questions(world, "Something else?"), site("t2", step=2)))
        kept = world.kept(recorder)
        assert ([turn.index for turn in kept.turns], kept.lost) == ([1], ("train-1-t-0-0#0",))
        assert (kept.samples, kept.account.dropped) == ((), {"status incomplete": kept.n(0)})

    def test_t10_the_next_attempt_begins_as_if_nothing_had_been(self, world: World) -> None:
        """It has a rollout id of its own, and may ask another first question."""
        world.speaker.lines += [OSError("gone"), world.ids("Yes.")]
        with pytest.raises(EngineError):
            world.open().answer(asks(self.questions(world)))
        again = world.open(request=RolloutRequest(task=Task(id="t", input={}), phase="train", step=1, attempt=1))
        again.answer(asks(self.questions(world, "Something else?")))
        kept = world.kept(again)
        assert (kept.causes, kept.lost, kept.account.trained) == (["first_turn"], (), kept.n(0))

    def test_t11_a_call_in_flight_when_the_rollout_ends_leaves_no_turn(self, world: World) -> None:
        """Others answer 404. Here the caller is told that the rollout has ended, and no trajectory holds its ids."""
        recorder, raised = world.open(), []
        world.speaker.held = True
        world.speaker.lines.append(world.ids("Too late."))

        def ask() -> None:
            try:
                recorder.answer(asks(self.questions(world)))
            except RolloutStop as stop:
                raised.append(str(stop))

        thread = threading.Thread(target=ask)
        thread.start()
        while not world.speaker.waiting and thread.is_alive():
            time.sleep(0.001)
        recorder.close()
        ((future, answer),) = world.speaker.waiting
        future.set_result(answer)
        thread.join()
        assert (raised, recorder.turns, recorder.lost) == (["aborted: the rollout has ended"], (), 0)

    # ── T18, T19 ─────────────────────────────────────────────────────────────────────────────────────────────────

    def test_t18_ids_and_log_probabilities_of_different_lengths_are_refused(self) -> None:
        """Where the record is made, whoever makes it; a missing one is never 0.0."""
        with pytest.raises(CaptureError, match="answered 2 ids with 1 log probabilities and 2 weight versions"):
            Generation(token_ids=(5, 6), logprobs=(-0.1,), weight_versions=(1, 1), stop_reason="stop")
        with pytest.raises(CaptureError, match="answered 1 ids with 0 log probabilities"):
            Generation(token_ids=(5,), logprobs=(), weight_versions=(1,), stop_reason="stop")

    def test_t18_a_turn_with_some_of_its_fields_is_refused(self, world: World) -> None:
        """All of ids, log probabilities and versions, or none."""
        recorder = world.open()
        world.speaker.lines.append(world.ids("Yes."))
        recorder.answer(asks(self.questions(world)))
        (turn,) = world.kept(recorder).turns
        with pytest.raises(CaptureError, match="All three must have one length"):
            replace(turn, response_logprobs=())

    def test_t18_an_answer_without_ids_is_lost(self, world: World) -> None:
        """There was room: nothing was sampled, so nothing may be trained."""
        recorder = world.open()
        world.speaker.lines.append(())
        with pytest.raises(EngineError, match="answered turn train-1-t-0-0#0 with no ids, though"):
            recorder.answer(asks(self.questions(world)))
        assert (recorder.lost, world.kept(recorder).samples) == (1, ())

    def test_t19_a_call_whose_answer_never_came_is_seen(self, world: World) -> None:
        """Its intent was written first: a process that is killed now leaves it in the store."""
        recorder, (store,) = world.open(), world.stores.values()
        world.speaker.lines.append(_Killed())
        with pytest.raises(_Killed):
            recorder.answer(asks(self.questions(world)))
        store.flush()
        view = read_store(store.path.parent)
        assert [call.turn_id for call in view.lost_calls()] == ["train-1-t-0-0#0"]
        assert (view.turns(recorder.rollout_id), view.rollouts()) == ((), ())

    # ── T20, T27 ─────────────────────────────────────────────────────────────────────────────────────────────────

    def test_t20_what_a_killed_process_wrote_is_read(self, world: World) -> None:
        """Its file was never closed, and its rollout has no result."""
        recorder = world.open()
        world.speaker.lines.append(world.ids("Yes."))
        recorder.answer(asks(self.questions(world)))
        (store,) = world.stores.values()
        store.flush()
        view = read_store(store.path.parent)
        assert view.turns(recorder.rollout_id) == recorder.turns
        assert [begun.request.rollout_id for begun in view.unfinished()] == [recorder.rollout_id]

    def test_t20_a_turn_is_written_once(self, world: World) -> None:
        """The same again changes nothing; another one under its id is refused, and the first stays."""
        recorder = world.open()
        world.speaker.lines.append(world.ids("Yes."))
        recorder.answer(asks(self.questions(world)))
        (turn,) = recorder.turns
        store = SqliteStore(world.folder / "twice")
        for _ in range(2):
            store.put_turn(turn)
        store.flush()
        store.put_turn(replace(turn, response_logprobs=tuple(-9.0 for _ in turn.response_logprobs)))
        with pytest.raises(CaptureError, match="was put into turns twice with different content"):
            store.close()
        assert read_store(world.folder / "twice").turns(recorder.rollout_id) == (turn,)

    def test_t27_every_number_comes_back_as_it_was(self, world: World) -> None:
        """-0.0 is not 0.0, and the smallest number is not 0."""
        recorder = world.open()
        world.speaker.lines.append(world.ids("Yes."))
        recorder.answer(asks(self.questions(world)))
        odd = (-0.0, 0.0, -5e-324, -1e300, -0.1)
        turn = replace(
            recorder.turns[0],
            id="odd#0",
            rollout_id="odd",
            response_ids=(0, 1, 2, 2**31 - 1, 4),
            response_logprobs=odd,
            weight_versions=(0, 1, 2, 3, 2**31 - 1),
        )
        store = SqliteStore(world.folder / "odd")
        store.put_turn(turn)
        store.close()
        (read,) = read_store(world.folder / "odd").turns("odd")
        assert read == turn
        assert [repr(value) for value in read.response_logprobs] == [repr(value) for value in odd]

    def test_t27_a_row_whose_fields_differ_in_length_is_refused(self, world: World) -> None:
        """And so is one without a response."""
        recorder = world.open()
        world.speaker.lines.append(world.ids("Yes."))
        recorder.answer(asks(self.questions(world)))
        (path,) = world.kept(recorder).trajectories
        with pytest.raises(SampleError, match="response_mask has 1 entries for"):
            replace(path, response_mask=(1,))
        with pytest.raises(SampleError, match="response_ids is empty"):
            replace(path, response_ids=(), response_mask=(), response_logprobs=(), weight_versions=())
        assert copy.deepcopy(path) == path

    # ── T21 ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def test_t21_routed_experts_of_the_turns_are_those_of_the_path(self, world: World) -> None:
        """Each turn asks for the rows that the turn before it could not have, and the sample has them all."""
        world.speaker.tells = _told
        recorder, messages = world.open(), self.questions(world)
        world.speaker.lines += [world.ids("In row four."), world.ids("Yes.")]
        reply = recorder.answer(asks(messages, site("t1")))
        recorder.answer(asks((*messages, handed_back(reply), user("Sure?")), site("t2", step=2)))
        kept = world.kept(recorder)
        first, second = kept.turns
        n = len(first.prompt_ids) + len(first.response_ids)
        assert [sampling.experts_from for _, sampling in world.speaker.asked] == [0, n - 1]
        assert first.routed_experts is not None
        assert second.routed_experts is not None
        (sample,) = kept.samples
        assert sample.routed_experts is not None
        assert sample.routed_experts.data == first.routed_experts.data + second.routed_experts.data

    @pytest.mark.parametrize("off", [(1, 0), (0, 1), (0, -1)], ids=["gap", "overlap", "one too few"])
    def test_t21_experts_at_the_wrong_place_lose_the_call(self, world: World, off: tuple[int, int]) -> None:
        """What can't be aligned is never kept. Others answer 422."""
        world.speaker.tells = lambda prompt, ids, sampling: _rows(off[0], len(prompt) + len(ids) - 1 + off[1])
        recorder = world.open()
        world.speaker.lines.append(world.ids("Yes."))
        with pytest.raises(EngineError, match="told routed experts of turn train-1-t-0-0#0 for positions"):
            recorder.answer(asks(self.questions(world)))
        assert (recorder.lost, world.kept(recorder).samples) == (1, ())


class _Killed(BaseException):
    """Stands for the end of the process."""
