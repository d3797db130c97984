"""What every process of a run must be given: variables, and on a joined cluster the graph's folder and the policy.

On an own cluster all processes see this machine's files, and paths stay as they are. On a joined one the folder that
graph.py is imported from, and the policy, are staged under the run's verl/shipped and carried by Ray as the working
directory. Each process makes the same short link to its node's copy before anything else runs, so one absolute path
holds on every node, this one's too: the spec, veRL's configuration and the engines need to know nothing of nodes.

Ray is not imported here.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from agenttrain.errors import ConfigError, RunError
from agenttrain.graph.load import place_of
from agenttrain.records import RolloutSpec

from agenttrain_verl import cpu
from agenttrain_verl.plan import Plan

CARRIED = ("AGENTTRAIN_", "OTEL_", "VERL_", "HF_HUB_OFFLINE")
"""How the names of this process's variables begin that the others get too."""
LINK_VARIABLE = "AGENTTRAIN_VERL_SHIPPED"
"""Tells a process where its link goes; set by `runtime_env` alone."""
GRAPH, POLICY = "graph-files", "policy-files"
"""Folders of what is shipped; no Python module has such a name."""
LARGEST_POLICY_BYTES = 300 * 2**20
LARGEST_BYTES = 500 * 2**20
"""Ray carries a package of less than 512 MiB (2.60: _private/runtime_env/packaging.py, GCS_STORAGE_MAX_SIZE)."""
IGNORE_FILE = ".rayignore"
LEFT_OUT = {
    *("runs", ".git", ".hg", ".svn", ".venv", "venv", "node_modules", ".tox", ".nox", ".gitignore", IGNORE_FILE),
    *("__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".ipynb_checkpoints"),
}
"""Names that are never shipped. Ray itself would obey a .gitignore, which often names the policy's weights."""


def runtime_env(plan: Plan, spec: RolloutSpec, *, joined: bool, run_dir: Path) -> tuple[dict[str, Any], RolloutSpec]:
    """What Ray must carry to every process of a run, and the spec as each of them sees it.

    The policy's folder in the spec is where every process finds it, veRL's ranks and this process too.

    Raises:
        ConfigError: the graph's folder is too large to be shipped.
        RunError: the link to what is shipped can't be made.
    """
    variables = carried_variables(os.environ)
    if plan.device == "cpu":
        variables |= cpu.environment_variables()
    if not joined:
        return {"env_vars": variables}, spec
    shipment = staged(spec, run_dir / "verl" / "shipped")
    make_link(shipment.link, to=shipment.folder)
    env = {
        "env_vars": variables | {LINK_VARIABLE: str(shipment.link)},
        "working_dir": str(shipment.folder),
        "worker_process_setup_hook": f"{__name__}.link_working_dir",
    }
    return env, shipment.spec


def carried_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Those of this process that the others get.

    Example: {"OTEL_TRACES_EXPORTER": "otlp", "HOME": "/root"} -> {"OTEL_TRACES_EXPORTER": "otlp"}
    """
    return {name: value for name, value in environment.items() if name.startswith(CARRIED) and name != LINK_VARIABLE}


# ── the link ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def link_working_dir() -> None:
    """Point this node's link at this process's working directory; Ray calls it first in every process of the run."""
    link = os.environ.get(LINK_VARIABLE)
    if link and not Path(link).exists():
        make_link(Path(link), to=Path.cwd())


def make_link(link: Path, *, to: Path) -> None:
    """Point a link at a folder, at once whatever others do.

    Raises:
        RunError: its folder is somebody else's.
    """
    link.parent.mkdir(mode=0o700, exist_ok=True)
    if link.parent.is_symlink() or link.parent.stat().st_uid != os.getuid():
        raise RunError(f"{link.parent} is not yours alone, and links to what is shipped go there. Remove it.")
    for old in link.parent.iterdir():
        if not old.exists():
            old.unlink(missing_ok=True)
    fresh = link.parent / f".{link.name}.{os.getpid()}"
    with suppress(FileNotFoundError):
        fresh.unlink()
    fresh.symlink_to(to, target_is_directory=True)
    fresh.replace(link)


# ── staging ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipment:
    """What is carried to the nodes."""

    folder: Path
    """Staged here, as it will be on each node."""
    link: Path
    """The one path to it, on every node."""
    spec: RolloutSpec
    """As seen through the link."""


def staged(spec: RolloutSpec, folder: Path) -> Shipment:
    """Put together what a spec needs, as hard links where the disk is the same.

    Args:
        folder: made anew.

    Raises:
        ConfigError: it is too large.
    """
    graph, policy = Path(spec.graph_file).resolve(), Path(spec.model).resolve()
    root = graph_root(graph)
    is_shipped = folder_bytes(policy) <= LARGEST_POLICY_BYTES
    shutil.rmtree(folder, ignore_errors=True)
    stage = _Stage(folder=folder)
    stage.take(root, GRAPH, besides=(Path(spec.run_dir).resolve(), *(() if is_shipped else (policy,))))
    inside = is_shipped and policy.is_relative_to(root) and (folder / GRAPH / policy.relative_to(root)).is_dir()
    if is_shipped and not inside:
        stage.take(policy, POLICY)
    link = Path("/tmp") / f"agenttrain-shipped-{os.getuid()}" / stage.digest
    there = link / GRAPH / policy.relative_to(root) if inside else link / POLICY
    return Shipment(
        folder=folder,
        link=link,
        spec=replace(
            spec,
            graph_file=str(link / GRAPH / graph.relative_to(root)),
            model=str(there) if is_shipped else spec.model,
        ),
    )


def graph_root(graph: Path) -> Path:
    """The folder that has all that graph.py may import beside itself, and the langgraph.json that names it.

    Example: /app/src/agent/graph.py in the package `agent`, /app/langgraph.json -> /app
    """
    root = graph.parent
    while (root / "__init__.py").is_file():
        root = root.parent
    project = place_of(str(graph), graph.parent).project
    needed = [root, *([project.path.parent, *project.folders] if project is not None else [])]
    return Path(os.path.commonpath([each.resolve() for each in needed]))


def folder_bytes(folder: Path) -> int:
    """The size of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@dataclass(slots=True, kw_only=True)
class _Stage:
    """A folder that is being filled."""

    folder: Path
    n_bytes: int = 0
    _hash: Any = field(default_factory=hashlib.sha256)

    @property
    def digest(self) -> str:
        """Of names and contents."""
        return str(self._hash.hexdigest())[:12]

    def take(self, source: Path, name: str, *, besides: tuple[Path, ...] = ()) -> None:
        """Put a folder's files under that name."""
        for relative in shipped_files(source, besides=besides):
            file, target = (source / relative).resolve(), self.folder / name / relative
            self.n_bytes += file.stat().st_size
            if self.n_bytes > LARGEST_BYTES:
                raise ConfigError(_too_large_text(source, besides))
            target.parent.mkdir(parents=True, exist_ok=True)
            _link_or_copy(file, target)
            self._hash.update(f"{name}/{relative.as_posix()}\0".encode())
            with file.open("rb") as content:
                self._hash.update(hashlib.file_digest(content, "sha256").digest())


def shipped_files(source: Path, *, besides: tuple[Path, ...] = ()) -> Iterator[Path]:
    """Files below a folder that are shipped, relative to it, in a fixed order.

    Left out are LEFT_OUT, virtual environments, other runs, and what the folder's .rayignore names.

    Args:
        besides: folders that are left out too.
    """
    patterns = _ignored(source)
    for at, folders, files in os.walk(source):
        here = Path(at)
        kept = [name for name in folders if not _is_left_out(here / name, source, patterns, besides)]
        folders[:] = sorted(kept)
        for name in sorted(files):
            if not _is_left_out(here / name, source, patterns, besides) and (here / name).is_file():
                yield (here / name).relative_to(source)


def _is_left_out(path: Path, source: Path, patterns: list[str], besides: tuple[Path, ...]) -> bool:
    relative = PurePosixPath(path.relative_to(source).as_posix())
    named = path.name in LEFT_OUT or path.suffix == ".pyc" or (path / "pyvenv.cfg").is_file() or path in besides
    return named or any(fnmatch(str(relative), pattern) or fnmatch(path.name, pattern) for pattern in patterns)


def _ignored(source: Path) -> list[str]:
    """Patterns of a .rayignore, each matched against the path from the folder on, and against the name."""
    with suppress(FileNotFoundError):
        lines = (source / IGNORE_FILE).read_text(encoding="utf-8").splitlines()
        return [line.strip().strip("/") for line in lines if line.strip() and not line.startswith("#")]
    return []


def _link_or_copy(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except OSError:
        shutil.copy2(file, target)


def _too_large_text(source: Path, besides: tuple[Path, ...]) -> str:
    sizes: dict[str, int] = {}
    for relative in shipped_files(source, besides=besides):
        first = relative.parts[0]
        sizes[first] = sizes.get(first, 0) + (source / relative).stat().st_size
    largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
    named = ", ".join(f"{name} ({sizes[name] / 2**20:.0f} MiB)" for name in largest)
    return (
        f"{source} is shipped to every node of the Ray cluster, and it is over {LARGEST_BYTES // 2**20} MiB, the most "
        f"that Ray carries: {named}. Name what the graph does not need in {source / IGNORE_FILE} (one pattern a line), "
        "or move it elsewhere."
    )
