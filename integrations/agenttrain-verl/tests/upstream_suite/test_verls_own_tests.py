"""veRL's own tests of agent loops, which its distribution installs, pass with this plugin loaded.

Left out are those that load a model from a hub or ask for a GPU. veRL's tests of its continuous-token builders are in
no distribution of 0.9.1 (wheel or source).
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

import pytest

SUITES = {
    "tests/experimental/agent_loop/test_agent_loop_extra_fields_schema_on_cpu.py": 7,
    "tests/experimental/agent_loop/test_audio_server_contract_on_cpu.py": 4,
    "tests/experimental/agent_loop/test_call_tool_on_cpu.py": 8,
    "tests/experimental/agent_loop/test_multimodal_position_ids_on_cpu.py": 1,
    "tests/experimental/agent_loop/test_qwen3_tool_parser_on_cpu.py": 5,
    "tests/experimental/agent_loop/test_tool_call_id_on_cpu.py": 3,
    "tests/tools/test_function_tool_on_cpu.py": 32,
    "tests/tools/test_mixed_tools_on_cpu.py": 10,
    "tests/trainer/test_multi_trajectories_advantage_on_cpu.py": 2,
}
"""File of veRL 0.9.1 to the tests in it: 72 in all."""


def environment() -> dict[str, str]:
    return os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def outcomes(report: Path) -> dict[str, dict[str, int]]:
    """File to how many of its tests there are and how many did not pass."""
    found: dict[str, dict[str, int]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        module = case.get("classname", "").split(".Test")[0]
        file = found.setdefault(f"{module.replace('.', '/')}.py", {"tests": 0, "not passed": 0})
        file["tests"] += 1
        file["not passed"] += len(case) > 0 and any(child.tag in ("failure", "error", "skipped") for child in case)
    return found


@pytest.mark.long
def test_they_pass_beside_our_plugin(tmp_path: Path) -> None:
    """As many as are written above, none skipped."""
    site_packages = Path(str(metadata.distribution("verl").locate_file("")))
    report = tmp_path / "report.xml"
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("-c", str(tmp_path / "pytest.ini"), "--rootdir", str(site_packages), "--junit-xml", str(report)),
            *SUITES,
        ],
        cwd=site_packages,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert outcomes(report) == {file: {"tests": n, "not passed": 0} for file, n in SUITES.items()}


@pytest.mark.long
def test_our_plugin_is_loaded_there() -> None:
    """veRL imports it in every process that imports veRL."""
    seen = "import sys, verl; print('agenttrain_verl.in_every_process' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", seen], env=environment(), capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1] == "True", done.stderr[-2000:]
