"""Where a policy and its settings stand, and the policies that this process serves: loaded once, whoever serves them.

A policy is loaded with the first call and unloaded when nobody holds it any more. One of a ledger is held against the
hash that the ledger recorded before it answers.
"""

from __future__ import annotations

import atexit
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from agenttrain import telemetry
from agenttrain.capture.render import open_renderer
from agenttrain.capture.served import ServedCalls
from agenttrain.config import Config, environment, find_file, read_file, resolve
from agenttrain.errors import ModelError, PromotionError, RunError
from agenttrain.folder_hash import policy_hash
from agenttrain.graph.self_test import self_test
from agenttrain.plugins import Plugins
from agenttrain.promotion.accepted_policy import refuse_changed
from agenttrain.promotion.fixed_set import NAME as FIXED_SET
from agenttrain.promotion.fixed_set import read_fixed_set
from agenttrain.promotion_record import BASE, LedgerEntry
from agenttrain.protocols import Engine, EngineContext
from agenttrain.run_folder import RunFolder, find_run, moved_tables

RUNS: Final = Path("runs")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedSource:
    """Where a policy and the settings it was trained with stand."""

    policy: Path
    run_id: str
    """Of its run, else the name of its folder."""
    config: Config
    plugins: Plugins
    graph_file: Path | None = None
    attribute: str = ""
    renderer: str | None = None
    """Identity of the tokenizer and template that the run trained with. None: not told."""

    def with_engine(self, name: str | None) -> ServedSource:
        """The same on another engine. None: as it is."""
        if name is None:
            return self
        engine = self.config.engine.model_copy(update={"name": name})
        return replace(self, config=self.config.model_copy(update={"engine": engine}))


def source_of_run(run: str) -> ServedSource:
    """Of an id under runs/, the path of a run, or the folder of a policy.

    Raises:
        RunError: there is no such run, or it has no policy.
    """
    plugins = Plugins.load(only=environment("AGENTTRAIN_PLUGINS"))
    if (Path(run) / "config.json").is_file():
        policy = Path(run).resolve()
        run_id = policy.parent.name if policy.name == "policy" else policy.name
        source = ServedSource(policy=policy, run_id=run_id, config=Config(), plugins=plugins)
        return _as_exported(source) if (policy / FIXED_SET).is_file() else source
    folder = find_run(run, RUNS)
    if not (folder.policy / "config.json").is_file():
        raise RunError(
            f"Run {folder.id} holds no policy: it has not ended, or was an evaluation. Finish it with agenttrain fit "
            f"--resume {folder.id}, or name another run or the folder of a model."
        )
    return _of_folder(folder, folder.policy, folder.id, plugins)


def _as_exported(source: ServedSource) -> ServedSource:
    """With the renderer that an exported folder says its policy was trained with."""
    fixed = read_fixed_set(source.policy)
    config = resolve((FIXED_SET, {"renderer": fixed.renderer_table}))
    return replace(source, config=config, renderer=fixed.renderer)


def source_of_entry(entry: LedgerEntry, entries: tuple[LedgerEntry, ...]) -> ServedSource:
    """Of the policy that a line of a ledger is about.

    The settings of the base are those of the last run that is still there; where none is, those of agenttrain.toml.

    Raises:
        PromotionError: its run is gone.
    """
    plugins = Plugins.load(only=environment(_PLUGINS))
    if entry.run_id == BASE:
        run = next(filter(None, map(_run_of, reversed(entries))), None)
        if run is None:
            return _of_graph(entry, entries, plugins)
    else:
        run = _there(entry)
    return _of_folder(run, Path(entry.policy), entry.run_id, plugins)


def source_of_base(entries: tuple[LedgerEntry, ...]) -> ServedSource:
    """Of the model that the runs of a ledger begin with; of a graph that was moved, beside it there.

    Raises:
        PromotionError: the run that names it is gone.
        ModelError: it is not there.
    """
    from agenttrain.prepare import model_folder

    last, plugins = _last_run(entries), Plugins.load(only=environment(_PLUGINS))
    run, graph = _there(last), Path(last.graph.rpartition(":")[0])
    source = _of_folder(run, run.policy, BASE, plugins, moved_to=graph)
    return replace(source, policy=model_folder(source.config).resolve())


_PLUGINS: Final = "AGENTTRAIN_PLUGINS"


def _last_run(entries: tuple[LedgerEntry, ...]) -> LedgerEntry:
    return next(entry for entry in reversed(entries) if entry.run_id != BASE)


def _run_of(entry: LedgerEntry) -> RunFolder | None:
    """The folder of a line's run. None: it is gone, or the line is of the base."""
    folders = (Path(entry.policy).parent, RUNS / entry.run_id) if entry.run_id != BASE else ()
    return next((RunFolder(each.resolve()) for each in folders if (each / "config.toml").is_file()), None)


def _there(entry: LedgerEntry) -> RunFolder:
    """The same, where it must be there.

    Raises:
        PromotionError: it is gone.
    """
    run = _run_of(entry)
    if run is None:
        refuse_changed(entry)
        raise PromotionError(
            f"{entry.run_id} was accepted to serve by line {entry.number} of the ledger, and its policy is there, but "
            f"no {Path(entry.policy).parent / 'config.toml'} says how it was trained. Put it back from a copy."
        )
    return run


def _of_graph(entry: LedgerEntry, entries: tuple[LedgerEntry, ...], plugins: Plugins) -> ServedSource:
    """Of the base where no run is there any more: by the agenttrain.toml of its graph, and its renderer as recorded."""
    graph, _, attribute = entry.graph.rpartition(":")
    file = find_file(Path(graph).parent)
    layers = [(str(file), read_file(file))] if file is not None else []
    return ServedSource(
        policy=Path(entry.policy).resolve(),
        run_id=BASE,
        config=resolve(*layers, plugin_tables=plugins.table_names),
        plugins=plugins,
        graph_file=Path(graph),
        attribute=attribute,
        renderer=_last_run(entries).hashes.get("renderer"),
    )


def _of_folder(
    folder: RunFolder, policy: Path, run_id: str, plugins: Plugins, *, moved_to: Path | None = None
) -> ServedSource:
    tables, provenance = folder.read_config()
    if moved_to is not None and "graph" in provenance:
        tables = moved_tables(tables, Path(provenance["graph"]).parent, moved_to.parent)
        provenance = {**provenance, "graph": str(moved_to)}
    config = resolve((f"config.toml of run {folder.id}", tables), plugin_tables=plugins.table_names)
    graph = provenance.get("graph")
    return ServedSource(
        policy=policy.resolve(),
        run_id=run_id,
        config=config,
        plugins=plugins,
        graph_file=Path(graph) if graph else None,
        attribute=str(provenance.get("attribute") or ""),
        renderer=provenance.get("hashes", {}).get("renderer"),
    )


def check_weights(policy: Path, entry: LedgerEntry) -> None:
    """Refuse a policy that is not what a line of a ledger is about; files that have not changed are hashed once.

    Raises:
        PromotionError: the folder is gone, can't be read, or holds other bytes.
    """
    refuse_changed(replace(entry, policy=str(policy)), hash_of=_hash)


_hashes: dict[Path, tuple[object, str]] = {}


def _hash(policy: Path) -> str:
    stamp = tuple((str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in sorted(policy.rglob("*")) if f.is_file())
    known, digest = _hashes.get(policy, (None, ""))
    if known != stamp:
        digest = policy_hash(policy)
        _hashes[policy] = (stamp, digest)
    return digest


@dataclass(slots=True)
class ServedPolicy:
    """A policy that somebody may serve: its engine is opened with the first call and closed with the last user."""

    source: ServedSource
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
                with _loading:
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
            model_name=source.run_id,
            tracer=telemetry.tracer(),
        )


_loading = threading.Lock()
"""One policy at a time: transformers 5 gives half of itself to a thread that imports it while another does."""
served_policies: dict[tuple[Path, str], ServedPolicy] = {}
"""(folder, engine) to what serves it in this process."""
_lock = threading.Lock()


def policy_of(source: ServedSource) -> ServedPolicy:
    """What serves a policy here, or would; nobody holds it yet."""
    with _lock:
        return served_policies.get(_key(source)) or ServedPolicy(source=source)


def held(policy: ServedPolicy) -> ServedPolicy:
    """The same policy, or what serves it by now, with one user more."""
    with _lock:
        policy = served_policies.setdefault(_key(policy.source), policy)
        policy.users += 1
        return policy


def let_go(policy: ServedPolicy) -> None:
    """One user less; the last one unloads it."""
    with _lock:
        policy.users -= 1
        is_last = policy.users == 0
        if is_last and served_policies.get(_key(policy.source)) is policy:
            del served_policies[_key(policy.source)]
    if is_last:
        policy.close()


def _key(source: ServedSource) -> tuple[Path, str]:
    return source.policy, source.config.engine.name
