"""What does capture cost? The same graph, engine and tasks, with agenttrain's capture and without.

    python benchmarks/capture.py [--rollouts 128] [--repeats 5]

Without: a plain chat model that renders with the chat template, asks the same engine and parses the answer; no gate,
no recorder, no store, no spans. With: what `agenttrain eval` does. Interleaved in one process; both are checked to
succeed about as often, so the ratio of seconds is the price of capture. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, SystemMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from agenttrain.records import Sampling

EXAMPLE = Path(__file__).parents[1] / "examples" / "order-desk"


class PlainModel(BaseChatModel):
    """The least that lets a graph talk to the engine: the whole conversation rendered anew at each call."""

    engine: Any
    renderer: Any
    tools: list[dict[str, Any]]

    @property
    def _llm_type(self) -> str:
        return "plain"

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        prompt = self.renderer.render([_plain(message) for message in messages], self.tools)
        sampling = Sampling(temperature=0.0, max_tokens=40, seed=0, stop_ids=self.renderer.stop_ids)
        answer = self.engine.generate(prompt, sampling, session=threading.current_thread().name).result()
        parsed = self.renderer.parse(answer.token_ids, self.tools, prompt)
        calls = [{"name": c.name, "args": dict(c.arguments), "id": c.id} for c in parsed.tool_calls]
        return ChatResult(generations=[ChatGeneration(message=AIMessage(content=parsed.text, tool_calls=calls))])


def _plain(message: BaseMessage) -> dict[str, Any]:
    role = {"human": "user", "ai": "assistant"}.get(message.type, message.type)
    plain: dict[str, Any] = {"role": role, "content": message.text}
    if isinstance(message, AIMessage) and message.tool_calls:
        plain["tool_calls"] = [
            {"type": "function", "id": c["id"], "function": {"name": c["name"], "arguments": c["args"]}}
            for c in message.tool_calls
        ]
    return plain


def plain_graph(desk: Any, model: PlainModel) -> Any:
    """The example's graph around the plain model."""

    def agent(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke([SystemMessage(desk.SYSTEM), *state["messages"]])]}

    builder = StateGraph(MessagesState, context_schema=desk.Desk)
    builder.add_node("agent", agent)
    builder.add_node("tools", ToolNode(desk.TOOLS))
    builder.add_edge(START, "agent")
    builder.add_conditional_edges("agent", tools_condition)
    builder.add_edge("tools", "agent")
    return builder.compile()


def without_capture(graph: Any, engine: Any, tasks: Any) -> list[str]:
    """The last message of each rollout, each on a thread of its own."""

    def run(task: Any) -> str:
        state = graph.invoke(dict(task.input), {"recursion_limit": 64}, context=task.context)
        engine.release(threading.current_thread().name)
        return str(state["messages"][-1].text)

    with ThreadPoolExecutor(len(tasks)) as threads:
        return list(threads.map(run, tasks))


def main() -> None:
    from agenttrain.evaluation import evaluation_requests, opened
    from agenttrain.prepare import prepare
    from agenttrain.protocols import EngineContext
    from agenttrain.run_folder import new_run

    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rollouts", type=int, default=128)
    arguments.add_argument("--repeats", type=int, default=5)
    chosen = arguments.parse_args()
    job = prepare(str(EXAMPLE / "graph.py"), cwd=Path.cwd(), flags={"eval": {"tasks": chosen.rollouts}})
    desk = sys.modules[job.loaded.target.__module__]
    engine = job.plugins.engine("local")(EngineContext(config=job.config, model=str(job.model)))
    tools = [convert_to_openai_tool(tool) for tool in desk.TOOLS]
    model = PlainModel(engine=engine, renderer=job.renderer, tools=tools)
    graph = plain_graph(desk, model)
    rows = []
    for i in range(chosen.repeats):
        began = time.perf_counter()
        plain = without_capture(graph, engine, job.held_out)
        middle = time.perf_counter()
        with (
            tempfile.TemporaryDirectory() as folder,
            opened(job, new_run(Path(folder), "capture")) as (store, _, pool),
        ):
            opening = time.perf_counter()
            results = pool.run(engine, evaluation_requests(job.held_out, "eval", 1, 0.0, i))
            store.flush()
            ended = time.perf_counter()
        rows.append({"without_s": middle - began, "with_s": ended - opening})
        right = sum(f"The answer is {t.reference}." == text for t, text in zip(job.held_out, plain, strict=True))
        successes = sum(result.rollout.success for result in results)
        assert abs(right - successes) <= 0.02 * len(plain) + 1, (right, successes)
    engine.close()
    ratio = statistics.median(row["with_s"] / row["without_s"] for row in rows)
    print(json.dumps({"rollouts": chosen.rollouts, "ratio_with_to_without": ratio, "rounds": rows}))


if __name__ == "__main__":
    main()
