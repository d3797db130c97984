"""Does a fit end well whose server is killed again and again while it samples?

    python integrations/agenttrain-sglang/benchmarks/server_kills.py [--kills 5] [--seed 1] [--steps 8]

Fits the order desk on a server of its own, and ends that server's whole process group with SIGKILL at random moments in
which it is being asked. Needs `agenttrain sglang setup`. Prints one JSON object; exits 1 when the run did not end, a
count does not add up, a dropped token has no cause, or a process is left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

EXAMPLE = Path(__file__).parents[3] / "examples" / "order-desk"
SETTINGS = {
    "trainer.tasks_per_step": 10,
    "trainer.group_size": 8,
    "eval.tasks": 60,
    "sglang.restarts": 20,
    "sglang.silence_s": 20.0,
}
LEAST_S, MOST_S = 2.0, 9.0
"""Between a server's first answer and its end."""


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--kills", type=int, default=5)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--steps", type=int, default=8)
    chosen = arguments.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = killed_run(Path(name), chosen)
    print(json.dumps(found, indent=2))
    return int(bool(found["faults"]))


def killed_run(folder: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    settings = {**SETTINGS, "trainer.steps": chosen.steps}
    command = [sys.executable, "-m", "agenttrain", "fit", str(EXAMPLE / "graph.py"), "--engine", "sglang", "--json"]
    command += ["--seed", str(chosen.seed)]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    began = time.monotonic()
    with (folder / "fit.err").open("w") as errors:
        fit = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        killed = kill_servers(fit, chosen.kills, random.Random(chosen.seed))
        out, _ = fit.communicate()
    finally:
        fit.kill()
    report = json.loads(out) if out.strip() else {}
    return {
        "wall_s": round(time.monotonic() - began, 1),
        "exit": fit.returncode,
        "kills": killed,
        **{key: report.get(key) for key in ("tokens", "difference", "logprob_gap", "engine_counts")},
        "statuses": report.get("trained", {}),
        "notes": [alarm["message"] for alarm in report.get("alarms", ()) if alarm["code"] == "engine"],
        "faults": [*faults(report, fit.returncode, len(killed), chosen.kills), *left(killed)],
        "error": "" if fit.returncode == 0 else (folder / "fit.err").read_text()[-2000:],
    }


def kill_servers(fit: subprocess.Popen[str], n: int, moments: random.Random) -> list[dict[str, Any]]:
    """End n servers of a fit, each some seconds after it began to answer; gives what was ended."""
    killed: list[dict[str, Any]] = []
    known: set[int] = set()
    began = time.monotonic()
    while fit.poll() is None and len(killed) < n:
        server = answering_server(fit.pid, known)
        if server is None:
            time.sleep(0.2)
            continue
        time.sleep(moments.uniform(LEAST_S, MOST_S))
        if fit.poll() is not None or not server.is_running():
            continue
        known.add(server.pid)
        group = os.getpgid(server.pid)
        killed.append({"group": group, "processes": members(group), "at": round(time.monotonic() - began, 1)})
        os.killpg(group, signal.SIGKILL)
    return killed


def members(group: int) -> list[int]:
    """Processes of a group."""
    found = []
    for pid in psutil.pids():
        try:
            if os.getpgid(pid) == group:
                found.append(pid)
        except ProcessLookupError:
            continue
    return found


def answering_server(fit_pid: int, known: set[int]) -> psutil.Process | None:
    """The first process of a server of the fit that listens on its port and was not ended yet."""
    try:
        children = psutil.Process(fit_pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return None
    for child in children:
        try:
            is_server = "sglang.launch_server" in child.cmdline() and child.pid not in known
            if is_server and any(c.status == psutil.CONN_LISTEN for c in child.net_connections("tcp")):
                return child
        except (psutil.NoSuchProcess, ProcessLookupError, psutil.AccessDenied):
            continue
    return None


def faults(report: dict[str, Any], exit_code: int, n_killed: int, n_wanted: int) -> list[str]:
    if exit_code != 0 or not report:
        return [f"the run ended with exit code {exit_code}"]
    tokens, found = report["tokens"], []
    if tokens["sampled"] != tokens["trained"] + tokens["frozen"] + tokens["dropped"]:
        found.append(f"tokens do not add up: {tokens}")
    if sum(tokens["dropped_by_cause"].values()) != tokens["dropped"] or "" in tokens["dropped_by_cause"]:
        found.append(f"dropped tokens without a cause: {tokens['dropped_by_cause']}")
    if tokens["drifted"]:
        found.append(f"{tokens['drifted']} trained tokens drifted")
    if n_killed != n_wanted:
        found.append(f"{n_killed} of {n_wanted} kills were made before the run ended")
    if report["engine_counts"]["restarts"] < n_killed:
        found.append(f"{report['engine_counts']['restarts']:g} replacements for {n_killed} kills")
    if report["logprob_gap"]["max"] >= 1e-3:
        found.append(f"logprob_gap.max is {report['logprob_gap']['max']}")
    return found


def left(killed: list[dict[str, Any]]) -> list[str]:
    """Processes of killed servers that are still there."""
    return [
        f"process {pid} of a killed server is left"
        for each in killed
        for pid in each["processes"]
        if psutil.pid_exists(pid) and "sglang" in " ".join(psutil.Process(pid).cmdline())
    ]


if __name__ == "__main__":
    sys.exit(main())
