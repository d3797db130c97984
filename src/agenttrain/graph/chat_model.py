"""A chat model for new graphs that stands for the policy by name: `agenttrain.chat_model()`.

Inside a rollout and where a policy serves the gate answers its calls, as it does for any model. What is written here is
what happens elsewhere: `default` answers, below LangChain's callbacks, so that one call is one run in a trace; without
one the call is an error. Invariant: all of these models are one model to the role book, whatever their settings.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Literal, cast

from langchain_core.language_models.base import LangSmithParams, LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import ConfigDict, PrivateAttr, SecretStr

from agenttrain.errors import ConfigError, ModelError
from agenttrain.graph.messages import own_max_tokens, own_stop, own_temperature, plain_tool_choice

Method = Literal["function_calling", "json_mode", "json_schema"]
Parser = Runnable[AIMessage, Any]
METHODS: tuple[Method, ...] = ("function_calling", "json_mode", "json_schema")
NOBODY = (
    "chat_model() was called, and nobody is there to answer. Three can: the policy in a rollout (agenttrain fit, "
    "agenttrain eval), a trained policy inside `with agenttrain.use(RUN):` or a graph from agenttrain.attach(graph, "
    "RUN), and a model of yours, chat_model(default=ChatOpenAI(…))."
)


def chat_model(
    default: BaseChatModel | str | None = None,
    *,
    temperature: float | None = None,
    max_tokens: int | None = None,
    stop: Sequence[str] | None = None,
    timeout: float | None = None,
    max_retries: int | None = None,
    api_key: str | None = None,
) -> ChatPolicy:
    """A chat model that the policy answers: in rollouts, and wherever a trained one serves.

    Args:
        default: answers elsewhere: a chat model, or text such as "openai:gpt-4o" for langchain's init_chat_model.
            None: a call elsewhere is an error.
        temperature, max_tokens, stop: of the policy where it serves, and of a default given as text. None: as the
            default has them. A rollout samples at its own temperature.
        timeout, max_retries, api_key: of a default given as text.

    Raises:
        ConfigError: `default` is no chat model and no text.

    Example:
        model = agenttrain.chat_model(default="openai:gpt-4o-mini").bind_tools([search])
        model.invoke("Hello")        # gpt-4o-mini answers
        with agenttrain.use("runs/desk-20260101-120000-abcd"):
            model.invoke("Hello")    # the trained policy answers
    """
    if default is not None and not isinstance(default, BaseChatModel | str):
        raise ConfigError(
            f"chat_model() got default={type(default).__name__}, and a chat model (ChatOpenAI(…)) or text "
            '("openai:gpt-4o") is taken. Bind tools and settings to what chat_model() gives: '
            "chat_model(default=model).bind_tools([…])."
        )
    if isinstance(default, BaseChatModel):
        temperature = own_temperature(default, {}) if temperature is None else temperature
        max_tokens = own_max_tokens(default, {}) if max_tokens is None else max_tokens
        stop = own_stop(default, None, {}) or None if stop is None else stop
    return ChatPolicy(
        default=default,
        temperature=temperature,
        max_tokens=max_tokens,
        stop=None if stop is None else list(stop),
        timeout=timeout,
        max_retries=max_retries,
        api_key=None if api_key is None else SecretStr(api_key),
    )


class ChatPolicy(BaseChatModel):
    """What `chat_model` gives; LangChain's standard parameters are its fields."""

    model_config = ConfigDict(extra="forbid")

    default: BaseChatModel | str | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    stop: list[str] | None = None
    timeout: float | None = None
    max_retries: int | None = None
    api_key: SecretStr | None = None
    streaming: bool = False
    _made: BaseChatModel | None = PrivateAttr(default=None)
    """The model that a default given as text names, once it is needed."""

    @property
    def model_name(self) -> str:
        """By which selectors find it: `model:policy`."""
        return "policy"

    @property
    def _llm_type(self) -> str:
        return "agenttrain-policy"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """What tells two of them apart in a cache."""
        named = self.default if isinstance(self.default, str | None) else self.default.dict()
        return {
            "model_name": self.model_name,
            "default": named,
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "stop": self.stop,
        }

    @classmethod
    def is_lc_serializable(cls) -> bool:
        return True

    @property
    def lc_secrets(self) -> dict[str, str]:
        return {"api_key": "AGENTTRAIN_DEFAULT_API_KEY"}

    def __getstate__(self) -> dict[Any, Any]:
        state = super().__getstate__()
        return {**state, "__pydantic_private__": {**(state["__pydantic_private__"] or {}), "_made": None}}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        if isinstance(self.default, BaseChatModel):
            return self.default._get_ls_params(stop=stop, **kwargs)
        params = super()._get_ls_params(stop=stop or self.stop, **kwargs)
        params["ls_provider"] = "agenttrain"
        return params

    def bind_tools(
        self,
        tools: Sequence[Mapping[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: Any = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Tell the model of tools, as for any chat model.

        Args:
            tool_choice: "auto", "none", "any" or "required", the name of a tool, or a provider's form of these.
            strict: handed to a default that knows it; a policy is never decoded under constraints.

        Raises:
            ConfigError: the named tool is not among the tools.
        """
        formatted = [convert_to_openai_tool(cast(Any, tool), strict=strict) for tool in tools]
        if tool_choice is not None:
            kwargs["tool_choice"] = _checked_choice(tool_choice, formatted)
        return super().bind(tools=formatted, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        include_raw: bool = False,
        method: Method = "function_calling",
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """The model with a parser behind it that gives the object which the schema describes.

        Args:
            schema: a pydantic class, a TypedDict or a JSON schema.
            include_raw: give {"raw", "parsed", "parsing_error"} instead, and never raise for the answer.
            method: a tool of that schema, any JSON object, or JSON of that schema.

        Raises:
            ConfigError: another method.
        """
        if method not in METHODS:
            raise ConfigError(f"with_structured_output got method={method!r}. Accepted: {', '.join(METHODS)}.")
        asked = {"kwargs": {"method": method, "strict": strict}, "schema": schema}
        if method == "function_calling":
            name = convert_to_openai_tool(schema)["function"]["name"]
            model = self.bind_tools(
                [schema], tool_choice=name, strict=strict, ls_structured_output_format=asked, **kwargs
            )
            return _with_parser(model, _tool_parser(schema, name), include_raw=include_raw)
        form = {"type": "json_object"} if method == "json_mode" else _json_schema(schema, strict)
        bound = self.bind(response_format=form, ls_structured_output_format=asked, **kwargs)
        return _with_parser(bound, _text_parser(schema), include_raw=include_raw)

    def _generate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        model, told = self._answering(kwargs)
        return model._generate_with_cache(messages, stop=stop, run_manager=run_manager, **told)

    async def _agenerate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        model, told = self._answering(kwargs)
        return await model._agenerate_with_cache(messages, stop=stop, run_manager=run_manager, **told)

    def _stream(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        model, told = self._answering(kwargs)
        if model._should_stream(async_api=False, stream=True):
            yield from model._stream(messages, stop=stop, run_manager=run_manager, **told)
        else:
            yield one_chunk(model._generate_with_cache(messages, stop=stop, run_manager=run_manager, **told))

    async def _astream(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        model, told = self._answering(kwargs)
        if model._should_stream(async_api=True, stream=True):
            async for chunk in model._astream(messages, stop=stop, run_manager=run_manager, **told):
                yield chunk
        else:
            result = await model._agenerate_with_cache(messages, stop=stop, run_manager=run_manager, **told)
            yield one_chunk(result)

    def _answering(self, settings: Mapping[str, Any]) -> tuple[BaseChatModel, dict[str, Any]]:
        """The default, and the call's settings in its own form.

        Raises:
            ModelError: there is no default, or its text can't be read here.
        """
        model = self._default_model()
        told = {name: value for name, value in settings.items() if name not in ("tools", "tool_choice")}
        tools = settings.get("tools")
        if not tools:
            return model, told
        choice = {"tool_choice": portable_choice(settings["tool_choice"])} if "tool_choice" in settings else {}
        bound = cast(Any, model.bind_tools(tools, **choice))
        return model, {**bound.kwargs, **told}

    def _default_model(self) -> BaseChatModel:
        if isinstance(self.default, BaseChatModel):
            return self.default
        if self.default is None:
            raise ModelError(NOBODY)
        if self._made is None:
            self._made = _from_text(self.default, self._given())
        return self._made

    def _given(self) -> dict[str, Any]:
        names = ("temperature", "max_tokens", "stop", "timeout", "max_retries", "api_key")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def _from_text(text: str, settings: Mapping[str, Any]) -> BaseChatModel:
    try:
        from langchain.chat_models import init_chat_model
    except ImportError as error:
        raise ModelError(
            f"chat_model(default={text!r}) needs langchain, which is not installed here. Install it, or hand the chat "
            "model itself: chat_model(default=ChatOpenAI(…))."
        ) from error
    return cast(BaseChatModel, init_chat_model(text, **settings))


def _checked_choice(choice: Any, tools: Sequence[Mapping[str, Any]]) -> Any:
    plain = plain_tool_choice(choice)
    names = [tool.get("function", {}).get("name") for tool in tools]
    if isinstance(plain, Mapping) and plain["function"]["name"] not in names:
        raise ConfigError(
            f"tool_choice names {plain['function']['name']!r}, and the tools are {', '.join(map(str, names))}. "
            "Name one of them, or write 'any'."
        )
    return plain


def portable_choice(choice: Any) -> Any:
    """A choice as every provider's `bind_tools` takes it."""
    if isinstance(choice, Mapping):
        return choice["function"]["name"]
    return "any" if choice == "required" else choice


def _json_schema(schema: Any, strict: bool | None) -> dict[str, Any]:
    function = convert_to_openai_tool(schema, strict=strict)["function"]
    told = {} if strict is None else {"strict": strict}
    return {"type": "json_schema", "json_schema": {"name": function["name"], "schema": function["parameters"], **told}}


def _tool_parser(schema: Any, name: str) -> Parser:
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        return cast(Parser, PydanticToolsParser(tools=[schema], first_tool_only=True))
    return cast(Parser, JsonOutputKeyToolsParser(key_name=name, first_tool_only=True))


def _text_parser(schema: Any) -> Parser:
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        return cast(Parser, PydanticOutputParser(pydantic_object=schema))
    return cast(Parser, JsonOutputParser())


def _with_parser(
    model: Runnable[LanguageModelInput, AIMessage], parser: Parser, *, include_raw: bool
) -> Runnable[LanguageModelInput, Any]:
    if not include_raw:
        return model | parser
    read = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    unread = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=model) | read.with_fallbacks([unread], exception_key="parsing_error")


def one_chunk(result: ChatResult) -> ChatGenerationChunk:
    """A whole answer as a stream of one."""
    said = cast(AIMessage, result.generations[0].message)
    calls = [
        tool_call_chunk(name=call["name"], args=json.dumps(call["args"]), id=call["id"], index=i)
        for i, call in enumerate(said.tool_calls)
    ]
    chunk = AIMessageChunk(
        content=said.content,
        id=said.id,
        additional_kwargs=said.additional_kwargs,
        response_metadata=said.response_metadata,
        usage_metadata=said.usage_metadata,
        tool_call_chunks=calls,
        chunk_position="last",
    )
    return ChatGenerationChunk(message=chunk)
