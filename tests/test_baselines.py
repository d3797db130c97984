"""`eval --run` with other models than a policy: the user's own, one at an address, one of a provider."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_server import ChatServer, call, serve

from agenttrain.evaluated import find_evaluation

pytestmark = pytest.mark.slow

HEAD = """\
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from agenttrain import Limits, trainable

@tool
def price(item: str) -> str:
    "Price of an item."
    return f"{item} costs 3"

builder = StateGraph(MessagesState)

def right(task, state):
    return state["messages"][-1].text == "it is: pen costs 3"
"""
MODEL = """
model = ChatOpenAI(model="own-1", api_key="unused", base_url=ADDRESS, max_tokens=60, temperature=0.7)
tooled = model.bind_tools([price])
"""
SYNC = """
def agent(state):
    return {"messages": [tooled.invoke(state["messages"])]}
"""
ASYNC = """
async def agent(state):
    return {"messages": [await tooled.ainvoke(state["messages"])]}
"""
STREAMED = """
def agent(state):
    message = None
    for piece in tooled.stream(state["messages"]):
        message = piece if message is None else message + piece
    return {"messages": [message]}
"""
LOOP = """
builder.add_node("agent", agent)
builder.add_node("tools", ToolNode([price]))
builder.set_entry_point("agent")
builder.add_conditional_edges("agent", tools_condition)
builder.add_edge("tools", "agent")
"""
DECORATED = "graph = trainable(builder, model='nowhere', tasks='tasks.jsonl', verifier=right, limits=Limits(turns=4))\n"


def clerk(body: Any) -> Any:
    """Asks the price, then says what it heard; without tools it says yes."""
    last = body["messages"][-1]
    if last["role"] == "tool":
        return {"content": f"it is: {last['content']}"}
    return call("price", item="pen") if body.get("tools") else {"content": "yes"}


@pytest.fixture
def clerks() -> Iterator[ChatServer]:
    with serve(clerk) as running:
        yield running


@pytest.fixture
def desk(new_project: Any) -> Any:
    """Makes a project whose agent has a tool and whose own model is at an address."""

    def make(address: str, agent: str = SYNC, *, decorated: str = DECORATED) -> Any:
        body = f"ADDRESS = {address!r}\n{MODEL}{agent}{LOOP}"
        return new_project(body, head=HEAD, decorated=decorated)

    return make


def figures(said: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(said[key] for key in ("success", "turns", "tool_calls", "invalid_tool_calls", "tokens"))


@pytest.mark.slow
@pytest.mark.parametrize("agent", [SYNC, ASYNC], ids=["sync", "async"])
def test_as_is_counts_what_the_users_own_model_tells(agent: str, clerks: ChatServer, desk: Any, command: Any) -> None:
    """2 calls of 11 + 3 tokens a rollout, one of them a tool's; the report, the store and inspect say the same."""
    project = desk(clerks.address, agent)
    said = command("eval", "graph.py", "--run", "as-is", "--json").json
    assert figures(said) == (1.0, 2.0, 1.0, 0.0, 6.0)
    assert said["environment_failures"] == 0
    assert said["cost"]["per_success"]["tokens"] == 6.0
    found = find_evaluation(project.run.id, project.folder / "runs")
    assert (found.answered_by, found.policy) == ("own models", "as-is")
    assert {(each.n_prompt_ids, each.n_sampled_ids, each.tokens_told) for each in found.rollouts} == {(22, 6, True)}
    assert [body["temperature"] for body in clerks.requests] == [0.7] * 6
    shown = command("inspect", project.run.id, found.rollouts[0].id).out
    assert (
        "turn 0 agent: auxiliary (as-is: the user's own models answer), 11 + 3 tokens, stop, 1 tool calls\n"
        '  {"name": "price", "arguments": {"item": "pen"}}\n'
        "turn 1 agent: auxiliary (as-is: the user's own models answer), 11 + 3 tokens, stop\n"
        "  it is: pen costs 3\n"
    ) in shown


def test_tokens_that_are_not_told_are_none(clerks: ChatServer, desk: Any, command: Any) -> None:
    """ChatOpenAI streams without usage from an address of one's own; the tool calls are known all the same."""
    project = desk(clerks.address, STREAMED)
    said = command("eval", "graph.py", "--run", "as-is", "--json").json
    assert figures(said) == (1.0, 2.0, 1.0, 0.0, None)
    assert {rollout.tokens_told for rollout in project.store.rollouts()} == {False}
    rows = command("inspect", project.run.id, "--json").json["rollouts"]
    assert {row["tokens"] for row in rows} == {None}


@pytest.mark.slow
def test_invalid_calls_of_the_users_own_model_count(desk: Any, command: Any) -> None:
    """A tool that nobody has, arguments that its schema refuses, and arguments that are no JSON."""
    broken = [call("prise", item="pen"), call("price", thing="pen"), call("price")]
    broken[2]["tool_calls"][0]["function"]["arguments"] = "{"
    calls = [{**each["tool_calls"][0], "id": f"call-{i}"} for i, each in enumerate(broken)]

    def script(body: Any) -> Any:
        done = body["messages"][-1]["role"] == "tool"
        return {"content": "it is: pen costs 3"} if done else {"content": None, "tool_calls": calls}

    with serve(script) as server:
        desk(server.address)
        said = command("eval", "graph.py", "--run", "as-is", "--json").json
    assert figures(said) == (1.0, 2.0, 3.0, 3.0, 6.0)


JUDGED = """
judge = ChatOpenAI(model="judge-1", api_key="unused", base_url=ADDRESS)

def agent(state):
    judge.invoke("Is this a question?")
    return {"messages": [tooled.invoke(state["messages"])]}
"""
WITH_JUDGE = DECORATED.replace("limits=", "auxiliary=['model:judge-1'], limits=")


def test_declared_auxiliary_calls_count_nowhere(clerks: ChatServer, desk: Any, command: Any) -> None:
    """As with a policy: as-is the judge's calls are recorded and are no turns; at an address it stays who it is."""
    project = desk(clerks.address, JUDGED, decorated=WITH_JUDGE)
    as_is = command("eval", "graph.py", "--run", "as-is", "--json").json
    assert figures(as_is) == (1.0, 2.0, 1.0, 0.0, 6.0)
    turns = project.store.turns(project.store.rollouts()[0].id)
    assert [(turn.site.model_name, turn.stands_for, turn.said[:7]) for turn in turns] == [
        ("judge-1", None, ""),
        ("own-1", "trained", '{"name"'),
        ("judge-1", None, ""),
        ("own-1", "trained", "it is: "),
    ]
    clerks.requests.clear()
    assert figures(command("eval", "graph.py", "--run", clerks.address, "--json").json) == figures(as_is)
    assert [body["model"] for body in clerks.asked].count("judge-1") == 6
    assert [body["model"] for body in clerks.asked].count("small-1") == 6


@pytest.mark.parametrize(
    "agent",
    [
        SYNC,
        pytest.param(ASYNC, marks=pytest.mark.slow),
        pytest.param(STREAMED, marks=pytest.mark.slow),
    ],
    ids=["sync", "async", "streamed"],
)
def test_a_model_at_an_address_answers_in_the_policys_place(
    agent: str, clerks: ChatServer, desk: Any, command: Any
) -> None:
    """With the call's own tools and cap, at the evaluation's temperature, by the one name that the address lists."""
    project = desk("http://127.0.0.1:9/v1", agent)
    done = command("eval", "graph.py", "--run", clerks.address, "--json")
    assert done.code == 0, done.err
    name = f"small-1 at {clerks.address}"
    assert figures(done.json) == (1.0, 2.0, 1.0, 0.0, 6.0)
    assert (done.json["model"]["base"], done.json["engine"]) == (name, "chat model")
    assert f"3 tasks, answered by {name}" in done.err
    found = find_evaluation(project.run.id, project.folder / "runs")
    assert (found.answered_by, found.policy) == ("chat model", name)
    assert {(each.n_prompt_ids, each.n_sampled_ids, each.tokens_told) for each in found.rollouts} == {(22, 6, True)}
    assert len(clerks.asked) == 6
    for body in clerks.asked:
        assert (body["model"], body["temperature"], body["max_completion_tokens"]) == ("small-1", 0.0, 60)
        assert [tool["function"]["name"] for tool in body["tools"]] == ["price"]
    turns = project.store.turns(found.rollouts[0].id)
    assert [(turn.role, turn.stands_for, turn.n_response_tokens) for turn in turns] == [("auxiliary", "trained", 3)] * 2


FORMED = """
from pydantic import BaseModel

class Answer(BaseModel):
    text: str

formed = model.with_structured_output(Answer, method="json_schema")
chosen = model.bind_tools([price], tool_choice="price", parallel_tool_calls=False, stop=["END"])

def agent(state):
    assert chosen.invoke(state["messages"]).tool_calls[0]["name"] == "price"
    return {"messages": [("ai", formed.invoke(state["messages"]).text)]}
"""


def test_what_a_call_asks_for_comes_with_it(desk: Any, command: Any) -> None:
    """tool_choice, parallel calls, stop and the answer's form; ChatOpenAI's parser finds the object it looks for."""

    def script(body: Any) -> Any:
        return call("price", item="pen") if body.get("tools") else {"content": '{"text": "it is: pen costs 3"}'}

    with serve(script) as server:
        desk("http://127.0.0.1:9/v1", FORMED)
        done = command("eval", "graph.py", "--run", server.address, "--temperature", "0.5", "--json")
        assert done.code == 0, done.err
    assert (done.json["success"], done.json["temperature"]) == (1.0, 0.5)
    asked = [body for body in server.asked if body.get("tools")]
    assert [(body["tool_choice"], body["parallel_tool_calls"], body["stop"]) for body in asked] == [
        ({"type": "function", "function": {"name": "price"}}, False, ["END"])
    ] * 3
    forms = [body["response_format"] for body in server.asked if not body.get("tools")]
    assert {(form["type"], form["json_schema"]["name"]) for form in forms} == {("json_schema", "Answer")}
    assert {body["temperature"] for body in server.asked} == {0.5}


@pytest.mark.slow
def test_turns_are_limited_as_the_policys_are(desk: Any, command: Any) -> None:
    """A model that never ends spends 4 turns at an address; as-is only LangGraph's recursion limit ends it."""
    with serve(lambda body: call("price", item="pen") if body.get("tools") else {"content": "yes"}) as server:
        project = desk(server.address)
        said = command("eval", "graph.py", "--run", server.address, "--json").json
        assert (said["success"], said["turns"], said["unfinished"]) == (0.0, 4.0, 3)
        assert {rollout.cause for rollout in project.store.rollouts()} == {"turns: all 4 policy calls are used"}
        assert command("eval", "graph.py", "--run", "as-is", "--json").json["turns"] == 16.0


@pytest.mark.slow
def test_an_answer_that_is_cut_ends_the_rollout_as_the_policys_would(desk: Any, command: Any) -> None:
    with serve(lambda body: {"content": "it is", "finish_reason": "length"}) as server:
        project = desk(server.address)
        assert command("eval", "graph.py", "--run", "as-is", "--json").json["unfinished"] == 3
    assert {rollout.status for rollout in project.store.rollouts()} == {"truncated"}


@pytest.mark.slow
def test_later_failures_are_the_environments(desk: Any, command: Any) -> None:
    """With their causes; a place that failed to the end is no success."""

    def script(body: Any) -> Any:
        return 400 if "item 5" in str(body["messages"]) else clerk(body)

    with serve(script) as server:
        project = desk("http://127.0.0.1:9/v1")
        said = command("eval", "graph.py", "--run", server.address, "--json").json
    assert (said["success"], said["environment_failures"]) == (pytest.approx(2 / 3), 1)
    failed = [rollout for rollout in project.store.rollouts() if rollout.status == "environment_failure"]
    assert len(failed) == 3  # the same place, tried again twice
    assert all("refused with 400" in rollout.cause for rollout in failed)
    assert {rollout.n_sampled_ids for rollout in failed} == {0}


@pytest.mark.parametrize(
    ("answer", "said"),
    [(None, "OpenAIConnectionError: Connection error"), (401, "OpenAIAuthenticationError: Error code: 401")],
)
def test_own_models_that_cannot_be_reached_end_it_early(answer: Any, said: str, desk: Any, command: Any) -> None:
    """After three rollouts, with the variables that say where they are; nothing is told as a success."""
    retries = MODEL.replace("max_tokens=60", "max_tokens=60, max_retries=0")
    with serve(lambda body: answer) as server:
        address = "http://127.0.0.1:9/v1" if answer is None else server.address
        project = desk(address, SYNC.replace("def agent", f"{retries}\ndef agent"))
        done = command("eval", "graph.py", "--run", "as-is")
    assert done.code == 1
    assert (
        "TrainerError: None of the 3 first evaluation rollouts has a reward, so the evaluation was ended. " in done.err
    )
    assert f"The commonest cause (3 of them): {said}" in done.err, done.err
    assert "(after 1 turn). See that the model's server runs, and that its address and key are in the env" in done.err
    assert "OPENAI_BASE_URL and OPENAI_API_KEY where ChatOpenAI asks" in done.err
    assert "\nevaluation: success" not in done.err
    assert {rollout.status for rollout in project.store.rollouts()} <= {"environment_failure", "aborted"}


@pytest.mark.slow
def test_an_address_is_tried_before_anything_starts(desk: Any, command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody there, a key that it refuses, several models, a call that it refuses: each says what to do."""
    project = desk("http://127.0.0.1:9/v1")

    def told(*arguments: str) -> str:
        done = command("eval", "graph.py", "--run", *arguments)
        assert done.code == 2
        return str(done.err)

    monkeypatch.setenv("OPENAI_API_KEY", "sk-wrong")
    assert "ConfigError: --run http://127.0.0.1:9/v1: nobody answers there" in told("http://name:pass@127.0.0.1:9/v1")
    with serve(clerk, models=("a", "b"), key="sk-right") as server:
        refused = told(server.address)
        assert f"--run {server.address}: it refuses to list its models (401). See that OPENAI_API_KEY holds" in refused
        assert "refused with 401" in told(server.address, "--chat-model", "a")
        monkeypatch.setenv("OPENAI_API_KEY", "sk-right")
        several = told(server.address)
        assert "lists 2 models (a, b), and one must answer. Name it: --chat-model NAME" in several
        done = command("eval", "graph.py", "--run", server.address, "--chat-model", "b")
        assert done.code == 0, done.err
        assert {body["model"] for body in server.requests} == {"b"}
    with serve(lambda body: 404) as server:
        assert "refused with 404" in told(server.address)
    (run,) = project.runs
    assert not any(b"sk-right" in file.read_bytes() for file in run.path.rglob("*") if file.is_file())


def test_a_providers_model_by_its_name(
    clerks: ChatServer, desk: Any, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = desk("http://127.0.0.1:9/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-mine")
    monkeypatch.setenv("OPENAI_API_BASE", clerks.address)
    monkeypatch.setenv("OPENAI_BASE_URL", clerks.address)
    done = command("eval", "graph.py", "--run", "openai:gpt-4o-mini", "--json")
    assert done.code == 0, done.err
    assert figures(done.json) == (1.0, 2.0, 1.0, 0.0, 6.0)
    assert {(body["model"], body["temperature"]) for body in clerks.requests} == {("gpt-4o-mini", 0.0)}
    assert find_evaluation(project.run.id, project.folder / "runs").policy == "openai:gpt-4o-mini"
    done = command("eval", "graph.py", "--run", "nobody:model-1")
    assert done.code == 2
    assert "ConfigError: --run nobody:model-1 can't answer in the policy's place: ValueError" in done.err


def test_an_address_without_its_version_is_told_the_whole_one(clerks: ChatServer, desk: Any, command: Any) -> None:
    """Also where a model is named, so that nothing is listed."""
    desk("http://127.0.0.1:9/v1")
    short = clerks.address.removesuffix("/v1")
    done = command("eval", "graph.py", "--run", short)
    assert done.code == 2
    assert f"--run {short}: it refuses to list its models (404). Did you mean {clerks.address}?\n" in done.err
    done = command("eval", "graph.py", "--run", f"{short}/", "--chat-model", "small-1")
    assert done.code == 2
    assert f" Did you mean {clerks.address}?\n" in done.err
    assert clerks.requests == []


def test_a_name_of_nobody_lists_what_is_accepted(desk: Any, command: Any) -> None:
    desk("http://127.0.0.1:9/v1")
    done = command("eval", "graph.py", "--run", "trained")
    assert done.code == 2
    assert (
        "RunError: No run is named 'trained' under runs or at that path. There are no runs there. --run takes base, "
        "as-is, a run's id or path, a policy's folder, an address (http://…/v1) or provider:model (openai:gpt-4o-mini)."
    ) in done.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("base", "--chat-model", "a"), "--chat-model names a model at an address, and --run is 'base'."),
        (("http://127.0.0.1:9/v1", "--model", "m"), "--model and --run http://127.0.0.1:9/v1 both name weights."),
        (("http://127.0.0.1:9/v1", "--engine", "local"), "--engine local answers for a policy, and --run http"),
        (
            ("127.0.0.1:9/v1",),
            "--run 127.0.0.1:9/v1 is an address without its scheme. Did you mean http://127.0.0.1:9/v1?",
        ),
        (("localhost:9",), "--run localhost:9 is an address without its scheme. Did you mean http://localhost:9?"),
        (("openai:gpt-4o", "--engine", "local"), "--engine local answers for a policy, and --run openai:gpt-4o is"),
    ],
)
def test_options_that_do_not_go_together(arguments: tuple[str, ...], said: str, desk: Any, command: Any) -> None:
    desk("http://127.0.0.1:9/v1")
    done = command("eval", "graph.py", "--run", *arguments)
    assert done.code == 2
    assert f"ConfigError: {said}" in done.err


@pytest.mark.slow
def test_a_policys_folder_is_taken(project: Any, command: Any, policy_folder: Path) -> None:
    done = command("eval", "graph.py", "--run", policy_folder, "--set", "eval.tasks=1", "--json")
    assert done.json["model"]["base"] == str(policy_folder), done.err
