"""veRL's own tests of agent loops, which its distribution installs, pass with this plugin loaded.

Left out are those that load a model from a hub or ask for a GPU. veRL's tests of its continuous-token builders are in
no distribution of 0.9.1 (wheel or source): they are run where a checkout of its repository is at hand.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

import pytest

pytestmark = pytest.mark.long

AGENT_LOOP = "tests/experimental/agent_loop/"
BASIC = f"{AGENT_LOOP}test_basic_agent_loop.py"
SUITES = {
    f"{AGENT_LOOP}test_agent_loop_extra_fields_schema_on_cpu.py": 7,
    f"{AGENT_LOOP}test_audio_server_contract_on_cpu.py": 4,
    BASIC: 16,
    f"{AGENT_LOOP}test_call_tool_on_cpu.py": 8,
    f"{AGENT_LOOP}test_multimodal_position_ids_on_cpu.py": 1,
    f"{AGENT_LOOP}test_qwen3_tool_parser_on_cpu.py": 5,
    f"{AGENT_LOOP}test_tool_call_id_on_cpu.py": 3,
    "tests/tools/test_function_tool_on_cpu.py": 32,
    "tests/tools/test_mixed_tools_on_cpu.py": 10,
    "tests/trainer/test_multi_trajectories_advantage_on_cpu.py": 2,
}
"""File of veRL 0.9.1 to the tests in it that run without a model: 88 in all."""
PARTS = {
    BASIC: (
        "TestLoadBalancerRouting",
        "TestLoadBalancerStickySession",
        "TestLoadBalancerHybrid",
        "test_get_trajectory_info",
    )
}
"""What is run of a file, where it is not the whole."""
CHECKOUT = "AGENTTRAIN_VERL_CHECKOUT"
"""Names a folder with the working tree of veRL's repository."""
CONTINUOUS = "tests/utils/test_continuous_token_on_cpu.py"
BUILDERS = "verl/utils/tokenizer/continuous_token.py"


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """For a process that may start a Ray of its own, and finds no other one."""
    with TemporaryDirectory(prefix="at-", dir="/tmp", ignore_cleanup_errors=True) as short:
        own = {"RAY_TMPDIR": short, "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
        given = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        yield given | own | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def run(root: Path, tests: list[str], *, environment: dict[str, str], folder: Path, cwd: Path) -> dict[str, list[str]]:
    """Tests below a folder that are not ours, to the names that passed and those that did not, by file.

    Args:
        folder: for what is written.
        cwd: is on the path.
    """
    report = folder / "report.xml"
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib"),
            *("-c", str(folder / "pytest.ini"), "--rootdir", str(root), "--junit-xml", str(report)),
            *(str(root / test) for test in tests),
        ],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode in (0, 1), done.stdout[-4000:] + done.stderr[-2000:]
    return outcomes(report)


def outcomes(report: Path) -> dict[str, list[str]]:
    """ "passed" and "not passed" to names: `file::test`."""
    found: dict[str, list[str]] = {"passed": [], "not passed": []}
    for case in ElementTree.parse(report).iter("testcase"):
        module = case.get("classname", "").split(".Test")[0]
        bad = any(child.tag in ("failure", "error", "skipped") for child in case)
        found["not passed" if bad else "passed"].append(f"{module.replace('.', '/')}.py::{case.get('name')}")
    return found


def test_they_pass_beside_our_plugin(environment: dict[str, str], tmp_path: Path) -> None:
    """As many as are written above, none skipped."""
    site_packages = Path(str(metadata.distribution("verl").locate_file("")))
    wanted = [f"{file}::{part}" for file, parts in PARTS.items() for part in parts]
    wanted += [file for file in SUITES if file not in PARTS]
    found = run(site_packages, wanted, environment=environment, folder=tmp_path, cwd=site_packages)
    assert found["not passed"] == []
    files = [name.partition("::")[0] for name in found["passed"]]
    assert {file: files.count(file) for file in SUITES} == SUITES


def test_its_builders_of_continuous_tokens_pass_beside_our_plugin(environment: dict[str, str], tmp_path: Path) -> None:
    """Against the installed veRL, from a checkout of the revision that it was built from."""
    checkout = Path(os.environ.get(CHECKOUT, ""))
    if not os.environ.get(CHECKOUT):
        pytest.skip(f"{CHECKOUT} names no checkout of veRL's repository: {CONTINUOUS} is in no distribution of it")
    installed = Path(str(metadata.distribution("verl").locate_file(BUILDERS)))
    is_its_own = (checkout / BUILDERS).read_bytes() == installed.read_bytes()
    found = run(checkout, [CONTINUOUS], environment=environment, folder=tmp_path, cwd=tmp_path)
    print({outcome: len(names) for outcome, names in found.items()}, *found["not passed"], sep="\n")
    if not is_its_own:
        pytest.skip(
            f"{checkout} is of another revision than the installed veRL ({BUILDERS} differs): {len(found['passed'])} "
            f"of its tests pass, {len(found['not passed'])} do not"
        )
    assert found["not passed"] == []
    assert len(found["passed"]) > 100


def test_our_plugin_is_loaded_there(environment: dict[str, str]) -> None:
    """veRL imports it in every process that imports veRL."""
    seen = "import sys, verl; print('agenttrain_verl.in_every_process' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", seen], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1] == "True", done.stderr[-2000:]
