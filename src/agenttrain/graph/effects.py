"""What a tool may do to the world inside a rollout: an external one has its stand-in run in its place, or is permitted.

BaseTool's `run` and `arun` are replaced when the first `open_effects` opens and put back after the last closes. There a
call of a tool gets its idempotency key, and a tool with a stand-in is exchanged for a copy that runs the stand-in, so
that validation, callbacks, and what is made of the answer stay langchain-core's. Invariants: the user's tool object is
never changed; in a rollout no external tool runs that isn't permitted, whoever calls it; outside of rollouts the tool
itself runs. A plain call of the function behind a tool is no call of the tool.

Source: langchain-core 1.0 to 1.8, tools/base.py.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import functools
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from langchain_core.runnables.config import ensure_config
from langchain_core.tools import BaseTool

from agenttrain.errors import EffectError, EscapeError, PolicyFailure
from agenttrain.graph.idempotency import CountedCalls, call_made, counted_calls
from agenttrain.graph.intercept import escaped, is_answered
from agenttrain.graph.policy_model import keep_refusal
from agenttrain.records import RolloutRequest
from agenttrain.tool_spec import Declared, External
from agenttrain.trainable import function_name

FUNNELS = ("run", "arun")
_FILLED = ("run_manager", "config", "callbacks")
"""What LangChain itself adds to a tool's arguments."""


class Effects:
    """The tools of one rollout: what is declared of them, and what ran."""

    def __init__(self, tools: Mapping[str, Declared], unseen: Collection[str] = ()) -> None:
        self.tools = tools
        self.unseen = unseen
        self._ran = Counter[str]()
        self._stood_in = Counter[str]()
        self._lock = threading.Lock()

    @property
    def ran(self) -> dict[str, int]:
        """Tool to how often it ran itself, sorted by name."""
        with self._lock:
            return dict(sorted(self._ran.items()))

    @property
    def stood_in(self) -> dict[str, int]:
        """Tool to how often its stand-in ran, sorted by name."""
        with self._lock:
            return dict(sorted(self._stood_in.items()))

    def external(self, name: str) -> External | None:
        """What is declared of an external tool. None: it is none, or nothing is."""
        declared = self.tools.get(name)
        return declared if isinstance(declared, External) else None

    def count(self, name: str) -> None:
        """A tool is about to run, or its stand-in."""
        external = self.external(name)
        with self._lock:
            (self._ran if external is None or external.stand_in is None else self._stood_in)[name] += 1


_effects: contextvars.ContextVar[Effects | None] = contextvars.ContextVar("agenttrain_effects", default=None)
_lock = threading.Lock()
_open: list[Mapping[str, Declared]] = []
_originals: dict[str, Any] = {}


@contextmanager
def open_effects(tools: Mapping[str, Declared]) -> Iterator[None]:
    """Let declarations hold in the rollouts of a block; nested and concurrent openings share the change.

    Args:
        tools: those of the graph whose rollouts are made; none where a policy serves.
    """
    with _lock:
        if not _open:
            _install()
        _open.append(tools)
    try:
        yield
    finally:
        with _lock:
            _open.remove(tools)
            if not _open:
                _uninstall()


@contextmanager
def effects_of(
    request: RolloutRequest, tools: Mapping[str, Declared], *, run_id: str, unseen: Collection[str] = ()
) -> Iterator[Effects]:
    """One rollout: the block, and tasks and context-copying threads begun there, may do what is declared.

    Args:
        unseen: names of tools with a stand-in that were not found in the graph. Where there is one, a tool of which
            nothing is declared may be the one that was meant, and doesn't run.
    """
    effects = Effects(tools, unseen)
    token = _effects.set(effects)
    try:
        with counted_calls(CountedCalls(request, run_id=run_id)):
            yield effects
    finally:
        _effects.reset(token)


@contextmanager
def stand_ins_run(tools: Mapping[str, Declared]) -> Iterator[None]:
    """Have external tools run their stand-ins in a block where a policy serves, as in a rollout; those without one run
    themselves. Calls have no key but the one of `idempotency_key`."""
    token = _effects.set(Effects(tools))
    try:
        yield
    finally:
        _effects.reset(token)


def _install() -> None:
    replacements: dict[str, Callable[[Any], Any]] = {"run": _run_gate, "arun": _arun_gate}
    for name in FUNNELS:
        original = vars(BaseTool)[name]
        _originals[name] = original
        setattr(BaseTool, name, functools.wraps(original)(replacements[name](original)))


def _uninstall() -> None:
    for name, original in _originals.items():
        setattr(BaseTool, name, original)
    _originals.clear()


def _run_gate(original: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: BaseTool, tool_input: Any, *args: Any, **kwargs: Any) -> Any:
        with call_made(self.name, _told(self, tool_input), kwargs.get("tool_call_id")) as key:
            tool, told = _admitted(self, tool_input, key)
            return original(tool, told, *args, **kwargs)

    return run


def _arun_gate(original: Callable[..., Any]) -> Callable[..., Any]:
    async def arun(self: BaseTool, tool_input: Any, *args: Any, **kwargs: Any) -> Any:
        with call_made(self.name, _told(self, tool_input), kwargs.get("tool_call_id")) as key:
            tool, told = _admitted(self, tool_input, key)
            return await original(tool, told, *args, **kwargs)

    return arun


def _told(tool: BaseTool, tool_input: Any) -> Any:
    """The arguments that the caller gave, without those that the runtime injects."""
    return tool._filter_injected_args(tool_input) if isinstance(tool_input, dict) else tool_input


def _admitted(tool: BaseTool, tool_input: Any, key: str) -> tuple[BaseTool, Any]:
    """What runs in a tool's call, and with which input.

    Raises:
        EffectError: the tool may not run in a rollout, or its stand-in can't.
        EscapeError: the call belongs to no rollout while rollouts run.
    """
    effects = _effects.get()
    if effects is None:
        _refuse_escape(tool.name)
        return tool, tool_input
    external = effects.external(tool.name)
    if effects.unseen and tool.name not in effects.tools:
        raise keep_refusal(_maybe_meant(tool.name, effects.unseen))
    if external is None:
        effects.count(tool.name)
        return tool, tool_input
    if external.stand_in is None and not external.permitted:
        raise keep_refusal(
            EffectError(
                f"The tool {tool.name!r} is external, and nothing permits it to run in a rollout. Add to @trainable: "
                f"tools={{{tool.name!r}: External(stand_in=function)}}, or External(permitted=True) if it may run."
            )
        )
    if external.key_argument is not None and key:
        tool_input = _with_key(tool, tool_input, external.key_argument, key)
    effects.count(tool.name)
    return (tool if external.stand_in is None else _exchanged(tool, external.stand_in)), tool_input


def _maybe_meant(name: str, unseen: Collection[str]) -> EffectError:
    return EffectError(
        f"The tool {name!r} is called, of which nothing is declared, and of what is declared external no tool is seen "
        f"that is named {' or '.join(map(repr, sorted(unseen)))}: it may be meant, so it does not run. "
        f"Correct the name in tools= of @trainable, or declare {name!r} too."
    )


def _with_key(tool: BaseTool, tool_input: Any, argument: str, key: str) -> dict[str, Any]:
    given = tool_input if isinstance(tool_input, dict) else {next(iter(tool.args)): tool_input}
    return {**given, argument: key}


def _refuse_escape(name: str) -> None:
    """Refuse an external tool that is called on a thread which lost its rollout.

    Raises:
        EscapeError: naming the place, whatever `allow_escapes` says of models: a tool that must not run doesn't.
    """
    with _lock:
        declared = [tools[name] for tools in _open if name in tools]
    if is_answered() or not any(isinstance(each, External) and not each.permitted for each in declared):
        return
    raise escaped(f"The external tool {name!r}", _escape_text)


def _escape_text(where: str) -> EscapeError:
    return EscapeError(
        f"{where}, outside of any rollout while rollouts run, so its stand-in is not known and the tool itself must "
        "not run. A thread of your own doesn't inherit the context: use "
        "langchain_core.runnables.config.ContextThreadPoolExecutor, asyncio.to_thread, or take "
        "context = contextvars.copy_context() before the thread starts and call context.run(tool.invoke, …) in it."
    )


def _exchanged(tool: BaseTool, stand_in: Callable[..., Any]) -> BaseTool:
    """A copy of a tool that runs the stand-in and has the signatures of the tool's own functions."""
    made = copy.copy(tool)

    @functools.wraps(tool._run)
    def run(*args: Any, **kwargs: Any) -> Any:
        said = _called(tool, stand_in, args, kwargs)
        return _on_a_thread(said) if inspect.isawaitable(said) else said

    @functools.wraps(tool._arun)
    async def arun(*args: Any, **kwargs: Any) -> Any:
        said = _called(tool, stand_in, args, kwargs)
        return await said if inspect.isawaitable(said) else said

    # An instance's own attribute goes before a function of its class, and pydantic's setattr would refuse it.
    made.__dict__.update(_run=run, _arun=arun)
    return made


def _called(tool: BaseTool, stand_in: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What the stand-in gives for a tool's validated arguments.

    Raises:
        PolicyFailure: they are not those of the tool's JSON schema, which langchain-core doesn't hold calls against.
        EffectError: it doesn't take them.
    """
    given = {name: value for name, value in kwargs.items() if name not in _FILLED}
    given |= {} if args else _defaults(tool, given)
    told = tool._filter_injected_args(given)
    named = asked_for(stand_in, given, told=told)
    if "config" in inspect.signature(stand_in).parameters and "config" not in given:
        named["config"] = kwargs.get("config") or ensure_config()
    try:
        inspect.signature(stand_in).bind(*args, **named)
    except TypeError as error:
        if wrong := _outside_schema(tool, told):
            raise PolicyFailure(
                f"The tool {tool.name!r} was called with other arguments than it has: {wrong}."
            ) from error
        raise keep_refusal(
            EffectError(
                f"The stand-in {function_name(stand_in)} of the tool {tool.name!r} can't be called as the tool is: "
                f"{error}. Arguments of this call: {', '.join(named) or len(args)}. Give it the tool's own parameters."
            )
        ) from error
    return stand_in(*args, **named)


def _outside_schema(tool: BaseTool, told: Mapping[str, Any]) -> str:
    """What a call lacks, or has too much, of a JSON schema, as tools of an MCP server have. Empty: nothing.

    Example: "'order' is missing, 'ordr' is not one of them"
    """
    if not isinstance(tool.args_schema, dict):
        return ""
    missing = [f"{name!r} is missing" for name in tool.args_schema.get("required", ()) if name not in told]
    unknown = [f"{name!r} is not one of them" for name in told if name not in tool.args_schema.get("properties", {})]
    return ", ".join([*missing, *unknown])


def _defaults(tool: BaseTool, given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of arguments that were not given; langchain-core 1.0 leaves them to the tool's own function, and every
    version those of a JSON schema."""
    if isinstance(tool.args_schema, dict):
        properties: Mapping[str, Any] = tool.args_schema.get("properties", {})
        return {name: each["default"] for name, each in properties.items() if name not in given and "default" in each}
    fields: Mapping[str, Any] = getattr(tool.args_schema, "model_fields", {})
    left = {name: field for name, field in fields.items() if name not in (*given, "args", "kwargs")}
    return {name: each.get_default(call_default_factory=True) for name, each in left.items() if not each.is_required()}


def asked_for(stand_in: Callable[..., Any], given: Mapping[str, Any], *, told: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a stand-in gets by name: all that the caller told, and of the injected what it asks for.

    Example: `def fake(order, state)` with given {order, state, store} and told {order} -> {order, state}
    """
    parameters = inspect.signature(stand_in).parameters
    return {name: value for name, value in given.items() if name in told or name in parameters}


def _on_a_thread(said: Any) -> Any:
    """Await what an async stand-in gives for a sync call, whatever loop runs on this thread."""

    async def awaited() -> Any:
        return await said

    outcome: list[Any] = []

    def live() -> None:
        try:
            outcome.append((asyncio.run(awaited()), None))
        except BaseException as error:
            outcome.append((None, error))

    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(live,), name="agenttrain-stand-in")
    thread.start()
    thread.join()
    value, error = outcome[0]
    if error is not None:
        raise error
    return value
