"""All checks, one after the other: facts are read here, and findings collected."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agenttrain.config import environment
from agenttrain.doctor import leftovers, machine, policy, sandboxes, versions
from agenttrain.doctor.finding import Finding
from agenttrain.errors import GraphError, PluginError
from agenttrain.plugins import Plugins


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """All that was found, and what was looked at."""

    findings: tuple[Finding, ...]
    """Errors first, in the order of the checks."""
    versions: Mapping[str, Any]
    """Python and distributions, by name."""
    tested: Mapping[str, str]
    """Distribution to the version that agenttrain is tested with."""
    machine: Mapping[str, Any]
    """cores, omp_num_threads, memory_bytes, disk_bytes, torch, gpus, sandboxes."""
    plugins: Mapping[str, Any]
    """loaded and left_out."""
    policy: Mapping[str, Any]
    """Of the graph or model that was named; empty without one."""

    @property
    def ok(self) -> bool:
        return not any(finding.severity == "error" for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, `ok` and `findings` first."""
        return {
            "ok": self.ok,
            "findings": [finding.as_dict() for finding in self.findings],
            "versions": dict(self.versions),
            "machine": dict(self.machine),
            "plugins": dict(self.plugins),
            "policy": dict(self.policy),
        }


def examine(*, cwd: Path, runs: Path, target: str | None = None, flags: Mapping[str, Any] | None = None) -> Examination:
    """Look at everything that a run rests on.

    Args:
        runs: where runs are written.
        target: graph.py or graph.py:attribute; its model, template, tasks and plugins are tried too.
        flags: tables that the command line set. A `model` without a target is tried by itself.
    """
    given = flags or {}
    found, tested = versions.installed(), versions.tested_versions()
    findings = [
        *versions.python_findings(versions.version_table({})["python"], versions.requires_python()),
        *versions.requirement_findings(found, tested),
        *versions.untested_findings(found, tested),
        *versions.import_findings(versions.IMPORTED, tested),
    ]
    here = machine.this_machine(runs)
    torch_findings, torch_facts = _torch(here, tested)
    plugin_findings, plugins = _plugins()
    findings += [*machine.machine_findings(here), *torch_findings, *plugin_findings]
    if not any(finding.code == "import_fails" for finding in findings):
        findings += _gate(tested)
    findings += [
        *leftovers.part_findings(runs, time.time()),
        *leftovers.engine_findings(leftovers.processes()),
        *sandboxes.left_findings(),
    ]
    made_here = sandboxes.what_works()
    findings += sandboxes.sandbox_findings(made_here)
    tried = policy.Tried()
    if target is not None:
        tried = policy.try_graph(target, cwd, given)
    elif given.get("model"):
        tried = policy.try_model(given["model"], cwd, given.get("renderer", {}).get("family"))
    findings += tried.findings
    return Examination(
        findings=tuple(sorted(findings, key=lambda finding: finding.severity)),
        versions=versions.version_table(found),
        tested=tested,
        machine={
            "cores": here.usable_cores,
            "omp_num_threads": here.omp_num_threads,
            "memory_bytes": here.memory_bytes,
            "disk_bytes": here.disk_bytes,
            **torch_facts,
            "sandboxes": made_here,
        },
        plugins=plugins,
        policy=tried.facts,
    )


def _torch(here: machine.Machine, tested: Mapping[str, str]) -> tuple[list[Finding], dict[str, Any]]:
    from agenttrain.local.torch_build import torch_build

    try:
        build = torch_build()
    except Exception:
        return versions.import_findings(("torch",), tested), {"torch": None, "gpus": 0}
    name = f"{build.version}, {build.accelerator or 'CPU'}, {build.cpu_capability}"
    return machine.torch_findings(build, here), {"torch": name, "gpus": build.n_gpus}


def _gate(tested: Mapping[str, str]) -> list[Finding]:
    """Whether every model call of the installed langchain-core would be caught."""
    from agenttrain.graph.self_test import self_test

    try:
        self_test()
    except GraphError as error:
        return [
            Finding(
                code="gate_self_test",
                severity="error",
                where="langchain-core",
                seen=str(error),
                accepted="a policy that answers each call once",
                fix=f"pip install 'langchain-core=={tested['langchain-core']}'",
            )
        ]
    return []


def _plugins() -> tuple[list[Finding], dict[str, Any]]:
    """Findings, and what is loaded and left out."""
    try:
        plugins = Plugins.load(only=environment("AGENTTRAIN_PLUGINS"))
    except PluginError as error:
        refused = Finding(
            code="plugins_refused",
            severity="error",
            where="plugins",
            seen=str(error),
            accepted="plugins whose names differ, and that are installed",
            fix="pip uninstall one of them, or mend AGENTTRAIN_PLUGINS",
        )
        return [refused], {"loaded": [], "left_out": []}
    findings = [
        Finding(
            code="plugin_left_out",
            severity="warning",
            where=problem.name,
            seen=problem.reason,
            accepted="a plugin that loads whole",
            fix="upgrade or uninstall its distribution; agenttrain plugins lists what is loaded",
        )
        for problem in plugins.problems
    ]
    loaded = [f"{plugin.name} {plugin.version}" for plugin in plugins.loaded]
    return findings, {"loaded": loaded, "left_out": [problem.name for problem in plugins.problems]}
