"""`agenttrain sglang`, through agenttrain's own command line in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from agenttrain_sglang.versions import TESTED


def agenttrain(*arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "COLUMNS": "100", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "agenttrain", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)


def test_help_names_the_options(tmp_path: Path) -> None:
    done = agenttrain("sglang", "setup", "--help", cache=tmp_path)
    assert done.returncode == 0
    for option in ("--device", "--folder", "--python", "--json"):
        assert option in done.stdout


def test_an_unknown_device_is_refused(tmp_path: Path) -> None:
    done = agenttrain("sglang", "setup", "--device", "tpu", "--json", cache=tmp_path)
    message = "--device is 'tpu'; it takes cpu, cuda."
    assert done.returncode == 2
    assert json.loads(done.stdout) == {"error": {"type": "ConfigError", "message": message}}
    assert message in done.stderr


def test_a_failure_of_the_work_is_one_object_and_exit_code_1(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncase "$1" in -c) echo 3 {sys.version_info[1]};; *) echo no room; exit 7;; esac\n')
    python.chmod(0o755)
    done = agenttrain("sglang", "setup", "--device", "cpu", "--python", str(python), "--json", cache=tmp_path)
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"]["type"] == "EngineError"
    assert "no room" in done.stderr


def test_done_twice_it_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").touch()
    (folder / "agenttrain-sglang.json").write_text(json.dumps({"ready": True, "device": "cpu", "sglang": TESTED}))

    told = agenttrain("sglang", "setup", "--device", "cpu", "--folder", str(folder), cache=tmp_path)
    object_ = agenttrain("sglang", "setup", "--device", "cpu", "--folder", str(folder), "--json", cache=tmp_path)

    assert told.stdout == (
        f"SGLang {TESTED} for cpu was ready already in {folder}.\n"
        f'Name it in agenttrain.toml: [sglang] environment = "{folder}"\n'
    )
    assert json.loads(object_.stdout) | {"seconds": 0} == {
        "folder": str(folder),
        "device": "cpu",
        "sglang": TESTED,
        "made": False,
        "seconds": 0,
    }


def test_the_commands_import_nothing_heavy() -> None:
    """`agenttrain --help` opens in under half a second; these are what would keep it from that."""
    code = (
        "import sys, agenttrain_sglang.commands; print([m for m in ('torch', 'aiohttp', 'psutil') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
