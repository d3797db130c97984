"""Is a canary that goes bad taken back, and one that does as well left alone?

    python benchmarks/canary.py [--trained RUN] [--seed 1]
    python benchmarks/canary.py --simulate

The first serves the order desk's graph, attached to "promoted", to 1,000 conversations. The incumbent was trained to
read errors (a run of `agenttrain fit examples/order-desk/graph.py`; without --trained it is made first, three minutes).
A tenth of the conversations tries a policy that was not: it does as well while orders have no errors, and badly once
they do, from conversation 400 on. The verifier says how each went. Prints both arms by hundreds, the ledger's line, and
exits 1 when the canary was not taken back, when it answered a conversation that began after that, or when its share is
not about a tenth.

The second draws outcomes by chance and prints how often a canary that does as well is taken back, and how many of its
conversations it takes until one that does worse is.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[1] / "examples" / "order-desk"
N_CONVERSATIONS = 1000
N_WITHOUT_ERRORS = 400
"""Conversations before orders begin to have errors."""
SHARE = 0.1
N_AT_ONCE = 16
OLDER = "order-desk-older"


@dataclass(frozen=True, slots=True)
class Answered:
    """One conversation."""

    began: float
    """Unix seconds."""
    by: frozenset[str]
    """Run ids."""
    success: bool


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trained", type=Path, help="a run of the order desk; without it, one is made")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--simulate", action="store_true")
    arguments = parser.parse_args()
    if arguments.simulate:
        return simulate(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        trained = arguments.trained.resolve() if arguments.trained else fit(Path(folder), arguments.seed)
        os.chdir(folder)
        return serve(trained, arguments.seed)


def fit(folder: Path, seed: int) -> Path:
    """The run of a fit."""
    command = [sys.executable, "-m", "agenttrain", "fit", str(EXAMPLE / "graph.py"), "--seed", str(seed), "--json"]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    return folder / "runs" / json.loads(done.stdout)["run_id"]


def serve(trained: Path, seed: int) -> int:
    """Serve the conversations in the current directory, and print what came of them."""
    import agenttrain
    from agenttrain.graph.load import load_module
    from agenttrain.promotion.canary import draws_canary
    from agenttrain.promotion.ledger import Ledger, ledger_folder
    from agenttrain.tasks import read_tasks

    ledger = Ledger(ledger_folder(Path(), "order-desk"))
    promoted, canary = written(ledger, trained)
    tasks = {task.id: task for task in read_tasks(task_file(seed))}
    desk = load_module(EXAMPLE / "graph.py")

    def verified(input: Any, state: Any) -> float:
        return float(desk.answered(tasks[agenttrain.current_serving().conversation], state))

    served = agenttrain.attach(desk.graph, "promoted", outcome=verified)
    began = time.monotonic()
    answered = []
    with ThreadPoolExecutor(N_AT_ONCE) as pool:
        asked = pool.map(lambda task: ask(served, task, desk.answered), tasks.values())
        for number, each in enumerate(asked, start=1):
            answered.append(each)
            if number % 100 == 0:
                print_hundred(number, answered[-100:], canary.run_id)
    served.close()
    seconds = time.monotonic() - began
    line = ledger.entries()[-1]
    n_drawn = sum(draws_canary(task, salt=canary.hash, share=SHARE) for task in tasks)
    later = [each for each in answered if line.deed == "taken_back" and each.began > line.at]
    n_later = sum(canary.run_id in each.by for each in later)
    n_by_canary = sum(canary.run_id in each.by for each in answered)
    print(f"\n{len(answered)} conversations in {seconds:.0f} s; the canary's share by the hash: {n_drawn}")
    print(f"answered by the canary {n_by_canary}, begun after it was taken back {len(later)}, of these by it {n_later}")
    print(f"ledger line {line.number}: {line.deed} {line.run_id}\n  {line.why}")
    faults = [
        *(["the canary was not taken back"] if line.deed != "taken_back" or line.incumbent != promoted.run_id else []),
        *(["it answered a conversation that began later"] if n_later or not later else []),
        *([f"{n_drawn} of 1,000 drawn"] if not 70 <= n_drawn <= 130 else []),
        *(["two lines took it back"] if len(ledger.entries()) != 3 else []),
    ]
    for fault in faults:
        print(f"FAULT: {fault}")
    return int(bool(faults))


def written(ledger: Any, trained: Path) -> tuple[Any, Any]:
    """Lines (promoted, canary) of a new ledger: the trained run, and the policy that training began with."""
    from agenttrain.folder_hash import policy_hash

    older = Path("runs") / OLDER
    shutil.copytree(EXAMPLE / "policy", older / "policy")
    shutil.copy(trained / "config.toml", older)
    graph = f"{EXAMPLE / 'graph.py'}:graph"
    lines = []
    for deed, run, share, incumbent in (("promoted", trained, None, "base"), ("canary", older, SHARE, trained.name)):
        policy = (run / "policy").absolute()
        line = ledger.append(
            deed,
            graph=graph,
            run_id=run.name,
            policy=policy,
            weights=policy_hash(policy),
            why="a benchmark",
            share=share,
            incumbent=incumbent,
        )
        lines.append(line)
    return lines[0], lines[1]


def task_file(seed: int) -> Path:
    """New tasks on the held-out items: first those without errors, then those with."""
    command = [
        sys.executable,
        str(EXAMPLE / "tasks.py"),
        "--split",
        "held_out",
        "--n",
        "4000",
        "--seed",
        str(seed + 100),
    ]
    rows = [json.loads(line) for line in subprocess.check_output(command, text=True).splitlines()]
    good = [row for row in rows if row["metadata"]["errors"] == 0][:N_WITHOUT_ERRORS]
    bad = [row for row in rows if row["metadata"]["errors"] > 0][: N_CONVERSATIONS - N_WITHOUT_ERRORS]
    file = Path("traffic.jsonl")
    file.write_text("".join(json.dumps(row) + "\n" for row in (*good, *bad)))
    return file


def ask(served: Any, task: Any, verifier: Any) -> Answered:
    """One conversation."""
    began = time.time()
    state = served.invoke(dict(task.input), {"configurable": {"thread_id": task.id}}, context=task.context)
    names = (message.response_metadata.get("model_name") for message in state["messages"])
    return Answered(began, frozenset(name for name in names if name), verifier(task, state) == 1)


def print_hundred(number: int, answered: list[Answered], canary: str) -> None:
    """Both arms of the last hundred conversations."""
    arms = [[each.success for each in answered if (canary in each.by) is is_canary] for is_canary in (True, False)]
    told = [f"{sum(arm):3} of {len(arm):3}" for arm in arms]
    print(f"conversations {number - 99:4} to {number:4}: canary {told[0]}, incumbent {told[1]}", flush=True)


def simulate(seed: int) -> int:
    """Draw many canaries by chance."""
    import numpy as np

    random = np.random.default_rng(seed)
    print("| the incumbent | the canary | taken back | its conversations until then: median, 90 % of them |")
    print("|---|---|---|---|")
    for incumbent, canary, good_for, n_canaries in SIMULATED:
        sizes = list(taken_back(random, incumbent, canary, good_for=good_for, n_canaries=n_canaries))
        found = [size - good_for for size in sizes if size is not None]
        when = f"{statistics.median(found):.0f}, {np.quantile(found, 0.9):.0f}" if found and canary != incumbent else ""
        changed = f" after {good_for} outcomes" if good_for else ""
        share = f"{len(found)} of {n_canaries} ({len(found) / n_canaries:.4f})"
        print(f"| {incumbent} | {canary}{changed} | {share} | {when} |", flush=True)
    return 0


SIMULATED = (
    (0.76, 0.76, 0, 10_000),
    (0.3, 0.3, 0, 10_000),
    (0.95, 0.95, 0, 10_000),
    (0.76, 0.8, 0, 10_000),
    (0.76, 0.5, 0, 2_000),
    (0.76, 0.3, 0, 2_000),
    (0.76, 0.5, 40, 2_000),
    (0.76, 0.3, 40, 2_000),
)
"""(success of the incumbent, of the canary, its outcomes before that in which it does as the incumbent, how often)."""


def taken_back(
    random: Any, incumbent: float, canary: float, *, good_for: int, n_canaries: int, n: int = 10_000
) -> Iterator[int | None]:
    """How many outcomes of the canary it took, for each of many that are tried on a tenth of n conversations."""
    import numpy as np
    from scipy.stats import hypergeom

    from agenttrain.promotion.canary import bound_of_look, look_sizes

    sizes = np.array(look_sizes(n, min_outcomes=10))
    bounds = np.array([bound_of_look(number, false_alarm=0.05) for number in range(1, len(sizes) + 1)])
    for _ in range(n_canaries):
        is_canary = random.random(n) < SHARE
        seen = np.cumsum(is_canary)
        success = random.random(n) < np.where(is_canary & (seen > good_for), canary, incumbent)
        due = sizes[sizes <= seen[-1]]
        at = np.searchsorted(seen, due)
        n_success, n_all = np.cumsum(is_canary & success)[at], np.cumsum(success)[at]
        is_worse = hypergeom.cdf(n_success, at + 1, n_all, due) <= bounds[: len(due)]
        yield int(due[np.argmax(is_worse)]) if is_worse.any() else None


if __name__ == "__main__":
    sys.exit(main())
