"""LangChain's stock middleware, all of it: what each asks the model, and who answers and learns.

A row's name begins with the middleware's class, so that a test can tell when LangChain has one that no row names.
Middleware that asks for its own ends is frozen on the agent's model, with nothing declared. On another model it is
refused, and the line that the refusal gives lets the user's own model answer.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import langchain.agents.middleware
import pytest
from langchain.agents import create_agent
from langchain_core.tools import tool
from matrix.harness import Roll, Rolled, Seen, call, says
from matrix.own_model import OwnModel
from pydantic import BaseModel

from agenttrain.errors import GraphError, RoleError

SECTION = "LangChain middleware"
AGENT = ("model", "trained")


def stock(name: str) -> Any:
    """A class of langchain.agents.middleware; the test is skipped where the installed langchain has none such."""
    found = getattr(langchain.agents.middleware, name, None)
    if found is None:
        pytest.skip(f"langchain {importlib.metadata.version('langchain')} has no {name}")
    return found


def breaks(rolled: Rolled) -> list[str | None]:
    """Why each turn began a trajectory, in the order of the calls. None: it extends an earlier one."""
    return [turn.break_cause for turn in rolled.turns]


def all_trained(rolled: Rolled, n: int) -> None:
    """The agent's own calls and no others, in one path."""
    assert rolled.places == [AGENT] * n
    assert breaks(rolled) == ["first_turn"] + [None] * (n - 1)
    assert rolled.account.trained == rolled.account.sampled > 0


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class Failing:
    """A tool that fails at first."""

    def __init__(self, n: int) -> None:
        self.n_calls, self.n_failures = 0, n

    def tool(self) -> Any:
        @tool
        def price(item: str) -> int:
            """Price of an item."""
            self.n_calls += 1
            if self.n_calls <= self.n_failures:
                raise TimeoutError("the shop is slow")
            return 12

        return price


class Total(BaseModel):
    """The total."""

    total: int


def summaries(model: Any) -> Any:
    kind = stock("SummarizationMiddleware")
    if "trigger" in inspect.signature(kind).parameters:
        return kind(model, trigger=("messages", 4), keep=("messages", 2))
    return kind(model, max_tokens_before_summary=4, messages_to_keep=2, token_counter=len)  # langchain 1.0


def selection(model: Any) -> Any:
    return stock("LLMToolSelectorMiddleware")(model=model)


def emulation(model: Any) -> Any:
    return stock("LLMToolEmulator")(model=model)


def working(seen: Seen) -> str:
    """Adds twice and says so; summarises, selects tools and stands for one where it is asked to."""
    if "most relevant tools" in seen.messages[0][1]:
        by_a_tool = "\nToolSelectionResponse: " in seen.messages[0][1]
        return call("ToolSelectionResponse", tools=["add"]) if by_a_tool else json.dumps({"tools": ["add"]})
    if "You are emulating a tool call" in seen.last:
        return "2"
    if "<messages>" in seen.text or "Messages to summarize" in seen.text:
        return "1 and 1 were added."
    if "Here is a summary" in seen.text:
        return "4"
    return call("add", a=seen.n_tool_results + 1, b=seen.n_tool_results + 1) if seen.n_tool_results < 2 else "4"


@pytest.mark.row(SECTION, "SummarizationMiddleware: the same model")
def test_summaries(roll: Roll, chat: Any) -> None:
    """At four messages it keeps the last two: one summary, frozen, and the agent reads a rewritten history."""
    model = chat()
    rolled = roll(create_agent(model, [add], middleware=[summaries(model)]), working)
    assert rolled.places == [AGENT, AGENT, ("SummarizationMiddleware.before_model", "frozen"), AGENT]
    assert breaks(rolled) == ["first_turn", None, "other_conversation", "history_rewritten"]


@pytest.mark.row(SECTION, "LLMToolSelectorMiddleware: the same model")
def test_tool_selection(roll: Roll, chat: Any) -> None:
    """Asked before each of the agent's calls, with the same two messages each time; the agent's path is one."""
    rolled = roll(create_agent(chat(), [add], middleware=[selection(None)]), working)
    assert rolled.places == [("model", "frozen"), AGENT] * 3
    assert {turn.site.source for turn in rolled.turns if turn.role == "frozen"} == {"tool_selection"}
    assert breaks(rolled) == ["first_turn", "other_conversation", "parallel_sibling", None, "parallel_sibling", None]


@pytest.mark.row(SECTION, "LLMToolSelectorMiddleware: it selects otherwise")
def test_another_selection(roll: Roll, chat: Any) -> None:
    """Other tools in the prompt: the agent's path breaks there, and says why."""

    @tool
    def subtract(a: int, b: int) -> int:
        """Subtract two numbers."""
        return a - b

    script = says(
        json.dumps({"tools": ["add"]}), call("add", a=1, b=1), json.dumps({"tools": ["subtract"]}), "There is no more."
    )
    rolled = roll(create_agent(chat(), [add, subtract], middleware=[selection(None)]), script)
    assert rolled.places == [("model", "frozen"), AGENT] * 2
    assert breaks(rolled) == ["first_turn", "other_conversation", "parallel_sibling", "tools_changed"]


@pytest.mark.row(SECTION, "LLMToolEmulator: the same model")
def test_tool_emulation(roll: Roll, chat: Any) -> None:
    """It speaks in the tool's place, frozen; the agent reads that as the tool's result."""
    model = chat()
    rolled = roll(create_agent(model, [add], middleware=[emulation(model)]), working)
    assert rolled.places == [AGENT, ("tools", "frozen"), AGENT, ("tools", "frozen"), AGENT]
    assert {turn.site.source for turn in rolled.turns if turn.role == "frozen"} == {"tool_emulation"}
    assert breaks(rolled) == ["first_turn", "other_conversation", None, "other_conversation", None]


OTHERS: dict[str, tuple[Callable[[Any], Any], int]] = {
    "SummarizationMiddleware": (summaries, 1),
    "LLMToolSelectorMiddleware": (selection, 3),
    "LLMToolEmulator": (emulation, 2),
}


@pytest.mark.row(SECTION, "SummarizationMiddleware, LLMToolSelectorMiddleware, LLMToolEmulator: another model")
@pytest.mark.parametrize("name", OTHERS)
def test_another_model_is_refused_and_the_line_helps(name: str, roll: Roll, chat: Any) -> None:
    """Detection never decides for another model; the line of the refusal, pasted, does."""
    middleware, n_calls = OTHERS[name]
    own = OwnModel()
    agent = create_agent(chat(), [add], middleware=[middleware(own)])
    with pytest.raises(RoleError, match="two models") as refused:
        roll(agent, working)
    line = re.search(r"auxiliary=(\[.*?\])", str(refused.value))
    assert line is not None
    rolled = roll(agent, working, auxiliary=json.loads(line[1]))
    assert [turn.role for turn in rolled.turns].count("auxiliary") == own.n_calls == n_calls
    assert rolled.roles == {"auxiliary": n_calls, "trained": 3}
    assert rolled.account.trained == rolled.account.sampled


@pytest.mark.row(SECTION, "ModelFallbackMiddleware: never asked, since the policy answers")
def test_fallbacks(roll: Roll, chat: Any) -> None:
    """The other model must be named, and naming it is no slip though nothing ever calls it."""
    fallback = stock("ModelFallbackMiddleware")(chat(model="gpt-4o-mini"))
    agent = create_agent(chat(), [add], middleware=[fallback])
    all_trained(roll(agent, working, auxiliary=["model:gpt-4o-mini"]), 3)


@pytest.mark.row(SECTION, "ModelFallbackMiddleware: after an answer that can't be read")
def test_a_fallback_is_asked(roll: Roll, chat: Any) -> None:
    """An answer that fails its schema is an error to the middleware: the other model answers."""
    from langchain.agents.structured_output import ToolStrategy

    own = OwnModel(says="never mind")
    agent = create_agent(
        chat(),
        [add],
        response_format=ToolStrategy(Total, handle_errors=False),
        middleware=[stock("ModelFallbackMiddleware")(own)],
    )
    rolled = roll(agent, says(call("Total", total="five")), auxiliary=["model:OwnModel"])
    assert rolled.places == [AGENT, ("model", "auxiliary")]
    assert rolled.account.trained == rolled.account.sampled


@pytest.mark.row(SECTION, "ModelRouterMiddleware: the same model decides")
def test_a_router(roll: Roll, chat: Any) -> None:
    """Its decision is asked in its own node, frozen; both routes are one model, whatever their settings."""
    router, choice = stock("ModelRouterMiddleware"), stock("ModelChoice")
    from langchain_core.decisions import BaseDecisionModel, ClassifierResponse

    model = chat()

    class Decides(BaseDecisionModel):
        @property
        def _provider(self) -> str:
            return "own"

        def _classify(self, state: Any, questions: Any) -> ClassifierResponse:
            route = model.invoke([state]).text
            answer = {"type": "choice", "choice": route, "probabilities": {route: 1.0}, "confidence": 1.0}
            return ClassifierResponse.model_validate({"model": "own", "answers": {"model_route": answer}})

    choices = {"slow": choice(chat(temperature=0.1), "hard"), "fast": choice(chat(temperature=0.9), "easy")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is in beta, told once a process
        routed = router(choices=choices, instructions="Choose.", classifier=Decides(model="own"))
    script = says("fast", call("add", a=1, b=1), "2")
    rolled = roll(create_agent(model, [add], middleware=[routed]), script)
    assert rolled.places == [("ModelRouterMiddleware.before_agent", "frozen"), AGENT, AGENT]
    assert breaks(rolled) == ["first_turn", "other_conversation", None]


@pytest.mark.row(SECTION, "AutoModeMiddleware: the same model decides, named by a tag")
def test_a_guard(roll: Roll, chat: Any) -> None:
    """It asks within the node of the tools, where nothing tells its calls: a tag and frozen= do."""
    guard = stock("AutoModeMiddleware")
    from langchain_core.decisions import BaseDecisionModel, ClassifierResponse

    model = chat()

    class Decides(BaseDecisionModel):
        @property
        def _provider(self) -> str:
            return "own"

        def _classify(self, state: Any, questions: Any) -> ClassifierResponse:
            risk = float(model.invoke("Is it risky?", config={"tags": ["guard"]}).text)
            return ClassifierResponse.model_validate(
                {"model": "own", "answers": {"is_risky": {"type": "noul", "noul": risk}}}
            )

    agent = create_agent(model, [add], middleware=[guard(tools=["add"], classifier=Decides(model="own"))])
    rolled = roll(agent, says(call("add", a=1, b=1), "0.9", "I may not."), frozen=["tag:guard"])
    assert rolled.places == [AGENT, ("tools", "frozen"), AGENT]


@pytest.mark.row(SECTION, "ModelRefusalMiddleware")
def test_refusals(roll: Roll, chat: Any) -> None:
    """A policy has no block for a refusal: nothing changes."""
    all_trained(roll(create_agent(chat(), [add], middleware=[stock("ModelRefusalMiddleware")()]), working), 3)


@pytest.mark.row(SECTION, "ModelCallLimitMiddleware")
def test_a_limit_of_calls(roll: Roll, chat: Any) -> None:
    """It ends the graph with a message that nobody sampled, which is not trained."""
    limit = stock("ModelCallLimitMiddleware")(run_limit=2)
    rolled = roll(create_agent(chat(), [add], middleware=[limit]), working, verifier=says_the_limit)
    all_trained(rolled, 2)
    assert rolled.result.rollout.success


def says_the_limit(task: Any, state: Any) -> bool:
    return "limit" in state["messages"][-1].text


@pytest.mark.row(SECTION, "ToolCallLimitMiddleware")
def test_a_limit_of_tools(roll: Roll, chat: Any) -> None:
    """A call past it is answered with an error, and the policy goes on."""
    limit = stock("ToolCallLimitMiddleware")(run_limit=1)
    all_trained(roll(create_agent(chat(), [add], middleware=[limit]), working), 3)


@pytest.mark.row(SECTION, "ToolRetryMiddleware")
def test_tools_are_retried(roll: Roll, chat: Any) -> None:
    """The tool is called again, and the policy isn't."""
    retry, shop = stock("ToolRetryMiddleware")(max_retries=1, initial_delay=0, jitter=False), Failing(1)
    all_trained(roll(create_agent(chat(), [shop.tool()], middleware=[retry]), says(call("price", item="B1"), "12")), 2)
    assert shop.n_calls == 2


@pytest.mark.row(SECTION, "ToolErrorMiddleware")
def test_errors_of_tools_are_told(roll: Roll, chat: Any) -> None:
    """What a tool raised becomes its result."""
    told = stock("ToolErrorMiddleware")(lambda error, request: f"failed: {error}")

    def script(seen: Seen) -> str:
        if not seen.n_tool_results:
            return call("price", item="B1")
        assert seen.last == "failed: the shop is slow"
        return "Later."

    all_trained(roll(create_agent(chat(), [Failing(9).tool()], middleware=[told]), script), 2)


@pytest.mark.row(SECTION, "ModelRetryMiddleware")
def test_the_model_is_retried(roll: Roll, chat: Any) -> None:
    """The same prompt twice within one execution of the node: siblings, each trained once."""
    from langchain.agents.structured_output import ToolStrategy

    agent = create_agent(
        chat(),
        [add],
        response_format=ToolStrategy(Total, handle_errors=False),
        middleware=[stock("ModelRetryMiddleware")(max_retries=1, initial_delay=0, jitter=False)],
    )
    rolled = roll(agent, says(call("Total", total="five"), call("Total", total=5)))
    assert rolled.places == [AGENT, AGENT]
    assert breaks(rolled) == ["first_turn", "parallel_sibling"]
    assert rolled.account.trained == rolled.account.sampled


@pytest.mark.row(SECTION, "ContextEditingMiddleware: ClearToolUsesEdit")
def test_results_are_cleared(roll: Roll, chat: Any) -> None:
    """From the third call on, results but the last are cleared: a rewritten history, a new path."""
    edit = stock("ClearToolUsesEdit")(trigger=1, keep=1)
    rolled = roll(create_agent(chat(), [add], middleware=[stock("ContextEditingMiddleware")(edits=[edit])]), working)
    assert rolled.places == [AGENT] * 3
    assert breaks(rolled) == ["first_turn", None, "history_rewritten"]
    assert rolled.account.trained == rolled.account.sampled


@pytest.mark.row(SECTION, "TodoListMiddleware")
def test_a_to_do_list(roll: Roll, chat: Any) -> None:
    """A tool and words in the system prompt; the list stands in the state."""
    listed = call("write_todos", todos=[{"content": "add", "status": "completed"}])
    agent = create_agent(chat(), [add], middleware=[stock("TodoListMiddleware")()])
    rolled = roll(agent, says(listed, "Done."), verifier=lambda task, state: len(state["todos"]) == 1)
    all_trained(rolled, 2)
    assert rolled.result.rollout.success


@pytest.mark.row(SECTION, "HumanInTheLoopMiddleware: approved and rejected")
def test_a_human(roll: Roll, chat: Any) -> None:
    """on_interrupt answers; no call is made again when the graph goes on."""
    decisions = [{"type": "reject", "message": "Not that."}, {"type": "approve"}]
    agent = create_agent(chat(), [add], middleware=[stock("HumanInTheLoopMiddleware")({"add": True})])
    rolled = roll(agent, working, on_interrupt=lambda task, interrupt: {"decisions": [decisions.pop(0)]})
    all_trained(rolled, 3)
    assert not decisions


@pytest.mark.row(SECTION, "PIIMiddleware: of the input")
def test_personal_data_of_the_input(roll: Roll, chat: Any) -> None:
    """The policy never sees it."""

    def script(seen: Seen) -> str:
        assert "[REDACTED_EMAIL]" in seen.text
        assert "ann@shop.org" not in seen.text
        return "Hello."

    agent = create_agent(chat(), [], middleware=[stock("PIIMiddleware")("email")])
    all_trained(roll(agent, script, input={"messages": [{"role": "user", "content": "I am ann@shop.org"}]}), 1)


@pytest.mark.row(SECTION, "PIIMiddleware: of the output")
def test_personal_data_of_the_output(roll: Roll, chat: Any) -> None:
    """What the policy said stands in the history otherwise: what it sampled is trained, the next call a new path."""
    agent = create_agent(chat(), [add], middleware=[stock("PIIMiddleware")("email", apply_to_output=True)])
    rolled = roll(agent, says("For ann@shop.org:\n" + call("add", a=1, b=1), "2"))
    assert rolled.places == [AGENT, AGENT]
    assert breaks(rolled) == ["first_turn", "history_rewritten"]
    assert rolled.account.trained == rolled.account.sampled


@pytest.mark.row(SECTION, "ProviderToolSearchMiddleware", outcome="refused")
def test_a_providers_tool_search(roll: Roll, chat: Any) -> None:
    """The provider's server would search; no policy can."""
    agent = create_agent(chat(), [add], middleware=[stock("ProviderToolSearchMiddleware")(searchable_tools=["add"])])
    with pytest.raises(GraphError, match="'tool_search' runs on the provider's server") as refused:
        roll(agent, working)
    assert "Bind a @tool that does the same" in str(refused.value)


@pytest.mark.row(SECTION, "ShellToolMiddleware")
@pytest.mark.filterwarnings("ignore:Exception ignored:pytest.PytestUnraisableExceptionWarning")  # 1.5 leaves its pipes
@pytest.mark.skipif(sys.platform == "win32", reason="it needs a shell")
def test_a_shell(roll: Roll, chat: Any) -> None:
    """Its session begins and ends with each rollout."""
    shell = stock("ShellToolMiddleware")(execution_policy=stock("HostExecutionPolicy")(command_timeout=20))

    def script(seen: Seen) -> str:
        if not seen.n_tool_results:
            return call("shell", command="echo $((2 + 3))")
        assert seen.last.strip() == "5"
        return "5"

    all_trained(roll(create_agent(chat(), [], middleware=[shell]), script), 2)


@pytest.mark.row(SECTION, "FilesystemFileSearchMiddleware")
def test_a_search_of_files(roll: Roll, chat: Any, tmp_path: Path) -> None:
    """Two tools over a folder."""
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "prices.txt").write_text("B1 12")
    search = stock("FilesystemFileSearchMiddleware")(root_path=str(tmp_path / "shop"), use_ripgrep=False)

    def script(seen: Seen) -> str:
        if not seen.n_tool_results:
            return call("glob_search", pattern="*.txt")
        assert "prices.txt" in seen.last
        return "There is one."

    all_trained(roll(create_agent(chat(), [], middleware=[search]), script), 2)


@pytest.mark.row(SECTION, "AnthropicPromptCachingMiddleware (langchain-anthropic)")
def test_prompt_caching(roll: Roll) -> None:
    """Its marks are the provider's: the policy reads the text alone, and the path is one."""
    anthropic = pytest.importorskip("langchain_anthropic")
    from langchain_anthropic.middleware import AnthropicPromptCachingMiddleware

    model = anthropic.ChatAnthropic(model_name="claude-sonnet-4-5", api_key="unused", base_url="http://127.0.0.1:9")
    agent = create_agent(model, [add], system_prompt="You add.", middleware=[AnthropicPromptCachingMiddleware()])
    all_trained(roll(agent, working), 3)


def test_no_middleware_is_left_out() -> None:
    """Each class of the installed package stands at the head of a row's name."""
    base = langchain.agents.middleware.AgentMiddleware
    exported = [getattr(langchain.agents.middleware, name) for name in langchain.agents.middleware.__all__]
    middleware = {each.__name__ for each in exported if isinstance(each, type) and issubclass(each, base)} - {
        "AgentMiddleware"
    }
    marks = [mark for each in globals().values() for mark in getattr(each, "pytestmark", ()) if mark.name == "row"]
    named = {name for mark in marks for name in re.findall(r"\w+", mark.args[1].partition(":")[0])}
    assert middleware - named == set()
