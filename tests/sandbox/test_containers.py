"""Containers: a real Podman with an image of this machine's own files where one answers, else real errors."""

from __future__ import annotations

import glob
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from agenttrain.errors import SandboxError
from agenttrain.sandbox.containers import DockerBackend, PodmanBackend
from agenttrain.sandbox_protocol import Sandbox, SandboxFile, SandboxRequest
from agenttrain.sandbox_spec import BOUNDARIES, LIMITS, SandboxLimits
from agenttrain.testing import SandboxBackendContract

IMAGE = "localhost/agenttrain-test:1"
PROGRAMS = (
    "sh",
    "cat",
    "chmod",
    "echo",
    "env",
    "head",
    "ln",
    "ls",
    "mkdir",
    "mkfifo",
    "mount",
    "pwd",
    "rm",
    "sleep",
    "touch",
    "true",
    "unshare",
)


@pytest.mark.parametrize("kind", [DockerBackend, PodmanBackend])
def test_without_an_image_nothing_is_tried(kind: type[DockerBackend]) -> None:
    with pytest.raises(
        SandboxError, match=r"no image is named\. Name one that has Python 3: SandboxSpec\(image='python"
    ):
        kind().isolation(SandboxRequest(name="a test"))


def test_an_engine_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        SandboxError, match=r"^No program 'docker' is on the PATH\. Install it, or name another backend"
    ):
        DockerBackend().isolation(SandboxRequest(name="a test", image=IMAGE))


def test_an_engine_that_does_not_answer_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if shutil.which("docker") is None:
        pytest.skip("no docker program here")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no-daemon.sock")
    with pytest.raises(SandboxError) as caught:
        DockerBackend().isolation(SandboxRequest(name="a test", image=IMAGE))
    assert re.match(r"docker does not answer: .*no-daemon\.sock", str(caught.value), re.DOTALL)
    assert str(caught.value).endswith("Start its daemon (systemctl start docker), or name another backend.")


def python_root(folder: Path) -> Path:
    """A tar of this machine's Python and a few programs, which makes an image."""
    binary = os.path.realpath("/usr/bin/python3")
    version = Path(binary).name
    programs = {path: shutil.which(path, path="/usr/bin:/bin") for path in PROGRAMS}
    found = {f"usr/bin/{name}": path for name, path in programs.items() if path}
    found |= {"usr/bin/python": binary, "usr/bin/python3": binary, f"usr/lib/{version}": f"/usr/lib/{version}"}
    loaded = glob.glob(f"/usr/lib/{version}/lib-dynload/*.so")
    libraries = subprocess.run(
        ["ldd", binary, *filter(None, programs.values()), *loaded], capture_output=True, text=True
    )
    for path in set(re.findall(r"(/\S+\.so[\w.]*)", libraries.stdout)):
        if "dynload" not in path:
            found[path.lstrip("/") if path.startswith("/usr") else f"usr{path}"] = path
    with tarfile.open(folder / "root.tar", "w") as tar:
        for name in ("bin", "lib", "lib64"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, f"usr/{name}"
            tar.addfile(link)
        for name, path in found.items():
            tar.add(os.path.realpath(path), arcname=name, filter=_wanted)
    return folder / "root.tar"


def _wanted(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if re.search(r"/(__pycache__|test|config-[^/]+)$", info.name) else info


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PodmanBackend]:
    """One that works, with the image; crun refuses hybrid control groups (crun 1.8.1), runc takes them."""
    program = shutil.which("podman")
    if program is None:
        pytest.skip("no podman program here")
    folder = tmp_path_factory.mktemp("podman")
    imported = subprocess.run([program, "import", str(python_root(folder)), IMAGE], capture_output=True, text=True)
    if imported.returncode != 0:
        pytest.skip(f"podman makes no image here: {imported.stderr}")
    with pytest.MonkeyPatch.context() as patch:
        refused = ""
        for runtime in (None, "runc"):
            if runtime is not None:
                (folder / "containers.conf").write_text(f'[engine]\nruntime = "{runtime}"\n')
                patch.setenv("CONTAINERS_CONF", str(folder / "containers.conf"))
            backend = PodmanBackend(image=IMAGE)
            try:
                backend.isolation(request())
            except SandboxError as error:
                refused = str(error)
                continue
            yield backend
            break
        else:
            pytest.skip(refused)
        subprocess.run([program, "rmi", "--force", IMAGE], check=True, capture_output=True)


def request(**limits: float) -> SandboxRequest:
    return SandboxRequest(
        name="a test",
        image=IMAGE,
        files={"a/x.txt": SandboxFile(data=b"hello")},
        limits=SandboxLimits(**limits),  # type: ignore[arg-type]
    )


@pytest.fixture
def sandbox(podman: PodmanBackend) -> Iterator[Sandbox]:
    made = podman.open(request(memory_mib=128, processes=8, disk_mib=8))
    yield made
    made.close()


@pytest.mark.long
def test_everything_is_enforced(podman: PodmanBackend) -> None:
    isolation = podman.isolation(request())
    assert isolation.unenforced == ()
    assert set(isolation.enforced) == {*BOUNDARIES, *LIMITS}
    assert re.fullmatch(r"network namespace of podman \d+\.\d+\.\d+", isolation.enforced["network"])


@pytest.mark.long
def test_programs_are_a_user_without_rights_who_writes_in_one_place(sandbox: Sandbox) -> None:
    code = """
import os, socket
print(os.getuid() > 0, "CapEff:\\t0000000000000000" in open("/proc/self/status").read())
for path in ("/x", "/usr/x", "/etc/x", "/run/x"):
    try:
        open(path, "w")
    except OSError as error:
        print(error.strerror)
print(socket.socket().connect_ex(("192.0.2.1", 80)))
"""
    assert sandbox.read("a/x.txt") == "hello"
    printed = sandbox.run(["python", "-c", code]).stdout
    assert printed == "True True\n" + "Read-only file system\n" * 4 + "101\n"


@pytest.mark.long
def test_limits_hold(sandbox: Sandbox) -> None:
    full = sandbox.run("head -c 9000000 /dev/zero > x")
    assert "No space left on device" in full.stderr
    fork = "import os, time\nwhile True:\n  if os.fork() == 0: time.sleep(60)"
    assert "Resource temporarily unavailable" in sandbox.run(["python", "-c", fork]).stderr
    sandbox.settle()
    greedy = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        kept = bytearray(60 << 20)
        time.sleep(60)
time.sleep(60)
"""
    assert sandbox.run(["python", "-c", greedy]).ended_by == "memory_mib"
    assert sandbox.run(["python", "-c", "while True: pass"], seconds=0.5).ended_by == "seconds"
    assert sandbox.run(["python", "-c", "print(1)"]).stdout == "1\n"


FILLS_MEMORY = """
import mmap, os, time
open("/proc/self/oom_score_adj", "w").write("0")
for _ in range(200):
    if os.fork() == 0:
        time.sleep(60)
with open("/dev/shm/fill", "wb") as file, open("fill", "wb") as more:
    while True:
        try:
            file.write(b"x" * 65536)
        except OSError:
            more.write(b"x" * 65536)
"""


@pytest.mark.long
def test_a_container_that_memory_ended_is_no_failure_of_the_environment(podman: PodmanBackend) -> None:
    sandbox = podman.open(request(memory_mib=1, processes=300, disk_mib=256))
    try:
        assert sandbox.run(["python", "-I", "-S", "-c", FILLS_MEMORY]).ended_by == "memory_mib"
        assert sandbox.run(["true"]).ended_by in ("", "memory_mib")
        sandbox.settle()
    finally:
        sandbox.close()


@pytest.mark.long
def test_an_image_that_is_not_there_is_never_pulled(podman: PodmanBackend) -> None:
    with pytest.raises(SandboxError, match=r"image not known See that it is there \(podman pull localhost/none:1\)"):
        podman.isolation(SandboxRequest(name="a test", image="localhost/none:1"))


KILLED = """
    import contextlib, os, signal
    from agenttrain.sandbox.containers import PodmanBackend
    from agenttrain.sandbox_protocol import SandboxRequest
    sandbox = PodmanBackend().open(SandboxRequest(name="killed", image={image!r}))
    sandbox.run("sleep 1000 >/dev/null 2>&1 &")
    if {client_too}:
        for each in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):  # others come and go
                if open(f"/proc/{{each}}/stat").read().rpartition(")")[2].split()[1] == str(os.getpid()):
                    os.kill(int(each), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.long
@pytest.mark.parametrize("client_too", [False, True])
def test_of_a_killed_agenttrain_the_next_run_leaves_nothing(podman: PodmanBackend, client_too: bool) -> None:
    code = textwrap.dedent(KILLED.format(image=IMAGE, client_too=client_too))
    killed = subprocess.run([sys.executable, "-W", "ignore", "-c", code], timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL
    podman.remove_left_behind()
    assert podman.left_behind() == []


@pytest.mark.long
class TestContract(SandboxBackendContract):
    """What every backend keeps to, in containers."""

    same_python = False
    n_at_once = 3

    @pytest.fixture
    def backend(self, podman: PodmanBackend) -> PodmanBackend:  # type: ignore[override]
        return podman
