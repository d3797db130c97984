"""Where SGLang's environment is found, and how it is made; the folders here are made as setup would leave them."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from agenttrain.errors import ConfigError, EngineError

from agenttrain_sglang.environment import (
    Environment,
    default_folder,
    find_environment,
    make_environment,
)
from agenttrain_sglang.settings import SglangTable
from agenttrain_sglang.versions import TESTED


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder is an empty one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "agenttrain"


def made(folder: Path, *, device: str = "cpu", version: str = TESTED, ready: bool = True) -> Path:
    """A folder as setup leaves it."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").touch()
    state = {"ready": ready, "device": device, "sglang": version}
    (folder / "agenttrain-sglang.json").write_text(json.dumps(state))
    return folder


def silent(line: str) -> None:
    """Takes a line of progress."""


def test_what_setup_made_is_found_from_any_directory() -> None:
    folder = made(default_folder("cpu"))
    found = find_environment(SglangTable())
    assert found == Environment(folder, "cpu", TESTED)
    assert found.python == folder / "bin" / "python"


def test_one_made_with_another_python_is_found_too(cache: Path) -> None:
    folder = made(cache / f"sglang-{TESTED}-cpu-py3.99")
    assert find_environment(SglangTable()).folder == folder


def test_without_one_the_command_to_type_is_named() -> None:
    with pytest.raises(ConfigError, match=r"SGLang isn't installed.* Run agenttrain sglang setup once"):
        find_environment(SglangTable())
    with pytest.raises(ConfigError, match=r"Run agenttrain sglang setup --device cuda once"):
        find_environment(SglangTable(device="cuda"))


def test_the_device_of_the_settings_decides() -> None:
    made(default_folder("cpu"))
    folder = made(default_folder("cuda"), device="cuda")
    assert find_environment(SglangTable(device="cuda")).folder == folder
    assert find_environment(SglangTable(device="cpu")).device == "cpu"


def test_a_half_made_one_is_never_found(tmp_path: Path) -> None:
    made(default_folder("cpu"), ready=False)
    with pytest.raises(ConfigError, match="isn't installed"):
        find_environment(SglangTable())
    half = made(tmp_path / "half", ready=False)
    with pytest.raises(ConfigError, match="is half made"):
        find_environment(SglangTable(environment=str(half)))


def test_one_without_its_python_is_half_made() -> None:
    """Somebody has removed what it was made of."""
    (made(default_folder("cpu")) / "bin" / "python").unlink()
    with pytest.raises(ConfigError, match="isn't installed"):
        find_environment(SglangTable())


def test_a_named_folder_without_a_python_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"its bin/python can't be run \(FileNotFoundError\)"):
        find_environment(SglangTable(environment=str(tmp_path)))


def own_environment(folder: Path, answer: str) -> str:
    """A folder with a bin/python that says what `answer` is."""
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin" / "python"
    python.write_text(f"#!/bin/sh\n{answer}\n")
    python.chmod(0o755)
    return str(folder)


def test_an_environment_of_the_users_own_is_known_by_the_sglang_in_it(tmp_path: Path) -> None:
    """Setup need not have made it; the device is what the settings say, else what is seen."""
    own = own_environment(tmp_path / "own", "echo 0.5.23")
    found = find_environment(SglangTable(environment=own, device="cuda"))
    assert (found.folder, found.device, found.version) == (Path(own), "cuda", "0.5.23")


@pytest.mark.parametrize(("answer", "seen"), [("echo 0.4.0", r"SGLang 0\.4\.0"), ("exit 1", "no SGLang")])
def test_an_environment_of_the_users_own_needs_a_supported_sglang(tmp_path: Path, answer: str, seen: str) -> None:
    own = own_environment(tmp_path / "own", answer)
    with pytest.raises(ConfigError, match=rf"which holds {seen}, and SGLang .* can be used"):
        find_environment(SglangTable(environment=own))


def test_a_named_folder_for_another_device_is_refused(tmp_path: Path) -> None:
    folder = made(tmp_path / "mine")
    with pytest.raises(ConfigError, match=r"was made for cpu, and sglang\.device is 'cuda'"):
        find_environment(SglangTable(environment=str(folder), device="cuda"))


def test_a_version_that_is_not_known_is_refused(tmp_path: Path) -> None:
    folder = made(tmp_path / "mine", version="0.4.0")
    with pytest.raises(ConfigError, match=r"holds SGLang 0\.4\.0 for cpu; .*>=0\.5\.12"):
        find_environment(SglangTable(environment=str(folder)))


def test_a_mark_that_cannot_be_read_is_half_made(tmp_path: Path) -> None:
    folder = made(tmp_path / "mine")
    (folder / "agenttrain-sglang.json").write_text("{")
    with pytest.raises(ConfigError, match="is half made"):
        find_environment(SglangTable(environment=str(folder)))


def test_what_is_ready_is_not_made_again(tmp_path: Path) -> None:
    folder = made(tmp_path / "mine")
    assert make_environment(folder, "cpu", tell=silent) == (Environment(folder, "cpu", TESTED), False)


def test_a_ready_one_for_another_device_is_left_alone(tmp_path: Path) -> None:
    folder = made(tmp_path / "mine")
    with pytest.raises(ConfigError, match="is ready for cpu, and cuda is wanted"):
        make_environment(folder, "cuda", tell=silent)


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="isn't empty and wasn't made by agenttrain sglang setup"):
        make_environment(tmp_path, "cpu", tell=silent)
    assert (tmp_path / "thesis.txt").exists()


def test_a_second_setup_at_once_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "mine.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="Another agenttrain sglang setup is at work"):
            make_environment(tmp_path / "mine", "cpu", tell=silent)


def test_what_outlives_a_killed_setup_keeps_the_next_one_out(tmp_path: Path) -> None:
    """Two at work in one folder would leave a mixture; when the first one's command has ended, the next may begin."""
    folder, number = tmp_path / "mine", tmp_path / "number"
    stub = tmp_path / "python"
    stub.write_text(
        f'#!/bin/sh\ncase "$1" in -c) echo 3 {sys.version_info[1]};; '
        f"*) echo $$ > {number}.part; mv {number}.part {number}; exec sleep 600;; esac\n"
    )
    stub.chmod(0o755)
    code = (
        "import sys; from pathlib import Path; from agenttrain_sglang.environment import make_environment\n"
        "make_environment(Path(sys.argv[1]), 'cpu', tell=print, python=sys.argv[2])"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(folder), str(stub)], stdout=subprocess.DEVNULL) as setup:
        while not number.exists():
            assert setup.poll() is None
            time.sleep(0.02)
        setup.kill()
    lives_on = psutil.Process(int(number.read_text()))

    try:
        with pytest.raises(ConfigError, match="Another agenttrain sglang setup is at work"):
            make_environment(folder, "cpu", tell=silent)
    finally:
        lives_on.kill()
        lives_on.wait()
    stub.write_text(f'#!/bin/sh\ncase "$1" in -c) echo 3 {sys.version_info[1]};; *) exit 7;; esac\n')
    with pytest.raises(EngineError, match="failed while making"):
        make_environment(folder, "cpu", tell=silent, python=str(stub))


def test_a_python_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    """One that isn't there, and one of a version that SGLang wasn't tested with."""
    with pytest.raises(ConfigError, match=r"can't be run: .* Name a Python 3\.11 or 3\.12"):
        make_environment(tmp_path / "mine", "cpu", tell=silent, python=str(tmp_path / "nowhere"))
    old = tmp_path / "old"
    old.write_text("#!/bin/sh\necho 3 9\n")
    old.chmod(0o755)
    with pytest.raises(ConfigError, match=r"is Python 3\.9; SGLang .* was tested with 3\.11 or 3\.12"):
        make_environment(tmp_path / "mine", "cpu", tell=silent, python=str(old))


def test_a_failed_install_shows_its_last_lines_and_stays_half_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's PIP_* variables reach pip: here they leave it nothing to install from."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    told: list[str] = []
    folder = tmp_path / "mine"

    with pytest.raises(EngineError) as raised:
        make_environment(folder, "cpu", tell=told.append)

    assert "agenttrain sglang setup failed while installing what SGLang" in str(raised.value)
    assert "No matching distribution found for aiohappyeyeballs" in str(raised.value)
    assert "run it again" in str(raised.value)
    assert list(dict.fromkeys(line.split("s  ", 1)[1] for line in told)) == [
        "making a virtual environment",
        f"installing what SGLang {TESTED} needs",
    ]
    with pytest.raises(ConfigError, match="is half made"):
        find_environment(SglangTable(environment=str(folder)))


def test_a_half_made_one_is_made_again(tmp_path: Path) -> None:
    """What it held is gone, and the new one fails for a reason of its own: a Python without `venv`."""
    folder = made(tmp_path / "mine", ready=False)
    stub = tmp_path / "python"
    stub.write_text(
        f'#!/bin/sh\ncase "$1" in -c) echo {sys.version_info[0]} {sys.version_info[1]};; *) exit 7;; esac\n'
    )
    stub.chmod(0o755)
    with pytest.raises(EngineError, match=r"failed while making a virtual environment \(exit code 7"):
        make_environment(folder, "cpu", tell=silent, python=str(stub))
    assert not (folder / "bin").exists()
    assert json.loads((folder / "agenttrain-sglang.json").read_text()) == {"ready": False}


def test_another_pythons_environment_has_a_folder_of_its_own(tmp_path: Path) -> None:
    stub = tmp_path / "python"
    stub.write_text('#!/bin/sh\ncase "$1" in -c) echo 3 12;; *) exit 7;; esac\n')
    stub.chmod(0o755)
    with pytest.raises(EngineError, match=rf"sglang-{TESTED}-cpu-py3\.12"):
        make_environment(None, "cpu", tell=silent, python=str(stub))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_requirement_is_pinned(device: str) -> None:
    from agenttrain_sglang import environment

    lines = Path(environment.__file__).with_name(f"requirements_{device}.txt").read_text().splitlines()
    needs = [line for line in lines if line and not line.startswith("#")]
    assert needs
    assert [line for line in needs if "==" not in line] == []
