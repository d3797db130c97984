"""What can't be trained: each ends with an error that names the way out, or, where agenttrain can't see the call, with
the alarm of a rollout without a trained call. Nothing of it is ever trained in silence.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from langchain_core.language_models import FakeListChatModel, FakeListLLM
from langchain_core.messages import HumanMessage
from langgraph.graph import MessagesState
from langgraph.pregel.remote import RemoteGraph
from matrix.graphs import add, answer, in_a_row, one_node
from matrix.harness import Roll, Rolled, says

from agenttrain.alarms import step_alarms
from agenttrain.errors import EscapeError, GraphError, RoleError
from agenttrain.figures import rollout_metrics
from agenttrain.records import StepResult

SECTION = "What can't be trained"
ALARM = "alarm no_trained_call: its rollouts teach nothing"
TO_AUXILIARY = "or auxiliary=[…]: your own model answers"


class Server(BaseHTTPRequestHandler):
    """Somebody's model server, and somebody's LangGraph server."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        if self.path.endswith("/chat/completions"):
            said = {"role": "assistant", "content": "from afar"}
            body = {"id": "1", "object": "chat.completion", "created": 1, "model": "m"}
            body |= {"choices": [{"index": 0, "message": said, "finish_reason": "stop"}]}
            self._send("application/json", json.dumps(body))
        else:
            said = {"messages": [{"type": "ai", "content": "from afar", "id": "1"}]}
            self._send("text/event-stream", f"event: values\ndata: {json.dumps(said)}\n\n")

    def _send(self, kind: str, text: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: Any) -> None: ...


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def is_not_seen(rolled: Rolled) -> None:
    """The rollout ended well, nothing of it can be trained, and that is said aloud."""
    assert rolled.turns == ()
    assert rolled.result.samples == ()
    metrics = rollout_metrics(rolled.results)
    step = StepResult(step=1, weight_version=1, metrics=metrics, trained_rollout_ids=(), dropped={})
    alarms = step_alarms(step, baseline_tool_calls=0.0)
    assert [(alarm.code, alarm.severity) for alarm in alarms] == [("no_trained_call", "loud")]
    assert "1 rollouts made no call that is trained" in alarms[0].message


@pytest.mark.row(
    SECTION,
    "a thread of one's own, without the context",
    outcome="refused",
    note="EscapeError names thread, line and fix: context = copy_context() before the thread starts",
)
def test_own_thread(roll: Roll, chat: Any) -> None:
    model = chat()

    def agent(state: MessagesState) -> Any:
        thread = threading.Thread(target=lambda: model.invoke("x"), name="mine")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(threading, "excepthook", lambda args: None)
            thread.start()
            thread.join()
        return {"messages": [("ai", "done")]}

    told = (
        r"on thread 'mine' at .*test_cannot\.py:\d+ .*context = contextvars\.copy_context\(\) before the thread starts"
    )
    with pytest.raises(EscapeError, match=told):
        roll(one_node(agent), says())


@pytest.mark.row(
    SECTION,
    "ThreadPoolExecutor",
    outcome="refused",
    note="EscapeError names thread, line and fix: langchain_core's ContextThreadPoolExecutor",
)
def test_thread_pool(roll: Roll, chat: Any) -> None:
    model = chat()

    def agent(state: MessagesState) -> Any:
        with ThreadPoolExecutor(1, thread_name_prefix="pool") as pool:
            return {"messages": [pool.submit(model.invoke, "x").result()]}

    with pytest.raises(EscapeError, match=r"on thread 'pool_0'.*ContextThreadPoolExecutor"):
        roll(one_node(agent), says())


@pytest.mark.row(
    SECTION,
    "the same with allow_escapes=True",
    outcome="not seen",
    note="your own model answers; counted, alarm `escapes`",
)
def test_allowed_escapes(roll: Roll, chat: Any) -> None:
    own, model = FakeListChatModel(responses=["own"]), chat()

    def agent(state: MessagesState) -> Any:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(own.invoke, "x").result().text == "own"
        return {"messages": [model.invoke("x")]}

    rolled = roll(one_node(agent), says("the policy"), allow_escapes=True)
    assert rolled.places == [("agent", "trained")]
    assert rolled.n_escapes == 1
    assert rolled.account.trained == rolled.account.sampled


@pytest.mark.row(SECTION, "raw openai client", outcome="not seen", note=ALARM)
def test_raw_openai_client(roll: Roll, address: str) -> None:
    import openai

    client = openai.OpenAI(api_key="unused", base_url=f"{address}/v1")

    def agent(state: MessagesState) -> Any:
        said = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
        return {"messages": [("ai", said.choices[0].message.content)]}

    is_not_seen(roll(one_node(agent), says()))
    client.close()


@pytest.mark.row(SECTION, "raw HTTP", outcome="not seen", note=ALARM)
def test_raw_http(roll: Roll, address: str) -> None:
    def agent(state: MessagesState) -> Any:
        with urllib.request.urlopen(f"{address}/v1/chat/completions", b"{}") as answered:
            return {"messages": [("ai", json.load(answered)["choices"][0]["message"]["content"])]}

    is_not_seen(roll(one_node(agent), says()))


@pytest.mark.row(SECTION, "a model called in a subprocess", outcome="not seen", note=ALARM)
def test_subprocess(roll: Roll, address: str) -> None:
    code = "import urllib.request as r, sys; print(r.urlopen(sys.argv[1], b'{}').read().decode())"

    def agent(state: MessagesState) -> Any:
        url = f"{address}/v1/chat/completions"
        said = subprocess.run([sys.executable, "-c", code, url], capture_output=True, text=True, check=True)
        return {"messages": [("ai", json.loads(said.stdout)["choices"][0]["message"]["content"])]}

    is_not_seen(roll(one_node(agent), says()))


@pytest.mark.row(SECTION, "RemoteGraph (a graph on a LangGraph server)", outcome="not seen", note=ALARM)
def test_remote_graph(roll: Roll, address: str) -> None:
    remote = RemoteGraph("agent", url=address)

    def agent(state: MessagesState) -> Any:
        return {"messages": [("ai", remote.invoke({"messages": []})["messages"][-1]["content"])]}

    is_not_seen(roll(one_node(agent), says()))


@pytest.mark.row(SECTION, "an LLM that is no chat model (BaseLLM)", outcome="not seen", note=ALARM)
def test_plain_llm(roll: Roll) -> None:
    llm = FakeListLLM(responses=["plain"])

    def agent(state: MessagesState) -> Any:
        return {"messages": [("ai", llm.invoke("x"))]}

    is_not_seen(roll(one_node(agent), says()))


@pytest.mark.row(SECTION, "images in messages", outcome="refused", note=f"GraphError: send its text, {TO_AUXILIARY}")
def test_images(roll: Roll, chat: Any) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    message = HumanMessage([{"type": "text", "text": "what is it?"}, picture])
    with pytest.raises(GraphError, match=r"block of type 'image_url'.*reads text only.*auxiliary=\[…\]"):
        roll(one_node(lambda state: {"messages": [chat().invoke([message])]}), says())


@pytest.mark.row(SECTION, "images in a node that catches every exception", outcome="refused", note="as above")
def test_a_caught_refusal(roll: Roll, chat: Any) -> None:
    """Else what the node does instead would be trained in its place."""
    picture = HumanMessage([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}])

    def agent(state: MessagesState) -> Any:
        try:
            return {"messages": [chat().invoke([picture])]}
        except Exception:
            return {"messages": [chat().invoke("describe it unseen")]}

    with pytest.raises(GraphError, match="reads text only"):
        roll(one_node(agent), says("nothing to see"))


SERVER_TOOLS = {
    "OpenAI": {"type": "web_search"},
    "Anthropic": {"type": "web_search_20250305", "name": "web_search"},
}


@pytest.mark.row(
    SECTION,
    "a provider's own server tools (web_search)",
    outcome="refused",
    note=f"GraphError: bind a @tool that does the same, {TO_AUXILIARY}",
)
def test_server_tools(roll: Roll, chat: Any) -> None:
    for tool in SERVER_TOOLS.values():
        bound = chat().bind(tools=[tool])
        with pytest.raises(GraphError, match=r"'web_search' runs on the provider's server.*auxiliary=\[…\]"):
            roll(one_node(answer(bound)), says())


@pytest.mark.row(
    SECTION,
    "custom tools (OpenAI's free text)",
    outcome="refused",
    note="GraphError: bind a @tool with one text argument",
)
def test_custom_tools(roll: Roll, chat: Any) -> None:
    bound = chat().bind(tools=[{"type": "custom", "name": "code", "description": "Runs code"}])
    with pytest.raises(
        GraphError, match=r"'code' takes free text.*Bind a @tool with one text argument.*auxiliary=\[…\]"
    ):
        roll(one_node(answer(bound)), says())


@pytest.mark.row(
    SECTION, "n > 1 answers of one call", outcome="refused", note=f"GraphError: model.batch, {TO_AUXILIARY}"
)
def test_several_answers(roll: Roll, chat: Any) -> None:
    with pytest.raises(GraphError, match=r"Node 'agent' asks ChatOpenAI for n > 1 answers.*model\.batch"):
        roll(one_node(answer(chat(n=2))), says())


@pytest.mark.row(
    SECTION, "a second model, undeclared", outcome="refused", note="RoleError: the line to paste, auxiliary= or frozen="
)
def test_second_model(roll: Roll, chat: Any) -> None:
    def first(state: MessagesState) -> Any:
        return {"messages": [chat().invoke("x")]}

    def second(state: MessagesState) -> Any:
        return {"messages": [chat("gpt-4o-mini").invoke("x")]}

    with pytest.raises(RoleError, match=r"Node 'second' calls .*auxiliary=\[\"model:gpt-4o-mini\"\]"):
        roll(in_a_row(first, second), says("one", "two"))


@pytest.mark.row(
    SECTION,
    "a tool whose exception nobody answers",
    outcome="refused",
    note="status environment_failure, tried again twice; ToolNode(handle_tool_errors=True) answers it",
)
def test_raising_tool(roll: Roll, chat: Any) -> None:
    def agent(state: MessagesState) -> Any:
        chat().bind_tools([add]).invoke("x")
        raise ConnectionError("no database")

    rolled = roll(one_node(agent), says("hm"), status="environment_failure")
    assert rolled.places == [("agent", "trained")]
    assert rolled.account.trained == 0
    assert rolled.account.dropped == {"status environment_failure": rolled.account.sampled}
    assert "ConnectionError: no database" in rolled.result.rollout.cause
