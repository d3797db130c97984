"""A routed call is answered by a chosen chat model in the policy's place, with all that the call asks for.

`OtherModel` stands where `PolicyModel` does, below LangChain's callbacks. The call's tools, tool choice and form are
bound to the chosen model in its own provider's way; its temperature is its own, whatever the user's model says.
Invariant: neither model object is changed. Async calls are made on threads: an HTTP client that keeps connections
belongs to one event loop, and each rollout has its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any, cast

from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult

from agenttrain.graph.chat_model import one_chunk, portable_choice
from agenttrain.graph.messages import json_object, max_tokens_name
from agenttrain.graph.own_answer import recorded
from agenttrain.graph.policy_model import CALL, Routed, StandIn
from agenttrain.records import ModelCall


class OtherModel(StandIn):
    """The chosen model of the route answers."""

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> Any:
        routed: Routed | None = kwargs.pop(CALL, None)
        return _chosen(routed)._get_ls_params(stop=stop) if routed else {"ls_model_type": "chat"}

    def _generate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        routed: Routed = kwargs[CALL]
        call = routed.other_call(messages, stop)
        with recorded(routed.route, call) as said:
            result = _chosen(routed)._generate(messages, **asked_of(_chosen(routed), call))
            message = cast(AIMessage, result.generations[0].message)
            said.append(message)
        if parsed := _parsed(routed, message):
            message.additional_kwargs = {**message.additional_kwargs, **parsed}
        return result

    def _stream(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        routed: Routed = kwargs[CALL]
        chosen = _chosen(routed)
        if not chosen._should_stream(async_api=False, stream=True):
            yield one_chunk(self._generate(messages, stop, run_manager, **kwargs))
            return
        call = routed.other_call(messages, stop)
        whole: AIMessageChunk | None = None
        with (
            recorded(routed.route, call) as said,
            closing(cast(Any, chosen._stream(messages, **asked_of(chosen, call)))) as chunks,
        ):
            for chunk in chunks:
                said.append(chunk.message)
                whole = chunk.message if whole is None else whole + chunk.message
                yield chunk
        if whole is not None and (parsed := _parsed(routed, whole)):
            yield ChatGenerationChunk(message=AIMessageChunk(content="", additional_kwargs=parsed))


_models = {version: OtherModel(cache=False, output_version=version) for version in ("v0", "v1")}


def other_model(model: BaseChatModel) -> OtherModel:
    """The stand-in that gives content in the form that the user's model was asked for."""
    return _models["v1" if model.output_version == "v1" else "v0"]


def _chosen(routed: Routed) -> BaseChatModel:
    return cast(BaseChatModel, routed.in_place.model if routed.in_place is not None else None)


def asked_of(chosen: BaseChatModel, call: ModelCall) -> dict[str, Any]:
    """What a call asks for, as the chosen model takes it."""
    told: dict[str, Any] = {"stop": list(call.stop) or None}
    if call.tools:
        told |= _bound_tools(chosen, call)
    if call.response_format is not None:
        told["response_format"] = call.response_format
    if call.max_tokens is not None:
        told[max_tokens_name(chosen)] = call.max_tokens
    return told


def _bound_tools(chosen: BaseChatModel, call: ModelCall) -> Mapping[str, Any]:
    options: dict[str, Any] = {}
    if call.tool_choice is not None:
        options["tool_choice"] = portable_choice(call.tool_choice)
    takes = inspect.signature(chosen.bind_tools).parameters
    if call.parallel_tool_calls is not None and "parallel_tool_calls" in takes:
        options["parallel_tool_calls"] = call.parallel_tool_calls
    return cast(Mapping[str, Any], cast(Any, chosen.bind_tools([dict(tool) for tool in call.tools], **options)).kwargs)


def _parsed(routed: Routed, message: AIMessage) -> dict[str, Any]:
    """What ChatOpenAI's json_schema output is read from, where the chosen model doesn't give it. Empty: not asked."""
    if not routed.wants_parsed or message.additional_kwargs.get("parsed"):
        return {}
    value = json_object(message.text)
    return {} if value is None else {"parsed": value}
