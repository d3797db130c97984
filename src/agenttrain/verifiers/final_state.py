"""A graph's last state becomes what verifiers look at: its messages, and the answer that stands in it.

The policy had a hand in everything here, so nothing that it left makes these raise. Messages are LangChain's, or
mappings in OpenAI's chat format; LangChain itself is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agenttrain.errors import ConfigError
from agenttrain.records import Task

Where = str | Callable[[Any], Any] | None
"""The answer's place: a key of the state, "outer.inner" within mappings, a function of the state, or None for the text
of the last message where it is the assistant's."""
Reference = Callable[[Task], Any]


def of_task(task: Task) -> Any:
    """The task's own reference."""
    return task.reference


def answer_in(state: Any, where: Where) -> Any:
    """What the agent answered. None: nothing stands there."""
    if where is None:
        messages = messages_of(state)
        return text_of(messages[-1]) if messages and role_of(messages[-1]) == "assistant" else None
    if callable(where):
        return where(state)
    found = state
    for key in where.split("."):
        found = found.get(key) if isinstance(found, Mapping) else getattr(found, key, None)
    return found


def check_where(where: Where, made: str) -> None:
    """Refuse a place that is none.

    Args:
        made: what is being made, for the message.

    Raises:
        ConfigError: it is no key, function or None.
    """
    if where is not None and not callable(where) and not (isinstance(where, str) and where):
        raise ConfigError(
            f"{made} got where={where!r}. Name a key of the state (where='answer'), or give a function of the state."
        )


def messages_of(state: Any) -> Sequence[Any]:
    """Those of a state; empty where it holds none."""
    found = state.get("messages") if isinstance(state, Mapping) else getattr(state, "messages", None)
    return found if isinstance(found, list | tuple) else ()


def role_of(message: Any) -> str:
    """ "user", "assistant", "tool", "system" or another; empty where it can't be told."""
    said = message.get("role") if isinstance(message, Mapping) else getattr(message, "type", None)
    return {"human": "user", "ai": "assistant", "AIMessageChunk": "assistant"}.get(str(said), str(said or ""))


def text_of(message: Any) -> str:
    """The text of a message, its blocks of text joined."""
    content = message.get("content") if isinstance(message, Mapping) else getattr(message, "content", None)
    if isinstance(content, str):
        return content
    blocks = content if isinstance(content, list) else []
    return "".join(block if isinstance(block, str) else _block_text(block) for block in blocks)


def _block_text(block: Any) -> str:
    text = block.get("text") if isinstance(block, Mapping) and block.get("type") == "text" else None
    return text if isinstance(text, str) else ""
