"""Facts of a machine to findings; and the facts of this one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agenttrain.doctor.machine import GIB, Machine, machine_findings, quota_cores, this_machine, torch_findings
from agenttrain.local.torch_build import TorchBuild, torch_build

GOOD = Machine(
    cores=8,
    allowed_cores=8,
    quota_cores=None,
    omp_num_threads="1",
    memory_bytes=16 * GIB,
    disk_bytes=50 * GIB,
    runs=Path("runs"),
    runs_writable=True,
    has_gpu=False,
)
CPU = TorchBuild(version="2.13.0+cpu", accelerator=None, n_gpus=0, cpu_capability="AVX512", n_threads=1)


def seen(**facts: object) -> list[tuple[str, str]]:
    return [(f.code, f.severity) for f in machine_findings(replace(GOOD, **facts))]  # type: ignore[arg-type]


def test_a_good_machine_has_no_finding() -> None:
    """Nor has one whose memory is not known."""
    assert seen() == []
    assert seen(memory_bytes=None, omp_num_threads=None) == []


@pytest.mark.parametrize(
    ("facts", "code", "severity"),
    [
        ({"omp_num_threads": "9"}, "threads_over_cores", "warning"),
        ({"omp_num_threads": "4,2", "quota_cores": 2.0}, "threads_over_cores", "warning"),
        ({"omp_num_threads": "all"}, "threads_unreadable", "warning"),
        ({"omp_num_threads": None, "quota_cores": 2.0}, "threads_unlimited", "warning"),
        ({"allowed_cores": 1}, "one_core", "warning"),
        ({"memory_bytes": 2 * GIB}, "memory_low", "warning"),
        ({"memory_bytes": GIB // 2}, "memory_low", "error"),
        ({"disk_bytes": GIB}, "disk_low", "warning"),
        ({"disk_bytes": 1000}, "disk_low", "error"),
        ({"runs_writable": False}, "runs_unwritable", "error"),
    ],
)
def test_what_is_wrong_has_a_code(facts: dict[str, object], code: str, severity: str) -> None:
    """And only that is told."""
    assert seen(**facts) == [(code, severity)]


def test_every_finding_says_what_to_do() -> None:
    """Seen, accepted and fix are never empty."""
    broken = replace(
        GOOD, omp_num_threads="64", quota_cores=0.5, memory_bytes=1, disk_bytes=1, has_gpu=True, runs=Path("/data/runs")
    )
    findings = [*machine_findings(broken), *torch_findings(replace(CPU, cpu_capability="DEFAULT"), broken)]
    assert len(findings) == 6
    assert all(value for finding in findings for value in finding.as_dict().values())
    assert findings[1].fix == "export OMP_NUM_THREADS=1"


def test_torch_is_held_against_the_gpu() -> None:
    """A build without CUDA beside a GPU; a CUDA build that sees none; an old CPU."""
    gpu = replace(GOOD, has_gpu=True)
    cuda = replace(CPU, version="2.13.0", accelerator="CUDA 12.8")
    assert torch_findings(CPU, GOOD) == []
    assert torch_findings(cuda, GOOD) == []
    assert torch_findings(replace(cuda, n_gpus=1), gpu) == []
    assert [f.code for f in torch_findings(CPU, gpu)] == ["torch_cpu_build"]
    assert "'torch==2.13.0'" in torch_findings(CPU, gpu)[0].fix
    assert [f.code for f in torch_findings(cuda, gpu)] == ["gpu_unseen"]
    assert [f.code for f in torch_findings(replace(CPU, cpu_capability="NO AVX"), GOOD)] == ["slow_cpu"]


def test_a_containers_share_of_the_cores(tmp_path: Path) -> None:
    """In both versions of control groups; "max" and -1 are no limit."""
    assert quota_cores(tmp_path) is None
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert quota_cores(tmp_path) is None
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("50000\n")
    assert quota_cores(tmp_path) == 0.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert quota_cores(tmp_path) is None
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    assert quota_cores(tmp_path) == 2.5


def test_this_machine_and_its_torch(tmp_path: Path) -> None:
    """Facts that hold anywhere; runs/ need not be there yet."""
    here = this_machine(tmp_path / "not" / "yet")
    assert 0 < here.usable_cores <= here.cores
    assert here.runs_writable
    assert here.disk_bytes > 0
    build = torch_build()
    assert build.version.startswith("2.")
    assert build.n_threads >= 1
