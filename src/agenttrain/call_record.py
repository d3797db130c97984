"""A model call as the graph makes it, and what goes back to it: where it was made, the call, the reply.

What a policy sampled for it is a Turn, see `records`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["trained", "frozen", "auxiliary"]
StopReason = Literal["stop", "length", "aborted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSite:
    """Where in the graph a model call was made; what roles and the tree of turns are decided by."""

    node: str | None = None
    """langgraph_node. None: outside of any node."""
    step: int | None = None
    """langgraph_step, the superstep from 1."""
    task_id: str | None = None
    """LangGraph's id of the node execution; differs between parallel siblings, equal over its retries."""
    checkpoint_ns: str = ""
    """`node:task_id|node:task_id`, outermost first."""
    path: str = ""
    """langgraph_path as text; tells Send siblings apart, the same in every run."""
    attempt: int = 1
    """Of the node from 1; more than 1 is a retry."""
    attempts: tuple[int, ...] = ()
    """Of each part of checkpoint_ns, from 1: a node around the call may have been tried again too. Empty: none was."""
    tags: tuple[str, ...] = ()
    source: str | None = None
    """lc_source of LangChain's own middleware, such as "summarization"."""
    model_class: str = ""
    model_name: str = ""
    base_url: str = ""
    thread: str = ""
    """Name of the thread that called."""

    @property
    def model_identity(self) -> tuple[str, str, str]:
        """Class, name and address: equal for one model whatever its settings."""
        return (self.model_class, self.model_name, self.base_url)

    @property
    def executions(self) -> dict[str, int]:
        """LangGraph's task id to its attempt: of the node, and of each one around it.

        Example: checkpoint_ns "team:a1|model:b2", attempts (2, 1) -> {"a1": 2, "b2": 1}
        """
        ids = [part.partition(":")[2] for part in self.checkpoint_ns.split("|")]
        by_id = {id: attempt for id, attempt in zip(ids, self.attempts or (1,) * len(ids), strict=True) if id}
        return by_id | ({self.task_id: self.attempt} if self.task_id else {})

    def retries(self, earlier: CallSite) -> bool:
        """Whether the earlier call was made in an attempt that this one's, of the same node execution, came after."""
        before = earlier.executions
        return any(before.get(id, attempt) < attempt for id, attempt in self.executions.items())

    @property
    def nodes(self) -> tuple[str, ...]:
        """The node and every node around it, innermost first, the same in every run.

        Numbers by which LangGraph counts a node's subgraphs are no nodes (langgraph 1.0, _internal/_config.py,
        recast_checkpoint_ns).

        Example: checkpoint_ns "team:a1|1|model:b2" -> ("model", "team")
        """
        parts = [part for part in reversed(self.checkpoint_ns.split("|")) if part and not part.isdigit()]
        around = tuple(part.partition(":")[0] for part in parts)
        return around if self.node is None or self.node in around else (self.node, *around)

    @property
    def place(self) -> str:
        """The nodes as people read them. Example: node model in node team -> "team:model"."""
        return ":".join(reversed(self.nodes)) or "outside of any node"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """One call as the graph made it, in plain data; made by graph/, answered by capture/."""

    messages: tuple[Mapping[str, Any], ...]
    """OpenAI chat format: role, content (str), tool_call_id, name, tool_calls [{id, type, function {name, arguments}}],
    arguments a dict."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """OpenAI function format."""
    tool_choice: Any = None
    """None, "auto", "none", "required", or {"type": "function", "function": {"name"}}."""
    response_format: Any = None
    max_tokens: int | None = None
    """The user's own cap on this call. None: the budget decides."""
    stop: tuple[str, ...] = ()
    parallel_tool_calls: bool | None = None
    temperature: float | None = None
    """The user's own, for serving; a rollout has its own. None: the user's model says nothing."""
    unsupported: tuple[str, ...] = ()
    """Sampling settings of the user's model that the policy doesn't follow, such as "top_p=0.9"."""
    site: CallSite = CallSite()
    role: Role = "trained"
    role_reason: str = ""
    """Why this role: the selector, the detection or the default that decided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCall:
    """A tool call read from sampled ids."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class InvalidCall:
    """An attempt at a tool call that can't be read, or that its tool's schema refuses."""

    id: str
    name: str | None
    arguments: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What goes back to the graph for one ModelCall."""

    call_id: str
    """Id of the Turn."""
    text: str
    reasoning: str | None = None
    tool_calls: tuple[ParsedCall, ...] = ()
    invalid_tool_calls: tuple[InvalidCall, ...] = ()
    stop_reason: StopReason = "stop"
    n_prompt_ids: int = 0
    n_response_ids: int = 0
    n_cached_ids: int = 0
    model: str = ""
    """Name of the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnAnswer:
    """What a model other than the policy answered to one call, as far as it told."""

    text: str = ""
    tool_calls: tuple[ParsedCall, ...] = ()
    invalid_tool_calls: tuple[InvalidCall, ...] = ()
    n_prompt_tokens: int | None = None
    """By that model's own tokenizer. None: it did not tell."""
    n_response_tokens: int | None = None
    """The same."""
    stop_reason: StopReason = "stop"
