"""Every call of a rollout leaves a Turn with exactly the ids that were sampled, or is seen to be lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agenttrain.capture.recorder import Recorder, RecorderLimits
from agenttrain.capture.render import open_renderer
from agenttrain.capture.store import SqliteStore, StoreView, read_store
from agenttrain.errors import CaptureError, EngineError, RolloutStop
from agenttrain.protocols import Renderer
from agenttrain.records import CallSite, Ids, ModelCall, Reply, Role, RolloutRequest, RoutedExperts, Sampling, Task

Encode = Callable[[str], Ids]
Open = Callable[..., Recorder]
ASKS: tuple[Mapping[str, Any], ...] = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Where is A41?"},
)
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"id": "A41"}}\n</tool_call><|im_end|>'
LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Find an order.",
        "parameters": {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]},
    },
}
REQUEST = RolloutRequest(task=Task(id="t", input={}), phase="train", step=2, sibling=1, temperature=0.8, seed=7)


class Desk:
    """A recorder's surroundings: an engine that says what it is told, a store, and what the recorder made."""

    def __init__(self, scripted: Any, renderer: Renderer, encode: Encode, folder: Path) -> None:
        self.says: str | Exception | Callable[[Ids, Sampling], str | Exception] = CALL
        self.engine = scripted(self._say)
        self.folder, self.renderer, self._encode = folder, renderer, encode
        self.store = SqliteStore(folder)

    def open_again(self, **more: Any) -> Recorder:
        """A recorder of a rollout that was made before, as a resumed process makes it: with a store of its own."""
        self.store.close()
        self.store = SqliteStore(self.folder)
        return self.open(**more)

    def _say(self, prompt_ids: Ids, sampling: Sampling) -> Ids | Exception:
        said = self.says(prompt_ids, sampling) if callable(self.says) else self.says
        return said if isinstance(said, Exception) else self._encode(said)

    def open(
        self, *, request: RolloutRequest = REQUEST, tracer: Any = None, on_turn: Any = None, **limits: Any
    ) -> Recorder:
        return Recorder(
            request=request,
            engine=self.engine,
            renderer=self.renderer,
            store=self.store,
            role_of=lambda site: ("frozen", "node: plan") if site.node == "plan" else ("trained", "default"),
            limits=RecorderLimits(**limits),
            tracer=tracer,
            model_name="policy",
            on_turn=on_turn,
        )

    def kept(self) -> StoreView:
        self.store.flush()
        return read_store(self.folder)


@pytest.fixture
def desk(scripted: Any, renderer: Renderer, encode: Encode, tmp_path: Path) -> Iterator[Desk]:
    made = Desk(scripted, renderer, encode, tmp_path)
    yield made
    made.store.close()


def site(task_id: str = "t1", *, node: str = "agent", step: int = 1, attempt: int = 1, around: str = "") -> CallSite:
    ns = f"{around}{node}:{task_id}"
    return CallSite(node=node, step=step, task_id=task_id, checkpoint_ns=ns, attempt=attempt, path=f"pull {node}")


def call(messages: Any = ASKS, *, at: CallSite | None = None, role: Role = "trained", **more: Any) -> ModelCall:
    return ModelCall(
        **{
            "messages": tuple(messages),
            "tools": (LOOK_UP,),
            "site": at or site(),
            "role": role,
            "role_reason": "default",
        }
        | more
    )


def followed(messages: Any, reply: Reply, *results: str) -> tuple[Mapping[str, Any], ...]:
    """The messages, the reply as a graph hands it back, and the results of its tools."""
    calls = [
        {"id": f"other {i}", "type": "function", "function": {"name": each.name, "arguments": dict(each.arguments)}}
        for i, each in enumerate(reply.tool_calls)
    ]
    says = {"role": "assistant", "content": reply.text, **({"tool_calls": calls} if calls else {})}
    answers = [{"role": "tool", "content": each, "tool_call_id": f"other {i}"} for i, each in enumerate(results)]
    return (*messages, says, *answers)


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


# Turns


def test_a_turn_holds_exactly_what_the_engine_saw_and_sampled(desk: Desk, encode: Encode) -> None:
    recorder = desk.open()
    reply = recorder.answer(call())
    (turn,) = recorder.turns
    asked, sampling = desk.engine.asked[0]
    assert (turn.prompt_ids, turn.response_ids) == (asked, encode(CALL))
    assert turn.response_logprobs == tuple(-0.125 * (i + 1) for i in range(len(encode(CALL))))
    assert turn.weight_versions == (3,) * len(encode(CALL))
    assert (turn.sampling, turn.break_cause, turn.extends) == (sampling, "first_turn", None)
    assert turn.renderer == desk.renderer.identity
    assert (reply.call_id, reply.model, reply.stop_reason) == (turn.id, "policy", "stop")
    assert [(each.name, each.arguments) for each in reply.tool_calls] == [("look_up", {"id": "A41"})]


def test_the_store_holds_the_intent_and_the_same_turn(desk: Desk) -> None:
    recorder = desk.open()
    recorder.answer(call())
    kept = desk.kept()
    assert kept.turns(recorder.rollout_id) == recorder.turns
    assert [intent.turn_id for intent in kept.intents()] == ["train-2-t-1-0#0"]
    assert kept.lost_calls() == ()


def test_sync_and_async_calls_leave_the_same_turn(desk: Desk) -> None:
    one = desk.open()
    one.answer(call())
    two = desk.open_again()
    asyncio.run(two.aanswer(call()))
    (a,), (b,) = one.turns, two.turns
    assert (a.prompt_ids, a.response_ids, a.sampling) == (b.prompt_ids, b.response_ids, b.sampling)


def test_the_rollouts_temperature_is_used(desk: Desk) -> None:
    desk.open().answer(call())
    assert desk.engine.asked[0][1].temperature == 0.8


def test_a_frozen_call_is_answered_and_recorded_as_frozen(desk: Desk) -> None:
    recorder = desk.open()
    assert recorder.role(site(node="plan")) == ("frozen", "node: plan")
    recorder.answer(call(role="frozen", role_reason="node: plan"))
    assert (recorder.turns[0].role, recorder.turns[0].role_reason) == ("frozen", "node: plan")
    assert recorder.last_trained_turn is None


def test_observers_are_told_of_each_turn(desk: Desk) -> None:
    told: list[str] = []
    recorder = desk.open(on_turn=lambda turn: told.append(turn.id))
    recorder.answer(call())
    recorder.auxiliary_ended(recorder.auxiliary_began(call(role="auxiliary")), None, None)
    assert told == [turn.id for turn in recorder.turns]
    assert len(told) == 2


def test_a_closed_recorder_answers_no_more(desk: Desk) -> None:
    recorder = desk.open()
    recorder.close()
    with pytest.raises(RolloutStop, match="aborted: the rollout has ended"):
        recorder.answer(call())
    assert recorder.stopped is None


def test_an_auxiliary_call_leaves_a_turn_without_ids(desk: Desk) -> None:
    recorder = desk.open(turns=1)
    turn_id = recorder.auxiliary_began(call(role="auxiliary"))
    recorder.auxiliary_ended(turn_id, None, None)
    (turn,) = recorder.turns
    assert (turn.id, turn.role, turn.prompt_ids, turn.sampling) == (turn_id, "auxiliary", (), None)
    recorder.answer(call())  # It used none of the budget.
    assert desk.kept().lost_calls() == ()


def test_an_auxiliary_call_does_not_come_to_the_policy(desk: Desk) -> None:
    with pytest.raises(CaptureError, match="It answers trained and frozen calls"):
        desk.open().answer(call(role="auxiliary"))


# What a call extends


def test_a_prompt_that_continues_a_turn_is_its_stored_ids_and_a_suffix(desk: Desk, encode: Encode) -> None:
    """The policy spelt its arguments in its own way; ids of calls and the spelling of arguments are not compared."""
    desk.says = CALL.replace(": ", ":")
    recorder = desk.open()
    reply = recorder.answer(call())
    recorder.answer(call(followed(ASKS, reply, "lamp"), at=site("t2", step=3)))
    first, second = recorder.turns
    stored = first.prompt_ids + first.response_ids
    assert second.prompt_ids[: len(stored)] == stored
    assert (second.extends, second.break_cause) == (first.id, None)


def test_unreadable_calls_may_be_handed_back_or_left_out(desk: Desk) -> None:
    broken = "<tool_call>\n{oops\n</tool_call><|im_end|>"
    for handed_back in (True, False):
        desk.says = broken
        recorder = desk.open_again()
        reply = recorder.answer(call())
        says: dict[str, Any] = {"role": "assistant", "content": reply.text}
        if handed_back:
            (invalid,) = reply.invalid_tool_calls
            function = {"name": invalid.name, "arguments": invalid.arguments}
            says["tool_calls"] = [{"id": invalid.id, "type": "function", "function": function}]
        recorder.answer(call((*ASKS, says, user("Again."))))
        assert recorder.turns[1].extends == recorder.turns[0].id


def test_a_trained_turn_may_extend_a_frozen_one(desk: Desk) -> None:
    recorder = desk.open()
    reply = recorder.answer(call(role="frozen"))
    recorder.answer(call(followed(ASKS, reply, "lamp"), at=site("t2", step=2)))
    assert recorder.turns[1].extends == recorder.turns[0].id


def test_a_turn_cut_at_its_length_is_extended(desk: Desk) -> None:
    desk.says = "The lamp is on the"
    recorder = desk.open()
    reply = recorder.answer(call(max_tokens=4))
    assert reply.stop_reason == "length"
    recorder.answer(call((*followed(ASKS, reply), user("Go on.")), at=site("t2", step=2)))
    assert recorder.turns[1].extends == recorder.turns[0].id


def causes(recorder: Recorder) -> list[str | None]:
    return [turn.break_cause for turn in recorder.turns]


def test_a_reply_that_the_template_would_write_otherwise_stays_as_sampled_and_is_told(desk: Desk) -> None:
    """No break: the next turn extends it, says how it would be written, and is stored so."""
    desk.says = "<think>\nHm.\n</think>\n\n" + CALL.replace(": ", ":")
    recorder = desk.open()
    messages = followed(ASKS, recorder.answer(call()), "lamp")
    desk.says = CALL
    messages = followed(messages, recorder.answer(call(messages, at=site("t2", step=3))), "desk")
    recorder.answer(call(messages, at=site("t3", step=5)))
    assert [turn.respelled for turn in recorder.turns] == [(), ("thinking_dropped", "arguments_respelled"), ()]
    assert causes(recorder) == ["first_turn", None, None]
    assert desk.kept().turns(recorder.rollout_id) == recorder.turns


@pytest.mark.parametrize("family", ["default", "qwen3"])
def test_thinking_that_the_history_drops_begins_a_trajectory(desk: Desk, qwen_folder: Path, family: str) -> None:
    """With renderer.history = template, once a user speaks; within the calls of one question it stays."""
    desk.renderer = open_renderer(str(qwen_folder), family=family, history="template")
    desk.says = f"<think>\nHm.\n</think>\n\n{CALL}"
    recorder = desk.open()
    messages = followed(ASKS, recorder.answer(call()), "lamp")
    desk.says = "<think>\nSo.\n</think>\n\nA lamp.<|im_end|>"
    reply = recorder.answer(call(messages, at=site("t2", step=3)))
    recorder.answer(call((*followed(messages, reply), user("And B7?")), at=site("t3", step=5)))
    assert causes(recorder) == ["first_turn", None, "thinking_dropped"]


class Plain:
    """A plugin's renderer that has what a renderer must have, and nothing more."""

    def __init__(self, whole: Renderer) -> None:
        self.identity, self.stop_ids = whole.identity, whole.stop_ids
        self.render, self.extend, self.parse, self.decode = whole.render, whole.extend, whole.parse, whole.decode


def test_a_renderer_need_not_tell_how_replies_are_spelt(desk: Desk) -> None:
    desk.renderer, desk.says = Plain(desk.renderer), CALL.replace(": ", ":")
    recorder = desk.open()
    recorder.answer(call(followed(ASKS, recorder.answer(call()), "lamp"), at=site("t2", step=3)))
    assert [(turn.break_cause, turn.respelled) for turn in recorder.turns] == [("first_turn", ()), (None, ())]


class Failing(Plain):
    """One that offers to tell, and fails at it."""

    def respelled(self, *given: Any) -> Any:
        raise KeyError("role")

    def drops_thinking(self, *given: Any) -> bool:
        return False


def test_a_renderer_that_fails_to_tell_costs_no_rollout(desk: Desk) -> None:
    desk.renderer = Failing(desk.renderer)
    recorder = desk.open()
    recorder.answer(call(followed(ASKS, recorder.answer(call()), "lamp"), at=site("t2", step=3)))
    assert [turn.respelled for turn in recorder.turns] == [(), ()]


def test_other_tools_begin_a_trajectory(desk: Desk) -> None:
    recorder = desk.open()
    reply = recorder.answer(call())
    recorder.answer(call(followed(ASKS, reply, "lamp"), at=site("t2", step=2), tools=()))
    assert causes(recorder) == ["first_turn", "tools_changed"]


def test_a_rewritten_history_begins_a_trajectory(desk: Desk) -> None:
    recorder = desk.open()
    reply = recorder.answer(call())
    edited = (ASKS[0], user("Summary: A41 is asked for."), *followed(ASKS, reply, "lamp")[2:])
    recorder.answer(call(edited, at=site("t2", step=3)))
    assert causes(recorder) == ["first_turn", "history_rewritten"]


def test_a_summary_in_place_of_the_history_is_a_rewritten_history(desk: Desk) -> None:
    recorder = desk.open()
    recorder.answer(call())
    recorder.answer(call((ASKS[0], user("Summary: all done.")), at=site("t2", step=3)))
    assert causes(recorder) == ["first_turn", "history_rewritten"]


def test_a_sub_agent_is_another_conversation_and_the_main_one_goes_on(desk: Desk) -> None:
    recorder = desk.open()
    reply = recorder.answer(call())
    helper = ({"role": "system", "content": "You help."}, user("Find a lamp."))
    recorder.answer(call(helper, at=site("s1", node="model", around="helper:h|")))
    recorder.answer(call(followed(ASKS, reply, "lamp"), at=site("t2", step=3)))
    assert causes(recorder) == ["first_turn", "other_conversation", None]
    assert recorder.turns[2].extends == recorder.turns[0].id


def test_the_task_id_tells_a_retry_from_a_parallel_sibling(desk: Desk) -> None:
    recorder = desk.open()
    recorder.answer(call(at=site("t1")))
    recorder.answer(call(at=site("t1", attempt=2)))
    recorder.answer(call(at=site("t9")))
    assert causes(recorder) == ["first_turn", "retry", "parallel_sibling"]


def test_each_of_two_equal_conversations_goes_on_from_its_own_turn(desk: Desk) -> None:
    """Two sub-agents ask and hear the same: the checkpoint namespace tells whose turn is whose."""
    recorder = desk.open()
    replies = [recorder.answer(call(at=site(f"x{i}", around=f"sub:{i}|"))) for i in range(2)]
    for i in reversed(range(2)):
        recorder.answer(call(followed(ASKS, replies[i], "lamp"), at=site(f"y{i}", step=2, around=f"sub:{i}|")))
    assert [turn.extends for turn in recorder.turns] == [None, None, recorder.turns[1].id, recorder.turns[0].id]


# Seeds


def seeds(recorder: Recorder) -> dict[Ids, int]:
    return {turn.prompt_ids: turn.sampling.seed for turn in recorder.turns if turn.sampling}


def test_parallel_calls_get_the_same_seeds_in_whatever_order_they_come(desk: Desk) -> None:
    calls = [call((ASKS[0], user(f"Where is A{i}?")), at=site(f"run {i}", step=2)) for i in range(4)]
    one = desk.open()
    for each in calls:
        one.answer(each)
    two = desk.open_again()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(two.answer, reversed(calls)))
    assert seeds(one) == seeds(two)
    assert len(set(seeds(one).values())) == 4


def test_equal_parallel_calls_get_different_seeds(desk: Desk) -> None:
    recorder = desk.open()
    for i in range(3):
        recorder.answer(call(at=site(f"t{i}")))
    assert len({turn.sampling.seed for turn in recorder.turns if turn.sampling}) == 3


def test_the_seed_tells_siblings_attempts_and_retries_apart_and_ids_of_tasks_not(desk: Desk) -> None:
    def seed(at: CallSite, **more: Any) -> int:
        request = RolloutRequest(**{"task": REQUEST.task, "phase": "train", "step": 2, "sibling": 1, "seed": 7, **more})
        recorder = desk.open_again(request=request)
        recorder.answer(call(at=at))
        (turn,) = recorder.turns
        assert turn.sampling is not None
        assert 0 <= turn.sampling.seed < 2**63
        return turn.sampling.seed

    assert seed(site("one run")) == seed(site("another run"))
    others = [
        seed(site(), sibling=2),
        seed(site(), attempt=1),
        seed(site(), seed=8),
        seed(site(attempt=2)),
        seed(site()),
    ]
    assert len(set(others)) == 5


def test_ids_of_tool_calls_are_unique_in_a_rollout_and_the_same_in_every_run(desk: Desk) -> None:
    def ids() -> list[str]:
        recorder = desk.open_again()
        return [recorder.answer(call(at=site(f"t{i}"))).tool_calls[0].id for i in range(3)]

    assert ids() == ids()
    assert len(set(ids())) == 3


# Budgets


def stops(recorder: Recorder, made: ModelCall | None = None) -> str:
    with pytest.raises(RolloutStop) as stop:
        recorder.answer(made or call())
    with pytest.raises(RolloutStop):
        recorder.answer(call())
    assert recorder.stopped == str(stop.value)
    return str(stop.value)


def test_no_more_turns_than_the_limit(desk: Desk) -> None:
    recorder = desk.open(turns=2)
    recorder.answer(call())
    recorder.answer(call())
    assert stops(recorder) == "turns: all 2 policy calls are used"
    assert len(desk.engine.asked) == 2


def test_sampled_tokens_are_limited_over_the_rollout(desk: Desk, encode: Encode) -> None:
    n = len(encode(CALL))
    recorder = desk.open(tokens=n + 3)
    recorder.answer(call())
    assert recorder.answer(call()).stop_reason == "length"
    assert [sampling.max_tokens for _, sampling in desk.engine.asked] == [n + 3, 3]
    assert stops(recorder) == f"tokens: {n + 3} of {n + 3} tokens are sampled"


def test_max_tokens_is_what_the_user_the_budget_and_the_room_allow(desk: Desk) -> None:
    recorder = desk.open(tokens=1000)
    recorder.answer(call(max_tokens=200))
    desk.engine.max_length = len(desk.engine.asked[0][0]) + 5
    recorder.answer(call(max_tokens=200))
    assert [sampling.max_tokens for _, sampling in desk.engine.asked] == [200, 5]


def test_a_prompt_that_leaves_no_room_ends_the_rollout(desk: Desk) -> None:
    desk.engine.max_length = 10
    assert stops(desk.open()).startswith("room: the prompt has ")
    assert desk.engine.asked == []


@pytest.mark.parametrize("style", ["sync", "async"])
def test_a_call_that_is_out_of_time_ends_the_rollout_and_keeps_what_was_sampled(desk: Desk, style: str) -> None:
    desk.engine.held = threading.Event()
    recorder = desk.open(seconds=0.05)
    with pytest.raises(RolloutStop, match=r"seconds: 0\.05 seconds are over"):
        recorder.answer(call()) if style == "sync" else asyncio.run(recorder.aanswer(call()))
    desk.engine.held.set()
    (turn,) = recorder.turns
    assert (turn.response_ids, turn.stop_reason, recorder.lost) == ((7,), "aborted", 0)
    assert desk.engine.released == [recorder.rollout_id]


@pytest.mark.parametrize("style", ["sync", "async"])
def test_time_that_ran_out_on_a_broken_engine_is_the_engines_failure(desk: Desk, style: str) -> None:
    """No budget is spent, and the call is lost: what the graph saw is the engine's own error."""
    desk.engine.held, desk.engine.is_broken = threading.Event(), True
    recorder = desk.open(seconds=0.05)
    with pytest.raises(EngineError, match="its server was gone"):
        recorder.answer(call()) if style == "sync" else asyncio.run(recorder.aanswer(call()))
    desk.engine.held.set()
    assert (recorder.turns, recorder.lost, recorder.stopped) == ((), 1, None)


def test_a_rollout_that_is_stopped_from_outside_answers_no_more(desk: Desk) -> None:
    recorder = desk.open()
    recorder.stop("aborted: the run was stopped")
    assert stops(recorder) == "aborted: the run was stopped"


def test_closing_releases_the_engines_cache_and_ends_calls_in_flight(desk: Desk) -> None:
    desk.engine.held = threading.Event()
    recorder = desk.open()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(recorder.answer, call())
        while not desk.engine.asked:
            pass
        recorder.close()
        with pytest.raises(RolloutStop, match="aborted"):
            waiting.result(5)
    desk.engine.held.set()
    assert desk.engine.released == [recorder.rollout_id]
    assert (recorder.turns, recorder.lost, recorder.stopped) == ((), 0, None)
    assert desk.kept().turns(recorder.rollout_id) == ()


# Lost calls


@pytest.mark.parametrize("style", ["sync", "async"])
def test_an_engine_that_fails_leaves_a_lost_call(desk: Desk, style: str) -> None:
    desk.says = ValueError("no memory")
    recorder = desk.open()
    with pytest.raises(EngineError, match="Engine scripted failed on turn train-2-t-1-0#0: ValueError: no memory"):
        recorder.answer(call()) if style == "sync" else asyncio.run(recorder.aanswer(call()))
    assert (recorder.lost, recorder.turns) == (1, ())
    assert [lost.turn_id for lost in desk.kept().lost_calls()] == ["train-2-t-1-0#0"]


def test_an_empty_answer_is_the_engines_failure(desk: Desk) -> None:
    desk.says = ""
    recorder = desk.open()
    with pytest.raises(EngineError, match="answered turn train-2-t-1-0#0 with no ids"):
        recorder.answer(call())
    assert recorder.lost == 1


class Unreadable:
    """A plugin's renderer with a fault in what reads answers."""

    def __init__(self, whole: Renderer) -> None:
        self._whole = whole

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def parse(self, *given: Any) -> Any:
        raise IndexError("no such id")


@pytest.mark.parametrize("style", ["sync", "async"])
def test_an_answer_that_the_renderer_fails_on_is_a_lost_call(desk: Desk, style: str) -> None:
    """So that a graph which goes on without it is not trained as if nothing had been sampled there."""
    desk.renderer = Unreadable(desk.renderer)  # type: ignore[assignment]
    recorder = desk.open()
    with pytest.raises(CaptureError, match=r"Renderer default.* can't read what was sampled: IndexError: no such id\."):
        recorder.answer(call()) if style == "sync" else asyncio.run(recorder.aanswer(call()))
    assert (recorder.lost, recorder.turns) == (1, ())


def test_a_cancelled_call_is_lost(desk: Desk) -> None:
    desk.engine.held = threading.Event()
    recorder = desk.open()

    async def cancelled() -> None:
        waiting = asyncio.create_task(recorder.aanswer(call()))
        while not desk.engine.asked:
            await asyncio.sleep(0.001)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(cancelled())
    desk.engine.held.set()
    assert (recorder.lost, len(desk.kept().lost_calls())) == (1, 1)


def test_a_call_that_goes_because_the_rollout_was_stopped_is_not_lost(desk: Desk) -> None:
    """LangGraph cancels the parallel branches of the one that ran out: the budget ended the rollout, nothing else."""
    desk.engine.held = threading.Event()
    recorder = desk.open(turns=1)

    async def branches() -> None:
        waiting = asyncio.create_task(recorder.aanswer(call()))
        while not desk.engine.asked:
            await asyncio.sleep(0.001)
        with pytest.raises(RolloutStop, match="turns: all 1 policy calls are used"):
            await recorder.aanswer(call())
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(branches())
    desk.engine.held.set()
    assert (recorder.lost, recorder.stopped) == (0, "turns: all 1 policy calls are used")


def test_a_failed_call_does_not_end_the_rollout(desk: Desk) -> None:
    desk.says = ValueError("once")
    recorder = desk.open()
    with pytest.raises(EngineError):
        recorder.answer(call())
    desk.says = CALL
    recorder.answer(call())
    assert (recorder.stopped, recorder.lost, len(recorder.turns)) == (None, 1, 1)


# Replies


def test_tool_calls_are_counted_and_those_that_a_tool_refuses_too(desk: Desk) -> None:
    misfit, unknown = CALL.replace('"A41"', "3"), CALL.replace("look_up", "fly")
    recorder = desk.open()
    for desk.says in (CALL, misfit, unknown, "<tool_call>\n{oops\n</tool_call><|im_end|>", "No call.<|im_end|>"):
        recorder.answer(call())
    assert [turn.n_tool_calls for turn in recorder.turns] == [1, 1, 1, 1, 0]
    assert [turn.n_invalid_tool_calls for turn in recorder.turns] == [0, 1, 1, 1, 0]
    assert [turn.parse_failed for turn in recorder.turns] == [False, False, False, True, False]


def test_tool_choice_none_gives_a_sampled_call_back_as_text(desk: Desk) -> None:
    recorder = desk.open()
    reply = recorder.answer(call(tool_choice="none"))
    assert (reply.text, reply.tool_calls) == (CALL.removesuffix("<|im_end|>"), ())
    assert recorder.turns[0].prompt_ids == desk.renderer.render(ASKS, (LOOK_UP,))


def test_what_was_asked_of_an_answer_and_is_not_in_it_stands_in_its_turn(desk: Desk) -> None:
    recorder = desk.open()
    recorder.answer(call(tool_choice="required"))
    recorder.answer(call(tool_choice=named("add")))
    desk.says = "No.<|im_end|>"
    recorder.answer(call(tool_choice="required"))
    recorder.answer(call(response_format={"type": "json_object"}))
    recorder.answer(call())
    assert [turn.missed for turn in recorder.turns] == ["", "tool_choice", "tool_choice", "response_format", ""]
    assert [turn.missed for turn in desk.kept().turns(recorder.rollout_id)] == [turn.missed for turn in recorder.turns]


def test_what_is_asked_of_an_answer_stands_in_the_prompt_and_stays_there(desk: Desk) -> None:
    """The next turn of the conversation, which asks the same, is the stored ids and a suffix."""
    recorder = desk.open()
    reply = recorder.answer(call(tool_choice=named("look_up")))
    recorder.answer(call(followed(ASKS, reply, "lamp"), at=site("t2", step=2), tool_choice=named("look_up")))
    first, second = recorder.turns
    system = {"role": "system", "content": "Be brief.\n\nCall the tool look_up."}
    assert first.prompt_ids == desk.renderer.render((system, ASKS[1]), (LOOK_UP,))
    assert (second.extends, second.prompt_ids[: len(first.prompt_ids)]) == (first.id, first.prompt_ids)


def test_another_instruction_begins_a_trajectory(desk: Desk) -> None:
    recorder = desk.open()
    reply = recorder.answer(call(tool_choice="required"))
    recorder.answer(call(followed(ASKS, reply, "lamp"), at=site("t2", step=2)))
    recorder.answer(call(followed(ASKS, reply, "lamp"), at=site("t3", step=2), tool_choice="required", tools=()))
    assert causes(recorder) == ["first_turn", "instruction_changed", "tools_changed"]


def test_a_stop_text_cuts_the_reply_and_not_the_ids(desk: Desk, encode: Encode) -> None:
    desk.says = "A lamp. STOP And more.<|im_end|>"
    recorder = desk.open()
    assert recorder.answer(call(stop=("STOP",))).text == "A lamp. "
    assert recorder.turns[0].response_ids == encode(desk.says)


def test_parallel_calls_from_threads_and_loops_are_all_kept(desk: Desk) -> None:
    recorder = desk.open()
    calls = [call((ASKS[0], user(str(i))), at=site(f"t{i}")) for i in range(12)]
    with ThreadPoolExecutor(6) as pool:
        sync = [pool.submit(recorder.answer, each) for each in calls[:6]]
        loops = [pool.submit(lambda each=each: asyncio.run(recorder.aanswer(each))) for each in calls[6:]]
        replies = [each.result(10) for each in (*sync, *loops)]
    assert len({reply.call_id for reply in replies}) == 12
    assert [turn.index for turn in recorder.turns] == list(range(12))
    assert desk.kept().turns(recorder.rollout_id) == recorder.turns


# Spans


def test_calls_are_spans_under_the_rollouts_from_every_thread(desk: Desk) -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    with tracer.start_as_current_span("rollout") as rollout:
        recorder = desk.open(tracer=tracer)
        recorder.answer(call(max_tokens=50))
        with ThreadPoolExecutor(1) as pool:
            pool.submit(recorder.answer, call()).result(5)
    chat, other, _ = exporter.get_finished_spans()
    assert {span.parent.span_id for span in (chat, other) if span.parent} == {rollout.get_span_context().span_id}
    assert chat.name == "chat policy"
    assert chat.attributes is not None
    assert dict(chat.attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "agenttrain",
        "gen_ai.request.model": "policy",
        "gen_ai.request.temperature": 0.8,
        "gen_ai.request.max_tokens": 50,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": len(recorder.turns[0].prompt_ids),
        "gen_ai.usage.output_tokens": len(recorder.turns[0].response_ids),
        "gen_ai.usage.cache_read.input_tokens": 0,
        "agenttrain.role": "trained",
        "agenttrain.role_reason": recorder.turns[0].role_reason,
        "agenttrain.rollout.id": "train-2-t-1-0",
        "agenttrain.turn.id": "train-2-t-1-0#0",
        "agenttrain.node": "agent",
        "agenttrain.break_cause": "first_turn",
        "agenttrain.first_weight_version": 3,
        "agenttrain.weight_version": 3,
    }
    own = chat.get_span_context()
    assert own is not None
    assert (recorder.turns[0].trace_id, recorder.turns[0].span_id) == (f"{own.trace_id:032x}", f"{own.span_id:016x}")


def test_a_lost_call_is_a_span_with_an_error(desk: Desk) -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    desk.says = ValueError("no memory")
    with pytest.raises(EngineError):
        desk.open(tracer=provider.get_tracer("test")).answer(call())
    (span,) = exporter.get_finished_spans()
    assert span.attributes is not None
    assert (span.attributes["error.type"], span.status.is_ok) == ("ValueError", False)


# Routed experts


def rows(start: int, end: int, *, n_layers: int = 2) -> RoutedExperts:
    return RoutedExperts(start=start, n_layers=n_layers, n_chosen=1, data=bytes(2 * n_layers * (end - start)))


def told(prompt_ids: Ids, ids: Ids, sampling: Sampling) -> RoutedExperts:
    return rows(sampling.experts_from, len(prompt_ids) + len(ids) - 1)


def test_a_turn_asks_for_the_experts_that_the_turn_before_it_does_not_hold(desk: Desk) -> None:
    """From the last id on that the earlier turn sampled: nobody had read it then. A new conversation asks for all."""
    desk.engine.tells = told
    recorder = desk.open()
    messages = followed(ASKS, recorder.answer(call()), "in row 4")
    recorder.answer(call(messages, at=site("t2", step=2)))
    recorder.answer(call([user("Something else")], at=site("t3", step=3)))
    first, second, third = recorder.turns
    n_first = len(first.prompt_ids) + len(first.response_ids)
    assert [sampling.experts_from for _, sampling in desk.engine.asked] == [0, n_first - 1, 0]
    assert first.routed_experts == rows(0, n_first - 1)
    assert second.routed_experts == rows(n_first - 1, len(second.prompt_ids) + len(second.response_ids) - 1)
    assert third.routed_experts == rows(0, len(third.prompt_ids) + len(third.response_ids) - 1)
    assert desk.kept().turns(recorder.rollout_id) == recorder.turns


def test_after_a_turn_without_experts_all_are_asked_for(desk: Desk) -> None:
    recorder = desk.open()
    messages = followed(ASKS, recorder.answer(call()), "in row 4")
    desk.engine.tells = told
    recorder.answer(call(messages, at=site("t2", step=2)))
    assert [turn.routed_experts is None for turn in recorder.turns] == [True, False]
    assert [sampling.experts_from for _, sampling in desk.engine.asked] == [0, 0]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda p, r, s: rows(1, len(p) + len(r) - 1), r"for positions 1 to \d+, and it was asked for 0 to"),
        (lambda p, r, s: rows(0, len(p) + len(r)), r"for positions 0 to \d+, and it was asked for 0 to"),
        (lambda p, r, s: rows(0, len(p)), r"for positions 0 to \d+, and it was asked for 0 to"),
    ],
    ids=["a row too few in front", "a row too many", "of the prompt alone"],
)
def test_rows_at_the_wrong_place_lose_the_call(desk: Desk, wrong: Any, says: str) -> None:
    """What can't be aligned is never kept, and the rollout is told as one that lost an answer."""
    desk.engine.tells = wrong
    recorder = desk.open()
    with pytest.raises(EngineError, match=f"scripted told routed experts of turn {recorder.rollout_id}#0 {says}"):
        recorder.answer(call())
    assert (recorder.turns, recorder.lost) == ((), 1)


def test_experts_of_other_layers_than_before_lose_the_call(desk: Desk) -> None:
    desk.engine.tells = told
    recorder = desk.open()
    messages = followed(ASKS, recorder.answer(call()), "in row 4")
    desk.engine.tells = lambda p, r, s: rows(s.experts_from, len(p) + len(r) - 1, n_layers=3)
    with pytest.raises(EngineError, match="for 3 layers of 1, and the turn before it has 2 layers of 1"):
        recorder.answer(call(messages, at=site("t2", step=2)))
    assert len(recorder.turns) == 1
