"""What does agenttrain cost over a bare client of the same SGLang server?

    python benchmarks/sglang_overhead.py [--rounds 2] [--widths 1 8 32] [--turns 8] [--hidden 512] [--layers 8]
                                         [--only made|order-desk] [--write docs/sglang-overhead.md]

1. Rollouts by the whole path of training: a LangGraph graph whose ChatOpenAI calls its model 8 times in a row, with a
   fixed observation after each call; gate, recorder, renderer, store, engine and pool.
2. A bare client (aiohttp, one coroutine a conversation) that posts the same ids, seeds, lengths and sampling settings
   to the same server. It renders nothing, parses nothing and keeps nothing; the next prompt is there already.
Rounds are interleaved (A B B A …), and the server's KV cache is emptied before each. The ratio is that of tokens a
second of two neighbouring rounds, its median over all pairs. Seeds make both sides sample the same ids; the share that
is equal is told, since a server's sums may differ in the last bit where other calls ran beside.

The prefix cache: of each turn after the first, ids of the prompt that the server took from its cache, over the ids that
it could have had: those of the turn before, prompt and response without its last id, which was never read.

Needs the server of `agenttrain sglang setup`. A model made here, and the order desk's policy as the worst case: its
server is done before anybody else has begun. Prints one JSON object; exits 1 when, with the model made here, the ratio
at the largest width is below 0.95 or the share of the cache below 0.9. About ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
from agenttrain_sglang.client import new_rid
from agenttrain_sglang.wire import generate_body
from langchain_core.messages import AnyMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph

from agenttrain import Task, trainable
from agenttrain.records import Generation, Ids, RolloutResult, Sampling

ROOT = Path(__file__).parents[1]
POLICY = ROOT / "examples" / "order-desk" / "policy"
LEAST_RATIO, LEAST_CACHED = 0.95, 0.9
OBSERVATION = '{"item": "red lamp", "qty": 12}'
MOST_TOKENS = 40

# ── the agent ────────────────────────────────────────────────────────────────────────────────────────────────────────


@tool
def look_up(item: str) -> str:
    """Quantity of an item."""
    return OBSERVATION


model = ChatOpenAI(model="gpt-4o-mini", api_key="unused", max_tokens=MOST_TOKENS).bind_tools([look_up])


class State(MessagesState):
    """A conversation, and how many calls of the model it will have."""

    turns: int


def agent(state: State) -> dict[str, list[AnyMessage]]:
    """Ask the model."""
    return {"messages": [model.invoke([SystemMessage("You look up items."), *state["messages"]])]}


def observe(state: State) -> dict[str, list[AnyMessage]]:
    """The same text, whatever the model said."""
    return {"messages": [ToolMessage(OBSERVATION, tool_call_id="1", name="look_up")]}


def goes_on(state: State) -> str:
    return "observe" if sum(message.type == "ai" for message in state["messages"]) < state["turns"] else END


def odd_share(task: Task, state: dict[str, Any]) -> float:
    """A reward that differs from rollout to rollout."""
    text = "".join(str(message.content) for message in state["messages"] if message.type == "ai")
    return sum(ord(character) % 2 for character in text) / max(1, len(text))


builder = StateGraph(State)
builder.add_node("agent", agent)
builder.add_node("observe", observe)
builder.add_edge(START, "agent")
builder.add_conditional_edges("agent", goes_on)
builder.add_edge("observe", "agent")
graph = trainable(builder.compile(), verifier=odd_share)

# ── models and tasks ─────────────────────────────────────────────────────────────────────────────────────────────────


def made_model(folder: Path, *, experts: int | None = None, dtype: str = "float32", **sizes: Any) -> Path:
    """A random Qwen3, or a mixture of which each token takes 2 experts in every layer, with a byte-level tokenizer.

    Args:
        sizes: as transformers names them; those that are left out are those of `agenttrain.testing.tiny_model`.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from agenttrain.testing import tiny_model

    config = AutoConfig.from_pretrained(tiny_model(folder, layers=1, experts=experts))
    for name, size in {"initializer_range": 0.02, "max_position_embeddings": 2048, **sizes}.items():
        setattr(config, name, size)
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    return folder


def sizes_of(hidden: int, layers: int) -> dict[str, int]:
    heads = max(4, hidden // 64)
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": 3 * hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": hidden // heads,
    }


def written_tasks(file: Path, n: int, turns: int) -> Path:
    """Questions, of which all but the first are held out."""
    rows = [
        {
            "id": f"item-{i}",
            "input": {"messages": [{"role": "user", "content": f"How many of item {i} are there?"}], "turns": turns},
            "split": "held_out" if i else "train",
        }
        for i in range(n + 1)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


# ── one server, and both ways to it ──────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Call:
    """What one call of the engine asked."""

    prompt_ids: Ids
    sampling: Sampling
    future: Future[Generation]

    @property
    def token_ids(self) -> Ids:
        return self.future.result().token_ids


class Recording:
    """An engine that remembers its calls."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.calls_by_session: dict[str, list[Call]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str) -> Future[Generation]:
        future: Future[Generation] = self._engine.generate(prompt_ids, sampling, session=session)
        self.calls_by_session.setdefault(session, []).append(Call(prompt_ids, sampling, future))
        return future


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round of one side."""

    seconds: float
    n_tokens: int
    own_cpu_s: float
    server_cpu_s: float
    equal: float
    """Share of the recorded ids that were sampled again."""

    @property
    def tokens_per_s(self) -> float:
        return self.n_tokens / self.seconds


@dataclass(slots=True)
class Bench:
    """A pool of rollouts, their engine and its server."""

    pool: Any
    engine: Any
    tasks: Sequence[Task]
    flush: Any
    """Until what the store was given is written."""
    rollouts_folder: Path
    """The store's."""
    n_rounds: int = 0
    address: str = field(init=False)

    def __post_init__(self) -> None:
        (replica,) = self.engine.replicas
        self.address = replica.server.client.address

    def rollouts(self, width: int, engine: Any = None) -> list[RolloutResult]:
        """One for each of `width` tasks, all at once; whole, or the benchmark ends."""
        from agenttrain.evaluation import evaluation_requests

        self.n_rounds += 1
        requests = evaluation_requests(self.tasks[:width], "eval", 1, 1.0, 0)
        results = self.pool.run(engine or self.engine, [replace(each, remake=self.n_rounds) for each in requests])
        self.flush()
        for result in results:
            if result.rollout.reward is None:
                raise SystemExit(f"Rollout {result.rollout.id} failed: {result.rollout.cause}")
        return list(results)

    def recorded(self, width: int) -> list[list[Call]]:
        """[width][turns] the calls of one round, which every later one repeats."""
        recording = Recording(self.engine)
        self.rollouts(width, recording)
        return list(recording.calls_by_session.values())

    def ours(self, conversations: Sequence[Sequence[Call]]) -> Round:
        with self._measured() as took:
            results = self.rollouts(len(conversations))
        turns = [turn for result in results for turn in result.turns]
        sampled = {turn.prompt_ids: turn.response_ids for turn in turns}
        return Round(
            n_tokens=sum(len(turn.response_ids) for turn in turns),
            equal=equal_share((sampled.get(c.prompt_ids, ()), c.token_ids) for talk in conversations for c in talk),
            **took,
        )

    def bare(self, conversations: Sequence[Sequence[Call]]) -> Round:
        with self._measured() as took:
            answers = asyncio.run(asked(self.address, conversations))
        pairs = zip((ids for talk in answers for ids in talk), (c for talk in conversations for c in talk), strict=True)
        return Round(
            n_tokens=sum(len(ids) for talk in answers for ids in talk),
            equal=equal_share((ids, call.token_ids) for ids, call in pairs),
            **took,
        )

    @contextmanager
    def _measured(self) -> Iterator[dict[str, float]]:
        took: dict[str, float] = {}
        emptied(self.address)
        server, own, began = self.engine.stats()["cpu_s"], time.process_time(), time.perf_counter()
        yield took
        took |= {"seconds": time.perf_counter() - began, "own_cpu_s": time.process_time() - own}
        took["server_cpu_s"] = self.engine.stats()["cpu_s"] - server


def emptied(address: str) -> None:
    """Drop the server's KV cache."""
    for _ in range(100):
        try:
            with urllib.request.urlopen(urllib.request.Request(f"{address}/flush_cache", b""), timeout=10):
                return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"The server at {address} does not empty its cache.")


async def asked(address: str, conversations: Sequence[Sequence[Call]]) -> list[list[list[int]]]:
    """The ids that the server samples for the recorded prompts, each conversation's one after the other."""
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:

        async def talk(calls: Sequence[Call]) -> list[list[int]]:
            answers = []
            for call in calls:
                body = generate_body(call.prompt_ids, call.sampling, rid=new_rid())
                async with http.post(f"{address}/generate", json=body) as response:
                    response.raise_for_status()
                    answers.append((await response.json())["output_ids"])
            return answers

        return await asyncio.gather(*map(talk, conversations))


def equal_share(pairs: Any) -> float:
    """Of (ids, recorded ids): places with the same id, over all recorded."""
    n_equal = n = 0
    for ids, recorded in pairs:
        n += len(recorded)
        n_equal += sum(a == b for a, b in zip(ids, recorded, strict=False))
    return n_equal / n


def cached_share(conversations: Sequence[Sequence[Call]]) -> dict[str, float]:
    """What the server took from its cache, of turns after the first."""
    possible = cached = n_prompt_ids = 0
    for talk in conversations:
        for before, call in pairwise(talk):
            possible += len(before.prompt_ids) + len(before.token_ids) - 1
            cached += call.future.result().n_cached_ids
            n_prompt_ids += len(call.prompt_ids)
    return {"of_possible": cached / possible, "of_prompts": cached / n_prompt_ids, "cached_ids": cached}


@contextmanager
def opened_bench(
    model: Path, scratch: Path, *, width: int, turns: int, tables: Mapping[str, Any] | None = None
) -> Iterator[Bench]:
    """A server on a model, and everything that a rollout goes through.

    Args:
        tables: of the configuration, over those that every benchmark has.
    """
    from agenttrain.evaluation import opened
    from agenttrain.prepare import prepare
    from agenttrain.protocols import EngineContext
    from agenttrain.run_folder import new_run

    own = dict(tables or {})
    flags = {
        "model": str(model),
        "tasks": str(written_tasks(scratch / "tasks.jsonl", width, turns)),
        "engine": {"name": "sglang", "concurrency": width},
        "sglang": {"max_running": max(32, width), "deterministic": True, **own.pop("sglang", {})},
        "limits": {"turns": turns + 1, "tokens": 100_000, "seconds": 600},
        "renderer": {"family": "default"},
        **own,
    }
    job = prepare(f"{Path(__file__).resolve()}:graph", cwd=scratch, flags=flags)
    run = new_run(scratch, "overhead")
    engine = job.plugins.engine("sglang")(EngineContext(config=job.config, model=str(job.model), run_dir=run.path))
    try:
        with opened(job, run) as (store, _, pool):
            yield Bench(pool, engine, job.held_out, store.flush, run.rollouts)
    finally:
        engine.close()


# ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def compared(bench: Bench, width: int, n_rounds: int) -> dict[str, Any]:
    """Both sides at one width."""
    emptied(bench.address)
    conversations = bench.recorded(width)
    ours: list[Round] = []
    bare: list[Round] = []
    for number in range(n_rounds):
        for is_ours in (True, False) if number % 2 == 0 else (False, True):
            (ours if is_ours else bare).append((bench.ours if is_ours else bench.bare)(conversations))
    ratios = [a.tokens_per_s / b.tokens_per_s for a, b in zip(ours, bare, strict=True)]
    n_calls = sum(map(len, conversations))
    return {
        "rollouts": width,
        "calls": n_calls,
        "tokens": bare[0].n_tokens,
        "ratio": {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)},
        "agenttrain": summed(ours),
        "bare": summed(bare),
        "more_cpu_ms_per_call": 1000
        * (statistics.median(x.own_cpu_s for x in ours) - statistics.median(x.own_cpu_s for x in bare))
        / n_calls,
        "calls_per_s_at_most": n_calls / statistics.median(x.own_cpu_s for x in ours),
        "cache": cached_share(conversations),
    }


def summed(rounds: Sequence[Round]) -> dict[str, float]:
    """Medians of one side's rounds."""
    return {
        "tokens_per_s": statistics.median(x.tokens_per_s for x in rounds),
        "seconds": statistics.median(x.seconds for x in rounds),
        "own_cpu_share": statistics.median(x.own_cpu_s / x.seconds for x in rounds),
        "server_cpu_share": statistics.median(x.server_cpu_s / x.seconds for x in rounds),
        "equal_ids": min(x.equal for x in rounds),
    }


def measured(model: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    """All widths with one model."""
    from agenttrain.prepare import n_parameters

    with tempfile.TemporaryDirectory() as name:
        bench = opened_bench(model, Path(name), width=max(chosen.widths), turns=chosen.turns)
        with bench as opened:
            by_width = {str(width): compared(opened, width, chosen.rounds) for width in chosen.widths}
    return {"parameters": n_parameters(model), "widths": by_width}


def page(found: Mapping[str, Any]) -> str:
    """docs/sglang-overhead.md"""
    lines = [
        "# What agenttrain costs over a bare client of SGLang",
        "",
        f"Made by `python benchmarks/sglang_overhead.py --rounds {found['rounds']}` on {date.today()}, "
        f"{found['machine']}. Not written by hand.",
        "",
        f"{found['turns']} model calls a rollout, up to {MOST_TOKENS} tokens each, an observation after each. The same "
        "ids, seeds and settings go to the same server, once through a LangGraph graph with gate, recorder, renderer, "
        "store and engine, once from a bare aiohttp client that renders, parses and keeps nothing. Rounds alternate, "
        "the server's cache is emptied before each, and the ratio is the median of neighbouring rounds (least to "
        "most). *CPU*: of this process, and of the server's processes, over the round's seconds.",
    ]
    for name, of_model in found["models"].items():
        lines += [
            "",
            f"## {name}: {of_model['parameters'] / 1e6:.2f} M parameters",
            "",
            "| rollouts at once | agenttrain, tokens/s | bare, tokens/s | ratio | CPU here, server | bare: CPU here, "
            "server | more CPU a call | equal ids | cached of what is possible |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for row in of_model["widths"].values():
            ours, bare, ratio = row["agenttrain"], row["bare"], row["ratio"]
            lines.append(
                f"| {row['rollouts']} | {ours['tokens_per_s']:.0f} | {bare['tokens_per_s']:.0f} | "
                f"{ratio['median']:.3f} ({ratio['least']:.3f} to {ratio['most']:.3f}) | "
                f"{ours['own_cpu_share']:.2f}, {ours['server_cpu_share']:.2f} | "
                f"{bare['own_cpu_share']:.2f}, {bare['server_cpu_share']:.2f} | {row['more_cpu_ms_per_call']:.1f} ms | "
                f"{100 * min(ours['equal_ids'], bare['equal_ids']):.1f} % | {100 * row['cache']['of_possible']:.1f} % |"
            )
    most = max(
        row["calls_per_s_at_most"] for of_model in found["models"].values() for row in of_model["widths"].values()
    )
    lines += [
        "",
        f"The bar, with the model made here at {found['largest']} at once: a ratio of {LEAST_RATIO} and "
        f"{LEAST_CACHED:.0%} of the cache: {'held' if found['holds'] else 'missed'}. The order desk's policy is the "
        "worst case: its server has nearly nothing to do, and both sides share its two cores.",
        "",
        f"This process's CPU bounds what one run can ask of any server, however fast: about {most:.0f} calls a second.",
        "",
    ]
    return "\n".join(lines)


def machine() -> str:
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    cores = f"{len(os.sched_getaffinity(0))} cores of {names[0] if names else 'an unknown kind'}"
    return f"{cores}, Python {platform.python_version()}"


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=2)
    arguments.add_argument("--widths", type=int, nargs="+", default=[1, 8, 32])
    arguments.add_argument("--turns", type=int, default=8)
    arguments.add_argument("--hidden", type=int, default=512)
    arguments.add_argument("--layers", type=int, default=8)
    arguments.add_argument("--only", choices=("made", "order-desk"), help="one of the two models")
    arguments.add_argument("--write", type=Path, help="file for the tables")
    chosen = arguments.parse_args()
    found: dict[str, Any] = {"machine": machine(), "rounds": chosen.rounds, "turns": chosen.turns, "models": {}}
    with tempfile.TemporaryDirectory() as name:
        if chosen.only != "order-desk":
            made = made_model(Path(name) / "made", **sizes_of(chosen.hidden, chosen.layers))
            found["models"]["made here"] = measured(made, chosen)
        if chosen.only != "made":
            found["models"]["the order desk's policy"] = measured(POLICY, chosen)
    found["largest"] = str(max(chosen.widths))
    row = found["models"].get("made here", {}).get("widths", {}).get(found["largest"])
    found["holds"] = row is None or (
        row["ratio"]["median"] >= LEAST_RATIO and row["cache"]["of_possible"] >= LEAST_CACHED
    )
    print(json.dumps(found))
    if chosen.write is not None:
        chosen.write.write_text(page(found), encoding="utf-8")
    return int(not found["holds"])


if __name__ == "__main__":
    sys.exit(main())
