"""graph.py, or a name in langgraph.json, becomes a LoadedGraph: the user's object and the way to open it.

A file is imported once per process. Invariant: nothing of the user's is called before `open`, and what goes wrong in
the user's file is told as one GraphError with file and line. Knows nothing of tasks or policies.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from langgraph.graph import StateGraph
from langgraph.pregel import Pregel

from agenttrain.errors import AgenttrainError, GraphError
from agenttrain.graph.langgraph_json import NAME, Entry, Project, find_project, read_project
from agenttrain.graph.runnable import RunnableGraph, opened
from agenttrain.trainable import Trainable, trainable_of, trainables_in

_lock = threading.RLock()
_modules: dict[Path, ModuleType] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedGraph:
    """A graph found in a file, not opened yet."""

    file: Path
    """Absolute."""
    attribute: str
    target: Any
    """The object of that name: graph, StateGraph, entrypoint, factory or context manager."""
    trainable: Trainable | None
    """What @trainable noted for it. None: it is not decorated."""
    folders: tuple[Path, ...] = ()
    """Local dependencies that langgraph.json put on sys.path."""
    notes: tuple[str, ...] = ()
    """What a user should know of how it was found."""

    @property
    def name(self) -> str:
        """As in reports: `graph.py:graph`."""
        return f"{self.file.name}:{self.attribute}"

    def open(self) -> AbstractContextManager[RunnableGraph]:
        """Build the graph and keep what it needs open for a block.

        Raises:
            GraphError: the object is no graph and makes none, or raised while it was built.
        """
        return _open(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a target points to, before anything is imported."""

    file: Path
    module: str | None = None
    """Dotted name to import it by. None: by its path."""
    attribute: str | None = None
    project: Project | None = None
    """The langgraph.json that names the file. None: there is none."""
    broken: GraphError | None = None
    """What is wrong with the nearest langgraph.json, which may name the file."""


def load_graph(target: str, *, cwd: Path | None = None) -> LoadedGraph:
    """Find the graph that `path.py`, `path.py:attribute`, a name in langgraph.json, or a folder with one names.

    Without an attribute: the single @trainable of the file, else what langgraph.json names there, else the single
    graph of the file. Where a langgraph.json names the file, its local dependencies are put on sys.path, and the
    variables of its `env` that are not set are set.

    Args:
        cwd: what a relative path is relative to, and where langgraph.json is sought. None: the current directory.

    Raises:
        GraphError: no such file or name, an import that fails, no such attribute, or several candidates.
    """
    place = place_of(target, cwd or Path.cwd())
    notes = place.project.make_ready() if place.project is not None else ()
    file, module = place.file, load_module(place.file, place.module)
    name = place.attribute or _only_trainable(file, module) or _named_by_project(place) or _only_graph(file, module)
    if not hasattr(module, name):
        raise GraphError(_missing_attribute_text(file, module, name))
    found = getattr(module, name)
    return LoadedGraph(
        file=file,
        attribute=name,
        target=found,
        trainable=trainable_of(found),
        folders=tuple(place.project.folders) if place.project is not None else (),
        notes=notes,
    )


def place_of(target: str, cwd: Path) -> Place:
    """Where a target points to; nothing is imported.

    Raises:
        GraphError: no such file or name, or several graphs in a folder's langgraph.json.
    """
    path, attribute = _split_target(target)
    place = (cwd / path).resolve()
    if place.is_file():
        return _place_of_file(place, attribute)
    is_name = "/" not in path and os.sep not in path and not path.endswith(".py") and path not in (".", "..")
    found = find_project(cwd.resolve()) if is_name and attribute is None else None
    if found is not None and (not place.is_dir() or path in read_project(found).names):
        return _place_of_entry(read_project(found), path)
    if not place.is_dir():
        raise GraphError(_missing_file_text(path, place))
    if not (place / NAME).is_file():
        raise GraphError(f"{place} is a folder without {NAME}. Name the file that holds your graph: {path}/graph.py")
    project = read_project(place / NAME)
    if attribute is None and len(project.names) > 1:
        raise GraphError(
            f"{project.path} names {len(project.names)} graphs: {', '.join(project.names)}. "
            f"Name one: agenttrain fit {path}:{project.names[0]}"
        )
    return _place_of_entry(project, attribute or project.names[0])


def _place_of_entry(project: Project, name: str) -> Place:
    entry = project.entry(name)
    if not entry.file.is_file():
        raise GraphError(f"{project.path} gives the graph {name!r}. {_missing_file_text(str(entry.file), entry.file)}")
    return Place(file=entry.file, module=entry.module, attribute=entry.attribute, project=project)


def _place_of_file(file: Path, attribute: str | None) -> Place:
    """A file, with the nearest langgraph.json if that names it."""
    found = find_project(file.parent)
    if found is None:
        return Place(file=file, attribute=attribute)
    try:
        project = read_project(found)
    except GraphError as error:
        return Place(file=file, attribute=attribute, broken=error)
    entries = _entries_of(project, file)
    if not entries:
        return Place(file=file, attribute=attribute)
    return Place(file=file, module=entries[0].module, attribute=attribute, project=project)


def _entries_of(project: Project, file: Path) -> list[Entry]:
    return [entry for entry in project.entries() if entry.file == file]


def _named_by_project(place: Place) -> str | None:
    """The attribute that langgraph.json names for a file, when it names one.

    Raises:
        GraphError: it is needed and can't be read.
    """
    if place.broken is not None:
        raise place.broken
    names = {entry.attribute for entry in _entries_of(place.project, place.file)} if place.project else set()
    return next(iter(names)) if len(names) == 1 else None


def load_module(file: Path, name: str | None = None) -> ModuleType:
    """The module of a file, imported at most once per process, under one name, with its siblings importable.

    Args:
        name: dotted name to import it by, as langgraph.json gives it. None: by its path.

    Raises:
        GraphError: the import raised; names file, line and exception.
    """
    file = file.resolve()
    with _lock:
        if file not in _modules:
            _modules[file] = _imported(file, name)
        return _modules[file]


def source_files(loaded: LoadedGraph) -> list[Path]:
    """graph.py and the modules under its folder, or under a local dependency, that are imported by now, sorted.

    Installed packages are left out.
    """
    folders = {_import_root(loaded.file), *loaded.folders}
    files = {loaded.file}
    for name, module in list(sys.modules.items()):
        source = getattr(module, "__file__", None)
        if not source or name.partition(".")[0] == "agenttrain":
            continue
        if any(_is_local(source, folder) for folder in folders):
            files.add(Path(source).resolve())
    return sorted(files)


def _is_local(source: str, folder: Path) -> bool:
    if not source.endswith(".py") or not source.startswith(f"{folder}{os.sep}"):
        return False
    parts = Path(source).relative_to(folder).parts
    return "site-packages" not in parts and not any(part.startswith(".") for part in parts)


def _split_target(target: str) -> tuple[str, str | None]:
    path, colon, attribute = target.rpartition(":")
    if colon and attribute.isidentifier():
        return path, attribute
    return target, None


def _missing_file_text(path: str, file: Path) -> str:
    folder = file.parent
    near = sorted(p.name for p in folder.glob("*.py")) if folder.is_dir() else []
    close = difflib.get_close_matches(file.name, near, n=1, cutoff=0.5)
    seen = (
        f"{folder} holds {', '.join(near[:8]) or 'no .py file'}" if folder.is_dir() else f"there is no folder {folder}"
    )
    hint = f" Did you mean {close[0]!r}?" if close else " Give the path of the file that holds your graph."
    return f"{path} is not a file: {seen}.{hint}"


def _missing_attribute_text(file: Path, module: ModuleType, name: str) -> str:
    names = [n for n in vars(module) if not n.startswith("_")]
    close = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean '{file.name}:{close[0]}'?" if close else ""
    graphs = list(dict.fromkeys([*trainables_in(module), *_candidates(module)]))
    return f"{file.name} has no {name!r}. Graphs there: {_listed(graphs)}.{hint}"


def _import_root(file: Path) -> Path:
    """The folder that has to be on sys.path: the file's own, or the one above its outermost package."""
    folder = file.parent
    while (folder / "__init__.py").is_file():
        folder = folder.parent
    return folder


def _imported(file: Path, name: str | None) -> ModuleType:
    root = _import_root(file) if name is None else file.parents[_depth(file, name)]
    _forget_namesakes(root, name)
    before = set(sys.modules)
    try:
        with _first_on_path(root):
            if name is not None:
                return importlib.import_module(name)
            return _import_package_module(file, root) if root != file.parent else _import_file(file)
    except AgenttrainError:
        raise
    except (Exception, SystemExit) as error:
        for new in set(sys.modules) - before:
            if _is_local(getattr(sys.modules[new], "__file__", None) or "", root):
                del sys.modules[new]
        raise GraphError(_import_error_text(file, error)) from error


def _import_package_module(file: Path, root: Path) -> ModuleType:
    """Import under its dotted name, so that relative and absolute imports meet one module."""
    parts = file.relative_to(root).with_suffix("").parts
    return importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))


def _import_file(file: Path) -> ModuleType:
    digest = hashlib.sha256(str(file).encode()).hexdigest()[:8]
    name = f"agenttrain_graph_{re.sub(r'[^0-9a-zA-Z]', '_', file.stem)}_{digest}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise GraphError(f"{file.name} is not a Python file. Give the path of the .py file that holds your graph.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@contextmanager
def _first_on_path(folder: Path) -> Iterator[None]:
    """Siblings win during the import; afterwards the folder stays last, for imports that happen inside nodes."""
    entry = str(folder)
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        sys.path.remove(entry)
        if entry not in sys.path:
            sys.path.append(entry)


def _depth(file: Path, name: str) -> int:
    """How many folders above its own a module's dotted name begins."""
    return name.count(".") + (file.name == "__init__.py")


def _forget_namesakes(root: Path, name: str | None) -> None:
    """Drop modules of graphs loaded before from other folders that this folder has under the same name."""
    others = {_import_root(file) for file in _modules} - {root}
    names = {path.stem for path in root.glob("*.py")} | {path.parent.name for path in root.glob("*/__init__.py")}
    if name is not None:
        names.add(name.partition(".")[0])
    for old in [old for old in list(sys.modules) if old.partition(".")[0] in names]:
        source = getattr(sys.modules[old], "__file__", None)
        if source and any(_is_local(source, other) for other in others):
            del sys.modules[old]


def _import_error_text(file: Path, error: BaseException) -> str:
    return f"{_place(file, error)} raised {_named(error)} while it was imported.{_next_step(error)}"


def _place(file: Path, error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    local = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_relative_to(file.parent)]
    return f"{Path(local[-1].filename).relative_to(file.parent)}:{local[-1].lineno}" if local else file.name


def _named(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:300]}" if lines else type(error).__name__


def _next_step(error: BaseException) -> str:
    key = re.search(r"[A-Z][A-Z0-9]*_API_KEY", str(error))
    if key or re.search(r"api[_ ]?key|credentials", str(error), re.IGNORECASE):
        name = key.group(0) if key else "OPENAI_API_KEY"
        return f" The policy answers in training, so any key will do: {name}=unused is enough."
    if isinstance(error, ModuleNotFoundError):
        return f" Install {error.name!r} in this environment, or put it beside graph.py."
    return " Mend it there; `python` on the file shows the whole traceback."


def _only_trainable(file: Path, module: ModuleType) -> str | None:
    by_target = {id(noted.target): name for name, noted in reversed(trainables_in(module).items())}
    if len(by_target) > 1:
        raise GraphError(_several_text(file, sorted(by_target.values()), "objects decorated with @trainable"))
    return next(iter(by_target.values()), None)


def _only_graph(file: Path, module: ModuleType) -> str:
    candidates = _candidates(module)
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise GraphError(_several_text(file, candidates, "graphs"))
    names = sorted(n for n, value in vars(module).items() if callable(value) and _is_defined_in(value, module))
    raise GraphError(
        f"{file.name} holds no graph. Functions and classes there: {_listed(names)}. Name what returns the graph "
        f"({file.name}:make_graph), or decorate it with @trainable."
    )


def _is_defined_in(value: object, module: ModuleType) -> bool:
    return getattr(value, "__module__", None) == module.__name__


def _candidates(module: ModuleType) -> list[str]:
    """Names of the compiled graphs of a module, else of its StateGraphs; one name for one object."""
    for kind in (Pregel, StateGraph):
        by_object = {id(v): n for n, v in reversed(vars(module).items()) if isinstance(v, kind)}
        if by_object:
            return sorted(by_object.values())
    return []


def _several_text(file: Path, names: list[str], what: str) -> str:
    return f"{file.name} holds {len(names)} {what}: {_listed(names)}. Name one: {file.name}:{names[0]}"


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "none"


@contextmanager
def _open(loaded: LoadedGraph) -> Iterator[RunnableGraph]:
    with opened(loaded.target, name=loaded.name, explain=_explained(loaded)) as runnable:
        yield runnable


def _explained(loaded: LoadedGraph) -> Any:
    def explain(error: BaseException) -> GraphError:
        place = _place(loaded.file, error)
        return GraphError(f"{place} raised {_named(error)} while {loaded.name} was built.{_next_step(error)}")

    return explain
