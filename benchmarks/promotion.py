"""Does the gate let the trained policy through, and keep out what it must, each for its own reason?

On the order desk, by the command line, in one folder: three cheap alternatives and RL in one table, then `agenttrain
promote` of five candidates that it has to refuse and two that it has to take, and the way back.

    python benchmarks/promotion.py [--folder DIR] [--seed 1]

The candidates are real ones: a fit that learned nothing; one whose training tasks of one wording had wrong references;
a policy that newly fails a case of the regression set; a run in whose policy one weight was changed afterwards; a fit
in which a tenth of the training tasks failed by their environment. Prints every rule of each, and exits 1 when one
comes out otherwise than it must. With --folder, runs that stand there already are taken as they are.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[1] / "examples" / "order-desk"
GRAPH = str(EXAMPLE / "graph.py")
SPOILT = "Current stock of what"
"""A wording of which the training tasks of one candidate have wrong references: the item's price."""
FLAKY = """
import importlib.util
import sys
import zlib
from contextlib import contextmanager

from agenttrain import trainable

spec = importlib.util.spec_from_file_location("order_desk_graph", {graph!r})
order_desk = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = order_desk
spec.loader.exec_module(order_desk)


@contextmanager
def database(task):
    if task.split == "train" and zlib.crc32(task.id.encode()) % 10 == 0:
        raise ConnectionError("the database of the desk refused the connection")
    yield


@trainable(model={model!r}, tasks={tasks!r}, verifier=order_desk.answered, setup=database)
def graph():
    return order_desk.builder.compile()
"""
"""The same agent, whose world fails for a tenth of the training tasks."""


class Desk:
    """The commands of one folder, and the names of the runs in it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, str(seed)
        self.faults: list[str] = []
        self._names = folder / "names.json"
        self.run_by_name: dict[str, str] = json.loads(self._names.read_text()) if self._names.is_file() else {}

    def agenttrain(self, *arguments: str, expected: int = 0, **variables: str) -> dict[str, Any]:
        """The JSON object that a command prints, once it ended as expected."""
        print(f"\n$ agenttrain {' '.join(arguments)}", flush=True)
        began = time.monotonic()
        command = [sys.executable, "-m", "agenttrain", *arguments, "--json"]
        environment = {**os.environ, **variables}
        done = subprocess.run(command, cwd=self.folder, env=environment, stdout=subprocess.PIPE, text=True, check=False)
        print(f"exit code {done.returncode}, {time.monotonic() - began:.0f} s", flush=True)
        if done.returncode != expected:
            self.faults.append(f"agenttrain {' '.join(arguments)}: exit code {done.returncode}, expected {expected}")
        result: dict[str, Any] = json.loads(done.stdout) if done.stdout.strip() else {}
        return result

    def made(self, name: str, *arguments: str, **variables: str) -> str:
        """The run of that name; made by a command if it isn't there yet."""
        if name not in self.run_by_name:
            self.run_by_name[name] = self.agenttrain(*arguments, "--seed", self.seed, **variables)["run_id"]
            self._names.write_text(json.dumps(self.run_by_name))
        return self.run_by_name[name]

    def promote(self, name: str, *, expected: int) -> None:
        """Ask the gate, and print what each rule came to."""
        answer = self.agenttrain("promote", self.run_by_name[name], expected=expected)
        print(f"{name}:")
        for result in answer.get("rules", []):
            mark = "+" if result["passed"] else "-"
            print(f"  {mark} {result['rule']:12} {result['figure']} (accepted: {result['bound']})")

    @property
    def runs(self) -> Path:
        return self.folder / "runs"


def spoilt_tasks(folder: Path) -> Path:
    """The tasks, each with its wording, and wrong references in the training tasks of one wording."""
    rows = [json.loads(line) for line in (EXAMPLE / "tasks.jsonl").read_text().splitlines()]
    for row in rows:
        question, order = row["input"]["messages"][0]["content"], row["context"]["order"]
        row["metadata"]["wording"] = question.replace(order, "…")
        if question.startswith(SPOILT) and row["split"] == "train":
            row["reference"] = row["context"]["price"]
    path = folder / "spoilt.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def flaky_graph(folder: Path) -> str:
    """A graph.py in a folder of its own, with the example's settings."""
    place = folder / "flaky-desk"
    place.mkdir(parents=True, exist_ok=True)
    shutil.copy(EXAMPLE / "agenttrain.toml", place)
    tasks, model = str(EXAMPLE / "tasks.jsonl"), str(EXAMPLE / "policy")
    (place / "graph.py").write_text(FLAKY.format(graph=GRAPH, model=model, tasks=tasks))
    return str(place / "graph.py")


def with_changed_weight(desk: Desk, name: str, of: str) -> None:
    """A copy of a run in whose policy the number that stands first in one matrix is 0.001 larger."""
    from safetensors.numpy import load_file, save_file

    source = desk.runs / desk.run_by_name[of]
    copy = source.with_name(f"{source.name}-changed")
    if not copy.is_dir():
        shutil.copytree(source, copy)
        file = copy / "policy" / "model.safetensors"
        weights = load_file(file)
        matrix = next(name for name in sorted(weights) if name.endswith("down_proj.weight"))
        weights[matrix] = weights[matrix].copy()
        weights[matrix][0, 0] += 0.001
        save_file(weights, file, metadata={"format": "pt"})
    desk.run_by_name[name] = copy.name


@contextmanager
def address(desk: Desk, policy: str) -> Iterator[str]:
    """A policy behind an OpenAI-compatible address for a block."""
    command = [sys.executable, "-m", "agenttrain", "serve", policy, "--port", "0", "--json"]
    with subprocess.Popen(command, cwd=desk.folder, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield json.loads(server.stdout.readline())["address"]
        finally:
            server.send_signal(signal.SIGTERM)


def a_case_that_got_worse(desk: Desk, name: str) -> str:
    """A rollout of a run's baseline that succeeded, on a task that the trained policy fails."""
    from agenttrain.capture.store import read_store

    rollouts = read_store(desk.runs / desk.run_by_name[name] / "rollouts").rollouts()
    lost = {each.task_id for each in rollouts if each.phase == "held_out" and not each.success}
    return next(each.id for each in rollouts if each.phase == "baseline" and each.success and each.task_id in lost)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="kept, and gone on with; else a temporary one")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
        return checked(Desk(options.folder.resolve(), options.seed))
    with tempfile.TemporaryDirectory() as folder:
        return checked(Desk(Path(folder), options.seed))


def checked(desk: Desk) -> int:
    """Everything, in order; 1 when something came out otherwise than it must."""
    alternatives(desk)
    refusals(desk)
    acceptance(desk)
    for fault in desk.faults:
        print(f"FAULT: {fault}")
    print("\nEverything came out as it must." if not desk.faults else f"\n{len(desk.faults)} faults.")
    return int(bool(desk.faults))


def alternatives(desk: Desk) -> None:
    """Production, prompt-only, supervised and RL on the same held-out tasks, in one table."""
    with address(desk, str(EXAMPLE / "policy")) as url:
        desk.made("as-is", "eval", GRAPH, "--run", "as-is", OPENAI_BASE_URL=url)
        desk.made("prompt-only", "eval", GRAPH, "--run", url, "--temperature", "0.7")
    desk.made("sft", "fit", GRAPH, "--trainer", "sft")
    desk.made("rl", "fit", GRAPH)
    names = [
        f"{desk.run_by_name['rl']}:baseline",
        *(desk.run_by_name[n] for n in ("as-is", "prompt-only", "sft", "rl")),
    ]
    command = [sys.executable, "-m", "agenttrain", "compare", *names]
    subprocess.run(command, cwd=desk.folder, check=True)


def refusals(desk: Desk) -> None:
    """Candidates that may not serve, each with the exit code of its own rule."""
    settings = ("--set", "trainer.learning_rate=0", "--set", "trainer.steps=2")
    desk.made("untrained", "fit", GRAPH, *settings)
    desk.made("spoilt slice", "fit", GRAPH, "--tasks", str(spoilt_tasks(desk.folder)))
    desk.made("loud alarm", "fit", flaky_graph(desk.folder))
    with_changed_weight(desk, "changed weight", "rl")
    desk.promote("untrained", expected=11)
    desk.promote("spoilt slice", expected=12)
    desk.promote("loud alarm", expected=17)
    desk.promote("changed weight", expected=19)
    case = a_case_that_got_worse(desk, "rl")
    added = desk.agenttrain("cases", "add", f"{desk.run_by_name['rl']}", case, "--why", "the base got it right")
    desk.promote("rl", expected=13)
    desk.agenttrain("cases", "remove", added["case"], "--why", "to see the rest of the gate")


def acceptance(desk: Desk) -> None:
    """The trained policy may serve, the better one in its place, their export reloads, and the first serves again."""
    desk.promote("rl", expected=0)
    desk.promote("sft", expected=0)
    desk.agenttrain("export", desk.run_by_name["rl"], "--to", "exported")
    print(json.dumps(desk.agenttrain("promote", "--status"), indent=1))
    desk.agenttrain("promote", "--rollback", "--why", "to see the way back")
    print(json.dumps(desk.agenttrain("promote", "--status"), indent=1))


if __name__ == "__main__":
    sys.exit(main())
