"""Conversations that part, shrink, come back or are asked twice: every sampled id is trained once or named.

Which is which is told by where LangGraph says a call was made: the task it belongs to, its attempt and its namespace.
"""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from agenttrain.capture.recorder import Recorder
from agenttrain.records import Ids, Sampling
from agenttrain.testing.scenarios.base import ScenarioBase
from agenttrain.testing.scenarios.world import ADD, Messages, World, asks, call, handed_back, results, says, site, user

SUPERSEDED = "superseded by a retry"


class _LosesThePrefix:
    """A renderer whose template is no longer append-only once a conversation goes on."""

    def __init__(self, renderer: Any) -> None:
        self._renderer = renderer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._renderer, name)

    def extend(self, prompt_ids: Ids, response_ids: Ids, new_messages: Messages, tools: Messages) -> Ids | None:
        longer: Ids | None = self._renderer.extend(prompt_ids, response_ids, new_messages, tools)
        return longer and longer[1:]


class TreeScenarios(ScenarioBase):
    """T7 to T9, T11 to T14, T16, T24; summaries, best of n and a node that runs again."""

    def answered(self, world: World, recorder: Recorder, text: str = "In row four.") -> Messages:
        """A first turn, and what the agent's state holds after it."""
        messages = self.questions(world)
        world.speaker.lines.append(world.ids(text))
        reply = recorder.answer(asks(messages, site("t1")))
        return (*messages, handed_back(reply))

    # ── T7, T8 ───────────────────────────────────────────────────────────────────────────────────────────────────

    def test_t07_a_prefix_that_does_not_hold_begins_a_trajectory_and_is_counted(self, world: World) -> None:
        """Others raise. Here nothing sampled is lost: the next turn has the whole history as its prompt, at mask 0.
        A template that is never append-only is refused by name before, by open_renderer."""
        world.renderer, real = _LosesThePrefix(world.renderer), world.renderer
        recorder = world.open()
        longer = (*self.answered(world, recorder), user("Sure?"))
        world.speaker.lines.append(world.ids("Yes."))
        recorder.answer(asks(longer, site("t2", step=2)))
        kept = world.kept(recorder)
        assert (kept.causes, kept.breaks) == (["first_turn", "template"], {"template": 1})
        assert kept.trajectories[1].prompt_ids == kept.turns[1].prompt_ids == real.render(longer, ())
        assert (len(kept.samples), kept.account.trained) == (2, kept.n(0, 1))

    @pytest.mark.parametrize("edited", [0, 1], ids=["the last reply", "the question"])
    def test_t08_an_edited_history_begins_a_trajectory(self, world: World, edited: int) -> None:
        """Others roll back and un-train what was edited. Here it stays trained: it was sampled, and led here."""
        recorder = world.open()
        messages = [*self.answered(world, recorder), user("Sure?")]
        messages[-2 - edited] = says("In row five.") if edited == 0 else user("Where is B7?")
        world.speaker.lines.append(world.ids("Yes."))
        recorder.answer(asks(tuple(messages), site("t2", step=2)))
        kept = world.kept(recorder)
        assert (kept.causes, kept.parents) == (["first_turn", "history_rewritten"], [None, None])
        assert (kept.breaks, kept.account.trained) == ({"history_rewritten": 1}, kept.n(0, 1))

    def test_t08_an_edit_far_back_leaves_the_later_turns_trained_too(self, world: World) -> None:
        """Two turns stand before it; the third goes on from the edited history."""
        recorder = world.open()
        messages = (*self.answered(world, recorder), user("Sure?"))
        world.speaker.lines += [world.ids("Yes."), world.ids("Good.")]
        reply = recorder.answer(asks(messages, site("t2", step=2)))
        edited = (*messages[:-2], says("In row five."), messages[-1], handed_back(reply), user("Thanks."))
        recorder.answer(asks(edited, site("t3", step=3)))
        kept = world.kept(recorder)
        assert (kept.parents, kept.breaks) == ([None, 0, None], {"history_rewritten": 1})
        assert [len(path.spans) for path in kept.trajectories] == [2, 1]
        assert kept.account.trained == kept.n(0, 1, 2)

    # ── T9, T11 ──────────────────────────────────────────────────────────────────────────────────────────────────

    def test_t09_a_retried_node_is_trained_in_its_last_attempt(self, world: World) -> None:
        """LangGraph's task id is the same and its attempt is higher: the graph threw the first answer away."""
        recorder, messages = world.open(), self.questions(world)
        world.speaker.lines += [world.ids("In row five."), world.ids("In row four, by the door.")]
        for attempt in (1, 2):
            recorder.answer(asks(messages, site("t1", attempt=attempt)))
        kept = world.kept(recorder)
        assert (kept.causes, kept.breaks) == (["first_turn", "retry"], {"retry": 1})
        assert (kept.account.trained, kept.account.dropped) == (kept.n(1), {SUPERSEDED: kept.n(0)})
        assert [sample.response_ids for sample in kept.samples] == [kept.turns[1].response_ids]

    def test_t09_a_retry_whose_first_answer_lives_on_is_trained(self, world: World) -> None:
        """A node that called twice and failed after the second call may hand the first answer on."""
        recorder = world.open()
        longer = (*self.answered(world, recorder), user("Sure?"))
        world.speaker.lines.append(world.ids("Yes."))
        recorder.answer(asks(longer, site("t1", attempt=2)))
        kept = world.kept(recorder)
        assert (kept.parents, kept.account.trained, kept.account.dropped) == ([None, 0], kept.n(0, 1), {})

    def test_t11_equal_calls_in_parallel_are_siblings(self, world: World) -> None:
        """Each task of LangGraph has its own: both answers are trained, with seeds of their own."""
        recorder, messages = world.open(), self.questions(world)
        world.speaker.lines += [world.ids("In row four."), world.ids("By the door.")]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(recorder.answer, [asks(messages, site(f"t{i}")) for i in range(2)]))
        kept = world.kept(recorder)
        assert ({*kept.causes}, kept.breaks) == ({"first_turn", "parallel_sibling"}, {"parallel_sibling": 1})
        assert (kept.account.trained, len(kept.samples)) == (kept.n(0, 1), 2)
        assert len({sampling.seed for _, sampling in world.speaker.asked}) == 2

    def test_t11_siblings_on_one_turn_train_it_once(self, world: World) -> None:
        """The first of them goes on in its trajectory, the other has the whole history as its prompt."""
        recorder = world.open()
        messages = self.answered(world, recorder)
        world.speaker.lines += [world.ids("Yes."), world.ids("Surely.")]
        for i in range(2):
            recorder.answer(asks((*messages, user("Sure?")), site(f"b{i}", step=2)))
        kept = world.kept(recorder)
        assert (kept.parents, kept.breaks) == ([None, 0, 0], {"parallel_sibling": 1})
        assert kept.trajectories[1].prompt_ids == kept.turns[2].prompt_ids
        assert kept.account.trained == kept.n(0, 1, 2)

    def test_t11_rollouts_in_parallel_have_nothing_in_common(self, world: World) -> None:
        """The same conversation in two of them extends its own turns alone."""
        recorders = [world.open(), world.open()]
        longer = [(*self.answered(world, recorder), user("Sure?")) for recorder in recorders]
        world.speaker.lines += [world.ids("Yes."), world.ids("Yes.")]
        with ThreadPoolExecutor(2) as pool:
            pairs = zip(recorders, longer, strict=True)
            list(pool.map(lambda pair: pair[0].answer(asks(pair[1], site("t2", step=2))), pairs))
        for recorder in recorders:
            kept = world.kept(recorder)
            assert (kept.parents, kept.account.trained) == ([None, 0], kept.n(0, 1))

    # ── T12, T13 ─────────────────────────────────────────────────────────────────────────────────────────────────

    def test_t12_a_sub_agent_has_its_trajectory_and_the_main_one_goes_on(self, world: World) -> None:
        """By another question, in a subgraph; its second turn extends its own first."""
        recorder = world.open()
        main, helper = self.answered(world, recorder), self.questions(world, "Find a lamp.")
        world.speaker.lines += [world.ids("Here."), world.ids("It is old."), world.ids("Yes.")]
        for step in (1, 2):
            around = "helper:h|"
            reply = recorder.answer(asks(helper, site(f"s{step}", node="model", step=step, around=around)))
            helper = (*helper, handed_back(reply), user("How old?"))
        recorder.answer(asks((*main, user("Sure?")), site("t2", step=2)))
        kept = world.kept(recorder)
        assert kept.causes == ["first_turn", "other_conversation", None, None]
        assert (kept.parents, kept.breaks) == ([None, None, 1, 0], {"other_conversation": 1})
        assert kept.account.trained == kept.n(0, 1, 2, 3)

    @pytest.mark.parametrize("fork", ["user", "assistant"])
    def test_t12_a_fork_keeps_both_ways(self, world: World, fork: str) -> None:
        """Another next question extends the same turn; another reply in its place extends none."""
        recorder = world.open()
        messages = self.answered(world, recorder)
        world.speaker.lines += [world.ids("Yes."), world.ids("No.")]
        recorder.answer(asks((*messages, user("Sure?")), site("t2", step=2)))
        other = (*messages, user("Really?")) if fork == "user" else (*messages[:-1], says("Nowhere."), user("Sure?"))
        recorder.answer(asks(other, site("t3", step=3)))
        kept = world.kept(recorder)
        assert (kept.parents, kept.breaks) == ([None, 0, 0 if fork == "user" else None], {"history_rewritten": 1})
        assert kept.account.trained == kept.n(0, 1, 2)

    def test_t12_another_result_of_the_same_call_extends_the_same_turn(self, world: World) -> None:
        """A tool that is asked again, say: both ways are trained, the call once."""
        recorder, tools = world.open(), self.tools(world)
        messages = self.questions(world)
        said = says("", call("x", {"id": "A41"}))
        world.speaker.lines += [world.spelt(messages, said, tools), world.ids("A lamp."), world.ids("A desk.")]
        back = handed_back(recorder.answer(asks(messages, site("t1"), tools=tools)))
        for step, found in ((2, "lamp"), (3, "desk")):
            recorder.answer(asks((*messages, back, *results(back, found)), site(f"t{step}", step=step), tools=tools))
        kept = world.kept(recorder)
        assert (kept.parents, kept.breaks) == ([None, 0, 0], {"history_rewritten": 1})
        assert kept.account.trained == kept.n(0, 1, 2)

    @pytest.mark.parametrize("carried", [False, True], ids=["the summary alone", "the last reply with it"])
    def test_t13_a_summary_by_the_same_model_is_frozen_and_begins_a_trajectory(
        self, world: World, carried: bool
    ) -> None:
        """Others train the summary's call. Here its ids stand at mask 0, and what was sampled before stays trained."""
        recorder = world.open()
        messages = self.answered(world, recorder)
        world.speaker.lines += [world.ids("A41 was asked for."), world.ids("Yes.")]
        told = self.questions(world, "Sum up: A41?")
        summary = recorder.answer(asks(told, site("s1", node="summarize", step=2), role="frozen")).text
        rest = (messages[-1], user("Sure?")) if carried else ()
        recorder.answer(asks((*self.questions(world, f"So far: {summary}"), *rest), site("t2", step=3)))
        kept = world.kept(recorder)
        assert kept.causes == ["first_turn", "other_conversation", "history_rewritten"]
        assert (kept.account.trained, kept.account.frozen) == (kept.n(0, 2), kept.n(1))
        assert [sample.response_ids for sample in kept.samples] == [
            kept.turns[0].response_ids,
            kept.turns[2].response_ids,
        ]

    # ── T14, T16 ─────────────────────────────────────────────────────────────────────────────────────────────────

    def test_t14_other_tools_begin_a_trajectory(self, world: World) -> None:
        """They stand at the front of the prompt. Images, another reason for others, are refused in graph/."""
        recorder, tools = world.open(), self.tools(world)
        messages = self.questions(world)
        world.speaker.lines += [world.ids("In row four."), world.ids("Yes.")]
        reply = recorder.answer(asks(messages, site("t1"), tools=tools))
        longer = (*messages, handed_back(reply), user("Sure?"))
        recorder.answer(asks(longer, site("t2", step=2), tools=(*tools, ADD)))
        kept = world.kept(recorder)
        assert (kept.causes, kept.breaks) == (["first_turn", "tools_changed"], {"tools_changed": 1})
        assert kept.account.trained == kept.n(0, 1)

    def test_t16_what_leaves_share_is_trained_once(self, world: World) -> None:
        """A turn with three continuations, one of them with two more: six turns, four leaves, every id once."""
        recorder = world.open()
        root = self.answered(world, recorder)
        world.speaker.lines += [world.ids(text) for text in ("One.", "Two.", "Three.", "Deep.", "Deeper.")]
        replies = [recorder.answer(asks((*root, user("Sure?")), site(f"b{i}", step=2))) for i in range(3)]
        for i in range(2):
            deep = (*root, user("Sure?"), handed_back(replies[1]), user(f"And {i}?"))
            recorder.answer(asks(deep, site(f"c{i}", step=3)))
        kept = world.kept(recorder)
        assert kept.parents == [None, 0, 0, 0, 2, 2]
        assert len(kept.trajectories) == len(kept.samples) == 4
        trained = [sum(path.response_mask) for path in kept.trajectories]
        assert sum(trained) == kept.account.trained == kept.n(0, 1, 2, 3, 4, 5)

    # ── best of n, resume ────────────────────────────────────────────────────────────────────────────────────────

    def test_best_of_n_trains_all_that_were_drawn(self, world: World) -> None:
        """A node asks one prompt three times and goes on from the second: all were sampled for this reward."""
        recorder, messages = world.open(), self.questions(world)
        world.speaker.lines += [world.ids(text) for text in ("Here.", "There.", "Nowhere.", "Yes.")]
        drawn = [recorder.answer(asks(messages, site("t1"))) for _ in range(3)]
        longer = (*messages, handed_back(drawn[1]), user("Sure?"))
        recorder.answer(asks(longer, site("t2", step=2)))
        kept = world.kept(recorder)
        assert (kept.parents, kept.breaks) == ([None, None, None, 1], {"parallel_sibling": 2})
        assert (kept.account.trained, len(kept.samples)) == (kept.n(0, 1, 2, 3), 3)

    def test_an_interrupted_node_runs_again_and_both_calls_are_trained(self, world: World) -> None:
        """The first answer led to the question that a human was asked, the second to what came after it. LangGraph
        counts no attempt: it is no retry."""
        recorder, messages = world.open(), self.questions(world)
        world.speaker.lines += [world.ids("Shall I?"), world.ids("Shall I then?"), world.ids("Done.")]
        recorder.answer(asks(messages, site("t1")))
        reply = recorder.answer(asks(messages, site("t1")))
        recorder.answer(asks((*messages, handed_back(reply), user("Do it.")), site("t2", step=2)))
        kept = world.kept(recorder)
        assert (kept.parents, kept.account.dropped) == ([None, None, 1], {})
        assert kept.account.trained == kept.n(0, 1, 2)

    def test_a_rolled_back_state_goes_on_from_where_it_stood(self, world: World) -> None:
        """A checkpoint before two turns is run from again: the turn before it is extended once more."""
        recorder = world.open()
        first = self.answered(world, recorder)
        world.speaker.lines += [world.ids(text) for text in ("Yes.", "Good.", "No.")]
        messages = first
        for step in (2, 3):
            messages = (*messages, user("Sure?"))
            messages = (*messages, handed_back(recorder.answer(asks(messages, site(f"t{step}", step=step)))))
        recorder.answer(asks((*first, user("Try again.")), site("t4", step=2)))
        kept = world.kept(recorder)
        assert (kept.parents, kept.breaks) == ([None, 0, 1, 0], {"parallel_sibling": 1})
        assert kept.account.trained == kept.n(0, 1, 2, 3)

    # ── T24 ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @pytest.mark.parametrize("seed", range(3))
    def test_t24_random_walks_keep_every_token(self, world: World, seed: int) -> None:
        """Sixty calls that append, edit, retry, fork, compress and run in parallel: `World.kept` holds the rest."""
        walk = _Walk(world, self.questions(world), random.Random(seed))
        for step in range(1, 61):
            walk.go(step)
        kept = world.kept(walk.recorder)
        assert len(kept.turns) == walk.n_calls >= 60
        assert kept.account.frozen == sum(len(turn.response_ids) for turn in kept.turns if turn.role == "frozen")
        retried = sum(n for cause, n in kept.account.dropped.items() if cause == SUPERSEDED)
        assert kept.account.trained == kept.account.sampled - kept.account.frozen - retried
        assert set(kept.account.dropped) <= {SUPERSEDED}


class _Walk:
    """A graph that does anything that graphs do, by chance."""

    def __init__(self, world: World, opening: Messages, rng: random.Random) -> None:
        self.world, self.opening, self.rng = world, opening, rng
        self.recorder, self.n_calls = world.open(), 0
        self.states: list[Messages] = [opening]
        self._lock = threading.Lock()

    def go(self, step: int) -> None:
        """One step: a call or two."""
        state, kind = self.rng.choice(self.states[-4:]), self.rng.choice(("append",) * 4 + tuple(_KINDS))
        if kind == "retry":
            self.ask(state, step, f"t{step}")
            self.ask(state, step, f"t{step}", attempt=2)
        elif kind == "parallel":
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(lambda i: self.ask(state, step, f"t{step}-{i}"), range(2)))
        elif kind == "edit" and len(state) > len(self.opening):
            at = len(self.opening)
            self.ask((*state[:at], says(f"Edited {step}."), *state[at + 1 :]), step, f"t{step}")
        elif kind == "compress":
            self.ask((*self.opening[:-1], user(f"Summary {step}.")), step, f"t{step}")
        elif kind == "summarize":
            self.ask((*self.opening[:-1], user(f"Sum up {step}.")), step, f"s{step}", node="summarize")
        else:
            self.ask(state, step, f"t{step}")

    def ask(self, messages: Messages, step: int, task_id: str, *, attempt: int = 1, node: str = "agent") -> None:
        role: Any = "frozen" if node == "summarize" else "trained"
        at = site(task_id, node=node, step=step, attempt=attempt)
        with self._lock:
            self.n_calls += 1
            self.world.speaker.lines.append(self.say)
        reply = self.recorder.answer(asks(messages, at, role=role))
        if role == "trained":
            with self._lock:
                self.states.append((*messages, handed_back(reply), user(f"Then {step}?")))

    def say(self, prompt_ids: Ids, sampling: Sampling) -> Ids:
        """Words by the call's own seed, so that parallel calls say the same in every run."""
        rng = random.Random(sampling.seed)
        return self.world.ids(" ".join(rng.choice(("row", "lamp", "four", "door", "grüße", "41")) for _ in range(6)))


_KINDS = ("retry", "parallel", "edit", "compress", "summarize")
