"""Cores, threads, memory, disk and GPU of this machine, or of the container that this process is in."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from agenttrain.config import environment
from agenttrain.doctor.finding import Finding
from agenttrain.local.torch_build import TorchBuild
from agenttrain.memory import available_bytes
from agenttrain.run_folder import SPARE_BYTES

GIB = 2**30
LEAST_MEMORY, GOOD_MEMORY = 1 * GIB, 3 * GIB
"""One process with torch and a small model; the two that a run has, with their rollouts."""
GOOD_DISK = 2 * GIB
"""Some runs of a small policy."""
FAST = ("AVX2", "AVX512", "AMX", "NEON", "SVE", "VSX", "ZVECTOR")
"""What torch's kernels are made for, as the beginnings of its own words for it."""
GPU_DEVICES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/kfd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a run will find."""

    cores: int
    """Of the machine."""
    allowed_cores: int
    """That this process may run on."""
    quota_cores: float | None
    """Core seconds a second that its control group grants. None: no limit."""
    omp_num_threads: str | None
    """As the environment has it."""
    memory_bytes: int | None
    """That may still be used. None: not known here."""
    disk_bytes: int
    """Free where runs/ stands or would stand."""
    runs: Path
    runs_writable: bool
    has_gpu: bool
    """A device file of a GPU's driver is there."""

    @property
    def usable_cores(self) -> float:
        return min(self.cores, self.allowed_cores, self.quota_cores or self.cores)


def this_machine(runs: Path) -> Machine:
    """The facts of here and now.

    Args:
        runs: where runs are written; it need not be there yet.
    """
    there = next(folder for folder in (runs.absolute(), *runs.absolute().parents) if folder.exists())
    cores = os.cpu_count() or 1
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return Machine(
        cores=cores,
        allowed_cores=len(affinity(0)) if affinity is not None else cores,
        quota_cores=quota_cores(Path("/sys/fs/cgroup")),
        omp_num_threads=environment("OMP_NUM_THREADS"),
        memory_bytes=available_bytes(),
        disk_bytes=shutil.disk_usage(there).free,
        runs=runs,
        runs_writable=os.access(there, os.W_OK),
        has_gpu=any(Path(device).exists() for device in GPU_DEVICES),
    )


def quota_cores(groups: Path) -> float | None:
    """Core seconds a second that the container may use. None: no limit.

    Args:
        groups: where control groups are mounted; version 2 and 1 are read.
    """
    try:
        quota, period = (groups / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (groups / "cpu" / "cpu.cfs_quota_us").read_text()
            period = (groups / "cpu" / "cpu.cfs_period_us").read_text()
        except OSError:
            return None
    return float(quota) / float(period) if quota.strip().isdigit() else None


def machine_findings(machine: Machine) -> list[Finding]:
    """What makes a run slow or ends it, by the machine alone."""
    return [*_thread_findings(machine), *_memory_findings(machine), *_disk_findings(machine)]


def torch_findings(build: TorchBuild, machine: Machine) -> list[Finding]:
    """Whether torch was built for this machine."""
    findings = []
    if machine.has_gpu and build.accelerator is None:
        findings.append(
            _warning(
                "torch_cpu_build",
                "torch",
                f"torch {build.version} is built for the CPU, and there is a GPU",
                "a build for the GPU",
                f"pip install --force-reinstall 'torch=={build.version.partition('+')[0]}', for your CUDA",
            )
        )
    elif machine.has_gpu and build.n_gpus == 0:
        findings.append(
            _warning(
                "gpu_unseen",
                "torch",
                f"torch {build.version} for {build.accelerator} sees no GPU, and there is one",
                "at least 1 GPU",
                "nvidia-smi  (the driver must be as new as torch's CUDA; CUDA_VISIBLE_DEVICES must not be empty)",
            )
        )
    if not build.cpu_capability.upper().startswith(FAST):
        findings.append(
            _warning(
                "slow_cpu",
                "torch",
                f"torch uses {build.cpu_capability} on this CPU",
                "AVX2 or better",
                "run on a newer CPU, or unset ATEN_CPU_CAPABILITY",
            )
        )
    return findings


def _thread_findings(machine: Machine) -> list[Finding]:
    usable = machine.usable_cores
    findings = []
    if usable < 2:
        findings.append(
            _warning(
                "one_core",
                "machine",
                f"{usable:g} cores",
                "at least 2: one for the engine",
                "give the container 2 cores",
            )
        )
    given = machine.omp_num_threads
    if given and not given.split(",")[0].isdigit():
        findings.append(
            _warning("threads_unreadable", "OMP_NUM_THREADS", given, "a number", "export OMP_NUM_THREADS=1")
        )
    elif given and int(given.split(",")[0]) > max(1, usable):
        findings.append(
            _warning("threads_over_cores", "OMP_NUM_THREADS", given, f"at most {usable:g}", "export OMP_NUM_THREADS=1")
        )
    elif not given and usable < machine.cores / 2:
        findings.append(
            _warning(
                "threads_unlimited",
                "OMP_NUM_THREADS",
                f"not set, and {usable:g} of the machine's {machine.cores} cores are ours: libraries start one thread "
                "for each",
                f"at most {usable:g}",
                "export OMP_NUM_THREADS=1",
            )
        )
    return findings


def _memory_findings(machine: Machine) -> list[Finding]:
    if machine.memory_bytes is None or machine.memory_bytes >= GOOD_MEMORY:
        return []
    return [
        Finding(
            code="memory_low",
            severity="error" if machine.memory_bytes < LEAST_MEMORY else "warning",
            where="machine",
            seen=f"{machine.memory_bytes / GIB:.1f} GiB may still be used",
            accepted=f"{GOOD_MEMORY / GIB:.0f} GiB",
            fix="end other programs, or raise the container's memory limit",
        )
    ]


def _disk_findings(machine: Machine) -> list[Finding]:
    if not machine.runs_writable:
        return [
            Finding(
                code="runs_unwritable",
                severity="error",
                where=str(machine.runs),
                seen="a folder that may not be written to",
                accepted="one that may: runs are written there",
                fix="start in a folder of your own",
            )
        ]
    if machine.disk_bytes >= GOOD_DISK:
        return []
    return [
        Finding(
            code="disk_low",
            severity="error" if machine.disk_bytes < SPARE_BYTES else "warning",
            where=str(machine.runs),
            seen=f"{machine.disk_bytes / GIB:.1f} GiB free",
            accepted=f"{GOOD_DISK / GIB:.0f} GiB",
            fix=f"du -sh {machine.runs}/*  (old runs can go), or start in another folder",
        )
    ]


def _warning(code: str, where: str, seen: str, accepted: str, fix: str) -> Finding:
    return Finding(code=code, severity="warning", where=where, seen=seen, accepted=accepted, fix=fix)
