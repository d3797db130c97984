"""Does a fit that is killed at any moment end as if it had not been?

    python benchmarks/kills.py [--kills 50] [--equal 3] [--jobs 1] [--seed 0] [--write docs/kills.md]

Fits the order desk on few tasks, once whole; then again and again with SIGKILL to its process group at a random moment,
each followed by `--resume` to the end. What is checked is read from the run folder, not from what the commands print.
`--equal` kills are made with `run.deterministic=true`, and their final weights held against those of a whole run.
Prints one JSON object, and writes the table where `--write` says; exits 1 when a check fails.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agenttrain.capture.store import StoreView, read_store
from agenttrain.figures import UNDONE, dropped_by_step, why_untrained
from agenttrain.records import Rollout
from agenttrain.run_folder import RunFolder

EXAMPLE = Path(__file__).parents[1] / "examples" / "order-desk"
STEPS = 6
SETTINGS = {
    "trainer.steps": STEPS,
    "trainer.tasks_per_step": 6,
    "trainer.group_size": 4,
    "trainer.minibatches": 2,
    "eval.tasks": 24,
    "checkpoint.every": 2,
}
"""Small, so that a good part of a run is the start of its processes, which nothing can keep."""
WHOLE_RUNS = 3
"""Whole runs that a resumed one is held against; the median counts."""
GONE_IN_S = 20.0
"""How long the engine's process of a killed fit may take to see that it is alone."""


@dataclass(kw_only=True)
class Kill:
    """One killed run, and what became of it."""

    number: int
    at_s: float
    """Seconds after the start."""
    begun: bool = False
    """Whether there was a run to go on with."""
    phase: str = "start"
    step: int = 0
    """Of the rollouts that were under way or had ended last, 0 outside of training; "start" when there was none yet,
    "ended" when the run was faster than the kill."""
    checkpoint: int = 0
    """Step that it went on from."""
    kept: int = 0
    """Rollouts made before the kill that count."""
    cut: int = 0
    """Rollouts under way at the kill."""
    undone: int = 0
    """Rollouts that had ended and were sampled from weights that the kill took."""
    made: int = 0
    """Rollouts made after the kill."""
    resumed_s: float = 0.0
    faults: list[str] = field(default_factory=list)
    """What is not as it should be."""


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--kills", type=int, default=50)
    arguments.add_argument("--equal", type=int, default=3, help="kills in deterministic mode")
    arguments.add_argument("--jobs", type=int, default=1, help="kills at once; times are then of a shared machine")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--write", type=Path, help="file for the table")
    chosen = arguments.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = measured(Path(name), chosen)
    if chosen.write is not None:
        chosen.write.write_text(page(found), encoding="utf-8")
    print(json.dumps({**found, "kills": [asdict(kill) for kill in found["kills"]]}))
    return int(any(kill.faults for kill in found["kills"]) or not all(row["equal"] for row in found["deterministic"]))


def measured(folder: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    began = time.perf_counter()
    walls = [
        whole_run(folder / f"whole-{i}", seed=chosen.seed)[0] for i in range(min(WHOLE_RUNS, 1 + chosen.kills // 5))
    ]
    whole_s = statistics.median(walls)
    moments = random.Random(chosen.seed)
    plan = [(number, moments.uniform(0, min(walls))) for number in range(1, chosen.kills + 1)]
    with ThreadPoolExecutor(chosen.jobs) as workers:
        kills = list(workers.map(lambda each: killed(folder, *each, whole_s=whole_s, seed=chosen.seed), plan))
    rows = list(deterministic(folder, chosen.equal, seed=chosen.seed, moments=moments))
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "jobs": chosen.jobs,
        "seed": chosen.seed,
        "whole_runs_s": [round(wall, 1) for wall in walls],
        "whole_s": round(whole_s, 1),
        "took_s": round(time.perf_counter() - began),
        "kills": kills,
        "deterministic": rows,
    }


# Runs


def whole_run(folder: Path, *, seed: int, **more: Any) -> tuple[float, RunFolder]:
    """(seconds, run) of a fit that nothing stops."""
    folder.mkdir()
    return ended(folder, *new(seed, **more)), the_run(folder)


def killed(folder: Path, number: int, at_s: float, *, whole_s: float, seed: int) -> Kill:
    """A fit that is killed and resumed, with what was found; its folder goes afterwards."""
    home, kill = folder / f"kill-{number}", Kill(number=number, at_s=round(at_s, 2))
    home.mkdir()
    left = killed_after(home, at_s, *new(seed))
    look(kill, home)
    kill.resumed_s = round(ended(home, *resumed(home, seed)), 1)
    run = the_run(home)
    count(kill, run)
    kill.faults = faults(run) + [f"process {pid} was left behind" for pid in left]
    if kill.kept and kill.resumed_s >= whole_s:
        kill.faults.append(f"the resumed part took {kill.resumed_s} s, a whole run {whole_s:.1f}")
    shutil.rmtree(home)
    print(json.dumps(asdict(kill)), file=sys.stderr)
    return kill


def deterministic(folder: Path, n: int, *, seed: int, moments: random.Random) -> Iterator[dict[str, Any]]:
    """Kills in a run whose floats are the same each time: the final weights and the trained ids are the same too."""
    if not n:
        return
    exact = {"run__deterministic": "true"}
    whole_s, whole = whole_run(folder / "exact", seed=seed, **exact)
    yield {
        "at_s": None,
        "weights": weights_hash(whole),
        "trained": trained_hash(whole),
        "equal": True,
        "faults": faults(whole),
    }
    for number in range(n):
        home, at_s = folder / f"exact-{number}", whole_s * (number + moments.uniform(0.2, 0.9)) / n
        home.mkdir()
        kill = Kill(number=number, at_s=at_s)
        killed_after(home, at_s, *new(seed, **exact))
        look(kill, home)
        ended(home, *resumed(home, seed, **exact))
        run = the_run(home)
        row = {
            "at_s": round(at_s, 2),
            "weights": weights_hash(run),
            "trained": trained_hash(run),
            "faults": faults(run),
        }
        same = row["weights"] == weights_hash(whole) and row["trained"] == trained_hash(whole)
        yield {**row, "phase": kill.phase, "step": kill.step, "equal": same and not row["faults"]}


def new(seed: int, **more: Any) -> list[str]:
    settings = SETTINGS | {key.replace("__", "."): value for key, value in more.items()}
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    return ["fit", str(EXAMPLE / "graph.py"), "--seed", str(seed), *sets, "--json"]


def resumed(home: Path, seed: int, **more: Any) -> list[str]:
    """The command that goes on; a run that was killed before it had a configuration begins anew."""
    runs = list(home.glob("runs/*/config.toml"))
    return ["fit", "--resume", runs[0].parent.name, "--json"] if runs else new(seed, **more)


@contextmanager
def started(home: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command in a process group of its own, which is gone when the block ends."""
    with (home / "log").open("ab") as log:
        command = [sys.executable, "-m", "agenttrain", *arguments]
        process = subprocess.Popen(command, cwd=home, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def ended(home: Path, *arguments: str) -> float:
    """Seconds that a command took to its end."""
    began = time.perf_counter()
    with started(home, *arguments) as process:
        code = process.wait()
    if code:
        sys.exit(f"A fit ended with {code}:\n{(home / 'log').read_text()[-3000:]}")
    return time.perf_counter() - began


def killed_after(home: Path, at_s: float, *arguments: str) -> list[int]:
    """Kill the process group of a command after so many seconds; gives the processes that are still there later."""
    with started(home, *arguments) as process:
        try:
            process.wait(at_s)
        except subprocess.TimeoutExpired:
            family = children(process.pid)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return still_there(family)
    return []


def children(pid: int) -> list[int]:
    """Ids of the processes that a process has started, and they in turn: the engine's has a group of its own."""
    try:
        own = [int(each) for file in Path(f"/proc/{pid}/task").glob("*/children") for each in file.read_text().split()]
    except OSError:
        return []
    return own + [grandchild for child in own for grandchild in children(child)]


def still_there(pids: Sequence[int]) -> list[int]:
    """Those that have not ended in their time; they are ended then."""
    deadline = time.monotonic() + GONE_IN_S
    while (left := [pid for pid in pids if runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left


def runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# What stands in the run folder


def the_run(home: Path) -> RunFolder:
    (run,) = [RunFolder(config.parent) for config in home.glob("runs/*/config.toml")]
    return run


def look(kill: Kill, home: Path) -> None:
    """Where the run was when it was killed, as its store tells."""
    for config in home.glob("runs/*/config.toml"):
        run, kill.begun = RunFolder(config.parent), True
        view = read_store(run.rollouts)
        seen = [*view.rollouts(), *(begun.request for begun in view.unfinished())]
        order = ("baseline", "train", "held_out")
        kill.phase, kill.step = max(
            ((r.phase, r.step) for r in seen), key=lambda r: (order.index(r[0]), r[1]), default=("start", 0)
        )
        kill.checkpoint = max((step for step, _ in run.checkpoint_folders()), default=0)
        if run.read_report() is not None:
            kill.phase = "ended"


def count(kill: Kill, run: RunFolder) -> None:
    view, rows = read_store(run.rollouts), run.metrics()
    made, why = view.rollouts(), why_untrained(view.rollouts(), rows, trained_in(view, rows))
    before = [rollout for rollout in made if kill.begun and rollout.life == 0]
    kill.made = len(made) - len(before)
    kill.cut = sum(rollout.status == "aborted" for rollout in before)
    kill.undone = sum(why.get(rollout.id) == UNDONE for rollout in before)
    kill.kept = len(before) - kill.cut - kill.undone


def faults(run: RunFolder) -> list[str]:
    """What the folder of an ended run says that it should not."""
    view, rows, report = read_store(run.rollouts), run.metrics(), run.read_report()
    made = view.rollouts()
    checks: list[tuple[str, Callable[[], bool]]] = [
        ("each step stands once", lambda: [row["step"] for row in rows] == list(range(1, STEPS + 1))),
        ("no rollout is without an end", lambda: view.unfinished() == ()),
        ("nothing is trained twice", lambda: max(times_trained(view, rows).values()) == 1),
        ("each rollout is trained or has a reason", lambda: not lost(view, rows, made)),
        ("each place of a step counts once", lambda: places_are_whole(view, rows, made)),
        ("each place is evaluated", lambda: both_evaluated(made)),
        ("the tokens add up", lambda: report is not None and adds_up(report["tokens"])),
        ("policy/ is there", lambda: (run.policy / "model.safetensors").is_file()),
    ]
    return [name for name, holds in checks if not holds()]


def lives_of(rows: Sequence[dict[str, Any]]) -> dict[int, int]:
    return {row["step"]: row["life"] for row in rows}


def times_trained(view: StoreView, rows: Sequence[dict[str, Any]]) -> Counter[tuple[str, int]]:
    """How often each trajectory of a rollout was handed to the loss in the steps that count."""
    samples = view.trained_samples(lives_of(rows))
    return Counter((sample.extra_fields["rollout_id"], sample.extra_fields["trajectory"]) for sample in samples)


def trained_in(view: StoreView, rows: Sequence[dict[str, Any]]) -> set[str]:
    """Ids of the rollouts that were handed to the loss."""
    return {rollout_id for rollout_id, _ in times_trained(view, rows)}


def lost(view: StoreView, rows: Sequence[dict[str, Any]], made: Sequence[Rollout]) -> list[str]:
    """Training rollouts that are neither trained nor have a reason."""
    trained = trained_in(view, rows)
    told = trained | why_untrained(made, rows, trained).keys()
    return [rollout.id for rollout in made if rollout.phase == "train" and rollout.id not in told]


def places_are_whole(view: StoreView, rows: Sequence[dict[str, Any]], made: Sequence[Rollout]) -> bool:
    """Of each task and sibling of a step exactly one rollout is trained or dropped by the step."""
    counted = trained_in(view, rows) | dropped_by_step(rows).keys()
    places = Counter((r.step, r.task_id, r.sibling) for r in made if r.phase == "train" and r.id in counted)
    return len(places) == STEPS * SETTINGS["trainer.tasks_per_step"] * SETTINGS["trainer.group_size"] and set(
        places.values()
    ) == {1}


def both_evaluated(made: Sequence[Rollout]) -> bool:
    places = {
        (rollout.phase, rollout.task_id) for rollout in made if rollout.phase != "train" and rollout.status != "aborted"
    }
    return len(places) == 2 * SETTINGS["eval.tasks"]


def adds_up(tokens: dict[str, Any]) -> bool:
    parts = tokens["trained"] + tokens["frozen"] + tokens["dropped"]
    by_cause = sum(tokens["dropped_by_cause"].values())
    return bool(tokens["sampled"] == parts > 0 and by_cause == tokens["dropped"] and tokens["drifted"] == 0)


def weights_hash(run: RunFolder) -> str:
    digest = hashlib.sha256()
    for file in sorted(run.policy.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def trained_hash(run: RunFolder) -> str:
    """Of the ids, log probabilities and places of all that was handed to the loss."""
    view, rows = read_store(run.rollouts), run.metrics()
    places = {rollout.id: (rollout.step, rollout.task_id, rollout.sibling) for rollout in view.rollouts()}
    handed = sorted(
        (*places[s.extra_fields["rollout_id"]], s.extra_fields["trajectory"], s.response_ids, s.response_logprobs)
        for s in view.trained_samples(lives_of(rows))
    )
    return hashlib.sha256(repr(handed).encode()).hexdigest()[:16]


# The page


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    return f"{len(os.sched_getaffinity(0))} cores of {model}, Python {platform.python_version()}"


def page(found: dict[str, Any]) -> str:
    kills: list[Kill] = found["kills"]
    whole = found["whole_s"]
    kept = [kill for kill in kills if kill.kept]
    shorter = sum(kill.resumed_s < whole for kill in kept)
    again = statistics.mean(kill.resumed_s for kill in kept) if kept else 0.0
    return "\n".join(
        [
            f"# {len(kills)} kills",
            "",
            f"Made by `python benchmarks/kills.py --kills {len(kills)} --seed {found['seed']} --jobs {found['jobs']}` "
            f"on {found['date']}, {found['machine']}, in {found['took_s'] / 60:.0f} minutes. Not written by hand.",
            "",
            f"The order desk, {STEPS} steps of {SETTINGS['trainer.tasks_per_step']} groups of "
            f"{SETTINGS['trainer.group_size']}, {SETTINGS['eval.tasks']} held-out tasks, a checkpoint every "
            f"{SETTINGS['checkpoint.every']} steps. A whole run takes {whole} s (median of "
            f"{', '.join(map(str, found['whole_runs_s']))}), its processes' start included. Each row is a run whose "
            "process group gets SIGKILL at a random moment and which `--resume` then brings to its end.",
            "",
            f"- Checks that failed: {sum(len(kill.faults) for kill in kills)}.",
            f"- Of {len(kept)} kills after the first rollout had ended, {shorter} resumed in less than a whole run: in "
            f"{again:.1f} s on average.",
            "",
            "Checked of each from its folder: step numbers stand once each; every rollout that was begun has an end; "
            "no rollout is trained twice; each is trained or has a reason; of each place of a step exactly one counts; "
            "both evaluations are whole; sampled = trained + frozen + dropped and drifted = 0; no process is left "
            "behind.",
            "",
            "*kept*: rollouts from before the kill that count. *cut*: under way at the kill, told as aborted and made "
            "again. *undone*: ended, and sampled from weights that came after the checkpoint. *made*: after the kill.",
            "",
            "| kill | at s | in | step | from checkpoint | kept | cut | undone | made | resumed in s | checks |",
            "|---|---|---|---|---|---|---|---|---|---|---|",
            *(kill_row(kill) for kill in kills),
            "",
            f"## {len(found['deterministic']) - 1} kills with run.deterministic=true" if found["deterministic"] else "",
            "",
            "Hashes of policy/*.safetensors, and of the ids and log probabilities that were trained.",
            "",
            "| killed at s | in | step | weights | trained | |",
            "|---|---|---|---|---|---|",
            *(exact_row(row) for row in found["deterministic"]),
            "",
        ]
    )


def kill_row(kill: Kill) -> str:
    cells = (
        kill.number, f"{kill.at_s:.1f}", kill.phase, kill.step or "", kill.checkpoint or "", kill.kept, kill.cut,
        kill.undone, kill.made, f"{kill.resumed_s:.1f}", "; ".join(kill.faults) or "all hold",
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def exact_row(row: dict[str, Any]) -> str:
    if row["at_s"] is None:
        return f"| not killed | | | {row['weights']} | {row['trained']} | |"
    same = "equal" if row["equal"] else "DIFFERENT " + "; ".join(row["faults"])
    return (
        f"| {row['at_s']:.1f} | {row['phase']} | {row['step'] or ''} | {row['weights']} | {row['trained']} | {same} |"
    )


if __name__ == "__main__":
    sys.exit(main())
