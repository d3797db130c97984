"""An address, or provider:model, becomes the chat model that answers in the policy's place, tried once.

Invariant: no key is in what this gives or raises of its own; an address is named without user, password and query.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NoReturn, cast
from urllib.parse import urlsplit, urlunsplit

from langchain_core.language_models.chat_models import BaseChatModel
from pydantic import SecretStr

from agenttrain.config import environment
from agenttrain.errors import ConfigError
from agenttrain.graph.messages import max_tokens_name
from agenttrain.protocols import InPlace

KEY = "OPENAI_API_KEY"
N_RETRIES = 5
"""Of a call that an address refuses for a while."""
PROBE = "Answer with the word yes."
PROBE_TOKENS = 64
LIST_SECONDS = 20.0
NAME_ONE = " Name one: --chat-model NAME."
VERSION = re.compile(r"/v\d+\w*/?$")
"""Ends an address that has its version."""


def model_at(address: str, *, name: str | None, temperature: float, seconds: float | None) -> InPlace:
    """The chat model of an OpenAI-compatible address, asked with the key in OPENAI_API_KEY.

    Args:
        address: up to and with its version, such as http://127.0.0.1:8000/v1.
        name: of the model there. None: the only one that it lists.
        seconds: the longest that one call may take. None: as its client has it.

    Raises:
        ConfigError: nobody answers there, it refuses the key or the call, or it doesn't list one model.
    """
    from langchain_openai import ChatOpenAI

    shown = _shown(address)
    key = environment(KEY) or "unused"
    chosen = name or _only_model(address, shown, key)
    model = ChatOpenAI(
        model=chosen,
        base_url=address,
        api_key=SecretStr(key),
        temperature=temperature,
        timeout=seconds,
        max_retries=N_RETRIES,
        stream_usage=True,
        use_responses_api=False,
        cache=False,
    )
    found = InPlace(name=f"{chosen} at {shown}", model=model)
    _try(found, f"--run {shown}", hint=lambda: _below(address, key))
    return found


def model_named(text: str, *, temperature: float) -> InPlace:
    """The chat model of provider:model, by LangChain's init_chat_model with the keys of that provider.

    Raises:
        ConfigError: langchain or the provider's package is missing, or it can't be made or asked.

    Example: model_named("openai:gpt-4o-mini", temperature=0.0).name -> "openai:gpt-4o-mini"
    """
    try:
        from langchain.chat_models import init_chat_model
    except ImportError:
        raise ConfigError(
            f"--run {text} needs langchain, which is not installed here. Install langchain and the provider's package, "
            "or name an OpenAI-compatible address: --run http://…/v1."
        ) from None
    try:
        model: BaseChatModel = init_chat_model(text, temperature=temperature)
    except Exception as error:  # a provider's own package may be missing, or want a key
        _refused(f"--run {text}", error)
    model = model.model_copy(update={"cache": False})
    found = InPlace(name=text, model=model)
    _try(found, f"--run {text}")
    return found


def _try(chosen: InPlace, option: str, *, hint: Callable[[], str] = str) -> None:
    """One short call, before anything starts.

    Args:
        hint: what more to say where it is refused; begins with a space.
    """
    model: BaseChatModel = chosen.model
    try:
        model.invoke(PROBE, **cast(Any, {max_tokens_name(model): PROBE_TOKENS}))
    except Exception as error:  # whatever the provider's client raises
        _refused(option, error, hint())


def _refused(option: str, error: Exception, hint: str = "") -> NoReturn:
    said = " ".join(str(error).split()).rstrip(".").replace(environment(KEY) or "\0", "…")
    raise ConfigError(
        f"{option} can't answer in the policy's place: {type(error).__name__}: {said[:300]}. See that it runs, that "
        f"its key is in the environment ({KEY} for an address), and that it takes the temperature (--temperature)."
        f"{hint}"
    ) from None


def _only_model(address: str, shown: str, key: str) -> str:
    names = _listed(address, shown, key)
    if len(names) == 1:
        return names[0]
    seen = f"{len(names)} models ({', '.join(names[:8])})" if names else "no model"
    raise ConfigError(f"--run {shown} lists {seen}, and one must answer. Name it: --chat-model NAME.")


def _listed(address: str, shown: str, key: str) -> list[str]:
    """The models that an address tells of.

    Raises:
        ConfigError: nobody answers, or it refuses.
    """
    from openai import APIConnectionError, APIStatusError, OpenAI

    try:
        with OpenAI(base_url=address, api_key=key, timeout=LIST_SECONDS, max_retries=0) as client:
            listed = [each.id for each in client.models.list()]
    except APIConnectionError as error:
        why = f"nobody answers there ({error.__cause__ or error}). Start the server, or see that the address is right."
    except APIStatusError as error:
        why = f"it refuses to list its models ({error.status_code})."
        why += (
            f" See that {KEY} holds its key." if error.status_code in (401, 403) else _below(address, key) or NAME_ONE
        )
    except (ValueError, AttributeError, TypeError):
        why = "it lists its models in no form that OpenAI's client knows." + (_below(address, key) or NAME_ONE)
    else:
        return listed
    raise ConfigError(f"--run {shown}: {why}")


def _below(address: str, key: str) -> str:
    """Asks whether the address was meant whose version is left out; empty where that lists no models, or has one."""
    from openai import OpenAI, OpenAIError

    parts = urlsplit(address)
    if VERSION.search(parts.path):
        return ""
    meant = urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/v1"))
    try:
        with OpenAI(base_url=meant, api_key=key, timeout=LIST_SECONDS, max_retries=0) as client:
            list(client.models.list())
    except (OpenAIError, ValueError, AttributeError, TypeError):
        return ""
    return f" Did you mean {_shown(meant)}?"


def _shown(address: str) -> str:
    parts = urlsplit(address)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path.rstrip("/"), "", ""))
