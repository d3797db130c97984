"""LangGraph's config variable and a chat model's settings become a CallSite: where in the graph a call was made.

Invariant: two executions of one graph on one input give the same node, step, path and model; task ids and the
namespace tell parallel siblings apart. Knows nothing of roles.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import BaseMessage
from langchain_core.runnables.config import var_child_runnable_config

from agenttrain.graph.attempts import attempts_at, namespaces_around, path_text
from agenttrain.records import CallSite

EMULATION = "You are emulating a tool call for testing purposes.\n\nTool: "
"""How langchain's LLMToolEmulator begins its one message, 1.0 to 1.5."""

_TASK_ID = "__pregel_task_id"
"""Where langgraph before 1.1.3 tells a node's task; it has no execution_info yet."""


def call_site(
    model: object, settings: Mapping[str, Any], *, tags: Sequence[str], metadata: Mapping[str, Any]
) -> CallSite:
    """Where in the graph a call is made, from LangGraph's config variable and LangChain's run manager.

    Args:
        tags, metadata: of the call itself, as LangChain merged them; middleware's own calls drop LangGraph's keys
            there, so those are read from the config variable first.
    """
    config: Mapping[str, Any] = var_child_runnable_config.get() or {}
    around = config.get("metadata") or {}
    configurable = config.get("configurable") or {}
    execution = getattr(configurable.get("__pregel_runtime"), "execution_info", None)
    model_class, model_name, base_url = model_identity(model, settings)
    namespace = str(configurable.get("checkpoint_ns") or around.get("langgraph_checkpoint_ns") or "")
    outer = _left_out(namespace, config)
    attempts = _attempts([*outer, namespace])
    return CallSite(
        node=around.get("langgraph_node") or _innermost(namespace),
        step=around.get("langgraph_step"),
        task_id=execution.task_id if execution else configurable.get(_TASK_ID),
        checkpoint_ns="|".join([*outer, namespace]),
        path=path_text(around.get("langgraph_path")),
        attempt=max((execution.node_attempt if execution else 1, *attempts[-1:])),
        attempts=attempts,
        tags=tuple(dict.fromkeys(tags)),
        source=metadata.get("lc_source") or around.get("lc_source") or _internal(metadata),
        model_class=model_class,
        model_name=model_name,
        base_url=base_url,
        thread=threading.current_thread().name,
    )


def namespaces_here() -> list[str]:
    """Of the node execution that this is called in: those that each begin anew, outermost first. Empty: in none."""
    config: Mapping[str, Any] = var_child_runnable_config.get() or {}
    namespace = str((config.get("configurable") or {}).get("checkpoint_ns") or "")
    return [*_left_out(namespace, config), namespace] if namespace else []


def _left_out(namespace: str, config: Mapping[str, Any]) -> list[str]:
    """Namespaces around one that begins anew, outermost first: a graph is called with a thread_id of its own.

    Source: langgraph 1.0 to 1.2, pregel/main.py: such a call is no subgraph of the node that makes it.
    """
    around = namespaces_around(getattr(config.get("callbacks"), "parent_run_id", None))
    return [outer for outer in around if not f"{namespace}|".startswith(f"{outer}|")] if namespace else []


def _attempts(namespaces: Sequence[str]) -> tuple[int, ...]:
    """The attempt of each part of the namespaces laid end to end. Empty: nothing was tried again."""
    by_namespace = [attempts_at(each) or (1,) * len(each.split("|")) for each in namespaces]
    attempts = tuple(attempt for each in by_namespace for attempt in each)
    return attempts if any(attempt > 1 for attempt in attempts) else ()


def model_identity(model: object, settings: Mapping[str, Any] | None = None) -> tuple[str, str, str]:
    """Class, name and base address of a chat model, "" where it has none; a call's own `model=` wins."""
    name = (settings or {}).get("model") or _first_text(model, ("model_name", "model", "model_id", "deployment_name"))
    address = _first_text(model, ("openai_api_base", "base_url", "anthropic_api_url", "azure_endpoint", "endpoint_url"))
    return type(model).__name__, str(name), address


def _first_text(model: object, names: Sequence[str]) -> str:
    for name in names:
        value = getattr(model, name, None)
        if isinstance(value, str) and value:
            return value
    return ""


def stock_use(messages: Sequence[BaseMessage], settings: Mapping[str, Any]) -> str | None:
    """What LangChain's middleware asks for here, where its call doesn't say so: langchain 1.0 to 1.3.

    Read from the schema of tool_selection.py and the prompt of tool_emulator.py, which have no setting.
    """
    form = _within(settings.get("response_format"), "json_schema")
    schemas = (*(settings.get("tools") or ()), form)
    if any(_schema_name(schema) == "ToolSelectionResponse" for schema in schemas):
        return "tool_selection"
    return "tool_emulation" if len(messages) == 1 and str(messages[0].content).startswith(EMULATION) else None


def _schema_name(schema: Any) -> str:
    named = _within(schema, "function") or schema
    return str(named.get("name") or named.get("title")) if isinstance(named, Mapping) else ""


def _within(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, Mapping) else None


def _internal(metadata: Mapping[str, Any]) -> str | None:
    """Middleware of anybody marks its own calls so: langchain 1.5 agents/middleware/internal_call_transformer.py."""
    return "middleware" if "lc_internal_call" in metadata else None


def _innermost(checkpoint_ns: str) -> str | None:
    """The node of a namespace's last part: where a call's own metadata took the place of LangGraph's."""
    return checkpoint_ns.rpartition("|")[2].partition(":")[0] or None
