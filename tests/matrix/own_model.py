"""A model of the user's own that answers, for calls that the policy must leave to it."""

from __future__ import annotations

from typing import Any

from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, ChatResult


class OwnModel(BaseChatModel):
    """Says always the same; calls the tools that are given as a bare schema, as structured output does."""

    says: str = "own words"
    n_calls: int = 0
    """How often it was asked."""

    @property
    def _llm_type(self) -> str:
        return "own"

    def bind_tools(self, tools: Any, **settings: Any) -> Any:
        return self.bind(tools=tools)

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **settings: Any) -> ChatResult:
        self.n_calls += 1
        bound = [str(each.get("title")) for each in settings.get("tools", ()) if isinstance(each, dict)]
        calls = [{"name": name, "args": {"tools": ["add"]}, "id": "s", "type": "tool_call"} for name in bound]
        return ChatResult(generations=[ChatGeneration(message=AIMessage(content=self.says, tool_calls=calls))])


class OwnWriter(OwnModel):
    """Another one."""
