"""A settled sandbox becomes the submission: what of the agent's files is judged, and what it changed of its judges.

Taken are regular files that the include patterns name. Whatever decides how a program is judged stays as it stood at
first: tests, their configuration, what Python runs by itself at start, programs and packages that would stand in for
others. Changes there are reported in words and never reach a judging sandbox, so they change nothing.
"""

from __future__ import annotations

import fnmatch
import functools
import re
import shutil
import site
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import PurePosixPath

from agenttrain.sandbox_protocol import SandboxFile

MAX_FILE_BYTES = 1 << 20
"""A larger file is not taken."""
MAX_BYTES, MAX_FILES = 8 << 20, 4000
"""Of all that is taken; where there is more, nothing is."""
MAX_FOUND, MAX_DEPTH = 20_000, 64
"""Entries that are looked at, and folders that a file may lie in; where there is more, nothing is taken. What an agent
leaves must never take longer to read than a verifier has."""
MAX_REPORTED = 20
"""Lines on tampering, and paths of what was judged and what was not, that are kept; the rest is counted."""
JUDGE_FOLDER = ".agenttrain-judge"
"""Of a judging sandbox, which holds the verifier's programs and what they say; first where Python looks for modules."""
TEST_FOLDERS = ("test", "tests")
TEST_FILES = ("test_*.py", "*_test.py")
CONFIGURATION = (
    "conftest.py",
    "pytest.ini",
    ".pytest.ini",
    "pytest.toml",
    ".pytest.toml",
    "tox.ini",
    "setup.cfg",
    "pyproject.toml",
)
AT_START = ("sitecustomize", "usercustomize")
PACKAGE_FOLDERS = ("site-packages", "dist-packages", "__pypackages__")
UNCHECKED_PYC = 0b01
"""Flags of a compiled module that Python runs without a look at its source (PEP 552)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What is judged."""

    files: Mapping[str, SandboxFile]
    """The initial files with the agent's own over them; nothing that judges is the agent's."""
    tampering: tuple[str, ...] = ()
    """What the agent changed of what judges it, one line each."""
    submitted: tuple[str, ...] = ()
    """Paths of what the agent changed or added and was taken."""
    left_behind: tuple[str, ...] = ()
    """Paths of what it changed or added and was not taken; caches and the git repository go without saying."""

    def with_hidden(self, hidden: Mapping[str, SandboxFile]) -> dict[str, SandboxFile]:
        """The files of a judging sandbox: hidden ones lie over all others."""
        return laid_over(self.files, hidden)


def submission_of(
    found: Mapping[str, SandboxFile],
    initial: Mapping[str, SandboxFile],
    *,
    include: Sequence[str],
    hidden: Iterable[str] = (),
) -> Submission:
    """What of the files found in a settled sandbox is judged.

    Args:
        found: all that stands there.
        initial: what stood there before the agent came.
        include: patterns of the agent's own files. Without "/" it holds for a name in any folder; with one for the
            whole path, where `**` goes across folders. One without wildcard takes a file whatever it is called.
        hidden: paths that hidden files will lie at.
    """
    if len(found) > MAX_FOUND + len(initial) or any(path.count("/") > MAX_DEPTH for path in found.keys() - initial):
        return _nothing_of(found, initial)
    modules = frozenset(_module_at(path) or "" for path in initial)
    judges = _Judges(include=tuple(include), hidden=frozenset(hidden), modules=modules)
    own = {
        path: file
        for path, file in found.items()
        if file.kind == "file" and len(file.data) <= MAX_FILE_BYTES and judges.takes(path)
        if path in initial or path in include or not _is_program(path, file)
    }
    gone = {path for path in initial if path not in found and judges.takes(path)}
    kept = {path: file for path, file in initial.items() if path not in gone and "__pycache__" not in path.split("/")}
    own = {path: file for path, file in own.items() if not _is_below_a_file(path, kept)}
    changed = _changed(found, initial)
    submitted = [path for path in changed if path in own]
    if len(submitted) > MAX_FILES or sum(len(own[path].data) for path in submitted) > MAX_BYTES:
        return _nothing_of(found, initial)
    return Submission(
        files=laid_over(kept, own),
        tampering=_tampering(found, initial, judges),
        submitted=tuple(submitted),
        left_behind=tuple(path for path in changed if path not in own and not _goes_without_saying(path)),
    )


def _changed(found: Mapping[str, SandboxFile], initial: Mapping[str, SandboxFile]) -> list[str]:
    return sorted(path for path, file in found.items() if file.kind != "folder" and initial.get(path) != file)


def _goes_without_saying(path: str) -> bool:
    return not {".git", "__pycache__", ".pytest_cache"}.isdisjoint(path.split("/"))


def _nothing_of(found: Mapping[str, SandboxFile], initial: Mapping[str, SandboxFile]) -> Submission:
    return Submission(
        files=initial,
        tampering=("the submission is too large to be judged, and none of it was taken",),
        left_behind=tuple(path for path in _changed(found, initial) if not _goes_without_saying(path)),
    )


def laid_over(below: Mapping[str, SandboxFile], above: Mapping[str, SandboxFile]) -> dict[str, SandboxFile]:
    """Both, and above where they don't fit together: what stands in the way of a file above is left out."""
    folders = {parent for path in above for parent in _parents(path)}
    blocked = {path for path, file in above.items() if file.kind != "folder"}
    kept = {
        path: file
        for path, file in below.items()
        if not (path in folders and file.kind != "folder")
        and not (path in blocked or any(parent in blocked for parent in _parents(path)))
    }
    return {**kept, **above}


def matches(path: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern names a path.

    Example: "*.py" names "a/b.py"; "a/*.py" names "a/b.py" and not "a/b/c.py"; "a/**/*.py" names both.
    """
    return any(_matches(path, pattern) for pattern in patterns)


def plain_text(text: str) -> str:
    """The same where it can be written as UTF-8; what can't is escaped."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def first_of(lines: Sequence[str]) -> list[str]:
    """The first MAX_REPORTED, and how many more there are."""
    more = len(lines) - MAX_REPORTED
    return [*lines[:MAX_REPORTED], f"and {more} more"] if more > 0 else list(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judges:
    """Tells what judges from what is judged."""

    include: tuple[str, ...]
    hidden: frozenset[str]
    modules: frozenset[str]
    """Top-level modules that stood there at first."""

    def takes(self, path: str) -> bool:
        """Whether a file is the agent's to give."""
        if path in self.hidden or path.split("/")[0] == JUDGE_FOLDER:
            return False
        if path in self.include:
            return True
        is_compiled = "__pycache__" in path.split("/") or path.endswith((".pyc", ".pyo"))
        return matches(path, self.include) and not is_compiled and not self.concern(path)

    def concern(self, path: str) -> str:
        """What a file has to do with judging, in words; empty: nothing."""
        parts, name = path.split("/"), path.rsplit("/", 1)[-1]
        if ".git" in parts:
            return "the git repository"
        if path in self.hidden:
            return "where a hidden file lies"
        if parts[0] == JUDGE_FOLDER:
            return "where the verifier's own programs lie"
        if name in CONFIGURATION:
            return "configuration of the tests"
        if name.split(".")[0] in AT_START or any(part in AT_START for part in parts[:-1]) or name.endswith(".pth"):
            return "what Python runs at its start"
        if name in ("pyvenv.cfg", "__pyvenv__.cfg") or any(_is_package_folder(part) for part in parts):
            return "installed packages"
        if any(part in TEST_FOLDERS for part in parts[:-1]) or any(fnmatch.fnmatch(name, each) for each in TEST_FILES):
            return "a test"
        module = _module_at(path)
        if module is not None and module not in self.modules and (owner := _owner(module)):
            return f"a module that stands in for {module} of {owner}"
        return ""


def _tampering(
    found: Mapping[str, SandboxFile], initial: Mapping[str, SandboxFile], judges: _Judges
) -> tuple[str, ...]:
    lines: list[str] = []
    n_by_git_part: Counter[str] = Counter()
    for path in sorted({*found, *initial}):
        was, now = initial.get(path), found.get(path)
        if was == now or path in judges.include or _is_only_a_folder(was, now):
            continue
        if ".git" in path.split("/"):
            n_by_git_part[_git_part(path)] += 1
        elif what := _suspicion(path, was, now, judges):
            lines.append(plain_text(f"{path} was {_change(was, now)}: {what}"))
    del n_by_git_part[""]
    lines += [
        f"{part} of the git repository changed: {n} file{'s' if n > 1 else ''}" for part, n in n_by_git_part.items()
    ]
    return tuple(first_of(lines))


def _is_only_a_folder(was: SandboxFile | None, now: SandboxFile | None) -> bool:
    return {each.kind if each else "folder" for each in (was, now)} == {"folder"}


def _suspicion(path: str, was: SandboxFile | None, now: SandboxFile | None, judges: _Judges) -> str:
    """What is wrong with one change; empty: it may be an honest one, whether or not it is taken."""
    if now is not None and now.kind == "link" and _leads_out(path, now.data):
        return "a link that leads out of the working directory"
    if now is not None and now.kind == "other":
        return "no file but a socket, a pipe or a device"
    if path.endswith((".pyc", ".pyo")):
        return _compiled(path, now)
    if "__pycache__" in path.split("/"):
        return ""
    concern = judges.concern(path)
    if concern == "a test" and was is None:
        return ""  # tests of its own are honest work; they are not taken
    if not concern and was is None and now is not None and now.kind != "folder" and _is_program(path, now):
        return "a program under the name of another"
    return concern


def _compiled(path: str, now: SandboxFile | None) -> str:
    if now is None or now.kind != "file":
        return ""
    if "__pycache__" not in path.split("/"):
        return "a compiled module without its source"
    flags = int.from_bytes(now.data[4:8], "little")
    return "a compiled module that Python would run whatever its source says" if flags == UNCHECKED_PYC else ""


def _change(was: SandboxFile | None, now: SandboxFile | None) -> str:
    if was is None:
        return "added"
    if now is None:
        return "removed"
    return (
        "changed" if was.kind == now.kind else f"replaced by a {'pipe or device' if now.kind == 'other' else now.kind}"
    )


def _leads_out(path: str, target: bytes) -> bool:
    to = target.decode("utf-8", "surrogateescape")
    depth = len(path.split("/")) - 1
    for part in to.split("/"):
        depth += -1 if part == ".." else 0 if part in ("", ".") else 1
        if depth < 0:
            return True
    return to.startswith("/")


def _is_program(path: str, file: SandboxFile) -> bool:
    """A file that a careless PATH would run in another's place."""
    name = path.rsplit("/", 1)[-1]
    known = re.fullmatch(r"python[\d.]*|pytest|py\.test|pip[\d.]*|coverage", name) or _is_installed_program(name)
    return bool(known) and (file.executable or file.kind == "link")


@functools.lru_cache(maxsize=1024)
def _is_installed_program(name: str) -> bool:
    return shutil.which(name, path="/usr/local/bin:/usr/bin:/bin") is not None


_GIT_PARTS = {"hooks": "hooks", "config": "configuration", "info": "configuration", "refs": "history"}


def _git_part(path: str) -> str:
    parts = path.split("/")
    if ".git" not in parts:
        return ""
    below = parts[parts.index(".git") + 1 :]
    if not below:
        return "history"
    first = below[0]
    return "history" if first in ("HEAD", "packed-refs", "logs") else _GIT_PARTS.get(first, "")


def _is_package_folder(part: str) -> bool:
    return part in PACKAGE_FOLDERS or part.endswith((".dist-info", ".egg-info", ".egg", ".egg-link"))


def _module_at(path: str) -> str | None:
    """Top-level module that a file would be imported as, or be part of. None: it is no Python."""
    if not path.endswith((".py", ".so", ".pyi")):
        return None
    below = path.removeprefix("src/")
    return below.split("/")[0].split(".")[0]


@functools.lru_cache(maxsize=1024)
def _owner(module: str) -> str:
    """Whose module it is where it isn't the agent's; empty: nobody else's."""
    if module in sys.stdlib_module_names:
        return "the standard library"
    if module == __name__.partition(".")[0]:
        return "the installed packages"
    places = [*site.getsitepackages(), site.getusersitepackages()]
    spec = PathFinder.find_spec(module, places)
    return "the installed packages" if spec is not None and spec.origin is not None else ""


def _matches(path: str, pattern: str) -> bool:
    if "/" not in pattern:
        return fnmatch.fnmatchcase(path.rsplit("/", 1)[-1], pattern)
    return _as_expression(pattern).fullmatch(path) is not None


@functools.lru_cache(maxsize=256)
def _as_expression(pattern: str) -> re.Pattern[str]:
    text = ""
    for part in re.split(r"(\*\*/|\*\*|\*|\?)", pattern.removeprefix("./")):
        text += {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}.get(part, re.escape(part))
    return re.compile(text, re.DOTALL)


def _parents(path: str) -> list[str]:
    return [str(parent) for parent in PurePosixPath(path).parents if str(parent) != "."]


def _is_below_a_file(path: str, files: Mapping[str, SandboxFile]) -> bool:
    return any(parent in files and files[parent].kind != "folder" for parent in _parents(path))
