"""Conversations that only grow: what was sampled stays in the next prompt, however the template would spell it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from agenttrain.capture.recorder import Recorder
from agenttrain.errors import RolloutStop
from agenttrain.records import Ids, Reply, Turn
from agenttrain.testing.scenarios.base import ScenarioBase
from agenttrain.testing.scenarios.world import (
    LOOK_UP,
    Message,
    Messages,
    World,
    asks,
    call,
    handed_back,
    oddly_split,
    results,
    says,
    site,
    user,
    with_other_arguments,
)

FOUND: dict[str, Any] = {"id": "A41", "row": 4}


class ChainScenarios(ScenarioBase):
    """T1 to T6, T15, T17, T22, T23, T25 and T26."""

    def grow(self, world: World, recorder: Recorder, said: list[Ids], *, follow: str = "And then?") -> Messages:
        """Question, answer, question, answer …: one turn for each of the answers."""
        messages = self.questions(world)
        for step, ids in enumerate(said, 1):
            world.speaker.lines.append(ids)
            reply = recorder.answer(asks(messages, site(f"t{step}", step=step)))
            messages = (*messages, handed_back(reply), user(follow))
        return messages

    def ask_and_hear(
        self, world: World, recorder: Recorder, said: Ids, *texts: str, then: str = "Found."
    ) -> tuple[Reply, Messages]:
        """A reply that calls tools, their results, and one more turn.

        Returns:
            The reply, and the messages of the turn after it.
        """
        tools, messages = self.tools(world), self.questions(world)
        world.speaker.lines.append(said)
        reply = recorder.answer(asks(messages, site("t1"), tools=tools))
        assert len(reply.tool_calls) == (len(texts) or 1), f"of {reply} the calls were not all read"
        back = handed_back(reply)
        messages = (*messages, back, *results(back, *texts))
        world.speaker.lines.append(world.ids(then))
        recorder.answer(asks(messages, site("t2", step=2), tools=tools))
        return reply, messages

    def calling(self, world: World, text: str = "", *calls: Message) -> Ids:
        """A reply that calls tools, as the template itself writes it."""
        tools = self.tools(world)
        return world.spelt(self.questions(world), says(text, *(calls or (call("x", FOUND),))), tools)

    # ── T1 ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def test_t01_three_turns_are_one_trajectory(self, world: World) -> None:
        """Each prompt begins with all that was seen and sampled before; every sampled id is trained once."""
        recorder = world.open()
        self.grow(world, recorder, [world.ids("In row four."), world.ids("It is a lamp."), world.ids("Yes.")])
        kept = world.kept(recorder)
        for before, after in zip(kept.turns, kept.turns[1:], strict=False):
            stored = before.prompt_ids + before.response_ids
            assert after.prompt_ids[: len(stored)] == stored
        assert (kept.causes, kept.parents) == (["first_turn", None, None], [None, 0, 1])
        assert len(kept.trajectories) == len(kept.samples) == 1
        assert (kept.account.trained, kept.account.sampled, kept.breaks) == (kept.n(0, 1, 2), kept.n(0, 1, 2), {})

    def test_t01_a_tool_call_and_its_result_are_one_trajectory(self, world: World) -> None:
        """The call is read back as it was meant, and stands in the next prompt as it was sampled."""
        recorder = world.open()
        reply, _ = self.ask_and_hear(world, recorder, self.calling(world))
        kept = world.kept(recorder)
        assert [(each.name, dict(each.arguments)) for each in reply.tool_calls] == [("look_up", FOUND)]
        assert (reply.invalid_tool_calls, kept.parents, len(kept.trajectories)) == ((), [None, 0], 1)
        assert kept.account.trained == kept.n(0, 1)
        assert [(turn.n_tool_calls, turn.n_invalid_tool_calls) for turn in kept.turns] == [(1, 0), (0, 0)]

    # ── T2 ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def test_t02_thinking_is_kept_or_begins_a_trajectory_when_the_user_speaks(self, world: World) -> None:
        """keep: it stays, and one trajectory goes on. template: it is dropped from the next prompt, which begins a
        trajectory; what was thought stays trained where it was sampled, and the break is counted."""
        self.need_thinking(world)
        recorder = world.open()
        thought = world.ids("<think>\nRow four, I think.\n</think>\n\nIn row four.")
        messages = self.grow(world, recorder, [thought, world.ids("Yes.")])
        kept = world.kept(recorder)
        assert messages[-4]["content"].strip() == "In row four."
        assert kept.account.trained == kept.n(0, 1)
        if self.history == "template":
            assert (kept.causes, kept.breaks) == (["first_turn", "thinking_dropped"], {"thinking_dropped": 1})
            assert "I think" not in world.renderer.decode(kept.turns[1].prompt_ids)
        else:
            assert (kept.parents, kept.breaks) == ([None, 0], {})
            assert "I think" in world.renderer.decode(kept.turns[1].prompt_ids)

    def test_t02_thinking_before_a_tool_call_stays_while_its_result_is_read(self, world: World) -> None:
        """With either history: no user has spoken since."""
        self.need_thinking(world)
        recorder = world.open()
        thought = world.renderer.encode("<think>\nI look it up.\n</think>\n\n")
        reply, _ = self.ask_and_hear(world, recorder, (*thought, *self.calling(world)))
        kept = world.kept(recorder)
        assert (reply.reasoning, len(reply.tool_calls)) == ("I look it up.", 1)
        assert (kept.parents, kept.breaks, kept.account.trained) == ([None, 0], {}, kept.n(0, 1))

    # ── T3, T4 ───────────────────────────────────────────────────────────────────────────────────────────────────

    def test_t03_arguments_keep_the_spelling_that_was_sampled(self, world: World) -> None:
        """Other spaces and key order than the template's: one trajectory, the sampled ids in it; what the template
        would write is told beside the turn."""
        said = self.calling(world)
        text = with_other_arguments(world.renderer.decode(said[:-1]), FOUND)
        if text is None:
            pytest.skip(f"{world.renderer.identity} writes arguments otherwise than as one JSON object")
        other = world.ids(text)
        assert other != said
        recorder = world.open()
        reply, _ = self.ask_and_hear(world, recorder, other)
        kept = world.kept(recorder)
        assert [dict(each.arguments) for each in reply.tool_calls] == [FOUND]
        assert (kept.turns[0].response_ids, kept.parents, kept.breaks) == (other, [None, 0], {})
        assert kept.turns[1].respelled == ("arguments_respelled",)

    def test_t04_other_ids_of_tool_calls_are_the_same_conversation(self, world: World) -> None:
        """Providers and checkpoints rename them; the conversation is told by what was said."""
        tools, messages = self.tools(world), self.questions(world)
        recorder = world.open()
        world.speaker.lines += [self.calling(world), world.ids("Found.")]
        reply = recorder.answer(asks(messages, site("t1"), tools=tools))
        assert len(reply.tool_calls) == 1
        back = says(reply.text, call("toolu_renamed", FOUND))
        recorder.answer(asks((*messages, back, *results(back)), site("t2", step=2), tools=tools))
        kept = world.kept(recorder)
        assert (kept.parents, kept.account.trained) == ([None, 0], kept.n(0, 1))

    # ── T5, T6 ───────────────────────────────────────────────────────────────────────────────────────────────────

    def test_t05_what_the_template_writes_between_turns_comes_once(self, world: World) -> None:
        """A newline after the end of turn, say, is never sampled: it comes with the new messages. The prompt is the
        one that the template makes of the whole conversation."""
        recorder, messages = world.open(), self.questions(world)
        said = says("In row four.")
        world.speaker.lines += [world.spelt(messages, said), world.ids("Yes.")]
        recorder.answer(asks(messages, site("t1")))
        longer = (*messages, said, user("Sure?"))
        recorder.answer(asks(longer, site("t2", step=2)))
        kept = world.kept(recorder)
        assert kept.turns[1].prompt_ids == world.renderer.render(longer, ())
        assert (kept.parents, kept.turns[1].respelled) == ([None, 0], ())

    def test_t05_so_it_does_after_a_tool_call(self, world: World) -> None:
        """The boundary to a tool's result is often another one."""
        recorder = world.open()
        _, messages = self.ask_and_hear(world, recorder, self.calling(world), "lamp")
        kept = world.kept(recorder)
        assert kept.turns[1].prompt_ids == world.renderer.render(messages, (LOOK_UP,))

    def test_t06_several_results_of_one_reply_are_appended_as_they_are_rendered(self, world: World) -> None:
        """In the order of the calls, joined as the template joins them."""
        self.need_two_calls(world)
        recorder = world.open()
        said = self.calling(world, "", call("x", {"id": "A41"}), call("y", {"id": "B7"}))
        reply, messages = self.ask_and_hear(world, recorder, said, "lamp", "grüße\n")
        kept = world.kept(recorder)
        assert [dict(each.arguments) for each in reply.tool_calls] == [{"id": "A41"}, {"id": "B7"}]
        assert kept.turns[1].prompt_ids == world.renderer.render(messages, (LOOK_UP,))
        assert (kept.parents, kept.account.trained) == ([None, 0], kept.n(0, 1))

    # ── T15 ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @pytest.mark.parametrize("most", [1, 1000], ids=["in one word", "in every word"])
    def test_t15_ids_that_the_tokenizer_would_not_make_stay(self, world: World, most: int) -> None:
        """A policy samples any split of a text. In the last reply or in an earlier one, short or long: the sampled
        ids stay, all trained, and no trajectory begins."""
        said = world.ids("It stands between the windows and the door of the second room.")
        odd = oddly_split(world.renderer, said, most=most)
        assert len(odd) > len(said)
        assert world.renderer.decode(odd) == world.renderer.decode(said)
        recorder = world.open()
        self.grow(world, recorder, [odd, odd, world.ids("Yes.")])
        kept = world.kept(recorder)
        assert (kept.parents, kept.breaks, kept.account.trained) == ([None, 0, 1], {}, kept.n(0, 1, 2))
        assert [turn.respelled for turn in kept.turns] == [(), ("tokens_respelled",), ("tokens_respelled",)]

    def test_t15_so_they_do_inside_a_tool_call(self, world: World) -> None:
        """The call is read from its text, whatever ids spell it."""
        said = self.calling(world)
        odd = oddly_split(world.renderer, said)
        assert len(odd) > len(said)
        recorder = world.open()
        reply, _ = self.ask_and_hear(world, recorder, odd)
        kept = world.kept(recorder)
        assert [dict(each.arguments) for each in reply.tool_calls] == [FOUND]
        assert (kept.turns[0].response_ids, kept.parents) == (odd, [None, 0])

    # ── T17 ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def test_t17_a_reply_cut_at_its_length_is_closed_by_context(self, world: World) -> None:
        """Others refuse to extend it. Here the end of turn that it lacks follows as context, at mask 0."""
        recorder, messages = world.open(), self.questions(world)
        cut = world.renderer.encode("The lamp is in the")
        world.speaker.lines += [cut, world.ids("Row four.")]
        reply = recorder.answer(asks(messages, site("t1"), max_tokens=len(cut)))
        recorder.answer(asks((*messages, handed_back(reply), user("Go on.")), site("t2", step=2)))
        kept = world.kept(recorder)
        n = len(kept.turns[0].prompt_ids) + len(cut)
        assert (reply.stop_reason, kept.turns[1].prompt_ids[n], kept.parents) == ("length", world.close_id, [None, 0])
        assert kept.trajectories[0].response_mask[: len(cut) + 1] == (*[1] * len(cut), 0)
        assert kept.account.trained == kept.n(0, 1)

    def test_t17_without_room_the_rollout_ends_and_the_engine_is_not_asked(self, world: World) -> None:
        """What was sampled before is trained: the budget ran out, nothing failed."""
        recorder, messages = world.open(), self.questions(world)
        world.speaker.lines.append(world.ids("In row four."))
        reply = recorder.answer(asks(messages, site("t1")))
        world.speaker.max_length = len(recorder.turns[0].prompt_ids) + len(recorder.turns[0].response_ids)
        longer = (*messages, handed_back(reply), user("Sure?"))
        with pytest.raises(RolloutStop, match="room: the prompt has"):
            recorder.answer(asks(longer, site("t2", step=2)))
        assert (len(world.speaker.asked), recorder.lost) == (1, 0)
        kept = world.kept(recorder, status="budget_exhausted")
        assert (len(kept.samples), kept.account.trained) == (1, kept.n(0))

    # ── T22, T23 ─────────────────────────────────────────────────────────────────────────────────────────────────

    def test_t22_blocking_and_awaited_calls_leave_the_same_turn(self, world: World) -> None:
        """Here a stream is a view on one reply, made in graph/: what is recorded knows nothing of it."""
        left: list[Turn] = []
        for awaited in (False, True):
            recorder, asked = world.open(), asks(self.questions(world))
            world.speaker.lines.append(world.ids("In row four."))
            _ = asyncio.run(recorder.aanswer(asked)) if awaited else recorder.answer(asked)
            (turn,) = world.kept(recorder).turns
            left.append(replace(turn, started_at=0.0, ended_at=0.0))
        assert left[0] == left[1]

    def test_t23_parallel_calls_of_one_reply_come_back_all(self, world: World) -> None:
        """With text before them, in their order, each with an id of its own."""
        self.need_two_calls(world)
        said = self.calling(
            world, "I look.", call("x", {"id": "A41"}), call("y", {"id": "B7"}), call("z", {"id": "A41"})
        )
        recorder = world.open()
        reply, _ = self.ask_and_hear(world, recorder, said, "lamp", "desk", "lamp")
        kept = world.kept(recorder)
        assert [each.arguments["id"] for each in reply.tool_calls] == ["A41", "B7", "A41"]
        assert len({each.id for each in reply.tool_calls}) == 3
        assert (reply.text.strip(), kept.parents, kept.turns[0].n_tool_calls) == ("I look.", [None, 0], 3)

    def test_t23_text_around_a_call_is_kept_with_it(self, world: World) -> None:
        """The text goes back to the graph, the call beside it; both stay as they were sampled."""
        said = self.calling(world, "I look it up.")
        if "I look it up." not in world.renderer.decode(said):
            pytest.skip(f"{world.renderer.identity} writes no text beside a call")
        recorder = world.open()
        reply, messages = self.ask_and_hear(world, recorder, said)
        kept = world.kept(recorder)
        assert (reply.text.strip(), len(reply.tool_calls)) == ("I look it up.", 1)
        trimmed = tuple({**message, "content": message["content"].strip()} for message in messages)
        assert kept.turns[1].prompt_ids == world.renderer.render(trimmed, (LOOK_UP,))

    # ── T25, T26 ─────────────────────────────────────────────────────────────────────────────────────────────────

    def test_t25_what_may_be_sampled_is_the_least_of_all_limits(self, world: World) -> None:
        """The user's own cap, the tokens that are left of the budget, and the room that the engine has."""
        messages = self.questions(world)
        n_prompt = len(world.renderer.render(messages, ()))
        recorder, allowed = world.open(tokens=40), []
        for cap in (7, None):
            world.speaker.lines.append(world.ids("Yes."))
            recorder.answer(asks(messages, site(f"t{cap}"), max_tokens=cap))
            allowed.append(world.speaker.asked[-1][1].max_tokens)
        world.speaker.max_length = n_prompt + 5
        world.speaker.lines.append(world.ids("Yes."))
        recorder.answer(asks(messages, site("t3")))
        allowed.append(world.speaker.asked[-1][1].max_tokens)
        assert allowed == [7, 40 - len(world.ids("Yes.")), 5]
        world.kept(recorder)

    def test_t25_where_no_tool_may_be_called_a_call_is_text(self, world: World) -> None:
        """The tools stay in the prompt, so that the conversation stays one."""
        tools, messages, said = self.tools(world), self.questions(world), self.calling(world)
        recorder = world.open()
        world.speaker.lines.append(said)
        reply = recorder.answer(asks(messages, tools=tools, tool_choice="none"))
        assert (reply.tool_calls, reply.text) == ((), world.renderer.decode(said[:-1]))
        assert recorder.turns[0].prompt_ids == world.renderer.render(messages, tools)
        world.kept(recorder)

    def test_t26_nothing_is_trimmed_between_turns(self, world: World) -> None:
        """The sampled end of turn stays, once, whichever of the stop ids it is."""
        for stop in world.renderer.stop_ids:
            recorder = world.open()
            said = (*world.renderer.encode("In row four."), stop)
            self.grow(world, recorder, [said, world.ids("Yes.")])
            kept = world.kept(recorder)
            stored = kept.turns[0].prompt_ids + said
            assert kept.turns[1].prompt_ids[: len(stored)] == stored
            assert kept.turns[1].prompt_ids[len(stored)] not in world.renderer.stop_ids
