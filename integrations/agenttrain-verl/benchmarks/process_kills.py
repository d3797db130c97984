"""What becomes of a fit on veRL one of whose processes is killed, or that is stopped, while it rolls out?

    python integrations/agenttrain-verl/benchmarks/process_kills.py [--only driver,rank] [--sglang] [--write FILE]

Fits the order desk on few tasks, once for each row of the table: at a moment when training rollouts are under way one
process gets SIGKILL, or the driver a signal. A run that ended so goes on with `--resume`. What is checked is read from
the run's folder. Prints one JSON object, and writes the table where `--write` says; exits 1 when a check fails.
`--sglang` adds the row of the server, which needs `agenttrain sglang setup`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from agenttrain.capture.store import StoreView, read_store
from agenttrain.figures import UNDONE, dropped_by_step, why_untrained
from agenttrain.records import Rollout
from agenttrain.run_folder import RunFolder

EXAMPLE = Path(__file__).parents[3] / "examples" / "order-desk"
STEPS = 2
AT_STEP = 2
"""Whose rollouts are under way at the kill: a checkpoint of the step before stands."""
ENDED = 8
"""Rollouts of that step that have ended by then."""
SETTINGS = {
    "trainer.steps": STEPS,
    "trainer.tasks_per_step": 12,
    "trainer.group_size": 8,
    "trainer.minibatches": 2,
    "engine.concurrency": 16,
    "eval.tasks": 8,
    "checkpoint.every": 1,
}
STARTS_IN_S = 900.0
HANGS_AFTER_S = 300.0
"""After a kill: a run that has not ended by then hangs, and is ended."""
GONE_IN_S = 10.0
"""How long the processes of an ended run may take to be gone."""
TITLE_READS = 60
"""Of all processes, before it is said that none has a title."""
PRESSED_AGAIN_S = 1.0
"""Between two Ctrl-C."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row of the table: what is killed, and what is expected of the run."""

    name: str
    what: str
    find: str = ""
    """In the title of the process; empty: the driver."""
    signals: tuple[signal.Signals, ...] = (signal.SIGKILL,)
    exit: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()


CASES = (
    Case(name="worker", what="a rollout worker", find="ray::AgentLoopWorkerTQ", exit=0),
    Case(
        name="worker-of-two",
        what="one of two rollout workers",
        find="ray::AgentLoopWorkerTQ",
        exit=0,
        settings={"verl.rollout_workers": 2},
    ),
    Case(name="driver", what="the driver", exit=-signal.SIGKILL),
    Case(name="rank", what="the trainer's rank", find="ray::WorkerDict", exit=1),
    Case(name="queue", what="the transfer queue's controller", find="ray::TransferQueueController", exit=1),
    Case(name="storage", what="the transfer queue's storage", find="ray::SimpleStorageUnit", exit=1),
    Case(name="engine", what="a replica's engine", find="ray::EngineServer", exit=1),
    Case(name="ctrl-c", what="the driver's process group, Ctrl-C", signals=(signal.SIGINT,), exit=130),
    Case(
        name="ctrl-c-twice",
        what="the same twice, one second apart",
        signals=(signal.SIGINT, signal.SIGINT),
        exit=130,
    ),
    Case(name="sigterm", what="the driver, SIGTERM", signals=(signal.SIGTERM,), exit=-signal.SIGTERM),
)
OF_SGLANG = Case(
    name="sglang",
    what="the SGLang server",
    find="sglang.launch_server",
    exit=0,
    settings={"sglang.silence_s": 20},
    arguments=("--engine", "sglang"),
)


@dataclass(kw_only=True)
class Kill:
    """One run, and what became of it."""

    name: str
    what: str
    at_step: int = 0
    """Of the rollouts that were under way."""
    ended: int = 0
    """Rollouts of that step that had ended."""
    under_way: int = 0
    exit: int | None = None
    """None: it hung."""
    ended_after_s: float = 0.0
    said: str = ""
    """The last line on standard error, or what the report notes of it."""
    left: int = 0
    """Processes that were still there."""
    lives: int = 0
    kept: int = 0
    """Rollouts of the step that the life of the kill made and that count."""
    aborted: int = 0
    trained_twice: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    """What is not as it should be."""


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--only", default="", help="names of rows, with commas")
    arguments.add_argument("--sglang", action="store_true")
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--folder", type=Path, help="where the runs stay; else they go with a temporary one")
    arguments.add_argument("--write", type=Path, help="file for the table")
    chosen = arguments.parse_args()
    cases = [*CASES, OF_SGLANG] if chosen.sglang else [*CASES]
    wanted = [name for name in chosen.only.split(",") if name] or [case.name for case in cases]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        kills = [
            killed(case, (chosen.folder or Path(name)) / case.name, chosen.seed)
            for case in cases
            if case.name in wanted
        ]
    found = {"date": time.strftime("%Y-%m-%d"), "machine": machine(), "took_s": round(time.perf_counter() - began)}
    if chosen.write is not None:
        chosen.write.write_text(page(kills, found), encoding="utf-8")
    print(json.dumps({**found, "kills": [asdict(kill) for kill in kills]}, indent=1))
    return int(any(kill.faults for kill in kills))


# Runs


def killed(case: Case, home: Path, seed: int) -> Kill:
    """A run that is killed, and brought to its end, with what was found."""
    home.mkdir(parents=True)
    kill = Kill(name=case.name, what=case.what)
    with started(home, *new(case, seed)) as process:
        if not under_way(kill, home, process):
            kill.faults.append(f"it ended with {process.wait()} before the kill: {last_line(home)}")
            return kill
        family = below(process.pid)
        strike(case, process, family)
        wait_for(kill, process)
        kill.left = len(still_there(family))
    kill.said = last_line(home)
    expect(kill, case)
    if kill.exit != 0:
        resume(kill, home)
    look(kill, the_run(home))
    print(json.dumps(asdict(kill)), file=sys.stderr)
    return kill


def new(case: Case, seed: int) -> list[str]:
    settings = {**SETTINGS, **case.settings}
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    graph = str(EXAMPLE / "graph.py")
    return ["fit", graph, "--trainer", "verl", *case.arguments, "--seed", str(seed), *sets, "--json"]


@contextmanager
def started(home: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command in a process group of its own; what is left of it is ended with the block."""
    with (home / "log").open("ab") as log, (home / "out").open("wb") as out:
        command = [sys.executable, "-m", "agenttrain", *arguments]
        process = subprocess.Popen(command, cwd=home, stdout=out, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            family = below(process.pid)
            process.kill()
            process.wait()
            still_there(family)


def under_way(kill: Kill, home: Path, process: subprocess.Popen[bytes]) -> bool:
    """Wait until the step's rollouts are being made; False when the run ended before."""
    until = time.monotonic() + STARTS_IN_S
    while process.poll() is None and time.monotonic() < until:
        for run in runs_of(home):
            view = read_store(run.rollouts)
            ended = [r for r in view.rollouts() if (r.phase, r.step) == ("train", AT_STEP)]
            open_now = [b for b in view.unfinished() if (b.request.phase, b.request.step) == ("train", AT_STEP)]
            if len(ended) >= ENDED and open_now:
                kill.at_step, kill.ended, kill.under_way = AT_STEP, len(ended), len(open_now)
                return True
        time.sleep(0.05)
    return False


def strike(case: Case, process: subprocess.Popen[bytes], family: Sequence[psutil.Process]) -> None:
    for number, sent in enumerate(case.signals):
        time.sleep(PRESSED_AGAIN_S if number else 0)
        if case.find:
            found_in(family, case.find).send_signal(sent)
        elif sent is signal.SIGINT:
            os.killpg(process.pid, sent)  # as a terminal sends it
        else:
            process.send_signal(sent)


def found_in(family: Sequence[psutil.Process], text: str) -> psutil.Process:
    """The first process with that in its title, which Ray writes anew with each call: meanwhile it may be none."""
    for _ in range(TITLE_READS):
        for process in family:
            if text in title(process):
                return process
        time.sleep(0.05)
    sys.exit(f"No process is {text}, of: {', '.join(sorted(title(each)[:60].strip() for each in family))}")


def wait_for(kill: Kill, process: subprocess.Popen[bytes]) -> None:
    began = time.monotonic()
    try:
        kill.exit = process.wait(HANGS_AFTER_S)
    except subprocess.TimeoutExpired:
        kill.faults.append(f"it hung for {HANGS_AFTER_S:.0f} s")
    kill.ended_after_s = round(time.monotonic() - began, 1)


def resume(kill: Kill, home: Path) -> None:
    """Go on with the command that a user is told."""
    run = the_run(home)
    with started(home, "fit", "--resume", run.id, "--json") as process:
        code = process.wait()
    if code:
        kill.faults.append(f"--resume ended with {code}: {last_line(home)}")


def expect(kill: Kill, case: Case) -> None:
    if kill.exit != case.exit:
        kill.faults.append(f"exit {kill.exit} where {case.exit} was expected")
    if kill.left:
        kill.faults.append(f"{kill.left} processes were left")
    if case.exit > 0 and "--resume" not in kill.said:
        kill.faults.append("the last line does not say how to go on")


# Processes


def below(pid: int) -> list[psutil.Process]:
    """All that a process has started, and they in turn."""
    return psutil.Process(pid).children(recursive=True)


def title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def still_there(family: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended in their time; they are ended then."""
    _, left = psutil.wait_procs(family, timeout=GONE_IN_S)
    left = [each for each in left if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    for each in left:
        print(f"left: {each.pid} {title(each)[:160]}", file=sys.stderr)
        each.kill()
    return left


# What stands in the run's folder


def runs_of(home: Path) -> list[RunFolder]:
    return [run for config in home.glob("runs/*/config.toml") if (run := RunFolder(config.parent)).rollouts.is_dir()]


def the_run(home: Path) -> RunFolder:
    (run,) = runs_of(home)
    return run


def last_line(home: Path) -> str:
    lines = [line.strip() for line in (home / "log").read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""


def look(kill: Kill, run: RunFolder) -> None:
    view, rows, report = read_store(run.rollouts), run.metrics(), run.read_report()
    made, trained = view.rollouts(), times_trained(view, rows)
    why = why_untrained(made, rows, {rollout_id for rollout_id, _ in trained})
    before = [r for r in made if (r.phase, r.step, r.life) == ("train", kill.at_step, 0)]
    kill.aborted = sum(r.status == "aborted" for r in made)
    kill.kept = sum(r.status != "aborted" and why.get(r.id) != UNDONE for r in before)
    kill.trained_twice = sum(times > 1 for times in trained.values())
    if report is None:
        kill.faults.append("there is no report")
        return
    kill.lives = report["lives"]
    names = ("sampled", "trained", "frozen", "dropped", "drifted")
    kill.tokens = {name: int(report["tokens"][name]) for name in names}
    if kill.exit == 0:
        kill.said = "; ".join(alarm["message"] for alarm in report["alarms"] if alarm["code"] == "engine")
        if not kill.said:
            kill.faults.append("the report says nothing of it")
    if kill.kept < kill.ended:
        kill.faults.append(f"of {kill.ended} rollouts that had ended {kill.kept} count")
    kill.faults += faults(view, rows, made, report)


def faults(
    view: StoreView, rows: Sequence[dict[str, Any]], made: Sequence[Rollout], report: dict[str, Any]
) -> list[str]:
    """What the folder of an ended run says that it should not."""
    trained = times_trained(view, rows)
    checks: list[tuple[str, Callable[[], bool]]] = [
        ("each step stands once", lambda: [row["step"] for row in rows] == list(range(1, STEPS + 1))),
        ("no rollout is without an end", lambda: view.unfinished() == ()),
        ("nothing is trained twice", lambda: max(trained.values()) == 1),
        ("each rollout is trained or has a reason", lambda: not without_reason(rows, made, trained)),
        ("each place of a step counts once", lambda: places_are_whole(rows, made, trained)),
        ("the tokens add up", lambda: adds_up(report["tokens"])),
        ("both policies were measured on all tasks", lambda: both_evaluated(made)),
    ]
    return [f"not so: {name}" for name, holds in checks if not holds()]


def times_trained(view: StoreView, rows: Sequence[dict[str, Any]]) -> Counter[tuple[str, int]]:
    """How often each trajectory of a rollout was handed to the loss in the steps that count."""
    samples = view.trained_samples({row["step"]: row["life"] for row in rows})
    return Counter((sample.extra_fields["rollout_id"], sample.extra_fields["trajectory"]) for sample in samples)


def without_reason(
    rows: Sequence[dict[str, Any]], made: Sequence[Rollout], trained: Mapping[tuple[str, int], int]
) -> list[str]:
    """Training rollouts that are neither trained nor have a reason."""
    ids = {rollout_id for rollout_id, _ in trained}
    told = ids | why_untrained(made, rows, ids).keys()
    return [rollout.id for rollout in made if rollout.phase == "train" and rollout.id not in told]


def places_are_whole(
    rows: Sequence[dict[str, Any]], made: Sequence[Rollout], trained: Mapping[tuple[str, int], int]
) -> bool:
    """Of each task and sibling of a step exactly one rollout is trained or dropped by the step."""
    counted = {rollout_id for rollout_id, _ in trained} | dropped_by_step(rows).keys()
    places = Counter((r.step, r.task_id, r.sibling) for r in made if r.phase == "train" and r.id in counted)
    n = STEPS * SETTINGS["trainer.tasks_per_step"] * SETTINGS["trainer.group_size"]
    return len(places) == n and set(places.values()) == {1}


def both_evaluated(made: Sequence[Rollout]) -> bool:
    places = Counter((r.phase, r.task_id) for r in made if r.phase != "train" and r.status != "aborted")
    return len(places) == 2 * SETTINGS["eval.tasks"] and set(places.values()) == {1}


def adds_up(tokens: dict[str, Any]) -> bool:
    parts = tokens["trained"] + tokens["frozen"] + tokens["dropped"]
    by_cause = sum(tokens["dropped_by_cause"].values())
    return bool(tokens["sampled"] == parts > 0 and by_cause == tokens["dropped"] and tokens["drifted"] == 0)


# The page


def machine() -> str:
    return f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}"


def page(kills: Sequence[Kill], found: Mapping[str, Any]) -> str:
    n = SETTINGS["trainer.tasks_per_step"] * SETTINGS["trainer.group_size"]
    rows = "\n".join(row(kill) for kill in kills)
    said = "\n".join(f"- {kill.what}: {re.sub(r'[0-9a-f]{8,}', '…', kill.said)}" for kill in kills if kill.said)
    return f"""# What a kill does to a run on veRL

Made by `python benchmarks/process_kills.py` on {found["date"]}, {found["machine"]}, in {found["took_s"] / 60:.0f}
minutes. Not written by hand.

The order desk, {STEPS} steps of {n} rollouts, {SETTINGS["eval.tasks"]} held-out tasks, a checkpoint after every step.
Each row is a run of which one process gets SIGKILL (or the driver the signal that is named) while rollouts of step
{AT_STEP} are under way. A run that ended by it goes on with `agenttrain fit --resume`.

Checked of each from its folder: step numbers stand once each; every rollout that was begun has an end; no rollout is
trained twice; each is trained or has a reason; of each place of a step exactly one counts; both evaluations are whole;
sampled = trained + frozen + dropped and drifted = 0; no process is left {GONE_IN_S:.0f} s after the end.

*under way*, *ended*: rollouts of the step at the kill. *kept*: rollouts of the step that the life of the kill
made and that count.
*aborted*: told so, and made again with the same seeds. *after s*: from the kill to the end of the run, or of its life.

| {" | ".join(COLUMNS)} |
|{"---|" * len(COLUMNS)}
{rows}

What the user reads: the last line on standard error, or the note in the report of a run that went on.

{said}
"""


COLUMNS = (
    "killed", "under way", "ended", "exit", "after s", "lives", "kept", "aborted",
    "sampled = trained + frozen + dropped", "drifted", "trained twice", "left", "checks",
)  # fmt: skip


def row(kill: Kill) -> str:
    tokens = kill.tokens
    account = "{sampled} = {trained} + {frozen} + {dropped}".format(**tokens) if tokens else ""
    cells = (
        kill.what, kill.under_way, kill.ended, kill.exit, kill.ended_after_s, kill.lives, kill.kept, kill.aborted,
        account, tokens.get("drifted", ""), kill.trained_twice, kill.left, "; ".join(kill.faults) or "all hold",
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    sys.exit(main())
