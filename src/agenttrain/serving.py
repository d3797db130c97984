"""A run's trained policy answers the model calls of a graph, for a block (`use`) or for a server (`attach`).

Opened lazily: engine and tokenizer with the first call, the gate with the first run of a graph, and out after the last;
other LangChain calls of the process go to their own models. Whoever serves one policy in one process shares its engine,
so concurrent requests batch there. What the roles of the run give to the user's own models stays theirs.
"""

from __future__ import annotations

import asyncio
import atexit
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from agenttrain import telemetry
from agenttrain.capture.render import open_renderer
from agenttrain.capture.served import ServedCalls
from agenttrain.config import Config, environment, resolve
from agenttrain.errors import ConfigError, ModelError, RoleError, RunError
from agenttrain.graph.effects import open_effects
from agenttrain.graph.intercept import open_serving_gate, self_test, use_route
from agenttrain.graph.load import load_graph, load_module
from agenttrain.graph.roles import RoleBook
from agenttrain.graph.served import served_graph
from agenttrain.plugins import Plugins
from agenttrain.protocols import Engine, EngineContext, Route
from agenttrain.records import CallSite, ModelCall, OwnAnswer, Reply, Role
from agenttrain.run_folder import find_run
from agenttrain.trainable import Selector, trainable_of

RUNS = Path("runs")


def use(run: str | Path, *, auxiliary: Sequence[Selector] = ()) -> Serving:
    """Let a trained policy answer the model calls of a block; for `with` and `async with`.

    The calls of any graph or model within are meant, also in tasks begun there and in threads that copy the context.
    Open it once around what serves many requests: the first call loads the policy, and the end of the block unloads it.

    Args:
        run: an id under runs/, the path of a run, or the folder of a policy.
        auxiliary: selectors of calls that stay with the user's own models, beside those of the run's @trainable.

    Raises:
        RunError: there is no such run, or it has no policy.
        ConfigError: a run that another version of agenttrain wrote with keys unknown here.

    Example:
        with agenttrain.use("runs/desk-20260101-120000-abcd"):
            graph.invoke({"messages": [("user", "Where is A41?")]})
    """
    return Serving(_policy_of(run), target=None, auxiliary=auxiliary)


def attach(graph: Any, run: str | Path, *, auxiliary: Sequence[Selector] = ()) -> Any:
    """The graph with a trained policy inside, for servers; a langgraph.json may name what is given.

    It runs like the graph itself, in every way to run one, keeps its LangGraph checkpointer and store, and may be used
    from several threads and event loops at once. `close()` unloads the policy; so does the end of the process.

    Args:
        graph: a compiled graph, an @entrypoint, a StateGraph, or a function that gives one. It is not changed.
        run: an id under runs/, the path of a run, or the folder of a policy.
        auxiliary: selectors of calls that stay with the user's own models, beside those of @trainable.

    Raises:
        GraphError: `graph` is no graph.
        RunError: there is no such run, or it has no policy.

    Example:
        served = agenttrain.attach(builder.compile(checkpointer=saver), "runs/desk-20260101-120000-abcd")
        served.invoke({"messages": [("user", "Where is A41?")]}, {"configurable": {"thread_id": "7"}})
    """
    serving = Serving(_policy_of(run), target=graph, auxiliary=auxiliary)
    return served_graph(graph, serving.run, serving.close)


def open_serving(run: str | Path, *, auxiliary: Sequence[Selector] = (), engine: str | None = None) -> Serving:
    """A trained policy for a server that is asked directly, with no graph of this process; `close()` ends it.

    Args:
        run: an id under runs/, the path of a run, or the folder of a policy.
        engine: name of another engine than the run's.

    Raises:
        RunError: there is no such run, or it has no policy.
    """
    serving = Serving(_policy_of(run, engine=engine), target=None, auxiliary=auxiliary)
    serving._hold()
    return serving


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """Where a policy and the settings it was trained with stand."""

    policy: Path
    config: Config
    plugins: Plugins
    graph_file: Path | None = None
    attribute: str = ""
    renderer: str | None = None
    """Identity of the tokenizer and template that the run trained with. None: not told."""


@dataclass(slots=True)
class _Policy:
    """A policy that somebody may serve: its engine is opened with the first call and closed with the last user."""

    source: _Source
    users: int = 0
    engine: Engine | None = None
    calls: ServedCalls | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def opened(self) -> ServedCalls:
        """Load it, once; blocks.

        Raises:
            ModelError: the policy's files can't be used, or are not those of its run.
            PluginError: the run's engine is not installed here.
            RunError: nobody serves it any more.
        """
        with self.lock:
            if not self.users:
                raise RunError(
                    f"{self.source.policy} is not served any more: close() was called, or the block of use(RUN) has "
                    "ended, while a run of the graph went on. Let runs end first."
                )
            if self.calls is None:
                self.calls = self._open()
            return self.calls

    def close(self) -> None:
        """Unload it, unless somebody serves it again by now."""
        with self.lock:
            if self.users:
                return
            engine, self.engine, self.calls = self.engine, None, None
            atexit.unregister(self._end)
        if engine is not None:
            engine.close()

    def _end(self) -> None:
        """The process ends, whoever serves."""
        self.users = 0
        self.close()

    def _open(self) -> ServedCalls:
        source, config = self.source, self.source.config
        renderer = open_renderer(str(source.policy), family=config.renderer.family, history=config.renderer.history)
        if source.renderer is not None and renderer.identity != source.renderer:
            raise ModelError(
                f"{source.policy} makes its ids by {renderer.identity}, and the run trained with {source.renderer}. "
                "Put the tokenizer files and the chat template of the run back, or train again."
            )
        make = source.plugins.engine(config.engine.name)
        self_test()
        engine = make(EngineContext(config=config, model=str(source.policy)))
        with ExitStack() as stack:
            stack.callback(engine.close)
            engine.stats()  # waits until it is ready
            stack.pop_all()
        self.engine = engine
        atexit.register(self._end)
        return ServedCalls(
            engine=engine,
            renderer=renderer,
            temperature=config.eval.temperature,
            max_tokens=config.limits.tokens,
            model_name=source.policy.parent.name if source.policy.name == "policy" else source.policy.name,
            tracer=telemetry.tracer(),
        )


_policies: dict[Path, _Policy] = {}
_lock = threading.Lock()


class Serving:
    """One `use` or `attach`: whose calls are answered, by which policy, in which roles."""

    def __init__(self, policy: _Policy, *, target: Any, auxiliary: Sequence[Selector]) -> None:
        """Note who serves; nothing is loaded before the first call."""
        self._policy, self._target, self._auxiliary = policy, target, tuple(auxiliary)
        RoleBook(auxiliary=self._auxiliary)  # tells of a selector that can't be read
        self._role_of: Callable[[CallSite], tuple[Role, str]] | None = None
        self._holds = False
        self._block: ExitStack | None = None

    def __enter__(self) -> Serving:
        if self._block is not None:
            raise ConfigError("This use(RUN) is open already. Call agenttrain.use(RUN) again for another block.")
        with ExitStack() as stack:
            stack.callback(self.close)
            stack.enter_context(use_route(stack.enter_context(self.run())))
            self._block = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        block, self._block = self._block, None
        if block is not None:
            block.close()

    async def __aenter__(self) -> Serving:
        return self.__enter__()

    async def __aexit__(self, *error: object) -> None:
        self.__exit__(*error)

    @contextmanager
    def run(self) -> Iterator[Route]:
        """The gate is in for a block; gives what answers the calls."""
        self._hold()
        with open_serving_gate(), open_effects({}):
            yield _ServedRoute(self)

    def close(self) -> None:
        """Leave the policy; it is unloaded when nobody else serves it."""
        with _lock:
            held, self._holds = self._holds, False
            self._policy.users -= held
            is_last = held and self._policy.users == 0
            if is_last and _policies.get(self._policy.source.policy) is self._policy:
                del _policies[self._policy.source.policy]
        if is_last:
            self._policy.close()

    def _hold(self) -> None:
        with _lock:
            if not self._holds:
                self._policy = _policies.setdefault(self._policy.source.policy, self._policy)
                self._policy.users += 1
                self._holds = True

    @property
    def loaded(self) -> ServedCalls | None:
        """What answers. None: it is not loaded yet."""
        return self._policy.calls

    def calls(self) -> ServedCalls:
        """What answers; blocks until it is loaded."""
        return self._policy.opened()

    def calls_for(self, conversation: str) -> ServedCalls:
        """What answers a conversation; blocks until it is loaded.

        Args:
            conversation: the same text for all calls of one conversation.
        """
        return self.calls()

    def record_outcome(self, conversation: str, success: bool | float | None, *, why: str = "") -> bool:
        """Note how a conversation went; the last word about it counts.

        Args:
            success: a number is a success where it passes as a verifier's does. None: nothing is known.
            why: in words.

        Returns:
            Whether it counts: only while a canary is tried.
        """
        return False

    def describe(self) -> dict[str, Any]:
        """What serves, since when, and how a canary does."""
        policy = self._policy.source.policy
        run_id = policy.parent.name if policy.name == "policy" else policy.name
        return {"promotion": None, "serves": run_id, "since": None, "canary": None}

    def role(self, site: CallSite) -> tuple[Role, str]:
        """Who answers a call, by the run's selectors.

        Raises:
            RoleError: a second model of which nothing was declared.
        """
        if self._role_of is None:
            self._role_of = _roles(self._policy.source, self._target, self._auxiliary)
        try:
            return self._role_of(site)
        except RoleError as error:
            raise RoleError(f"{error} Where a policy serves: use(RUN, auxiliary=[…]).") from None


class _ServedRoute:
    """protocols.Route of a served graph."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    def role(self, site: CallSite) -> tuple[Role, str]:
        return self._serving.role(site)

    def answer(self, call: ModelCall) -> Reply:
        return self._serving.calls().answer(call)

    async def aanswer(self, call: ModelCall) -> Reply:
        calls = self._serving.loaded
        if calls is None:
            calls = await asyncio.to_thread(self._serving.calls)
        return await calls.aanswer(call)

    def auxiliary_began(self, call: ModelCall) -> str:
        return ""

    def auxiliary_ended(self, turn_id: str, error: BaseException | None, answer: OwnAnswer | None) -> None:
        """Nothing is recorded where a policy serves."""


class _ServedRoles(RoleBook):
    """A role book for a process without end: it keeps no names of nodes and tags, which may be new in each request."""

    def _note(self, site: CallSite) -> None:
        """Nothing: what was seen is only told of selectors that match nothing."""


def _policy_of(run: str | Path, *, engine: str | None = None) -> _Policy:
    source = _source(str(run))
    if engine is not None:
        config = source.config
        config = config.model_copy(update={"engine": config.engine.model_copy(update={"name": engine})})
        source = replace(source, config=config)
    with _lock:
        return _policies.setdefault(source.policy, _Policy(source=source))


def _source(run: str) -> _Source:
    plugins = Plugins.load(only=environment("AGENTTRAIN_PLUGINS"))
    if (Path(run) / "config.json").is_file():
        return _Source(policy=Path(run).resolve(), config=Config(), plugins=plugins)
    folder = find_run(run, RUNS)
    if not (folder.policy / "config.json").is_file():
        raise RunError(
            f"Run {folder.id} holds no policy: it has not ended, or was an evaluation. Finish it with agenttrain fit "
            f"--resume {folder.id}, or name another run or the folder of a model."
        )
    tables, provenance = folder.read_config()
    config = resolve((f"config.toml of run {folder.id}", tables), plugin_tables=plugins.table_names)
    graph = provenance.get("graph")
    return _Source(
        policy=folder.policy.resolve(),
        config=config,
        plugins=plugins,
        graph_file=Path(graph) if graph else None,
        attribute=str(provenance.get("attribute") or ""),
        renderer=provenance.get("hashes", {}).get("renderer"),
    )


def _roles(source: _Source, target: Any, auxiliary: Sequence[Selector]) -> Callable[[CallSite], tuple[Role, str]]:
    """By the selectors of the graph's own @trainable, else of the run's; a hook's word comes first, also graph.py's."""
    noted = trainable_of(target)
    module = _module(source, Path(noted.file) if noted is not None else None)
    if noted is None and module is not None:
        noted = trainable_of(getattr(module, source.attribute, None))
    plugins = source.plugins
    if module is not None:
        plugins = Plugins.load(only=environment("AGENTTRAIN_PLUGINS"), graph_module=module)
    book = (
        _ServedRoles(train=noted.train, frozen=noted.frozen, auxiliary=(*auxiliary, *noted.auxiliary))
        if noted is not None
        else _ServedRoles(auxiliary=auxiliary)
    )
    return lambda site: plugins.decide_role(site) or book.role(site)


def _module(source: _Source, file: Path | None) -> ModuleType | None:
    """Of the file that notes the graph, else of the run's graph.py: what a server has imported where there is one."""
    file = file or source.graph_file
    if file is None:
        return None
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str) and path.endswith(file.name) and Path(path).resolve() == file:
            return module
    if file != source.graph_file or not file.is_file():
        return None
    return load_module(load_graph(f"{file}:{source.attribute}").file)
