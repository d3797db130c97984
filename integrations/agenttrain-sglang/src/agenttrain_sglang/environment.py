"""SGLang's own virtual environment: where it is, whether it can be used, how it is made.

SGLang's pins and the trainer's don't go together, so it lives apart, in the user's cache folder unless named.
Invariant: the mark in the folder says "ready" only after SGLang was imported there, and it is written last; a folder
without it is never found, and is made again. The CPU's environment has been run with SGLang 0.5.23; CUDA's has not been
run on a GPU.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agenttrain.disk import replace_file
from agenttrain.errors import ConfigError, EngineError

from agenttrain_sglang.settings import SglangTable
from agenttrain_sglang.versions import SUPPORTED, TESTED, is_supported

Device = Literal["cpu", "cuda"]

PYTHONS = ((3, 11), (3, 12))
STAND_INS = Path(__file__).parent / "stand_ins"
WITHOUT_DEPENDENCIES: Mapping[Device, tuple[str, ...]] = {"cpu": ("xgrammar==0.2.7", f"sglang=={TESTED}"), "cuda": ()}
"""Installed last and alone: what they depend on is for GPUs."""
MARK = "agenttrain-sglang.json"
LOG = "agenttrain-setup.log"
SETUP = "agenttrain sglang setup"
TELLS_AFTER_S = 10.0
"""Between two lines of progress."""
DROPPED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
ASK = "from importlib.metadata import version; print(version('sglang'))"
TRY = "import sglang.launch_server, sglang.version; print(sglang.version.__version__)"

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment that holds SGLang: one that setup made, where it was imported once, or the user's own."""

    folder: Path
    device: Device
    version: str
    """SGLang's."""

    @property
    def python(self) -> Path:
        return _python_of(self.folder)


def default_folder(device: Device, python: tuple[int, int] = sys.version_info[:2]) -> Path:
    """Where setup puts an environment, by device, SGLang's version and Python's."""
    return _cache() / f"sglang-{TESTED}-{device}-py{python[0]}.{python[1]}"


def detected_device() -> Device:
    """ "cuda" where a GPU is seen, without importing torch."""
    if Path("/dev/nvidia0").exists():
        return "cuda"
    try:
        asked = subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "cpu"
    return "cuda" if asked.returncode == 0 and asked.stdout.strip() else "cpu"


def find_environment(settings: SglangTable) -> Environment:
    """The environment that the settings name, else the one that setup made; only a few small files are read.

    Where setup has made both, a GPU that is seen decides.

    Raises:
        ConfigError: there is none, it is half made, or its version or device is another.
    """
    if settings.environment is not None:
        folder = Path(settings.environment).expanduser().absolute()
        found = _read(folder) if _state(folder) is not None else _users_own(folder, settings)
        if settings.device not in ("auto", found.device):
            raise ConfigError(
                f"sglang.environment {found.folder} was made for {found.device}, and sglang.device is "
                f"{settings.device!r}. Leave one of the two out, or run {SETUP} --device {settings.device}."
            )
        return found
    made = _made(_wanted(settings))
    if made is None:
        option = "" if settings.device == "auto" else f" --device {settings.device}"
        raise ConfigError(
            f"SGLang isn't installed: no environment of it in {_cache()}. Run {SETUP}{option} once (about 2 GB on a "
            f"CPU), or name the addresses of running servers in sglang.servers."
        )
    return made


def make_environment(
    folder: Path | None, device: Device, *, tell: Tell, python: str | None = None
) -> tuple[Environment, bool]:
    """Install SGLang into a folder, try it, and mark the folder; what is there and ready is left as it is.

    Args:
        folder: the virtual environment. One that was half made is made again. None: `default_folder`.
        device: what it is for.
        tell: takes a line of progress.
        python: of which the environment is made. None: the running one.

    Returns:
        The environment, and whether it was made now.

    Raises:
        ConfigError: the folder holds something else, the Python isn't supported, or another setup is at work there.
        EngineError: it can't be installed, or what was installed can't be imported.
    """
    interpreter, version = _checked_python(python)
    folder = folder.expanduser().absolute() if folder is not None else default_folder(device, version)
    with _locked(folder) as lock:
        state = _state(folder)
        if state is None and folder.exists() and any(not name.startswith(MARK) for name in os.listdir(folder)):
            raise ConfigError(f"{folder} isn't empty and wasn't made by {SETUP}. Name another --folder.")
        if state is not None and state.get("ready") and is_supported(state.get("sglang")):
            found = _read(folder)
            if found.device != device:
                seen = f"{folder} is ready for {found.device}, and {device} is wanted"
                raise ConfigError(f"{seen}. Name another --folder, or remove this one.")
            return found, False
        return _made_new(folder, device, interpreter, _Work(folder, lock, tell)), True


def _made_new(folder: Path, device: Device, interpreter: str, work: _Work) -> Environment:
    _emptied(folder)
    work.run("making a virtual environment", [interpreter, "-m", "venv", str(folder)])
    pip = [str(_python_of(folder)), "-m", "pip", "install", "--progress-bar", "off", "--only-binary", ":all:"]
    needs = Path(__file__).with_name(f"requirements_{device}.txt")
    work.run(f"installing what SGLang {TESTED} needs", [*pip, "-r", str(needs)])
    if alone := WITHOUT_DEPENDENCIES[device]:
        work.run(f"installing {' and '.join(alone)}", [*pip, "--no-deps", *alone])
    version = work.run(
        "importing SGLang for the first time", [str(_python_of(folder)), "-c", TRY], stand_ins=device == "cpu"
    )[-1].strip()
    if version != TESTED:
        raise EngineError(f"{folder} imports SGLang {version}, and {TESTED} was installed. See {folder / LOG}.")
    _write_state(folder, {"ready": True, "device": device, "sglang": version, "made_by": interpreter})
    return Environment(folder, device, version)


def _emptied(folder: Path) -> None:
    """Nothing in it but the mark of something half made, which is there from before the first change."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_state(folder, {"ready": False})
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != MARK:
            entry.unlink()


class _Work:
    """The commands of one setup: their output goes to a log, and is shown when one of them fails.

    Each holds the lock too: where a setup was killed, the pip that outlives it keeps the next setup out.
    """

    def __init__(self, folder: Path, lock: int, tell: Tell) -> None:
        self._folder, self._lock, self._tell = folder, lock, tell
        self._log = folder / LOG
        self._began = time.monotonic()

    def run(self, what: str, command: list[str], *, stand_ins: bool = False) -> list[str]:
        """Run a command to its end, telling how long it has taken so far.

        Returns:
            The lines that it printed.

        Raises:
            EngineError: with its last lines and the next step.
        """
        self._say(what)
        environment = {name: value for name, value in os.environ.items() if name not in DROPPED}
        if stand_ins:
            environment |= cpu_variables()
        start = self._log.stat().st_size if self._log.exists() else 0
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=(self._lock,),
            )
        try:
            code = self._wait(process, what, start)
        finally:
            process.kill()
            process.wait()
        lines = self._printed(start)
        if code != 0:
            raise EngineError(self._failure(what, code, lines))
        return lines

    def _wait(self, process: subprocess.Popen[bytes], what: str, start: int) -> int:
        while True:
            try:
                return process.wait(timeout=TELLS_AFTER_S)
            except subprocess.TimeoutExpired:
                self._say(_last_package(self._printed(start)) or what)

    def _say(self, what: str) -> None:
        self._tell(f"{time.monotonic() - self._began:4.0f} s  {what}")

    def _printed(self, start: int) -> list[str]:
        with self._log.open("rb") as log:
            log.seek(start)
            return log.read().decode(errors="replace").splitlines()

    def _failure(self, what: str, code: int, lines: list[str]) -> str:
        last = "\n".join(f"  {line[:300]}" for line in [line for line in lines if line.strip()][-8:])
        return (
            f"{SETUP} failed while {what} (exit code {code}, {self._folder}):\n{last}\n"
            f"Check the network, the free disk space and pip's settings (PIP_*), then run it again; what is half made "
            f"is made again."
        )


def cpu_variables() -> dict[str, str]:
    """What a process needs to import SGLang on a CPU: the stand-ins, no compiler, and no look at the hub."""
    return {
        "PYTHONPATH": str(STAND_INS),
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _last_package(lines: list[str]) -> str | None:
    """What pip is at, from its last line that tells.

    Example: ["Collecting torch==2.13.0 (from …)", "  Using cached x.whl"] -> "Collecting torch==2.13.0"
    """
    for line in reversed(lines):
        if line.startswith("Installing collected packages"):
            return "unpacking"
        if found := re.match(r"\s*((?:Collecting|Downloading) \S+)", line):
            return found[1]
    return None


def _checked_python(python: str | None) -> tuple[str, tuple[int, int]]:
    """The Python to make an environment of, and its version.

    Raises:
        ConfigError: it can't be started, or its version isn't one of PYTHONS.
    """
    accepted = " or ".join(f"{major}.{minor}" for major, minor in PYTHONS)
    if python is None:
        python, version = sys.executable, sys.version_info[:2]
    else:
        ask = [python, "-c", "import sys; print(*sys.version_info[:2])"]
        try:
            told = subprocess.run(ask, capture_output=True, text=True, timeout=60, check=True).stdout.split()
            version = (int(told[0]), int(told[1]))
        except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
            raise ConfigError(f"--python {python} can't be run: {error}. Name a Python {accepted}.") from None
    if version not in PYTHONS:
        raise ConfigError(
            f"{python} is Python {version[0]}.{version[1]}; SGLang {TESTED} was tested with {accepted}. Name one by "
            "--python."
        )
    return python, version


@contextmanager
def _locked(folder: Path) -> Iterator[int]:
    """Keep a second setup out of the same folder, however the first one ends; gives the lock's file descriptor."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = (folder.parent / f"{folder.name}.lock").open("w")
    except OSError as error:
        raise ConfigError(f"{folder} can't be made: {error}. Name another --folder.") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"Another {SETUP} is at work in {folder}. Wait until it is done, or end it.") from None
        yield lock.fileno()


def _cache() -> Path:
    from platformdirs import user_cache_path

    return user_cache_path("agenttrain")


def _wanted(settings: SglangTable) -> tuple[Device, ...]:
    """Devices to look for, the preferred one first."""
    if settings.device != "auto":
        return (settings.device,)
    return ("cuda", "cpu") if Path("/dev/nvidia0").exists() else ("cpu", "cuda")


def _made(devices: tuple[Device, ...]) -> Environment | None:
    """What setup has made for the first of the devices that it was made for; the running Python's before others."""
    for device in devices:
        candidates = sorted(_cache().glob(f"sglang-{TESTED}-{device}-py*"))
        for folder in [default_folder(device), *candidates]:
            state = _state(folder)
            if state is not None and state.get("ready") and _python_of(folder).exists():
                return _read(folder)
    return None


def _users_own(folder: Path, settings: SglangTable) -> Environment:
    """An environment that setup did not make, by what is installed in it.

    Raises:
        ConfigError: there is no Python in it, or no SGLang of a supported version.
    """
    command = [str(_python_of(folder)), "-c", ASK]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"sglang.environment is {folder}, and its bin/python can't be run ({type(error).__name__}). Name the "
            f"folder of a virtual environment, or run {SETUP} --folder {folder}."
        ) from None
    version = asked.stdout.strip()
    if asked.returncode != 0 or not is_supported(version):
        seen = f"SGLang {version}" if asked.returncode == 0 else "no SGLang"
        raise ConfigError(
            f"sglang.environment is {folder}, which holds {seen}, and SGLang {SUPPORTED} can be used ({TESTED} is "
            f"tested). Install that there, or leave the key out and run {SETUP}."
        )
    device: Device = settings.device if settings.device != "auto" else detected_device()
    return Environment(folder, device, version)


def _read(folder: Path) -> Environment:
    """The environment in a folder that setup has marked.

    Raises:
        ConfigError: nothing there that can be used.
    """
    state, again = _state(folder), f"Run {SETUP} --folder {folder}."
    if state is None or not state.get("ready") or not _python_of(folder).exists():
        raise ConfigError(f"SGLang's environment {folder} is half made. {again}")
    version, device = state.get("sglang"), state.get("device")
    if not is_supported(version) or device not in ("cpu", "cuda"):
        raise ConfigError(
            f"{folder} holds SGLang {version} for {device}; {SUPPORTED} for cpu or cuda can be used. {again}"
        )
    return Environment(folder, device, str(version))


def _state(folder: Path) -> dict[str, Any] | None:
    """What the mark says; None without one, an empty one where it can't be read."""
    try:
        found = json.loads((folder / MARK).read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    replace_file(folder / MARK, (json.dumps(state, indent=1) + "\n").encode())


def _python_of(folder: Path) -> Path:
    return folder / "bin" / "python"
