"""OpenAI's own client at an address: what it gets is what OpenAI's API reference says."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

ASK: Any = [{"role": "user", "content": "How many lamps?"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Quantity of an item.",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
    },
}
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"item": "lämp"}}\n</tool_call>'


# Answers


def test_an_answer_has_text_usage_and_reason(desk: Any) -> None:
    raw = desk.client.chat.completions.with_raw_response.create(model="gpt-4o-mini", messages=ASK)
    answer = raw.parse()
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Hello there.", "stop")
    assert choice.message.tool_calls is None
    prompt, sampling = desk.engine.asked[-1]
    assert answer.model == "told-1"
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.total_tokens == len(prompt) + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert sampling.temperature == 0
    assert raw.headers["x-conversation-id"] == desk.serving.asked_for[-1]
    assert "x-without-effect" not in raw.headers


def test_an_answer_that_is_cut_says_so(desk: Any) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        answer = desk.client.chat.completions.create(model="m", messages=ASK, **{name: 2})
        assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 2)


def test_stop_cuts_the_text(desk: Any) -> None:
    for stop in (" there", [".", " there"]):
        assert desk.client.chat.completions.create(model="m", messages=ASK, stop=stop).choices[0].message.content == (
            "Hello"
        )


def test_a_stream_is_the_answer_in_pieces(desk: Any) -> None:
    """And its sum, as OpenAI's helper adds it up, is the whole answer."""
    pieces = list(desk.client.chat.completions.create(model="m", messages=ASK, stream=True))
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == "Hello there."
    assert [piece.choices[0].finish_reason for piece in pieces] == [None, None, None, "stop"]
    assert {piece.usage for piece in pieces} == {None}
    with desk.client.chat.completions.stream(model="m", messages=ASK) as stream:
        stream.until_done()
    assert stream.get_final_completion().choices[0].message.content == "Hello there."


def test_a_stream_tells_its_usage_where_it_is_asked_for(desk: Any) -> None:
    asked = {"stream": True, "stream_options": {"include_usage": True}}
    *pieces, last = desk.client.chat.completions.create(model="m", messages=ASK, **asked)
    assert last.choices == []
    assert last.usage.prompt_tokens == len(desk.engine.asked[-1][0])
    assert {piece.usage for piece in pieces} == {None}


def test_the_bytes_of_a_stream_end_with_done(desk: Any) -> None:
    response = desk.http.post("/chat/completions", json={"messages": ASK, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert {json.loads(event.removeprefix("data: "))["object"] for event in events} == {"chat.completion.chunk"}


def test_async_requests_are_answered_together(open_desk: Any) -> None:
    """All of them wait in the engine at one time."""
    n_requests = 12

    async def asked(url: str) -> list[str | None]:
        async with AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as client:
            create = client.chat.completions.create
            answers = await asyncio.gather(*(create(model="m", messages=ASK) for _ in range(n_requests)))
        return [answer.choices[0].message.content for answer in answers]

    with open_desk() as desk:
        desk.engine.holds = True
        answers: list[Any] = []
        thread = threading.Thread(target=lambda: answers.extend(asyncio.run(asked(desk.url))))
        thread.start()
        while len(desk.engine.open) < n_requests:
            thread.join(0.005)
        for future in list(desk.engine.open.values()):
            future.set_result(desk.hello())
        thread.join()
    assert answers == ["Hello there."] * n_requests


# Tools


def test_a_tool_call_and_its_result_continue_the_sampled_ids(open_desk: Any) -> None:
    """What a client hands back begins with what was sampled, exactly."""
    with open_desk(CALL, "Four.") as desk:
        first = desk.client.chat.completions.create(model="m", messages=ASK, tools=[TOOL])
        (choice,) = first.choices
        (call,) = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("look_up", {"item": "lämp"})
        assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
        said = choice.message.model_dump(exclude_none=True)
        result = {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "4"}]}
        second = desk.client.chat.completions.create(model="m", messages=[*ASK, said, result], tools=[TOOL])
        assert second.choices[0].message.content == "Four."
        (before, sampled), (after, _) = desk.engine.asked
        answer = (*desk.engine.encode(CALL), *sampled.stop_ids[:1])
        assert after[: len(before) + len(answer)] == before + answer


def test_a_streamed_tool_call_is_whole(open_desk: Any) -> None:
    with open_desk(CALL) as desk:
        with desk.client.chat.completions.stream(model="m", messages=ASK, tools=[TOOL]) as stream:
            stream.until_done()
        (choice,) = stream.get_final_completion().choices
        (call,) = choice.message.tool_calls
        assert (call.function.arguments, choice.finish_reason) == ('{"item": "lämp"}', "tool_calls")


def test_the_first_call_alone_where_one_at_a_time_is_asked_for(open_desk: Any) -> None:
    with open_desk(f"{CALL}\n{CALL}") as desk:
        create = desk.client.chat.completions.create
        both = create(model="m", messages=ASK, tools=[TOOL])
        one = create(model="m", messages=ASK, tools=[TOOL], parallel_tool_calls=False)
        assert [len(answer.choices[0].message.tool_calls) for answer in (both, one)] == [2, 1]


def test_no_call_is_read_where_none_may_be_made(open_desk: Any) -> None:
    with open_desk(CALL) as desk:
        answer = desk.client.chat.completions.create(model="m", messages=ASK, tools=[TOOL], tool_choice="none")
        assert answer.choices[0].message.content == CALL
        assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_an_unreadable_call_keeps_its_text(open_desk: Any, stream: bool) -> None:
    """As the arguments of a tool call."""
    broken = '{"name": "look_up", "arguments": {"item": "lamp"'
    with open_desk(f"<tool_call>\n{broken}\n</tool_call>") as desk:
        message, reason = _asked(desk.client, stream=stream)
        (call,) = message.tool_calls
        assert (call.function.arguments.strip(), reason) == (broken, "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", ["[1]", '{"arguments": {"item": "lamp"}}', '{"name": "look_up", "arguments": 3}'])
def test_an_unreadable_call_that_a_client_would_run_is_text(open_desk: Any, body: str, stream: bool) -> None:
    with open_desk(f"<tool_call>\n{body}\n</tool_call>") as desk:
        message, reason = _asked(desk.client, stream=stream)
        assert (message.content.strip(), message.tool_calls, reason) == (body, None, "stop")


def _asked(client: OpenAI, *, stream: bool) -> tuple[Any, str]:
    asked: Any = {"model": "m", "messages": ASK, "tools": [TOOL]}
    if not stream:
        (choice,) = client.chat.completions.create(**asked).choices
        return choice.message, choice.finish_reason
    pieces = list(client.chat.completions.create(**asked, stream=True))
    deltas = [piece.choices[0].delta for piece in pieces]
    text = "".join(delta.content or "" for delta in deltas)
    calls = [call for delta in deltas for call in delta.tool_calls or ()] or None
    message = deltas[0].model_copy(update={"content": text, "tool_calls": calls})
    return message, pieces[-1].choices[0].finish_reason


# Refusals


@pytest.mark.parametrize(
    ("asked", "param", "says"),
    [
        ({"n": 2}, "n", "n is 2: the policy gives one answer a call"),
        ({"logprobs": True}, "logprobs", "tells no log probabilities"),
        ({"messages": []}, "messages", "Give the policy a question"),
        ({"messages": [{"role": "owner", "content": "a"}]}, "messages[0]", "role is 'owner'; it takes system"),
        ({"extra_body": {"top_k": 3}}, "top_k", "Did you mean 'top_p'"),
        ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools[0]", "'custom', and the policy calls"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"temperature": -1}, "temperature", "a number from 0"),
        ({"max_tokens": 0}, "max_tokens", "a whole number from 1"),
        ({"response_format": {"type": "grammar"}}, "response_format", "it takes text, json_object, json_schema"),
        ({"messages": [{"role": "user", "content": "lamp " * 900}]}, "messages", "Shorten the conversation"),
    ],
)
def test_what_a_policy_cannot_do_is_a_bad_request(desk: Any, asked: Any, param: str, says: str) -> None:
    with pytest.raises(openai.BadRequestError, match=says) as error:
        desk.client.chat.completions.create(**{"model": "m", "messages": ASK, **asked})
    assert error.value.param == param
    assert error.value.type == "invalid_request_error"


def test_a_prompt_without_room_has_openais_code(desk: Any) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        desk.client.chat.completions.create(model="m", messages=[{"role": "user", "content": "lamp " * 900}])
    assert error.value.code == "context_length_exceeded"


def test_an_image_is_refused_by_its_place(desk: Any) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    with pytest.raises(
        openai.BadRequestError, match=r"messages\[0\].content\[1\] is a content part of type 'image_url'"
    ):
        desk.client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, image]}]
        )


def test_what_the_template_refuses_is_a_bad_request(desk: Any) -> None:
    """This template joins the description of each tool."""
    tool: Any = {"type": "function", "function": {"name": "look_up", "parameters": {}}}
    with pytest.raises(openai.BadRequestError, match="The chat template of the policy can't write this conversation"):
        desk.client.chat.completions.create(model="m", messages=ASK, tools=[tool])


@pytest.mark.parametrize(
    ("body", "says"), [(b"{", "can't be read as JSON"), (b"[1]", "is a JSON list"), (b'{"a": "\\ud800"}', "can't be")]
)
def test_a_body_that_is_no_object_is_refused(desk: Any, body: bytes, says: str) -> None:
    response = desk.http.post("/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert says in response.json()["error"]["message"]


def test_other_content_and_too_much_of_it_is_refused(desk: Any) -> None:
    path = "/chat/completions"
    assert desk.http.post(path, content=b"{}", headers={"Content-Type": "text/plain"}).status_code == 415
    large = desk.http.post(path, content=b" " * (16 * 2**20 + 1), headers={"Content-Type": "application/json"})
    assert large.status_code == 413


def test_another_path_says_which_there_are(desk: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="use_responses_api=False"):
        desk.client.responses.create(model="m", input="Hello")
    assert desk.http.get("/chat/completions").status_code == 405


def test_a_wrong_key_is_refused(open_desk: Any) -> None:
    """And the health of the server needs none."""
    with open_desk(key="s3cret") as desk:
        for client in (desk.client, desk.client.with_options(api_key="")):
            with pytest.raises(openai.AuthenticationError, match="API key is not this server's"):
                client.models.list()
        assert desk.client.with_options(api_key="s3cret").models.list().data[0].id == "told"
        assert desk.http.get(desk.url.replace("/v1", "/health")).status_code == 503


def test_any_model_is_taken_unless_it_is_strict(open_desk: Any) -> None:
    """Clients send the name of the model that the policy stands in for."""
    with open_desk() as desk:
        assert desk.client.models.retrieve("gpt-4o-mini").id == "gpt-4o-mini"
    with open_desk(strict_model=True) as desk:
        assert desk.client.chat.completions.create(model="told", messages=ASK).model == "told-1"
        with pytest.raises(openai.NotFoundError, match="'gpt-4o-mini' is not served here; 'told' is"):
            desk.client.chat.completions.create(model="gpt-4o-mini", messages=ASK)
        with pytest.raises(openai.NotFoundError):
            desk.client.models.retrieve("gpt-4o-mini")


def test_what_has_no_effect_is_told(desk: Any) -> None:
    """Sampling settings also in the server's log, once."""
    create = desk.client.chat.completions.with_raw_response.create
    with pytest.warns(UserWarning, match=r"Your model asks for top_p=0\.5"):
        raw = create(model="m", messages=ASK, top_p=0.5, seed=7, frequency_penalty=0)
    assert raw.headers["x-without-effect"] == "top_p=0.5, seed=7"


# An engine that is gone, a client that is gone, too many


def test_an_engine_that_is_gone_is_told_as_unavailable(open_desk: Any) -> None:
    with open_desk() as desk:
        asyncio.run(desk.address.load())
        health = desk.url.replace("/v1", "/health")
        assert desk.http.get(health).json() == {"status": "ready"}
        desk.engine.failed = "The engine's process answers no more: signal SIGKILL. Open a new engine."
        with pytest.raises(openai.InternalServerError, match="signal SIGKILL") as error:
            desk.client.chat.completions.create(model="m", messages=ASK)
        assert error.value.status_code == 503
        response = desk.http.get(health)
        assert (response.status_code, response.json()["status"]) == (503, "failed")


def test_a_client_that_goes_away_ends_its_call(open_desk: Any) -> None:
    """Whether it wanted a stream or not."""
    for stream in (False, True):
        with open_desk() as desk:
            desk.engine.holds = True
            with pytest.raises(httpx.ReadTimeout):
                desk.http.post("/chat/completions", json={"messages": ASK, "stream": stream}, timeout=0.2)
            assert desk.engine.came.wait(10)
            assert desk.engine.went.wait(10)
            assert desk.engine.open == {}


def test_a_request_too_many_is_told_to_come_again(open_desk: Any) -> None:
    with open_desk(most_open=1) as desk:
        desk.engine.holds = True
        first = threading.Thread(target=lambda: desk.client.chat.completions.create(model="m", messages=ASK))
        first.start()
        assert desk.engine.came.wait(10)
        with pytest.raises(openai.RateLimitError, match="1 requests are in work") as error:
            desk.client.chat.completions.create(model="m", messages=ASK)
        assert error.value.response.headers["retry-after"] == "1"
        (future,) = desk.engine.open.values()
        future.set_result(desk.hello())
        first.join()
        desk.engine.holds = False
        assert desk.client.chat.completions.create(model="m", messages=ASK).choices[0].message.content == "Hello there."


# Conversations


def test_a_conversation_is_told_by_header_metadata_user_or_its_beginning(desk: Any) -> None:
    create = desk.client.chat.completions.with_raw_response.create
    asked: Any = {"model": "m", "messages": ASK}
    ids = [
        create(**asked, extra_headers={"X-Conversation-Id": "a"}, metadata={"conversation": "b"}, user="c"),
        create(**asked, metadata={"conversation": "b"}, user="c"),
        create(**asked, user="c"),
        create(**asked),
        create(model="m", messages=[*ASK, {"role": "assistant", "content": "4"}, {"role": "user", "content": "Sure?"}]),
        create(model="m", messages=[{"role": "system", "content": "Be brief."}, *ASK]),
    ]
    told = [raw.headers["x-conversation-id"] for raw in ids]
    assert told[:3] == ["a", "b", "c"]
    assert told[3] == told[4] != told[5]
    assert desk.serving.asked_for[-6:] == told


def test_an_outcome_counts_for_the_conversation_that_was_told(desk: Any) -> None:
    """An id that no header holds is told as its hash, and found under either."""
    raw = desk.client.chat.completions.with_raw_response.create(model="m", messages=ASK, user="Jürgen\n")
    id = raw.headers["x-conversation-id"]
    assert id.startswith("id-")
    for said in (id, "Jürgen\n"):
        response = desk.http.post("/outcomes", json={"conversation": said, "success": False, "why": "refunded"})
        assert response.json() == {"conversation": id, "counts": True}
    assert desk.serving.outcomes[-2:] == [(id, False, "refunded")] * 2
    assert desk.http.post("/outcomes", json={"conversation": "a", "success": None}).status_code == 200
    for wrong in ({"success": True}, {"conversation": "a"}, {"conversation": "a", "success": "yes"}):
        assert desk.http.post("/outcomes", json=wrong).status_code == 400
    assert desk.http.get("/serving").json() == {"serves": "told"}


def test_an_answer_of_a_canary_says_so_and_one_that_failed_counts(open_desk: Any) -> None:
    """The client runs the tools, and may hold them back; a canary whose engine is gone must not stay."""
    with open_desk() as desk:
        desk.serving.is_canary = True
        create = desk.client.chat.completions.with_raw_response.create
        assert create(model="m", messages=ASK).headers["x-canary"] == "true"
        assert desk.serving.outcomes == []
        desk.engine.failed = "It is gone."
        with pytest.raises(openai.InternalServerError):
            create(model="m", messages=ASK, user="c")
        with pytest.raises(openai.BadRequestError):
            create(model="m", messages=ASK, user="c", n=2)
        assert desk.serving.outcomes == [("c", False, "EngineError")]
        desk.serving.is_canary = False
        with pytest.raises(openai.InternalServerError):
            create(model="m", messages=ASK, user="of the incumbent")
        assert desk.serving.outcomes[1:] == [("of the incumbent", False, "EngineError")]
        desk.engine.failed = ""
        assert "x-canary" not in create(model="m", messages=ASK).headers


def test_a_failure_that_cannot_be_counted_is_told_as_what_it_is(open_desk: Any, caplog: Any) -> None:
    with open_desk() as desk:
        desk.engine.failed, desk.serving.cannot_count = "It is gone.", True
        with pytest.raises(openai.InternalServerError) as error:
            desk.client.chat.completions.create(model="m", messages=ASK, user="c")
    assert (error.value.status_code, error.value.code) == (503, "engine_unavailable")
    assert "That conversation c failed is not counted: the disk is full" in caplog.text


def test_while_a_promoted_policy_loads_the_one_before_goes_on_answering(open_desk: Any) -> None:
    """However many conversations wait for it."""
    with open_desk() as desk:
        desk.serving.loads = threading.Event()
        waiting = [threading.Thread(target=ask, args=(desk, f"new-{i}")) for i in range(20)]
        for thread in waiting:
            thread.start()
        assert desk.serving.all_wait.wait(20)
        assert ask(desk, "old") == "Hello there."
        desk.serving.loads.set()
        for thread in waiting:
            thread.join()


def ask(desk: Any, conversation: str) -> str:
    answer = desk.client.chat.completions.create(model="m", messages=ASK, user=conversation)
    return str(answer.choices[0].message.content)


def test_the_span_of_an_answer_continues_the_clients_trace(open_desk: Any) -> None:
    """By traceparent, with the run and the conversation on it."""
    trace_id, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with open_desk(tracer=provider.get_tracer("test")) as desk:
        headers = {"traceparent": f"00-{trace_id}-{parent}-01", "X-Conversation-Id": "a"}
        desk.client.chat.completions.create(model="m", messages=ASK, extra_headers=headers)
    (span,) = exporter.get_finished_spans()
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (trace_id, parent)
    assert span.attributes["gen_ai.conversation.id"] == "a"
    assert span.attributes["agenttrain.run.id"] == "told-1"
