"""making.py: what a user writes and a task become a request, and a backend that enforces what was asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agenttrain.config import SandboxTable
from agenttrain.errors import ConfigError, SandboxError
from agenttrain.records import Isolation, Task
from agenttrain.sandbox.making import BEST_FIRST, SandboxMaker, folder_files, sandbox_files, without_network
from agenttrain.sandbox.opening import open_sandbox
from agenttrain.sandbox_protocol import Sandbox, SandboxFile, SandboxRequest
from agenttrain.sandbox_spec import SandboxLimits, SandboxSpec
from agenttrain.trainable import current_sandbox

TASK = Task(id="t1", input={"n": 3}, metadata={"name": "seven"})


@dataclass
class Backend:
    """One that makes nothing but notes what it was asked for."""

    name: str
    unenforced: tuple[str, ...] = ()
    broken: str = ""
    opened: list[SandboxRequest] = field(default_factory=list)

    def isolation(self, request: SandboxRequest) -> Isolation:
        if self.broken:
            raise SandboxError(self.broken)
        return Isolation(backend=self.name, enforced={}, unenforced=self.unenforced)

    def open(self, request: SandboxRequest) -> Any:
        self.opened.append(request)
        return self.name


def maker(spec: SandboxSpec, *backends: Backend, folder: Path = Path("/"), **table: Any) -> SandboxMaker:
    by_name = {backend.name: backend for backend in backends}
    backend_of: Callable[[str], Any] = by_name.__getitem__
    return SandboxMaker(spec=spec, folder=folder, backend_of=backend_of, table=SandboxTable(**table))


def test_a_spec_of_functions_is_asked_for_each_task(tmp_path: Path) -> None:
    """Template, files and environment; files lie over the template; paths begin at graph.py's folder."""
    (tmp_path / "seven" / "src").mkdir(parents=True)
    (tmp_path / "seven" / "src" / "a.py").write_text("old")
    (tmp_path / "seven" / "keep").write_text("kept")
    spec = SandboxSpec(
        template=lambda task: task.metadata["name"],
        files=lambda task: {"src/a.py": f"n = {task.input['n']}", "./b": b"\0"},
        env=lambda task: {"TASK": task.id},
        visible=["data", "/opt/x/../y"],
        network=True,
        limits=SandboxLimits(seconds=2),
        image="spec:1",
    )
    assert maker(spec, folder=tmp_path).request(TASK, name="r1") == SandboxRequest(
        name="r1",
        files={
            "src": SandboxFile(kind="folder"),
            "src/a.py": SandboxFile(data=b"n = 3"),
            "keep": SandboxFile(data=b"kept"),
            "b": SandboxFile(data=b"\0"),
        },
        env={"TASK": "t1"},
        visible=(str(tmp_path / "data"), "/opt/y"),
        network=True,
        limits=SandboxLimits(seconds=2),
        image="spec:1",
    )
    assert maker(spec, folder=tmp_path, image="table:2").request(TASK, name="r").image == "table:2"


def test_a_template_is_copied_as_it_stands(tmp_path: Path) -> None:
    """Links as links, what may be executed, folders that are empty; caches of Python are left out."""
    secret = tmp_path / "secret"
    secret.write_text("s")
    folder = tmp_path / "template"
    (folder / "empty").mkdir(parents=True)
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "a.pyc").write_text("x")
    (folder / "run").write_text("#!")
    (folder / "run").chmod(0o755)
    (folder / "out").symlink_to(secret)
    os.mkfifo(folder / "pipe")
    assert folder_files(folder) == {
        "empty": SandboxFile(kind="folder"),
        "run": SandboxFile(data=b"#!", executable=True),
        "out": SandboxFile(kind="link", data=os.fsencode(secret)),
    }


def test_a_template_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=f"names the template {tmp_path}/none, and that is no folder. Make it, or name another."
    ):
        maker(SandboxSpec(template="none"), folder=tmp_path).request(TASK, name="r")


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", ".", "..", "a/.."])
def test_a_file_outside_of_the_working_directory_is_an_error(path: str) -> None:
    with pytest.raises(ConfigError, match="Give a path within its working directory"):
        sandbox_files({path: "x"})


def test_content_that_is_no_text_and_no_bytes_is_an_error() -> None:
    wrong: Mapping[str, Any] = {"a": 3}
    with pytest.raises(ConfigError, match=r"The file 'a' of a sandbox is 3\. Give a text or bytes\."):
        sandbox_files(wrong)


def test_the_best_backend_that_enforces_everything_is_taken() -> None:
    """And is asked once for all sandboxes of a graph."""
    backends = [
        Backend("namespaces", broken="no user namespaces"),
        Backend("bubblewrap", unenforced=("disk_mib",)),
        Backend("subprocess"),
    ]
    made = maker(SandboxSpec(), *backends)
    assert [made.open(TASK, name=name) for name in ("r1", "r2")] == ["subprocess", "subprocess"]
    assert [request.name for request in backends[2].opened] == ["r1", "r2"]
    assert made.isolation(TASK).backend == "subprocess"
    assert tuple(backend.name for backend in backends) == BEST_FIRST


@pytest.mark.parametrize(
    ("spec", "table"),
    [
        (SandboxSpec(allow_unenforced=["disk_mib"]), {}),
        (SandboxSpec(), {"allow_unenforced": ["disk_mib"]}),
        (SandboxSpec(backend="subprocess"), {"backend": "bubblewrap", "allow_unenforced": ["disk_mib"]}),
    ],
)
def test_what_is_allowed_by_name_may_be_unenforced(spec: SandboxSpec, table: Mapping[str, Any]) -> None:
    backends = [
        Backend("namespaces", unenforced=("disk_mib", "network")),
        Backend("bubblewrap", unenforced=("disk_mib",)),
        Backend("subprocess"),
    ]
    assert maker(spec, *backends, **table).open(TASK, name="r") == "bubblewrap"


def test_what_nothing_enforces_is_refused_by_name() -> None:
    """With what each backend lacks, before anything is opened."""
    backends = [
        Backend("namespaces", broken="no user namespaces"),
        Backend("bubblewrap", broken="not installed"),
        Backend("subprocess", unenforced=("network", "disk_mib")),
    ]
    with pytest.raises(SandboxError) as caught:
        maker(SandboxSpec(allow_unenforced=["network"]), *backends).open(TASK, name="r")
    words = str(caught.value)
    assert "namespaces: no user namespaces. bubblewrap: not installed. subprocess: does not enforce disk_mib" in words
    assert "--set 'sandbox.allow_unenforced=[\"disk_mib\"]'" in words
    assert all(backend.opened == [] for backend in backends)


def test_a_backend_that_is_named_is_the_only_one_that_is_tried() -> None:
    named = maker(
        SandboxSpec(backend="bubblewrap"), Backend("bubblewrap", broken="not installed"), Backend("namespaces")
    )
    with pytest.raises(SandboxError, match="bubblewrap: not installed"):
        named.open(TASK, name="r")


def test_without_network_is_all_else() -> None:
    request = SandboxRequest(name="r", network=True, env={"A": "1"})
    assert without_network(request) == SandboxRequest(name="r", env={"A": "1"})


def test_open_sandbox_is_a_rollouts_sandbox_outside_of_rollouts(tmp_path: Path) -> None:
    """Tools reach it as they do there; it is closed at the end."""
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "a").write_text("x")
    inner: list[Sandbox] = []
    try:
        with open_sandbox(SandboxSpec(template="t"), folder=tmp_path) as sandbox:
            assert current_sandbox() is sandbox
            assert sandbox.read("a") == "x"
            inner.append(sandbox)
    except SandboxError as error:
        pytest.skip(str(error))
    with pytest.raises(SandboxError):
        inner[0].list()
