"""A routed call becomes a ModelCall for its route, and the Reply what LangChain's callbacks and streams expect.

`PolicyModel` stands in for the user's chat model below LangChain's callbacks, so that those, streaming handlers and
`stream_mode="messages"` work as ever. Invariant: the user's model is read and never changed. Knows nothing of the gate.
"""

from __future__ import annotations

import contextvars
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from agenttrain.errors import GraphError
from agenttrain.graph import messages as convert
from agenttrain.protocols import InPlace, Route
from agenttrain.records import CallSite, ModelCall, Reply, Role

CALL = "agenttrain_call"
"""Keyword that carries a `Routed` from a funnel to what stands in."""
PlainMessages = Callable[[Sequence[BaseMessage]], tuple[Mapping[str, Any], ...]]


_refusals: contextvars.ContextVar[list[GraphError] | None] = contextvars.ContextVar("agenttrain_refusals", default=None)


@contextmanager
def kept_refusals(refusals: list[GraphError]) -> Iterator[None]:
    """Put into a list what calls in the block are refused for, whether or not it comes out of the graph."""
    token = _refusals.set(refusals)
    try:
        yield
    finally:
        _refusals.reset(token)


E = TypeVar("E", bound=GraphError)


def keep_refusal(error: E) -> E:
    """Keep what a call in a rollout is refused for, and give it to be raised: the graph's own code may catch it."""
    if (refusals := _refusals.get()) is not None:
        refusals.append(error)
    return error


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """One call that a route answers, up to its messages."""

    route: Route
    model: BaseChatModel
    settings: Mapping[str, Any]
    """The call's keyword arguments: tools, tool_choice, response_format …"""
    site: CallSite
    role: Role
    reason: str
    in_place: InPlace | None = None
    """What answers a trained or frozen call in the policy's place. None: nothing, the policy answers."""
    replies: list[Reply] = field(default_factory=list)
    """The reply, once there is one."""

    def call(self, messages: Sequence[BaseMessage], stop: Sequence[str] | None) -> ModelCall:
        """The call in plain data.

        Raises:
            GraphError: the policy can't answer it; kept too, since the graph's own code may catch it.
        """
        return self._plain(messages, stop, convert.plain_messages)

    def other_call(self, messages: Sequence[BaseMessage], stop: Sequence[str] | None) -> ModelCall:
        """The same for a chat model in the policy's place, which reads the messages as they are.

        Raises:
            GraphError: only the provider of the user's own model can answer it; kept too.
        """
        return self._plain(messages, stop, convert.described_messages)

    def _plain(self, messages: Sequence[BaseMessage], stop: Sequence[str] | None, plain: PlainMessages) -> ModelCall:
        try:
            return self._read(plain(messages), stop)
        except GraphError as error:
            keep_refusal(error)
            raise

    def _read(self, messages: tuple[Mapping[str, Any], ...], stop: Sequence[str] | None) -> ModelCall:
        settings = self.settings
        if (settings.get("n") or getattr(self.model, "n", None) or 1) > 1:
            raise GraphError(
                f"Node {self.site.node!r} asks {self.site.model_class} for n > 1 answers, and the policy gives one a "
                "call. Call it several times (model.batch), or give this call to your own model with auxiliary=[…]."
            )
        choice = settings.get("tool_choice", settings.get("function_call"))
        parallel = settings.get("parallel_tool_calls")
        if isinstance(choice, Mapping) and "disable_parallel_tool_use" in choice:
            parallel = not choice["disable_parallel_tool_use"]
        return ModelCall(
            messages=messages,
            tools=convert.plain_tools(settings.get("tools") or settings.get("functions") or ()),
            tool_choice=convert.plain_tool_choice(choice),
            response_format=convert.plain_response_format(settings),
            max_tokens=convert.own_max_tokens(self.model, settings),
            stop=convert.own_stop(self.model, stop, settings),
            parallel_tool_calls=parallel,
            temperature=convert.own_temperature(self.model, settings),
            unsupported=convert.unsupported_sampling(self.model, settings),
            site=self.site,
            role=self.role,
            role_reason=self.reason,
        )

    @property
    def wants_parsed(self) -> bool:
        """ChatOpenAI's json_schema output is read from additional_kwargs, not from the text."""
        found = convert.plain_response_format(self.settings)
        return found is not None and found.get("type") == "json_schema"

    @property
    def is_own(self) -> bool:
        """Whether the model that was called answers by itself."""
        return self.role == "auxiliary" or (self.in_place is not None and self.in_place.model is None)

    def auxiliary_call(self, messages: Sequence[BaseMessage]) -> ModelCall:
        """The same for a call that the policy doesn't answer: nothing is refused."""
        return ModelCall(
            messages=convert.described_messages(messages),
            tools=convert.described_tools(self.settings.get("tools") or self.settings.get("functions") or ()),
            site=self.site,
            role=self.role,
            role_reason=self.reason,
        )


class StandIn(BaseChatModel):
    """What stands in for the user's model below LangChain's callbacks; stateless, it is told the call by keyword."""

    @property
    def _llm_type(self) -> str:
        return "agenttrain"

    def _get_invocation_params(self, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        kwargs.pop(CALL, None)
        return {"_type": self._llm_type, "stop": stop, **kwargs}


class PolicyModel(StandIn):
    """The route answers."""

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> Any:
        routed = kwargs.get(CALL)
        name = routed.site.model_name if routed else ""
        return {"ls_provider": "agenttrain", "ls_model_name": name, "ls_model_type": "chat"}

    def _generate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        routed: Routed = kwargs[CALL]
        return _result(routed, routed.route.answer(routed.call(messages, stop)))

    async def _agenerate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        routed: Routed = kwargs[CALL]
        return _result(routed, await routed.route.aanswer(routed.call(messages, stop)))

    def _stream(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        routed: Routed = kwargs[CALL]
        yield from _chunks(routed, routed.route.answer(routed.call(messages, stop)))

    async def _astream(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        routed: Routed = kwargs[CALL]
        for chunk in _chunks(routed, await routed.route.aanswer(routed.call(messages, stop))):
            yield chunk


def _result(routed: Routed, reply: Reply) -> ChatResult:
    routed.replies.append(reply)
    return ChatResult(
        generations=[ChatGeneration(message=convert.assistant_message(reply, parsed=routed.wants_parsed))]
    )


def _chunks(routed: Routed, reply: Reply) -> Iterator[ChatGenerationChunk]:
    routed.replies.append(reply)
    for chunk in convert.message_chunks(reply, parsed=routed.wants_parsed):
        yield ChatGenerationChunk(message=chunk)


_policies = {version: PolicyModel(cache=False, output_version=version) for version in ("v0", "v1")}


def policy_for(model: BaseChatModel) -> PolicyModel:
    """The stand-in that gives content in the form that the user's model was asked for."""
    return _policies["v1" if model.output_version == "v1" else "v0"]


def exact_invalid_calls(routed: Routed, result: ChatResult) -> ChatResult:
    """Put back what a sum of chunks can't carry, see `messages.message_chunks`."""
    if routed.replies and routed.replies[-1].invalid_tool_calls:
        message = result.generations[0].message
        if isinstance(message, AIMessage):
            message.invalid_tool_calls = convert.invalid_tool_calls(routed.replies[-1])
    return result
