"""How far is the memory forecast from what a fit really takes?

Runs fits of a few steps as programs of their own: of the order desk, and of models of random weights made on the spot,
with a graph of one call whose verifier gives nearly any two answers different rewards, so that every group teaches.
Samples the resident memory of the fit's process and of its engine's from /proc, and prints forecast / peak for each.

    python benchmarks/memory.py [--sizes 30 120] [--adapter none lora]
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

DESK = Path(__file__).parents[1] / "examples" / "order-desk"
SHAPES = {
    30: {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 9, "num_attention_heads": 8},
    120: {"hidden_size": 768, "intermediate_size": 2816, "num_hidden_layers": 14, "num_attention_heads": 12},
}
"""Millions of parameters to what makes them, without the vocabulary."""
GRAPH = """
from langchain_openai import ChatOpenAI
from langgraph.graph import MessagesState, StateGraph
from agenttrain import Task, trainable

model = ChatOpenAI(model="gpt-4o", api_key="unused")

def agent(state: MessagesState):
    return {"messages": [model.invoke(state["messages"])]}

def score(task: Task, state: dict) -> float:
    return sum(map(ord, repr(state["messages"][-1].content))) % 7 / 6

@trainable(tasks="tasks.jsonl", verifier=score)
def graph():
    builder = StateGraph(MessagesState)
    builder.add_node("agent", agent)
    builder.set_entry_point("agent")
    return builder.compile()
"""
SAMPLE_S = 0.05
MIB = 2**20


def made_model(folder: Path, millions: int) -> Path:
    """A model of random weights with the order desk's tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shutil.copytree(DESK / "policy", folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    settings = json.loads((DESK / "policy" / "config.json").read_text())
    settings |= SHAPES[millions] | {"num_key_value_heads": 4, "head_dim": 64, "layer_types": None}
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**settings)).save_pretrained(folder)
    return folder


def peaks(command: list[str], cwd: Path) -> tuple[dict[str, int], int]:
    """Peak resident bytes of a command ("trainer") and of its child ("engine"), and its exit code."""
    found = {"trainer": 0, "engine": 0, "together": 0}
    with (cwd / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=cwd, stdout=log, stderr=log)
        ended = threading.Event()
        watch = threading.Thread(target=_watch, args=(process.pid, found, ended))
        watch.start()
        code = process.wait()
        ended.set()
        watch.join()
    return found, code


def _watch(pid: int, found: dict[str, int], ended: threading.Event) -> None:
    while not ended.wait(SAMPLE_S):
        trainer, engine = _resident(pid), sum(map(_resident, _children(pid)))
        found["trainer"], found["engine"] = max(found["trainer"], trainer), max(found["engine"], engine)
        found["together"] = max(found["together"], trainer + engine)


def _resident(pid: int) -> int:
    """Without the pages of files, which the kernel takes back when it needs them."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def made_graph(folder: Path) -> Path:
    """graph.py and tasks.jsonl with long questions."""
    words = " ".join(f"order {n} of the red lamp" for n in range(24))
    rows = [
        {
            "input": {"messages": [{"role": "user", "content": f"{n}: {words}"}]},
            "split": "held_out" if n >= 16 else "train",
        }
        for n in range(20)
    ]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "graph.py").write_text(GRAPH)
    return folder / "graph.py"


def measured(name: str, graph: Path, model: Path, settings: list[str]) -> dict[str, Any]:
    """One line of the table."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "agenttrain", "fit", str(graph), "--model", str(model)]
        command += [part for setting in settings for part in ("--set", setting)]
        plan = subprocess.run([*command, "--dry-run", "--json"], cwd=folder, capture_output=True, text=True)
        if plan.returncode:
            return {"name": name, "refused": plan.stderr.strip().splitlines()[-1]}
        parts = json.loads(plan.stdout)["forecast"]["parts"]
        forecast = {p: sum(part["bytes"] for part in parts if part["process"] == p) for p in ("trainer", "engine")}
        began = time.monotonic()
        peak, code = peaks(command, Path(folder))
        log = (Path(folder) / "log").read_text().splitlines()
    return {
        "name": name,
        "settings": settings,
        "exit": code,
        "last": log[-1] if log else "",
        "wall_s": round(time.monotonic() - began),
        "forecast_mib": {p: round(n / MIB) for p, n in forecast.items()},
        "peak_mib": {p: round(n / MIB) for p, n in peak.items()},
        "ratio": {p: round(forecast[p] / max(1, peak[p]), 2) for p in forecast},
        "ratio_together": round(sum(forecast.values()) / max(1, peak["together"]), 2),
        "parts_mib": {f"{part['process']} {part['name']}": round(part["bytes"] / MIB) for part in parts},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="*", default=[30, 120], choices=sorted(SHAPES))
    parser.add_argument("--adapter", nargs="*", default=["none", "lora"], choices=["none", "lora"])
    parser.add_argument("--no-desk", action="store_true", help="leave out the order desk's own policy")
    chosen = parser.parse_args()
    if not chosen.no_desk:
        settings = ["trainer.steps=1", "eval.tasks=256"]
        print(json.dumps(measured("order desk", DESK / "graph.py", DESK / "policy", settings)), flush=True)
    settings = ["trainer.steps=1", "trainer.tasks_per_step=4", "trainer.group_size=6", "limits.tokens=32"]
    settings += ["trainer.minibatches=1", "trainer.micro_batch_tokens=2048"]
    settings += ["sampling.temperature=2.0", 'renderer.family="default"']
    with tempfile.TemporaryDirectory() as folder:
        graph = made_graph(Path(folder))
        for millions in chosen.sizes:
            model = made_model(Path(folder) / str(millions), millions)
            for adapter in chosen.adapter:
                name = f"{millions} M, adapter {adapter}"
                line = measured(name, graph, model, [*settings, f"trainer.adapter={adapter}"])
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
