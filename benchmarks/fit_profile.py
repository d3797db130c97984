"""Where does the time of a fit go, and what would it be at best?

    python benchmarks/fit_profile.py [--steps 4] [--held-out 160] [--write]

A short run of the order desk, with the functions of each owner wrapped from outside (`cpu_accounts`), in this process
and in the engine's. CPU seconds, because they bear a noisy machine better than wall time, which stands beside each
phase. Then the bounds, on the same machine: the speed of a large matrix product for the model's passes, the imports
and the model alone for the start, the same graph with a model that answers at once for LangGraph, the same rows written
by one statement a table for the store. Prints the table; --write puts it into docs/profile.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from cpu_accounts import CpuAccounts, by_phase

HERE = Path(__file__).parent
EXAMPLE = HERE.parent / "examples" / "order-desk"
PAGE = HERE.parent / "docs" / "profile.md"
BEGIN, END = "<!-- written by benchmarks/fit_profile.py -->", "<!-- end -->"

START, EVALUATION, ROLLOUTS, TRAINING, PUBLISH, REST = (
    "start",
    "evaluation",
    "training rollouts",
    "update",
    "publish",
    "figures, checkpoints, report",
)
FORWARD, CACHE, DRAW, ADMIT, PIPE = "model forward", "KV cache", "sampling", "scheduling", "messages between processes"
LANGGRAPH, GATE, RECORDER, RENDERER = "LangGraph and LangChain", "gate", "recorder", "renderer"
STORE, VERIFIER, RECORD, POOL = "store", "verifier", "status, trajectories, samples", "pool"
BACKWARD, BATCHES, OPTIMIZER = "model backward", "batches", "optimizer"


# ── who owns what ────────────────────────────────────────────────────────────────────────────────────────────────────


def own_engine(accounts: CpuAccounts) -> None:
    """Charge the functions of the engine's process."""
    accounts.own(FORWARD, "agenttrain.local.policy:Logits.at", size=lambda self, flat, ids, **_: ids.numel())
    rows = "agenttrain.local.kv_cache:KVRows."
    accounts.own(CACHE, "agenttrain.local.kv_cache:SlotCache.update", f"{rows}ensure_length", f"{rows}gather_front")
    accounts.own(CACHE, f"{rows}copy_prefixes", f"{rows}take")
    accounts.own(DRAW, "agenttrain.local.engine:draw")
    engine = "agenttrain.local.engine:LocalEngine."
    accounts.own(ADMIT, f"{engine}_receive", f"{engine}_admit", f"{engine}_decode")
    accounts.own(PIPE, "multiprocessing.connection:Connection.send", "multiprocessing.connection:Connection.recv")


def own_main(accounts: CpuAccounts) -> None:
    """Charge the functions of the run's own process."""
    accounts.own(LANGGRAPH, "agenttrain.rollout:run_graph", "langgraph.prebuilt.tool_node:ToolNode._run_one")
    accounts.own(GATE, "agenttrain.graph.policy_model:PolicyModel._generate")
    recorder = "agenttrain.capture.recorder:Recorder."
    accounts.own(RECORDER, f"{recorder}answer", f"{recorder}close")
    renderer = "agenttrain.capture.render:TemplateRenderer."
    accounts.own(RENDERER, f"{renderer}render", f"{renderer}extend", f"{renderer}parse")
    store = "agenttrain.capture.store:SqliteStore."
    puts = [f"{store}{name}" for name in ("put_begun", "put_intent", "put_turn", "put_result", "_wave", "_write")]
    accounts.own(STORE, *puts)
    accounts.own(VERIFIER, "agenttrain.rollout:score")
    accounts.own(RECORD, "agenttrain.rollout:Runner.run")
    accounts.own(POOL, "agenttrain.pool:RolloutPool.run")
    accounts.own(PIPE, "multiprocessing.connection:Connection.send", "multiprocessing.connection:Connection.recv")
    accounts.own(FORWARD, "agenttrain.local.policy:Logits.at", size=lambda self, flat, ids, **_: ids.numel())
    accounts.own(BACKWARD, "torch.autograd:grad")
    accounts.own(BATCHES, "agenttrain.local.passes:micro_batches")
    accounts.own(OPTIMIZER, "torch.optim:AdamW.step")


def serve(descriptor: int, path: str) -> None:
    """The engine's process, with its accounts written at the end."""
    accounts = CpuAccounts()
    own_engine(accounts)
    from agenttrain.local import process

    process.serve(descriptor)
    accounts.write(Path(path))


# ── the run ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Phases:
    """When each phase began, told by the calls that begin it."""

    began: list[tuple[float, str]] = field(default_factory=list)

    def enter(self, name: str) -> None:
        self.began.append((time.monotonic(), name))

    def walls(self, ended: float) -> Counter[str]:
        found: Counter[str] = Counter()
        for (at, name), (until, _) in pairwise([*self.began, (ended, "")]):
            found[name] += until - at
        return found

    def watch(self) -> None:
        """Enter phases where the run's own functions are called."""
        from agenttrain.local.learner import Learner
        from agenttrain.local.trainer import LocalTrainer
        from agenttrain.pool import RolloutPool

        run = RolloutPool.run

        def pool_run(pool: Any, engine: Any, requests: Any, on_done: Any = None) -> Any:
            self.enter(ROLLOUTS if requests[0].phase == "train" else EVALUATION)
            try:
                return run(pool, engine, requests, on_done)
            finally:
                self.enter(REST)

        RolloutPool.run = pool_run
        for kind, name, phase in (
            (Learner, "measured", TRAINING),
            (Learner, "train", TRAINING),
            (LocalTrainer, "_publish", PUBLISH),
        ):
            setattr(kind, name, self._entering(phase, getattr(kind, name)))

    def _entering(self, phase: str, function: Any) -> Any:
        def entering(*args: Any, **options: Any) -> Any:
            self.enter(phase)
            try:
                return function(*args, **options)
            finally:
                self.enter(REST)

        return entering


@dataclass(frozen=True)
class Run:
    """One profiled fit."""

    main: dict[str, Any]
    engine: dict[str, Any]
    phases: list[tuple[float, str]]
    walls: Mapping[str, float]
    n_parameters: int
    n_calls: int
    """Of the policy, by all rollouts."""
    n_rollouts: int
    store_s: float
    """CPU seconds that writing the same rows takes alone."""


def profiled_fit(steps: int, held_out: int, folder: Path) -> Run:
    phases = Phases()
    phases.enter(START)
    accounts = CpuAccounts()
    from agenttrain.commands.progress import Progress
    from agenttrain.fit import fit
    from agenttrain.local import process
    from agenttrain.prepare import prepare
    from agenttrain.run_folder import new_run

    engine_path = folder / "engine.json"
    process.SERVE = (
        f"import sys; sys.path.append({str(HERE)!r}); from fit_profile import serve; "
        f"serve(int(sys.argv[1]), {str(engine_path)!r})"
    )
    own_main(accounts)
    phases.watch()
    flags = {"trainer": {"steps": steps}, "eval": {"tasks": held_out}}
    job = prepare(str(EXAMPLE / "graph.py"), cwd=Path.cwd(), flags=flags)
    run = new_run(folder, "profile")
    report = fit(job, run, watcher=Progress(job))
    ended = time.monotonic()
    engine = json.loads(engine_path.read_text())
    rows = list((run.rollouts).glob("*.db"))
    with sqlite3.connect(rows[0]) as connection:
        ((n_calls,),) = connection.execute("SELECT count(*) FROM turns")
        ((n_rollouts,),) = connection.execute("SELECT count(*) FROM results")
    return Run(
        main=accounts.read(),
        engine=engine,
        phases=phases.began,
        walls=phases.walls(ended),
        n_parameters=report["model"]["parameters"],
        n_calls=n_calls,
        n_rollouts=n_rollouts,
        store_s=writing_alone(rows[0], folder / "again.db"),
    )


# ── the bounds ───────────────────────────────────────────────────────────────────────────────────────────────────────


def writing_alone(source: Path, target: Path) -> float:
    """CPU seconds to write all rows of a store into a new file, one statement a table."""
    with sqlite3.connect(source) as connection:
        made = [sql for (sql,) in connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")]
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        rows = {name: connection.execute(f"SELECT * FROM {name}").fetchall() for name in tables}
    began = time.process_time()
    with sqlite3.connect(target) as connection:
        for sql in made:
            connection.execute(sql)
        for name, each in rows.items():
            if each:
                connection.executemany(f"INSERT INTO {name} VALUES ({', '.join('?' * len(each[0]))})", each)
    connection.close()
    return time.process_time() - began


def alone(code: str) -> float:
    """CPU seconds of a new Python process that runs some code."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    if status != 0:
        raise RuntimeError(f"python -c {code!r} ended with status {status}")
    return usage.ru_utime + usage.ru_stime


LOAD = (
    "import torch; from transformers import AutoModelForCausalLM; "
    f"AutoModelForCausalLM.from_pretrained({str(EXAMPLE / 'policy')!r}, dtype=torch.float32)"
)
GRAPH = "from langchain_openai import ChatOpenAI; from langgraph.prebuilt import ToolNode"


def flops_per_s() -> float:
    """Of one thread, in a matrix product of 1024 by 1024."""
    import torch

    torch.set_num_threads(1)
    a = torch.randn(1024, 1024)
    a @ a
    n, began = 0, time.thread_time()
    while time.thread_time() - began < 1.0:
        a @ a
        n += 1
    return n * 2 * 1024**3 / (time.thread_time() - began)


def graph_alone(n: int) -> float:
    """CPU seconds a model call of the example's graph, whose model answers at once; one rollout after another."""
    from capture import plain_graph
    from langchain_core.language_models.chat_models import BaseChatModel
    from langchain_core.messages import AIMessage, BaseMessage
    from langchain_core.outputs import ChatGeneration, ChatResult

    from agenttrain.graph.load import load_graph
    from agenttrain.tasks import read_tasks

    script = (("get_order", {"order_id": "A1"}), ("get_price", {"item": "lamp"}), ("calc", {"expression": "2*3"}))

    class AtOnce(BaseChatModel):
        """Three tool calls, then an answer."""

        @property
        def _llm_type(self) -> str:
            return "at once"

        def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
            done = sum(isinstance(message, AIMessage) for message in messages)
            calls = [{"name": name, "args": args, "id": f"c{done}"} for name, args in script[done : done + 1]]
            message = AIMessage(content="" if calls else "The answer is 6.", tool_calls=calls)
            return ChatResult(generations=[ChatGeneration(message=message)])

    desk = sys.modules[load_graph(str(EXAMPLE / "graph.py")).target.__module__]
    graph = plain_graph(desk, AtOnce())
    tasks = read_tasks(EXAMPLE / "tasks.jsonl")[: n + 1]
    for i, task in enumerate(tasks):
        if i == 1:  # the first one warms up
            began = time.process_time()
        graph.invoke(dict(task.input), context=task.context)
    return (time.process_time() - began) / (n * (len(script) + 1))


# ── the table ────────────────────────────────────────────────────────────────────────────────────────────────────────

Row = tuple[str, str, float, str]
"""Phase, owner, CPU seconds, bound."""


def rows_of(run: Run) -> Iterator[Row]:
    """The table's rows: each phase, each owner above 0.5 % of the whole, what is left."""
    flops, call_s = flops_per_s(), graph_alone(64)
    imports = alone(LOAD), alone(f"{LOAD}; {GRAPH}")
    main, engine = by_phase(run.main, run.phases), by_phase(run.engine, run.phases)
    in_engine = sum(engine[name][FORWARD] for name in (EVALUATION, ROLLOUTS)) or 1.0
    n_engine = run.engine["sizes"][FORWARD] * 2 * run.n_parameters / flops
    in_rollouts = sum(main[name][LANGGRAPH] for name in (EVALUATION, ROLLOUTS)) or 1.0
    in_store = sum(main[name][STORE] for name in main) or 1.0
    n_update = run.main["sizes"][FORWARD] * 2 * run.n_parameters / flops

    def bound(phase: str, owner: str, process: str, s: float) -> str:
        if phase == START and owner == "":
            return f"{imports[process == 'run']:.1f} s: the same imports and the model loaded, alone"
        if owner == FORWARD and phase in (EVALUATION, ROLLOUTS):
            return f"{n_engine * s / in_engine:.1f} s: its products at the speed of a large one"
        if owner == FORWARD and phase == TRAINING:
            return f"{n_update:.1f} s: its products at the speed of a large one"
        if owner == BACKWARD:
            return f"{2 * n_update:.1f} s at most: twice the forward's products"
        if owner == LANGGRAPH:
            return f"{call_s * run.n_calls * s / in_rollouts:.1f} s: the graph with a model that answers at once"
        if owner == STORE:
            return f"{run.store_s * s / in_store:.1f} s: the same rows in one statement a table"
        return "0 s: neither the model nor the graph"

    total = sum(sum(each.values()) for side in (main, engine) for each in side.values())
    for phase in (START, EVALUATION, ROLLOUTS, TRAINING, PUBLISH, REST):
        yield phase, f"wall {run.walls.get(phase, 0.0):.1f} s", 0.0, ""
        for process, side in (("engine", engine), ("run", main)):
            small = 0.0
            for owner, s in side.get(phase, Counter()).most_common():
                if owner and s < 0.005 * total:
                    small += s
                elif owner:
                    yield process, owner, s, bound(phase, owner, process, s)
            left = side.get(phase, Counter())[""] + small
            if left >= 0.005 * total:
                yield process, "all else", left, bound(phase, "", process, left)


def table(run: Run) -> str:
    rows = list(rows_of(run))
    total = sum(s for *_, s, _ in rows)
    lines = [
        f"{run.n_rollouts} rollouts with {run.n_calls} model calls; {total:.0f} CPU seconds of both processes, "
        f"{sum(run.walls.values()):.0f} s of wall time; load {os.getloadavg()[0]:.1f} at the end.",
        "",
        "| phase, process | owner | CPU s | share | bound |",
        "|---|---|---|---|---|",
    ]
    for place, owner, s, bound in rows:
        if s == 0.0:
            lines.append(f"| **{place}** | {owner} | | | |")
        else:
            lines.append(f"| {place} | {owner} | {s:.1f} | {s / total:.0%} | {bound} |")
    return "\n".join(lines)


def put_into(page: Path, text: str) -> None:
    """Replace what stands between the page's two marks."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--held-out", type=int, default=160)
    parser.add_argument("--write", action="store_true", help="put the table into docs/profile.md")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        text = table(profiled_fit(chosen.steps, chosen.held_out, Path(folder)))
    print(text)
    if chosen.write:
        put_into(PAGE, text)


if __name__ == "__main__":
    main()
