"""What a user writes over a graph: the decorator, its settings, and the task at hand inside tools.

`trainable` notes settings beside an object and gives back that very object. It loads nothing and patches nothing.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from agenttrain.errors import ConfigError
from agenttrain.part import Part as Part
from agenttrain.part import VerifierFn as VerifierFn
from agenttrain.part import part_of
from agenttrain.sandbox_spec import SandboxSpec
from agenttrain.tool_spec import Declared, check_tools

if TYPE_CHECKING:
    from agenttrain.records import Task
    from agenttrain.sandbox_protocol import Sandbox

T = TypeVar("T")
Selector = str | Callable[..., bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one rollout may use before it ends as budget_exhausted. None leaves the configured value."""

    turns: int | None = None
    """Policy calls."""
    tokens: int | None = None
    """Sampled policy tokens over the whole rollout."""
    seconds: float | None = None
    """Wall-clock seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainable:
    """The settings that `@trainable` notes for one object."""

    target: Any
    """The decorated object: factory, compiled graph, StateGraph, entrypoint or context manager."""
    file: str
    """File of the module that decorates; its paths are relative to that file's folder."""
    model: str | None = None
    """Folder or hub id of the policy. None: given by --model or the configuration."""
    tasks: str | None = None
    """Task file, relative to `file`. None: given by the caller."""
    verifiers: Mapping[str, Part] = field(default_factory=dict)
    """Name to what it is in the reward."""
    train: tuple[Selector, ...] = ()
    frozen: tuple[Selector, ...] = ()
    auxiliary: tuple[Selector, ...] = ()
    limits: Limits = Limits()
    setup: Callable[..., Any] | None = None
    """Makes the context manager that is a task's world. None: the tasks share one."""
    sandbox: SandboxSpec | None = None
    """How each rollout's sandbox is made. None: it has none."""
    tools: Mapping[str, Declared] = field(default_factory=dict)
    """Name of a tool to what it does to the world. Empty: nothing is declared."""
    on_interrupt: Callable[..., Any] | None = None
    """Answers where the graph waits for a human. None: a rollout that waits ends as an environment failure."""
    allow_escapes: bool = False
    """True counts model calls that get past the gate; False ends the run at the first."""


_noted: dict[int, Trainable] = {}
_current_task: contextvars.ContextVar[Task] = contextvars.ContextVar("agenttrain_task")
_current_sandbox: contextvars.ContextVar[Sandbox] = contextvars.ContextVar("agenttrain_sandbox")


def trainable(
    target: T | None = None,
    *,
    model: str | None = None,
    tasks: str | None = None,
    verifier: VerifierFn | Part | None = None,
    verifiers: Mapping[str, VerifierFn | tuple[VerifierFn, float] | Part] | None = None,
    train: Sequence[Selector] = (),
    frozen: Sequence[Selector] = (),
    auxiliary: Sequence[Selector] = (),
    limits: Limits | None = None,
    setup: Callable[..., Any] | None = None,
    sandbox: SandboxSpec | None = None,
    tools: Mapping[str, Declared] | None = None,
    on_interrupt: Callable[..., Any] | None = None,
    allow_escapes: bool = False,
) -> Any:
    """Note how an object is trained, and give back the very same object.

    `setup` gives each rollout a world of its own. It is called with the task, gives a context manager, sync or async,
    and is entered before the graph and left after the verifiers. What it yields is nothing, or a mapping with any of
    "context" (LangGraph's runtime context, laid over the task's; a verifier may ask for it by the name `context`),
    "configurable" (keys of the config) and "state" (keys of the graph's input). Raising on entry is an environment
    failure; what raises while it is left stands in the rollout's cause, and its reward stays. Its time is part of
    limits.seconds. Nodes, tools and verifiers run on other threads than it does, async ones on its event loop if it is
    async.

    `on_interrupt` stands in for the human of a graph that calls `interrupt()`. It is called for each interrupt with any
    of `task`, `interrupt` (LangGraph's, with `.value`), `state` and `context` by name, may be async, and gives the
    value to resume with. A graph without a LangGraph checkpointer gets one in memory. A breakpoint (interrupt_before=…)
    asks nothing and is passed. An interrupted node runs again from its start, so a model call before its `interrupt()`
    is sampled twice, and both are trained, each once: put `interrupt()` into a node of its own.

    Args:
        target: the graph, when called as `trainable(graph, …)`; left out when used as a decorator.
        model: Hugging Face folder (relative to the file) or hub id of the policy.
        tasks: tasks.jsonl, relative to the file.
        verifier: scores a rollout: a bool, a number, or {"score": …, "comment": …}, which may hold "nodes" (name to
            number) and "turns" (index to number): what is added to the score for the tokens that were sampled there.
        verifiers: several of them, name to a function, (function, weight), or a Part: gates, terms, bounds and what a
            failure does.
        train, frozen, auxiliary: selectors of model calls, see `agenttrain.graph.roles`.
        limits: what one rollout may use.
        setup: makes each rollout's world: a function of the task that gives a context manager.
        sandbox: gives each rollout a sandbox of its own: `current_sandbox()` in tools, an argument `sandbox` of
            verifiers.
        tools: name of a tool to what it does to the world: "read_only", "sandboxed", or `External(stand_in=function)`,
            whose function runs in its place in every rollout; `External(permitted=True)` lets it run itself.
        on_interrupt: answers a human interrupt.
        allow_escapes: count model calls that get past the gate instead of ending the run.

    Raises:
        ConfigError: both `verifier` and `verifiers`, one that can't be called or has no finite weight, a lone selector,
            an adapter for each node, a `setup` or `on_interrupt` that can't be called, or `limits` or `verifiers` of
            another type.

    Example:
        @contextmanager
        def shop(task):
            with closing(sqlite3.connect(":memory:", check_same_thread=False)) as db:
                db.executescript(task.metadata["tables"])
                yield {"context": {"db": db}}

        def human(task, interrupt):
            return "yes" if interrupt.value["refund"] <= task.metadata["allowed"] else "no"

        def refunded(task, state, context):
            return context["db"].execute("select count(*) from refunds").fetchone()[0] == task.reference

        @trainable(model="Qwen/Qwen3-0.6B", tasks="tasks.jsonl", verifier=refunded, setup=shop, on_interrupt=human)
        def graph():
            return builder.compile()
    """
    if verifier is not None and verifiers is not None:
        raise ConfigError("@trainable got verifier= and verifiers=. Keep one: verifiers={'name': (function, weight)}.")
    for name, selectors in (("train", train), ("frozen", frozen), ("auxiliary", auxiliary)):
        if isinstance(selectors, Mapping):
            raise ConfigError(
                f"@trainable got {name}={selectors!r}, a mapping. One policy is trained for all nodes: none has "
                f"weights or an adapter of its own. Write a list of selectors: {name}={list(selectors)!r}. What each "
                'node is worth, a verifier says: {"score": …, "nodes": {name: number}}.'
            )
        if isinstance(selectors, str) or callable(selectors):
            shown = repr(selectors) if isinstance(selectors, str) else function_name(selectors)
            raise ConfigError(f"@trainable got {name}={shown}, one selector. Write a list: {name}=[{shown}].")
    for name, function in (("setup", setup), ("on_interrupt", on_interrupt)):
        if function is not None and not callable(function):
            raise ConfigError(f"@trainable got {name}={function!r}. Name the function itself: {name}=…")
    if sandbox is not None and not isinstance(sandbox, SandboxSpec):
        raise ConfigError(f"@trainable got sandbox={sandbox!r}. Write sandbox=SandboxSpec(template=…, files=…).")
    check_tools(tools or {}, has_sandbox=sandbox is not None)
    if limits is not None and not isinstance(limits, Limits):
        raise ConfigError(f"@trainable got limits={limits!r}. Write limits=Limits(turns=…, tokens=…, seconds=…).")
    if verifiers is not None and not isinstance(verifiers, Mapping):
        raise ConfigError(f"@trainable got verifiers={verifiers!r}. Write verifiers={{'name': (function, weight)}}.")
    given = dict(verifiers if verifiers is not None else {})
    if verifier is not None:
        given[function_name(verifier.function if isinstance(verifier, Part) else verifier)] = verifier
    parts = {name: part_of(name, each) for name, each in given.items()}

    def note(obj: T) -> T:
        _noted[id(obj)] = Trainable(
            target=obj,
            file=_caller_file(),
            model=model,
            tasks=tasks,
            verifiers=parts,
            train=tuple(train),
            frozen=tuple(frozen),
            auxiliary=tuple(auxiliary),
            limits=limits or Limits(),
            setup=setup,
            sandbox=sandbox,
            tools=dict(tools or {}),
            on_interrupt=on_interrupt,
            allow_escapes=allow_escapes,
        )
        return obj

    return note if target is None else note(target)


def trainable_of(obj: object) -> Trainable | None:
    """The settings noted for exactly this object, or None."""
    noted = _noted.get(id(obj))
    return noted if noted is not None and noted.target is obj else None


def trainables_in(module: ModuleType) -> dict[str, Trainable]:
    """Name to settings of the decorated objects of a module, in the order they stand there."""
    return {name: noted for name, obj in vars(module).items() if (noted := trainable_of(obj)) is not None}


def current_task() -> Task:
    """The task of the rollout that runs this code; for use inside tools and nodes.

    Raises:
        LookupError: no rollout is running here.
    """
    try:
        return _current_task.get()
    except LookupError:
        raise LookupError(
            "No rollout is running here, so there is no current task. Call current_task() inside a node, tool or "
            "verifier that agenttrain runs; a test sets one: from agenttrain.trainable import current_task_is."
        ) from None


@contextmanager
def current_task_is(task: Task) -> Iterator[None]:
    """Make `current_task` give this task inside the block."""
    token = _current_task.set(task)
    try:
        yield
    finally:
        _current_task.reset(token)


def current_sandbox() -> Sandbox:
    """The sandbox of the rollout that runs this code; for use inside tools and nodes.

    Raises:
        LookupError: no rollout with a sandbox is running here.
    """
    try:
        return _current_sandbox.get()
    except LookupError:
        raise LookupError(
            "No rollout with a sandbox is running here. Add sandbox=SandboxSpec(…) to @trainable; outside of rollouts, "
            "in a test or a server, open one: with agenttrain.open_sandbox(SandboxSpec(…)):"
        ) from None


@contextmanager
def current_sandbox_is(sandbox: Sandbox | None) -> Iterator[None]:
    """Make `current_sandbox` give this one inside the block. None: as it was."""
    if sandbox is None:
        yield
        return
    token = _current_sandbox.set(sandbox)
    try:
        yield
    finally:
        _current_sandbox.reset(token)


def function_name(function: Callable[..., Any]) -> str:
    """The name that a user's function goes by in reports and messages: its own, else its class's."""
    return str(getattr(function, "__name__", type(function).__name__))


def _caller_file() -> str:
    """File of the nearest frame outside of this module."""
    import sys

    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    return str(Path(frame.f_globals.get("__file__") or frame.f_code.co_filename).resolve())
