"""A Ray error becomes one line: what went wrong at the bottom of it, where, and what that process said last."""

from __future__ import annotations

import re
from pathlib import Path

import ray
from agenttrain.errors import AgenttrainError
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError, RayTaskError

N_LINES = 3
TAIL_BYTES = 64 * 2**10
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
OF_RAY = re.compile(r"^(:(job_id|actor_name|task_name):|\[\d{4}-\d\d-\d\d .*\] )")
"""Ray's own lines in a worker's log: marks, and those of its C++ parts."""
NOISE = re.compile(r"%\||[Ww]arning|^(\[rank\d+\]:)?[WI]\d{4} |Using blocking ray\.get|Using dataset class")
"""Progress bars, warnings, what veRL prints as it starts: what a process goes on after, and no reason for its end."""
WENT = "connection error code 2. End of file."
"""Ray's word for a process that was suddenly gone."""
FIELD = re.compile(r"^\s*(class_name|pid|ip|name): (.+)$", re.MULTILINE)


def worker_trouble(error: BaseException) -> str | AgenttrainError:
    """What a Ray error comes down to, while Ray is there; an error of ours that it wraps is given itself.

    Args:
        error: as ray.get raised it; any other error is told as it is.

    Example: "EngineServer (pid 4711 on 10.0.0.7) died; it said last: CUDA out of memory"
    """
    innermost = cause_of(error)
    if isinstance(innermost, AgenttrainError):
        return innermost
    if isinstance(innermost, OutOfMemoryError):
        return f"Ray ended a process because the node's memory was nearly full: {_first_line(innermost)}"
    if isinstance(innermost, RayActorError):
        return _of_actor(innermost)
    text = _first_line(innermost)
    return f"{type(innermost).__name__}: {text}" if text else repr(innermost)


def cause_of(error: BaseException) -> BaseException:
    """The innermost error that has a name of its own: Ray wraps one in the next for each process that it passes."""
    seen = {id(error)}
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException) and id(error.cause) not in seen:
        error = error.cause
        seen.add(id(error))
    return error


def last_lines(pid: int, logs: Path, *, n: int = N_LINES) -> list[str]:
    """What a worker said last; Ray's own lines are left out, and of a traceback only its last line stands."""
    for log in sorted(logs.glob(f"worker-*-{pid}.err")):  # what it printed is no reason for its end
        lines = _own_lines(log)
        if lines:
            return lines[-n:]
    return []


def _of_actor(error: RayActorError) -> str:
    text = COLOURS.sub("", str(error))
    fields = dict(reversed(FIELD.findall(text)))
    name = fields.get("class_name", "An actor").rpartition(".")[2]
    pid, address = fields.get("pid"), fields.get("ip")
    where = f" (pid {pid} on {address})" if pid else ""
    how = "can't be reached" if isinstance(error, ActorUnavailableError) else "died"
    logs = _logs_on(address)
    said = last_lines(int(pid), logs) if logs is not None and pid and pid.isdigit() else []
    if said:
        return f"{name}{where} {how}; it said last: {' | '.join(said)}"
    there = "" if logs is not None or not pid else f"; its log is on {address}: session_latest/logs/worker-*-{pid}.err"
    return f"{name}{where} {how}: {_why(text)}{there}"


def _logs_on(address: str | None) -> Path | None:
    """The folder of logs, where that node is this machine."""
    node = ray._private.worker._global_node
    if node is None or address != node.node_ip_address:
        return None
    return Path(node.get_logs_dir_path())


def _why(text: str) -> str:
    """Ray's reason, without its list of what is common."""
    found = re.search(r"Worker exit detail: (.+?)(?: Some common causes| There are some|$)", text, re.DOTALL)
    if found is None:
        return text.strip().splitlines()[-1].strip()
    why = " ".join(found.group(1).split())
    return "it was killed, by hand or by the kernel for its memory, or it crashed" if why.endswith(WENT) else why


def _own_lines(log: Path) -> list[str]:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        text = file.read().decode("utf-8", "replace")
    lines = [COLOURS.sub("", line).rstrip() for line in text.splitlines()]
    return [
        line
        for line in lines
        if line.strip()
        and not OF_RAY.match(line)
        and not NOISE.search(line)
        and not line.startswith((" ", "Traceback "))
    ]


def _first_line(error: BaseException) -> str:
    lines = COLOURS.sub("", str(error)).strip().splitlines()
    return lines[0] if lines else ""
