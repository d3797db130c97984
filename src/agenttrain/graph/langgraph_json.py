"""langgraph.json becomes a Project: where its graphs are, and what LangGraph's own command line would make ready.

Nothing is imported here. Values of the environment are set and never told. Source: LangGraph's CLI reference,
"Configuration file": `graphs`, `dependencies` and `env`.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agenttrain.config import set_missing
from agenttrain.errors import GraphError

NAME = "langgraph.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One graph of a langgraph.json."""

    name: str
    file: Path
    """Absolute."""
    module: str | None
    """Dotted name where the entry gives one. None: it gives a path."""
    attribute: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """A langgraph.json, read."""

    path: Path
    tables: Mapping[str, Any]

    @property
    def names(self) -> list[str]:
        return sorted(self.tables["graphs"])

    @property
    def folders(self) -> list[Path]:
        """The local folders among its dependencies, in their order.

        Raises:
            GraphError: they are no list, or one that is written as a path is no folder.
        """
        folders, listed = [], self.tables.get("dependencies") or []
        if not isinstance(listed, list):
            raise GraphError(f'{self.path} gives dependencies as {listed!r}. Write a list: "dependencies": ["."].')
        for dependency in listed:
            folder = (self.path.parent / str(dependency)).resolve()
            if folder.is_dir():
                folders.append(folder)
            elif str(dependency).startswith("."):
                raise GraphError(
                    f"{self.path} names the dependency {dependency!r}, and {folder} is no folder. Mend it."
                )
        return folders

    def entry(self, name: str) -> Entry:
        """The graph of that name.

        Raises:
            GraphError: there is none, or its value can't be used.
        """
        if name not in self.tables["graphs"]:
            close = difflib.get_close_matches(name, self.names, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else f" Name one: agenttrain fit {self.names[0]}"
            raise GraphError(f"{self.path} has no graph {name!r}. Graphs there: {', '.join(self.names)}.{hint}")
        value = self.tables["graphs"][name]
        text = value if isinstance(value, str) else value.get("path") if isinstance(value, Mapping) else None
        where, colon, attribute = text.rpartition(":") if isinstance(text, str) else ("", "", "")
        if not colon or not attribute.isidentifier():
            raise GraphError(self._misfit(name, value))
        is_path = where.endswith(".py") or "/" in where
        if is_path:
            file: Path | None = (self.path.parent / where).resolve()
        else:
            file = self._file_of(where) if all(part.isidentifier() for part in where.split(".")) else None
        if file is None or file.suffix != ".py":
            raise GraphError(self._misfit(name, value))
        return Entry(name=name, file=file, module=None if is_path else where, attribute=attribute)

    def entries(self) -> Iterator[Entry]:
        """Those of its graphs that can be used."""
        for name in self.names:
            try:
                yield self.entry(name)
            except GraphError:
                continue

    def make_ready(self) -> tuple[str, ...]:
        """Put the dependencies on sys.path and the environment's missing variables in place.

        Returns:
            What a user should know: the names of the variables that were set.

        Raises:
            GraphError: a dependency or `env` that can't be used.
        """
        for folder in self.folders:
            if str(folder) not in sys.path:
                sys.path.append(str(folder))
        where, pairs = self._environment()
        names = set_missing(pairs)
        return (f"{', '.join(names)} set from {where} (variables that were set already stay).",) if names else ()

    def _file_of(self, module: str) -> Path | None:
        """The file of a dotted name: in the dependencies, beside langgraph.json, else installed."""
        parts = module.split(".")
        for folder in (*self.folders, self.path.parent):
            for file in (folder.joinpath(*parts).with_suffix(".py"), folder.joinpath(*parts, "__init__.py")):
                if file.is_file():
                    return file.resolve()
        try:
            spec = importlib.util.find_spec(module)
        except (ImportError, ValueError):
            return None
        return Path(spec.origin).resolve() if spec is not None and spec.origin else None

    def _environment(self) -> tuple[str, Mapping[str, str]]:
        """(where it is written, name to value)."""
        env = self.tables.get("env") or {}
        if isinstance(env, Mapping):
            return self.path.name, {str(name): str(value) for name, value in env.items()}
        file = self.path.parent / str(env)
        try:
            return str(env), dict(_pairs(file.read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError) as error:
            raise GraphError(
                f"{self.path} names env {env!r}, and it can't be read ({type(error).__name__}). Make that file, "
                "or take env out."
            ) from None

    def _misfit(self, name: str, value: Any) -> str:
        return (
            f"{self.path} gives the graph {name!r} as {value!r}. Accepted: './path.py:attribute' or "
            "'package.module:attribute' of a Python file that is there."
        )


def read_project(path: Path) -> Project:
    """A langgraph.json.

    Raises:
        GraphError: it can't be read, or names no graphs.
    """
    try:
        tables = json.loads(path.read_text(encoding="utf-8"))
        named = isinstance(tables["graphs"], Mapping) and bool(tables["graphs"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise GraphError(f"{path} can't be read ({type(error).__name__}: {error}). {_ACCEPTED}") from error
    if not named:
        raise GraphError(f"{path} names no graphs. {_ACCEPTED}")
    return Project(path=path, tables=tables)


def find_project(folder: Path) -> Path | None:
    """The nearest langgraph.json, in a folder or its parents."""
    return next((f / NAME for f in (folder, *folder.parents) if (f / NAME).is_file()), None)


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    """Names and values of a .env file: NAME=value lines, with `export`, quotes and comments."""
    for line in text.splitlines():
        name, equals, value = line.strip().removeprefix("export ").partition("=")
        if equals and name.strip().isidentifier():
            yield name.strip(), _unquoted(value.strip())


def _unquoted(value: str) -> str:
    if value[:1] in ("'", '"') and (end := value.find(value[0], 1)) > 0:
        return value[1:end]
    return value.partition(" #")[0].rstrip()


_ACCEPTED = 'Accepted: {"graphs": {"name": "./graph.py:graph"}}; or name the object: agenttrain fit graph.py:graph'
