"""What is shipped to the nodes of a joined cluster, and under which paths."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from agenttrain.config import resolve
from agenttrain.errors import ConfigError
from agenttrain.records import RolloutSpec

from agenttrain_verl import shipping
from agenttrain_verl.plan import Plan, plan_of
from agenttrain_verl.shipping import carried_variables, graph_root, runtime_env, shipped_files, staged

POLICY = Path(__file__).parents[4] / "examples" / "order-desk" / "policy"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A graph with siblings, and much beside it that nobody needs."""
    files = (
        "graph.py tools/search.py tasks.jsonl data.bin policy/config.json policy/model.safetensors .git/HEAD "
        "runs/r0/report.json .venv/bin/python env/pyvenv.cfg env/lib/x.py __pycache__/graph.pyc .gitignore"
    )
    for name in files.split():
        file = tmp_path / "app" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    return tmp_path / "app"


def spec_of(graph: Path, policy: Path, run_dir: Path) -> RolloutSpec:
    return RolloutSpec(graph_file=str(graph), attribute="graph", config={}, run_dir=str(run_dir), model=str(policy))


def plan() -> Plan:
    return plan_of(resolve(("test", {"trainer": {"name": "verl"}})), POLICY, n_tasks=20)


def names(folder: Path) -> list[str]:
    return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())


@pytest.fixture(autouse=True)
def links_removed() -> Iterator[None]:
    folder = Path("/tmp") / f"agenttrain-shipped-{os.getuid()}"
    before = set(folder.iterdir()) if folder.is_dir() else set()
    yield
    for link in (set(folder.iterdir()) if folder.is_dir() else set()) - before:
        link.unlink()


def test_on_an_own_cluster_only_variables_are_carried(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    spec = spec_of(project / "graph.py", project / "policy", project / "runs/r1")
    env, seen = runtime_env(plan(), spec, joined=False, run_dir=project / "runs/r1")
    assert seen is spec
    assert list(env) == ["env_vars"]
    assert (env["env_vars"]["OTEL_TRACES_EXPORTER"], env["env_vars"]["VERL_PLATFORM"]) == ("otlp", "cpu")
    assert not (project / "runs/r1").exists()


def test_variables_of_others_stay_here() -> None:
    given = {"AGENTTRAIN_PLUGINS": "verl", "OPENAI_API_KEY": "secret", "HOME": "/root", "VERL_LOGGING_LEVEL": "WARN"}
    assert carried_variables(given) == {"AGENTTRAIN_PLUGINS": "verl", "VERL_LOGGING_LEVEL": "WARN"}


def test_the_graphs_folder_is_staged_without_runs_caches_and_environments(project: Path) -> None:
    shipment = staged(spec_of(project / "graph.py", project / "policy", project / "runs/r1"), project / "runs/r1/s")
    assert names(shipment.folder) == [
        *(f"graph-files/{name}" for name in ("data.bin", "graph.py", "policy/config.json", "policy/model.safetensors")),
        *("graph-files/tasks.jsonl", "graph-files/tools/search.py"),
    ]
    assert (shipment.folder / "graph-files/data.bin").stat().st_ino == (project / "data.bin").stat().st_ino


def test_paths_of_the_spec_lead_through_one_link(project: Path) -> None:
    spec = spec_of(project / "graph.py", project / "policy", project / "runs/r1")
    env, seen = runtime_env(plan(), spec, joined=True, run_dir=project / "runs/r1")
    link = Path(env["env_vars"]["AGENTTRAIN_VERL_SHIPPED"])
    assert seen.graph_file == str(link / "graph-files/graph.py")
    assert seen.model == str(link / "graph-files/policy")
    assert Path(seen.graph_file).read_text() == "graph.py"
    assert env["working_dir"] == str(project / "runs/r1/verl/shipped")
    assert seen.attribute == "graph"


def test_the_link_is_named_after_what_is_shipped(project: Path) -> None:
    spec = spec_of(project / "graph.py", project / "policy", project / "runs/r1")
    first, again = (staged(spec, project / "runs/r1/s").link for _ in range(2))
    (project / "tools/search.py").write_text("changed")
    assert first == again != staged(spec, project / "runs/r1/s").link


def test_a_policy_elsewhere_is_shipped_beside_the_graph(project: Path, tmp_path: Path) -> None:
    (project / "policy").rename(tmp_path / "weights")
    shipment = staged(spec_of(project / "graph.py", tmp_path / "weights", project / "runs/r1"), tmp_path / "s")
    assert shipment.spec.model == str(shipment.link / "policy-files")
    assert names(shipment.folder / "policy-files") == ["config.json", "model.safetensors"]


def test_a_large_policy_stays_where_it_is(project: Path, tmp_path: Path) -> None:
    with (project / "policy/model.safetensors").open("wb") as weights:
        weights.truncate(301 * 2**20)
    shipment = staged(spec_of(project / "graph.py", project / "policy", project / "runs/r1"), tmp_path / "s")
    assert shipment.spec.model == str(project / "policy")
    assert not (shipment.folder / "graph-files/policy").exists()


def test_links_into_a_hub_cache_are_shipped_as_files(project: Path, tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    (project / "policy").rename(blobs)
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(blob)
    shipment = staged(spec_of(project / "graph.py", snapshot, project / "runs/r1"), tmp_path / "s")
    copies = list((shipment.folder / "policy-files").iterdir())
    assert len(copies) == 2
    assert not any(copy.is_symlink() for copy in copies)


def test_what_is_too_large_is_refused_with_the_largest(project: Path, tmp_path: Path) -> None:
    with (project / "data.bin").open("wb") as data:
        data.truncate(600 * 2**20)
    with pytest.raises(ConfigError, match=r"over 500 MiB.*data\.bin \(600 MiB\).*\.rayignore"):
        staged(spec_of(project / "graph.py", project / "policy", project / "runs/r1"), tmp_path / "s")
    (project / ".rayignore").write_text("# large\n*.bin\n/tools/\n")
    shipment = staged(spec_of(project / "graph.py", project / "policy", project / "runs/r1"), tmp_path / "s")
    assert not any("data.bin" in name or "tools" in name for name in names(shipment.folder))


def test_the_root_has_the_package_and_the_langgraph_json(tmp_path: Path) -> None:
    graph = tmp_path / "src" / "agent" / "graph.py"
    graph.parent.mkdir(parents=True)
    graph.write_text("")
    (graph.parent / "__init__.py").write_text("")
    assert graph_root(graph) == tmp_path / "src"
    (tmp_path / "langgraph.json").write_text('{"dependencies": ["."], "graphs": {"g": "./src/agent/graph.py:graph"}}')
    assert graph_root(graph) == tmp_path


def test_shipped_files_come_in_one_order(project: Path) -> None:
    assert [path.as_posix() for path in shipped_files(project, besides=(project / "policy",))] == [
        *("data.bin", "graph.py", "tasks.jsonl", "tools/search.py")
    ]


def test_a_process_in_the_working_directory_finds_it_under_the_link(project: Path, tmp_path: Path) -> None:
    link = Path("/tmp") / f"agenttrain-shipped-{os.getuid()}" / "test-of-a-link"
    code = "from agenttrain_verl.shipping import link_working_dir; link_working_dir()"
    subprocess.run(
        [sys.executable, "-c", code], cwd=project, check=True, env={**os.environ, shipping.LINK_VARIABLE: str(link)}
    )
    assert link.resolve() == project.resolve()
