"""Rows that the oldest column can't run: what its versions lack, by the test's name."""

from __future__ import annotations

from importlib import metadata

from packaging.version import Version

IS_OLDEST = Version(metadata.version("langgraph")) < Version("1.1")
LACKS = {
    "test_structured_output[ChatAnthropic-json_schema]": "langchain-anthropic 1.0 has no json_schema",
    "test_a_limit_of_tools": "langchain 1.0: ToolCallLimitMiddleware ends the agent",
    "test_an_answer_as_langchain_chooses[by the provider]": "langchain 1.0 knows no other model's profile: by a tool",
    "test_a_context": "langchain 1.0: ToolRuntime takes two types",
    "test_a_deep_agent_with_summaries": "deepagents 0.2 has no summaries of its own",
    "test_a_swarm": "langchain 1.0 alone, too, gives langgraph-swarm's tools no state",
}
