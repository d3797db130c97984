from __future__ import annotations

import pytest

from agenttrain.sandbox_protocol import SandboxFile
from agenttrain.verifiers.submission import MAX_FILE_BYTES, MAX_REPORTED, laid_over, matches, submission_of

INITIAL = {
    "shop.py": SandboxFile(data=b"RATE = 1\n"),
    "README.md": SandboxFile(data=b"A shop.\n"),
    "tests": SandboxFile(kind="folder"),
    "tests/test_shop.py": SandboxFile(data=b"def test(): assert False\n"),
    "tests/conftest.py": SandboxFile(data=b""),
    "pyproject.toml": SandboxFile(data=b"[tool.pytest]\n"),
    ".git/HEAD": SandboxFile(data=b"ref: refs/heads/main\n"),
    ".git/refs/heads/main": SandboxFile(data=b"1" * 40),
    ".git/hooks/pre-commit": SandboxFile(data=b"#!/bin/sh\n", executable=True),
    ".git/config": SandboxFile(data=b"[core]\n"),
}
UNCHECKED = b"\xa7\x0d\x0d\x0a\x01\x00\x00\x00" + bytes(8)


def taken(changes: dict[str, SandboxFile | None], include=("*.py",), hidden=()):
    found = {path: file for path, file in {**INITIAL, **changes}.items() if file is not None}
    return submission_of(found, INITIAL, include=include, hidden=hidden)


def text(data: str, **more) -> SandboxFile:
    return SandboxFile(data=data.encode(), **more)


def test_an_untouched_folder_is_judged_as_it_is():
    """Nothing changed, nothing to report."""
    submission = taken({})

    assert dict(submission.files) == INITIAL
    assert submission.tampering == ()


def test_the_agents_own_files_are_taken():
    """Changed and new modules are judged; files that no pattern names are not."""
    submission = taken({"shop.py": text("RATE = 2\n"), "vat/rates.py": text("A = 1\n"), "notes.txt": text("done")})

    assert submission.files["shop.py"].data == b"RATE = 2\n"
    assert submission.files["vat/rates.py"].data == b"A = 1\n"
    assert "notes.txt" not in submission.files
    assert submission.tampering == ()


def test_a_module_that_the_agent_removed_is_gone():
    """What it may change it may remove; the rest comes back."""
    submission = taken({"shop.py": None, "README.md": None})

    assert "shop.py" not in submission.files
    assert submission.files["README.md"] == INITIAL["README.md"]
    assert submission.tampering == ()


@pytest.mark.parametrize(
    ("path", "file", "line"),
    [
        ("tests/test_shop.py", text("def test(): pass\n"), "tests/test_shop.py was changed: a test"),
        ("tests/test_shop.py", None, "tests/test_shop.py was removed: a test"),
        (
            "tests/test_shop.py",
            SandboxFile(kind="folder"),
            "tests/test_shop.py was replaced by a folder: a test",
        ),
        ("tests/conftest.py", text("import os\n"), "tests/conftest.py was changed: configuration of the tests"),
        ("conftest.py", text("import os\n"), "conftest.py was added: configuration of the tests"),
        ("pytest.ini", text("[pytest]\n"), "pytest.ini was added: configuration of the tests"),
        (".pytest.toml", text(""), ".pytest.toml was added: configuration of the tests"),
        ("tox.ini", text("[pytest]\n"), "tox.ini was added: configuration of the tests"),
        ("setup.cfg", text("[tool:pytest]\n"), "setup.cfg was added: configuration of the tests"),
        ("pyproject.toml", text(""), "pyproject.toml was changed: configuration of the tests"),
        ("pyproject.toml", None, "pyproject.toml was removed: configuration of the tests"),
        ("sitecustomize.py", text("import os\n"), "sitecustomize.py was added: what Python runs at its start"),
        ("usercustomize/__init__.py", text(""), "usercustomize/__init__.py was added: what Python runs at its start"),
        ("evil.pth", text("import os\n"), "evil.pth was added: what Python runs at its start"),
        ("lib/site-packages/shop.py", text(""), "lib/site-packages/shop.py was added: installed packages"),
        (
            "evil-1.0.dist-info/entry_points.txt",
            text("[pytest11]\n"),
            "evil-1.0.dist-info/entry_points.txt was added: installed packages",
        ),
        ("venv/pyvenv.cfg", text("home = .\n"), "venv/pyvenv.cfg was added: installed packages"),
        (
            ".agenttrain-judge/json.py",
            text("raise SystemExit"),
            ".agenttrain-judge/json.py was added: where the verifier's own programs lie",
        ),
        ("json.py", text(""), "json.py was added: a module that stands in for json of the standard library"),
        (
            "unittest/__init__.py",
            text(""),
            "unittest/__init__.py was added: a module that stands in for unittest of the standard library",
        ),
        (
            "src/random.py",
            text(""),
            "src/random.py was added: a module that stands in for random of the standard library",
        ),
        ("pytest.py", text(""), "pytest.py was added: a module that stands in for pytest of the installed packages"),
        (
            "_pytest/runner.py",
            text(""),
            "_pytest/runner.py was added: a module that stands in for _pytest of the installed packages",
        ),
        (
            "pluggy/__init__.py",
            text(""),
            "pluggy/__init__.py was added: a module that stands in for pluggy of the installed packages",
        ),
        ("python", text("#!/bin/sh\n", executable=True), "python was added: a program under the name of another"),
        (
            "bin/pytest",
            text("#!/bin/sh\n", executable=True),
            "bin/pytest was added: a program under the name of another",
        ),
        ("sh", SandboxFile(kind="link", data=b"bin/evil"), "sh was added: a program under the name of another"),
        (
            "data",
            SandboxFile(kind="link", data=b"/etc"),
            "data was added: a link that leads out of the working directory",
        ),
        (
            "a/b",
            SandboxFile(kind="link", data=b"../../x"),
            "a/b was added: a link that leads out of the working directory",
        ),
        ("pipe", SandboxFile(kind="other"), "pipe was added: no file but a socket, a pipe or a device"),
        ("shop.pyc", SandboxFile(data=bytes(16)), "shop.pyc was added: a compiled module without its source"),
        (
            "__pycache__/shop.pyc",
            SandboxFile(data=UNCHECKED),
            "__pycache__/shop.pyc was added: a compiled module that Python would run whatever its source says",
        ),
        (".git/HEAD", text("ref: refs/heads/evil\n"), "history of the git repository changed: 1 file"),
        (".git/refs/heads/main", None, "history of the git repository changed: 1 file"),
        (".git/hooks/post-checkout", text("#!/bin/sh\n"), "hooks of the git repository changed: 1 file"),
        (
            ".git/config",
            text("[core]\nhooksPath=/x\n"),
            "configuration of the git repository changed: 1 file",
        ),
    ],
)
def test_what_judges_stays_as_it_was_and_is_reported(path, file, line):
    """Each kind of tampering leaves the judged files equal to the initial ones, and one line."""
    submission = taken({path: file}, include=("*.py", "*.ini", "*.toml", "*.cfg", "*.pth", "*.txt", "*.pyc"))

    assert dict(submission.files) == INITIAL
    assert submission.tampering == (line,)


@pytest.mark.parametrize(
    ("path", "file"),
    [
        ("tests/test_mine.py", text("def test(): pass\n")),
        ("test_mine.py", text("def test(): pass\n")),
        ("__pycache__/shop.cpython-311.pyc", SandboxFile(data=b"\xa7\x0d\x0d\x0a" + bytes(12))),
        (".pytest_cache/v/lastfailed", text("{}")),
        (".git/objects/aa/bb", text("x")),
        ("run.sh", text("#!/bin/sh\n", executable=True)),
        ("here", SandboxFile(kind="link", data=b"shop.py")),
        ("empty", SandboxFile(kind="folder")),
    ],
)
def test_honest_work_is_no_tampering(path, file):
    """Tests of its own, caches, commits: not judged, and not reported."""
    submission = taken({path: file})

    assert dict(submission.files) == INITIAL
    assert submission.tampering == ()


def test_a_file_that_is_named_whole_is_taken_whatever_it_is_called():
    """The task may be to write a conftest.py, or a module that is called as one of Python's."""
    submission = taken({"conftest.py": text("a"), "json.py": text("b")}, include=("conftest.py", "json.py"))

    assert submission.files["conftest.py"].data == b"a"
    assert submission.files["json.py"].data == b"b"
    assert submission.tampering == ()


def test_a_module_of_the_initial_files_may_be_called_as_one_of_pythons():
    """Its own package statistics may grow."""
    initial = {"statistics/__init__.py": text("")}
    found = {**initial, "statistics/mean.py": text("A = 1\n")}

    submission = submission_of(found, initial, include=("*.py",))

    assert submission.files["statistics/mean.py"].data == b"A = 1\n"
    assert submission.tampering == ()


def test_a_file_at_a_hidden_files_place_is_reported_and_covered():
    """Guessing the name of the hidden test gains nothing."""
    submission = taken({"check_it.py": text("print('ok')")}, hidden=("check_it.py",))

    assert submission.tampering == ("check_it.py was added: where a hidden file lies",)
    assert submission.with_hidden({"check_it.py": text("hidden")})["check_it.py"].data == b"hidden"


def test_too_large_a_file_is_not_taken():
    """One byte past the bound leaves the initial file."""
    within, past = SandboxFile(data=b"#" * MAX_FILE_BYTES), SandboxFile(data=b"#" * (MAX_FILE_BYTES + 1))

    assert taken({"shop.py": within}).files["shop.py"] == within
    assert taken({"shop.py": past}).files["shop.py"] == INITIAL["shop.py"]


@pytest.mark.parametrize(
    "files",
    [
        {f"m{n}.py": b"" for n in range(4001)},
        {f"m{n}.py": b"#" * (1 << 20) for n in range(9)},
        {f"m{n}.txt": b"" for n in range(20_004)},
        {f"{'d/' * 65}m.py": b""},
    ],
)
def test_too_large_a_submission_is_not_taken(files):
    """It could fill the judging sandbox, or take longer to read than a verifier has: the environment's failure."""
    submission = taken({path: SandboxFile(data=data) for path, data in files.items()})

    assert dict(submission.files) == INITIAL
    assert submission.tampering == ("the submission is too large to be judged, and none of it was taken",)
    assert submission.submitted == ()
    assert submission.left_behind == tuple(sorted(files))


@pytest.mark.parametrize("kind", ["link", "other"])
def test_a_link_in_a_modules_place_is_not_taken(kind):
    """Only regular files are."""
    submission = taken({"shop.py": SandboxFile(kind=kind, data=b"/etc/passwd" if kind == "link" else b"")})

    assert submission.files["shop.py"] == INITIAL["shop.py"]


def test_a_hidden_file_pushes_aside_what_stands_in_its_way():
    """A file where its folder must be, and a folder where it must be, are left out."""
    below = {"tests.py": text("x"), "tests.py/a.py": text("x"), "checks": text("x"), "b.py": text("x")}

    laid = laid_over(below, {"checks/test_a.py": text("hidden"), "tests.py": text("hidden")})

    assert laid == {"checks/test_a.py": text("hidden"), "tests.py": text("hidden"), "b.py": text("x")}


def test_a_folder_that_the_agent_made_of_a_file_does_not_break_the_judging_sandbox():
    """README.md stays the file that it was; the module below it has no place."""
    submission = taken({"README.md": SandboxFile(kind="folder"), "README.md/a.py": text("x")})

    assert dict(submission.files) == INITIAL


def test_a_program_under_the_name_of_another_is_not_taken_by_a_pattern():
    """bin/python stays behind where all of bin is the agent's; a program of its own goes along."""
    python, own = text("#!/bin/sh\n", executable=True), text("#!/bin/sh\n", executable=True)

    submission = taken({"bin/python": python, "bin/shop": own}, include=("bin/*",))

    assert submission.files == {**INITIAL, "bin/shop": own}
    assert submission.tampering == ("bin/python was added: a program under the name of another",)


def test_many_lines_are_cut():
    """Thirty sins are twenty lines and a number."""
    submission = taken({f"{n:02}.pth": text("x") for n in range(30)})

    assert len(submission.tampering) == MAX_REPORTED + 1
    assert submission.tampering[-1] == "and 10 more"


def test_a_name_that_is_no_text_can_be_written_down():
    """Bytes that are no UTF-8 are escaped in the report."""
    submission = taken({"\udcff.pth": text("x")})

    assert submission.tampering == ("\\udcff.pth was added: what Python runs at its start",)
    assert submission.tampering[0].encode()


@pytest.mark.parametrize(
    ("path", "pattern", "named"),
    [
        ("a.py", "*.py", True),
        ("a/b.py", "*.py", True),
        ("a/b.py", "a/*.py", True),
        ("a/b/c.py", "a/*.py", False),
        ("a/b/c.py", "a/**/*.py", True),
        ("a/b.py", "a/**/*.py", True),
        ("a/b.py", "./a/b.py", True),
        ("a/b.pyc", "*.py", False),
        ("axpy", "a.py", False),
        ("ab/c.py", "a?/c.py", True),
    ],
)
def test_patterns(path, pattern, named):
    """As in .gitignore, near enough."""
    assert matches(path, [pattern]) is named
