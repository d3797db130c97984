"""Installed distributions and graph.py become loaded plugins and what they registered.

Built-ins come through the same entry points as third parties, so this module names none of ours. A plugin is loaded
whole or not at all. A broken one is left out and listed with its reason, unless graph.py is it or the configuration
names it: then loading ends with PluginError. What a plugin raises later is attributed to it by name.
"""

from __future__ import annotations

import difflib
import functools
import importlib.metadata
import inspect
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_args

import pluggy

from agenttrain import hookspecs
from agenttrain.errors import AgenttrainError, PluginError
from agenttrain.hookspecs import Settings
from agenttrain.promotion_record import Promotion
from agenttrain.protocols import (
    AdvantageEstimator,
    EngineContext,
    EngineFactory,
    Forecast,
    ForecastContext,
    TrainerCheckContext,
    TrainerFactory,
)
from agenttrain.records import CallSite, Role, RolloutResult
from agenttrain.sandbox_protocol import SandboxBackend, SandboxFactory

if TYPE_CHECKING:
    import typer

    from agenttrain.config import Config

GROUP = "agenttrain"
"""The entry-point group, and pluggy's project name."""
PREFIX = "agenttrain_"
GRAPH_PLUGIN = "graph.py"
"""The name that graph.py's own module goes by as a plugin."""

KINDS = ("engines", "trainers", "advantages", "sandboxes")
"""What can be registered; each has a hook `agenttrain_register_<kind>`."""

_MARK = "agenttrain_impl"
"""Attribute that pluggy's HookimplMarker("agenttrain") leaves on a function."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Loaded(NamedTuple):
    """A plugin that is in use."""

    name: str
    version: str
    """Of its distribution; empty for graph.py."""
    distribution: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A plugin that was left out, or that failed later, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """Something registered, and by which plugin."""

    plugin: str
    factory: Any
    forecast: Callable[[ForecastContext], Any] | None = None
    """Of a trainer or an engine that can tell what it will need: a Forecast, or an engine's MemoryParts."""
    settings: Settings | None = None
    """What the plugin's table of the configuration may hold. None: anything."""
    check: Callable[[Any], Sequence[str]] | None = None
    """Of an engine or a trainer that can tell beforehand what would keep it from working."""


@dataclass(kw_only=True)
class Plugins:
    """The plugins of this process, and what they registered. Made by `Plugins.load`."""

    manager: pluggy.PluginManager
    loaded: list[Loaded] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    observer_errors: dict[tuple[str, str], str] = field(default_factory=dict)
    """(plugin, hook) to the first exception it raised there, in words."""
    _registered: dict[str, dict[str, _Entry]] = field(default_factory=lambda: {kind: {} for kind in KINDS})
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def load(cls, *, only: str | None, named: Sequence[str] = (), graph_module: ModuleType | None = None) -> Plugins:
        """Find, check and load plugins.

        Args:
            only: names to load, separated by commas; empty loads none, None loads all that are installed.
            named: plugins that the configuration names; they must load.
            graph_module: graph.py's module, a plugin when it has hookimpls; it must load then.

        Raises:
            PluginError: a plugin that must load doesn't, a name that isn't installed, or two plugins that register one
                name.
        """
        plugins = cls(manager=_manager())
        for entry_point in _chosen(_installed(), only, named):
            plugins._load_entry_point(entry_point, must_load=entry_point.name in named)
        if graph_module is not None and _has_hookimpls(graph_module):
            plugins._add(graph_module, Loaded(GRAPH_PLUGIN, "", ""), must_load=True)
        return plugins

    def add(self, plugin: Any, name: str) -> None:
        """Take a plugin that is no installed distribution: a module or an object with hook implementations.

        Raises:
            PluginError: it is broken, or registers a name that is taken.
        """
        self._add(plugin, Loaded(name, "", ""), must_load=True)

    @property
    def engines(self) -> Mapping[str, EngineFactory]:
        return self._by_name("engines")

    @property
    def trainers(self) -> Mapping[str, TrainerFactory]:
        return self._by_name("trainers")

    @property
    def advantages(self) -> Mapping[str, AdvantageEstimator]:
        return self._by_name("advantages")

    @property
    def sandboxes(self) -> Mapping[str, SandboxFactory]:
        return self._by_name("sandboxes")

    @property
    def table_names(self) -> tuple[str, ...]:
        """Names of the tables that a configuration may hold beside ours: each installed plugin has one."""
        return tuple(plugin.name for plugin in self.loaded if plugin.name != GRAPH_PLUGIN)

    def engine(self, name: str) -> EngineFactory:
        """The factory of an engine.

        Raises:
            PluginError: no such engine, with those that are installed.
        """
        return self._named(self.engines, name, "engine")

    def trainer(self, name: str) -> TrainerFactory:
        """The factory of a trainer.

        Raises:
            PluginError: no such trainer, with those that are installed.
        """
        return self._named(self.trainers, name, "trainer")

    def advantage(self, name: str) -> AdvantageEstimator:
        """An advantage estimator, [G] rewards -> [G] advantages.

        Raises:
            PluginError: no such estimator, with those that are installed.
        """
        return self._named(self.advantages, name, "advantage estimator")

    def sandbox(self, name: str) -> SandboxBackend:
        """A new backend of sandboxes.

        Raises:
            PluginError: no such backend, with those that are installed, or its factory raised.
        """
        factory = self._named(self.sandboxes, name, "sandbox backend")
        made: SandboxBackend = _asked(self._registered["sandboxes"][name], factory, f"its sandbox backend {name!r}")
        return made

    def forecast(self, trainer: str, context: ForecastContext) -> Forecast | None:
        """What a run by this trainer, on the configured engine, will need. None: the trainer doesn't say.

        Raises:
            PluginError: the plugin's forecast raised; what is an error of agenttrain's own passes.
        """
        self.trainer(trainer)
        entry = self._registered["trainers"][trainer]
        if entry.forecast is None:
            return None
        ask = functools.partial(entry.forecast, context)
        found: Forecast = _asked(entry, ask, f"the forecast of its trainer {trainer!r}")
        name = context.config.engine.name
        engine = self._registered["engines"].get(name)
        if engine is None or engine.forecast is None:
            return found
        parts = _asked(engine, functools.partial(engine.forecast, context), f"the forecast of its engine {name!r}")
        return replace(found, parts=(*found.parts, *parts))

    def check_tables(self, config: Config) -> None:
        """Hold the tables of the chosen engine's and trainer's plugins against what they said they may hold.

        Raises:
            ConfigError: a key that nobody knows, or a value of a wrong type or range.
            PluginError: the plugin raised where it was asked what its table may hold.
        """
        from agenttrain.config import plugin_table

        for kind, name in (("engines", config.engine.name), ("trainers", config.trainer.name)):
            entry = self._registered[kind].get(name)
            if entry is not None and entry.settings is not None:
                plugin_table(_asked(entry, entry.settings, "its settings"), entry.plugin, config)

    def check_engine(self, context: EngineContext) -> tuple[str, ...]:
        """Notes of the configured engine before anything starts.

        Raises:
            AgenttrainError: what would keep it from working; a PluginError where its check raised something else.
        """
        self.engine(context.config.engine.name)
        return self._checked("engines", context.config.engine.name, context)

    def check_trainer(self, context: TrainerCheckContext) -> tuple[str, ...]:
        """Notes of the configured trainer before anything starts.

        Raises:
            AgenttrainError: what would keep it from working; a PluginError where its check raised something else.
        """
        self.trainer(context.config.trainer.name)
        return self._checked("trainers", context.config.trainer.name, context)

    def _checked(self, kind: str, name: str, context: EngineContext | TrainerCheckContext) -> tuple[str, ...]:
        entry = self._registered[kind][name]
        if entry.check is None:
            return ()
        return tuple(_asked(entry, functools.partial(entry.check, context), f"the check of {name!r}"))

    def decide_role(self, site: CallSite) -> tuple[Role, str] | None:
        """The first plugin's word on who answers a call, or None.

        Raises:
            PluginError: a plugin raised, or answered with something that is no (role, reason).
        """
        for plugin, answer in self._answers("agenttrain_role", site=site):
            if not _is_role_and_reason(answer):
                raise PluginError(
                    f"Plugin {plugin!r} answered agenttrain_role with {answer!r}. "
                    f"Answer with (role, reason), the role one of {', '.join(get_args(Role))}; or with None."
                )
            role: tuple[Role, str] = answer
            return role
        return None

    def admit(self, result: RolloutResult) -> str | None:
        """The first plugin's reason to keep a rollout out of training, or None.

        Raises:
            PluginError: a plugin raised, or answered with something that is no text.
        """
        for plugin, answer in self._answers("agenttrain_admit", result=result):
            if not isinstance(answer, str) or not answer:
                raise PluginError(
                    f"Plugin {plugin!r} answered agenttrain_admit with {answer!r}. "
                    "Answer with the reason to drop the rollout, or with None to let it in."
                )
            return answer
        return None

    def vetoes(self, promotion: Promotion) -> tuple[str, ...]:
        """Every plugin's reason to keep a policy from serving, each behind the plugin's name; empty lets it serve.

        A plugin that raises, or answers with something that is no text, has vetoed: nobody can tell what it meant.
        """
        found = []
        for plugin, call in self._calls("agenttrain_veto_promotion", {"promotion": promotion}):
            try:
                answer = call()
            except Exception as error:
                found.append(f"{plugin}: raised {_in_words(error)}")
                continue
            if answer is not None:
                is_reason = isinstance(answer, str) and answer.strip()
                found.append(f"{plugin}: {answer if is_reason else f'answered with {answer!r}, which is no reason'}")
        return tuple(found)

    def observe(self, hook_name: str, **arguments: Any) -> None:
        """Tell every observer; what one raises is logged once, kept in `observer_errors`, and stops no other."""
        for plugin, call in self._calls(hook_name, arguments):
            try:
                call()
            except Exception as error:
                self._note_observer_error(plugin, hook_name, error)

    def register_commands(self, app: typer.Typer) -> None:
        """Let every plugin add its commands; one that raises is listed in `problems`."""
        for plugin, call in self._calls("agenttrain_register_commands", {"app": app}):
            try:
                call()
            except Exception as error:
                reason = f"agenttrain_register_commands raised {_in_words(error)}"
                self.problems.append(Problem(name=plugin, reason=reason))

    def _load_entry_point(self, entry_point: importlib.metadata.EntryPoint, *, must_load: bool) -> None:
        dist = entry_point.dist
        loaded = Loaded(entry_point.name, dist.version if dist else "", dist.name if dist else "")
        try:
            module = entry_point.load()
        except (Exception, SystemExit) as error:
            self._leave_out(loaded.name, f"{entry_point.value} can't be imported: {_in_words(error)}", must_load, error)
            return
        self._add(module, loaded, must_load=must_load)

    def _add(self, module: Any, loaded: Loaded, *, must_load: bool) -> None:
        """Check one plugin, take what it registers, and put it into use."""
        fault = _fault(module) or self._taken(loaded.name)
        if fault is not None:
            self._leave_out(loaded.name, fault, must_load)
            return
        try:
            self.manager.register(module, name=loaded.name)
            entries = self._collect(loaded.name)
        except Exception as error:
            self.manager.unregister(name=loaded.name)
            self._leave_out(loaded.name, _in_words(error), must_load, error)
            return
        self._check_names_are_free(entries)
        for kind, name, entry in entries:
            self._registered[kind][name] = entry
        self.loaded.append(loaded)

    def _taken(self, name: str) -> str | None:
        if not self.manager.has_plugin(name):
            return None
        return "another installed distribution has a plugin of this name; uninstall one of them"

    def _leave_out(self, plugin: str, reason: str, must_load: bool, error: BaseException | None = None) -> None:
        """List a plugin that can't be used, or end loading when it has to be."""
        if must_load:
            fix = "Fix it" if plugin == GRAPH_PLUGIN else "Fix or upgrade it, or take it out of the configuration"
            raise PluginError(f"Plugin {plugin!r} can't be loaded: {reason}. {fix}.") from error
        self.problems.append(Problem(name=plugin, reason=reason))

    def _collect(self, plugin: str) -> list[tuple[str, str, _Entry]]:
        """(kind, name, entry) of all that one plugin registers."""
        entries: list[tuple[str, str, _Entry]] = []
        for kind in KINDS:

            def register(name: str, factory: Any, *, kind: str = kind, **more: Any) -> None:
                if not isinstance(name, str) or not name or not callable(factory):
                    raise PluginError(f"register({name!r}, {factory!r}): give a name and something that can be called")
                entries.append((kind, name, _Entry(plugin=plugin, factory=factory, **_beside(kind, more))))

            for owner, call in self._calls(f"{PREFIX}register_{kind}", {"register": register}):
                if owner == plugin:
                    call()
        return entries

    def _check_names_are_free(self, entries: Iterable[tuple[str, str, _Entry]]) -> None:
        """Refuse a second entry of one name.

        Raises:
            PluginError: naming both plugins.
        """
        seen: dict[tuple[str, str], str] = {}
        for kind, name, entry in entries:
            there = self._registered[kind].get(name)
            first = there.plugin if there else seen.get((kind, name))
            if first is not None:
                raise PluginError(
                    f"{name!r} is registered twice under {kind}, by plugin {first!r} and by {entry.plugin!r}. "
                    "Uninstall one, or load one only: AGENTTRAIN_PLUGINS=name,name."
                )
            seen[(kind, name)] = entry.plugin

    def _by_name(self, kind: str) -> Mapping[str, Any]:
        return MappingProxyType({name: entry.factory for name, entry in self._registered[kind].items()})

    def _named(self, entries: Mapping[str, T], name: str, what: str) -> T:
        if name in entries:
            return entries[name]
        from agenttrain.config import INTEGRATIONS

        if name in INTEGRATIONS and name not in self.table_names:
            raise PluginError(
                f"No {what} is named {name!r}: {INTEGRATIONS[name]}, the plugin of that name, is not in use here. "
                f"pip install {INTEGRATIONS[name]}, or see agenttrain plugins for why it was left out."
            )
        left_out = f" {len(self.problems)} plugins were left out: see agenttrain plugins." if self.problems else ""
        raise PluginError(
            f"No {what} is named {name!r}. Installed {what}s: {', '.join(sorted(entries)) or 'none'}."
            f"{suggestion(name, entries)}{left_out}"
        )

    def _answers(self, hook_name: str, **arguments: Any) -> Iterator[tuple[str, Any]]:
        """Each plugin's answer that is not None, asked one after the other."""
        for plugin, call in self._calls(hook_name, arguments):
            try:
                answer = call()
            except Exception as error:
                raise PluginError(f"Plugin {plugin!r} raised in {hook_name}: {_in_words(error)}.") from error
            if answer is not None:
                yield plugin, answer

    def _calls(self, hook_name: str, arguments: Mapping[str, Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
        """(plugin, call) of each implementation, in pluggy's order: tryfirst, then last loaded first, then trylast."""
        for impl in reversed(getattr(self.manager.hook, hook_name).get_hookimpls()):
            given = [arguments[name] for name in impl.argnames]
            yield impl.plugin_name, functools.partial(impl.function, *given)

    def _note_observer_error(self, plugin: str, hook_name: str, error: Exception) -> None:
        with self._lock:
            if (plugin, hook_name) in self.observer_errors:
                return
            self.observer_errors[(plugin, hook_name)] = _in_words(error)
        _log.warning(
            "Plugin %r raised in %s and goes on being called; further exceptions there are not logged.",
            plugin,
            hook_name,
            exc_info=error,
        )


def _beside(kind: str, more: Mapping[str, Any]) -> Mapping[str, Any]:
    """What was registered beside a factory.

    Raises:
        PluginError: a keyword that this kind doesn't take, or a value that is none of what it may be.
    """
    known = ("check", "forecast", "settings") if kind in ("trainers", "engines") else ()
    for name, value in more.items():
        if name not in known:
            raise PluginError(f"register for {kind} takes no {name}=.{suggestion(name, known)}")
        if value is not None and not callable(value):
            raise PluginError(f"register(…, {name}={value!r}): give something that can be called")
    return more


def _asked(entry: _Entry, ask: Callable[[], Any], what: str) -> Any:
    """What a plugin's function says.

    Raises:
        PluginError: it raised; an error of agenttrain's own passes.
    """
    try:
        return ask()
    except AgenttrainError:
        raise
    except Exception as error:
        raise PluginError(f"Plugin {entry.plugin!r} raised in {what}: {_in_words(error)}.") from error


def _manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(hookspecs)
    return manager


def hook_names() -> list[str]:
    """Every plugin point, in the order of `hookspecs`."""
    return [name for name, value in vars(hookspecs).items() if hasattr(value, "agenttrain_spec")]


def _installed() -> list[importlib.metadata.EntryPoint]:
    """The entry points of our group, by name."""
    return sorted(importlib.metadata.entry_points(group=GROUP), key=lambda entry_point: entry_point.name)


def _chosen(
    installed: Sequence[importlib.metadata.EntryPoint], only: str | None, named: Sequence[str]
) -> list[importlib.metadata.EntryPoint]:
    """The entry points to load.

    Raises:
        PluginError: a name that isn't installed, or one that the configuration names and `only` leaves out.
    """
    names = [entry_point.name for entry_point in installed]
    allowed = names if only is None else [name.strip() for name in only.split(",") if name.strip()]
    for name in (*allowed, *named):
        if name not in names:
            raise PluginError(
                f"No plugin is named {name!r}. Installed plugins: {', '.join(names) or 'none'}."
                f"{suggestion(name, names)} Install it, or take it out of "
                f"{'the configuration' if name in named else 'AGENTTRAIN_PLUGINS'}."
            )
        if name not in allowed:
            raise PluginError(
                f"The configuration names plugin {name!r}, and AGENTTRAIN_PLUGINS={only} leaves it out. Add it there."
            )
    return [entry_point for entry_point in installed if entry_point.name in allowed]


def _has_hookimpls(module: ModuleType) -> bool:
    """True when a module marks a function as a hook implementation, or names one as if it did."""
    return any(_is_hookimpl(value) or name in hook_names() for name, value in _functions(module))


def _fault(module: Any) -> str | None:
    """What keeps a module from being a plugin, in words; None when it can be one."""
    faults = (_function_fault(name, function) for name, function in _functions(module))
    return next((fault for fault in faults if fault is not None), None)


def _function_fault(name: str, function: Any) -> str | None:
    """What is wrong with one function of a plugin."""
    if not _is_hookimpl(function):
        return f"{name} has no @hookimpl, so it would never be called; mark it" if name in hook_names() else None
    marks = getattr(function, _MARK)
    name = marks.get("specname") or name
    if name not in hook_names():
        return f"there is no hook {name!r}.{suggestion(name, hook_names())} Hooks: {', '.join(hook_names())}"
    if marks.get("wrapper") or marks.get("hookwrapper"):
        return f"{name} is a wrapper, and hooks are called one at a time; take wrapper=True away"
    accepted = inspect.signature(getattr(hookspecs, name)).parameters
    for argument in inspect.signature(function).parameters.values():
        if argument.name not in accepted and argument.default is argument.empty:
            return (
                f"{name} has no argument {argument.name!r}.{suggestion(argument.name, accepted)} "
                f"Accepted: {', '.join(accepted)}"
            )
    return None


def _functions(module: Any) -> list[tuple[str, Any]]:
    """Names and functions of a module, in the order they stand there; of anything else its routines."""
    if isinstance(module, ModuleType):
        return [(name, value) for name, value in vars(module).items() if inspect.isroutine(value)]
    return inspect.getmembers(module, inspect.isroutine)


def _is_hookimpl(function: Any) -> bool:
    return isinstance(getattr(function, _MARK, None), dict)


def _is_role_and_reason(answer: Any) -> bool:
    return isinstance(answer, tuple) and len(answer) == 2 and answer[0] in get_args(Role) and isinstance(answer[1], str)


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def suggestion(name: str, known: Iterable[str]) -> str:
    """A suggestion with a space before it, or nothing; upper and lower case are taken for the same."""
    by_lower = {each.lower(): each for each in known}
    close = difflib.get_close_matches(name.lower(), list(by_lower), n=1)
    return f" Did you mean {by_lower[close[0]]!r}?" if close else ""
