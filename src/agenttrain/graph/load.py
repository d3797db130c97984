"""graph.py becomes a LoadedGraph: the user's object, found in the file, and the way to open it.

A file is imported once per process. Invariant: nothing of the user's is called before `open`, and what goes wrong in
the user's file is told as one GraphError with file and line. Knows nothing of tasks or policies.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import json
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from langgraph.graph import StateGraph
from langgraph.pregel import Pregel

from agenttrain.errors import AgenttrainError, GraphError
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


def load_graph(target: str, *, cwd: Path | None = None) -> LoadedGraph:
    """Find the graph that `path.py` or `path.py:attribute` names.

    Without an attribute: the single @trainable of the file, else what langgraph.json names there, else the single
    graph of the file.

    Args:
        cwd: what a relative path is relative to. None: the current directory.

    Raises:
        GraphError: no such file, an import that fails, no such attribute, or several candidates.
    """
    path, attribute = _split_target(target)
    file = ((cwd or Path.cwd()) / path).resolve()
    if not file.is_file():
        raise GraphError(_missing_file_text(path, file))
    module = load_module(file)
    name = attribute or _only_trainable(file, module) or _langgraph_json_name(file) or _only_graph(file, module)
    if not hasattr(module, name):
        raise GraphError(_missing_attribute_text(file, module, name))
    found = getattr(module, name)
    return LoadedGraph(file=file, attribute=name, target=found, trainable=trainable_of(found))


def load_module(file: Path) -> ModuleType:
    """The module of a file, imported at most once per process, under one name, with its siblings importable.

    Raises:
        GraphError: the import raised; names file, line and exception.
    """
    file = file.resolve()
    with _lock:
        if file not in _modules:
            _modules[file] = _imported(file)
        return _modules[file]


def source_files(loaded: LoadedGraph) -> list[Path]:
    """graph.py and the modules under its folder that are imported by now, sorted; installed packages left out."""
    folder = _import_root(loaded.file)
    files = {loaded.file}
    for name, module in list(sys.modules.items()):
        source = getattr(module, "__file__", None)
        if source and name.partition(".")[0] != "agenttrain" and _is_local(source, folder):
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
    return f"{file.name} has no {name!r}. Graphs there: {_listed(_candidates(module))}.{hint}"


def _import_root(file: Path) -> Path:
    """The folder that has to be on sys.path: the file's own, or the one above its outermost package."""
    folder = file.parent
    while (folder / "__init__.py").is_file():
        folder = folder.parent
    return folder


def _imported(file: Path) -> ModuleType:
    root = _import_root(file)
    _forget_namesakes(root)
    before = set(sys.modules)
    try:
        with _first_on_path(root):
            return _import_package_module(file, root) if root != file.parent else _import_file(file)
    except AgenttrainError:
        raise
    except (Exception, SystemExit) as error:
        for name in set(sys.modules) - before:
            if _is_local(getattr(sys.modules[name], "__file__", None) or "", root):
                del sys.modules[name]
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


def _forget_namesakes(root: Path) -> None:
    """Drop modules of graphs loaded before from other folders that this folder has under the same name."""
    others = {_import_root(file) for file in _modules} - {root}
    names = {path.stem for path in root.glob("*.py")} | {path.parent.name for path in root.glob("*/__init__.py")}
    for name in [name for name in list(sys.modules) if name.partition(".")[0] in names]:
        source = getattr(sys.modules[name], "__file__", None)
        if source and any(_is_local(source, other) for other in others):
            del sys.modules[name]


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


def _langgraph_json_name(file: Path) -> str | None:
    """The attribute that the nearest langgraph.json names for this file, when it names one."""
    found = next((f / "langgraph.json" for f in file.parents if (f / "langgraph.json").is_file()), None)
    if found is None:
        return None
    try:
        graphs = json.loads(found.read_text())["graphs"]
        specs = [_spec_text(value) for value in graphs.values()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise GraphError(
            f'{found} can\'t be read ({_named(error)}), and {file.name} needs it. Accepted: {{"graphs": {{"name": '
            f'"./{file.name}:graph"}}}}; or name the object: {file.name}:graph'
        ) from error
    pairs = [spec.rpartition(":") for spec in specs]
    names = {name for path, colon, name in pairs if colon and (found.parent / path).resolve() == file}
    return next(iter(names)) if len(names) == 1 else None


def _spec_text(value: str | Mapping[str, str]) -> str:
    return value if isinstance(value, str) else value["path"]


@contextmanager
def _open(loaded: LoadedGraph) -> Iterator[RunnableGraph]:
    with opened(loaded.target, name=loaded.name, explain=_explained(loaded)) as runnable:
        yield runnable


def _explained(loaded: LoadedGraph) -> Any:
    def explain(error: BaseException) -> GraphError:
        place = _place(loaded.file, error)
        return GraphError(f"{place} raised {_named(error)} while {loaded.name} was built.{_next_step(error)}")

    return explain
