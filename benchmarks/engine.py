"""How fast is the embedded engine, against what a user would pick instead and against the machine?

    python benchmarks/engine.py [--conversations 128] [--turns 4] [--repeats 3]

1. The same multi-turn work (order-desk prompts, observations of equal length, sampled to the end of turn or 40 tokens)
   by the engine, by transformers' `generate` in one left-padded batch a turn, and by `generate` one conversation at a
   time. Interleaved in one process, medians of ratios.
2. The machine's bound: measured matrix products and memory reads, as sampled tokens a second for this model.
3. The mean batch width of real rollouts whose node is sync, async, or async with a blocking call.
Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import torch

from agenttrain.capture.render import open_renderer
from agenttrain.local.engine import LocalEngine
from agenttrain.records import Generation, Ids, Sampling
from agenttrain.tasks import read_tasks

EXAMPLE = Path(__file__).parents[1] / "examples" / "order-desk"
POLICY = EXAMPLE / "policy"
MOST_TOKENS = 40
OBSERVATION = '{"item": "red lamp", "qty": 12}'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": text,
            "parameters": {"type": "object", "properties": {key: {"type": "string"}}, "required": [key]},
        },
    }
    for name, key, text in (
        ("get_order", "order_id", "Item and quantity of an order."),
        ("get_price", "item", "Price of one unit of an item."),
        ("get_stock", "item", "Units in stock of an item."),
        ("calc", "expression", "Result of an expression with + - *."),
    )
]


class Work:
    """Conversations of several turns, whose next prompt is the last one, what was sampled, and an observation."""

    def __init__(self, n: int, turns: int) -> None:
        self.renderer = open_renderer(str(POLICY), family="default")
        system = {"role": "system", "content": "You are the order desk agent. Use the tools to answer the question."}
        asked = [task.input["messages"][0] for task in read_tasks(EXAMPLE / "tasks.jsonl")[:n]]
        self.first = [self.renderer.render([system, message], TOOLS) for message in asked]
        self.turns = turns

    def next_prompt(self, prompt: Ids, sampled: Ids) -> Ids:
        observation = {"role": "tool", "content": OBSERVATION, "tool_call_id": "1", "name": "get_order"}
        if sampled[-1] not in self.renderer.stop_ids:
            sampled = (*sampled, self.renderer.stop_ids[0])
        extended = self.renderer.extend(prompt, sampled, [observation], TOOLS)
        assert extended is not None
        return extended


def by_engine(work: Work, engine: LocalEngine, life: int) -> int:
    """Tokens sampled; every conversation goes on as soon as its turn is answered."""
    n_tokens = 0
    waiting: dict[Future[Generation], tuple[int, int, Ids]] = {}

    def ask(which: int, turn: int, prompt: Ids) -> None:
        sampling = Sampling(
            temperature=1.0, max_tokens=MOST_TOKENS, seed=which * 100 + turn, stop_ids=work.renderer.stop_ids
        )
        waiting[engine.generate(prompt, sampling, session=f"{life}-{which}")] = (which, turn, prompt)

    for which, prompt in enumerate(work.first):
        ask(which, 0, prompt)
    while waiting:
        done, _ = wait(waiting, return_when="FIRST_COMPLETED")
        for future in done:
            which, turn, prompt = waiting.pop(future)
            generation = future.result()
            n_tokens += len(generation.token_ids)
            if turn + 1 < work.turns:
                ask(which, turn + 1, work.next_prompt(prompt, generation.token_ids))
            else:
                engine.release(f"{life}-{which}")
    return n_tokens


def by_generate(work: Work, model: Any, width: int) -> int:
    """Tokens sampled by transformers' generate, `width` conversations in a left-padded batch."""
    return sum(_generate_batch(work, model, work.first[i : i + width]) for i in range(0, len(work.first), width))


def _generate_batch(work: Work, model: Any, prompts: list[Ids]) -> int:
    n_tokens, stop = 0, work.renderer.stop_ids[0]
    for _ in range(work.turns):
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=mask, do_sample=True, max_new_tokens=MOST_TOKENS, eos_token_id=stop, pad_token_id=0
            )
        sampled = [_until(row, stop) for row in out[:, longest:].tolist()]
        n_tokens += sum(map(len, sampled))
        prompts = [work.next_prompt(prompt, ids) for prompt, ids in zip(prompts, sampled, strict=True)]
    return n_tokens


def _until(row: list[int], stop: int) -> Ids:
    return tuple(row[: row.index(stop) + 1] if stop in row else row)


def tokens_per_second(run: Callable[[], int]) -> float:
    began = time.perf_counter()
    return run() / (time.perf_counter() - began)


def machine_bound(n_parameters: int, threads: int) -> dict[str, float]:
    """Sampled tokens a second if every operation ran at the speed of a large matrix product."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    a = torch.randn(1024, 1024)
    a @ a
    began, n = time.perf_counter(), 0
    while time.perf_counter() - began < 1.0:
        a @ a
        n += 1
    flops = n * 2 * 1024**3 / (time.perf_counter() - began)
    torch.set_num_threads(before)
    return {"matmul_gflops": flops / 1e9, "tokens_per_s": flops / (2 * n_parameters)}


def batch_widths(n: int) -> dict[str, dict[str, float]]:
    """Mean batch width and seconds of n rollouts, by how the node calls its model."""
    from agenttrain.evaluation import evaluation_requests, opened
    from agenttrain.prepare import prepare
    from agenttrain.protocols import EngineContext
    from agenttrain.run_folder import new_run

    found = {}
    for style in ("sync", "asynchronous", "blocking"):
        target = f"{Path(__file__).with_name('node_styles.py')}:{style}"
        flags = {"model": str(POLICY), "tasks": str(EXAMPLE / "tasks.jsonl"), "eval": {"tasks": n}, **_settings()}
        job = prepare(target, cwd=Path.cwd(), flags=flags)
        with _folder() as folder, opened(job, new_run(folder, "widths")) as (_, _, pool):
            engine = job.plugins.engine("local")(EngineContext(config=job.config, model=str(job.model)))
            began = time.perf_counter()
            pool.run(engine, evaluation_requests(job.held_out, "eval", 1, 0.0, 0))
            wall = time.perf_counter() - began
            stats = engine.stats()
            engine.close()
        found[style] = {"mean_batch_width": stats["decode_rows"] / stats["decode_steps"], "seconds": wall}
    return found


def _settings() -> dict[str, Any]:
    from agenttrain.config import read_file

    tables = read_file(EXAMPLE / "agenttrain.toml")
    return {key: tables[key] for key in ("limits", "renderer") if key in tables}


def _folder() -> Any:
    import contextlib
    import tempfile

    @contextlib.contextmanager
    def made() -> Any:
        with tempfile.TemporaryDirectory() as name:
            yield Path(name)

    return made()


def main() -> None:
    from transformers import AutoModelForCausalLM

    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--conversations", type=int, default=128)
    arguments.add_argument("--turns", type=int, default=4)
    arguments.add_argument("--repeats", type=int, default=3)
    chosen = arguments.parse_args()
    torch.manual_seed(0)
    work = Work(chosen.conversations, chosen.turns)
    model = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32).eval()
    few = Work(8, chosen.turns)
    engine = LocalEngine(POLICY)
    rounds = [
        {
            "engine": tokens_per_second(lambda life=life: by_engine(work, engine, life)),
            "generate_batched": tokens_per_second(lambda: by_generate(work, model, chosen.conversations)),
            "generate_one_by_one": tokens_per_second(lambda: by_generate(few, model, 1)),
        }
        for life in range(chosen.repeats)
    ]
    engine.close()
    n_parameters = sum(p.numel() for p in model.parameters())
    bound = machine_bound(n_parameters, 1)
    median = {name: statistics.median(row[name] for row in rounds) for name in rounds[0]}
    print(
        json.dumps(
            {
                "tokens_per_s": median,
                "ratio_to_generate_batched": statistics.median(r["engine"] / r["generate_batched"] for r in rounds),
                "ratio_to_generate_one_by_one": statistics.median(
                    r["engine"] / r["generate_one_by_one"] for r in rounds
                ),
                "bound_one_thread": bound,
                "share_of_bound": median["engine"] / bound["tokens_per_s"],
                "batch_width": batch_widths(chosen.conversations),
            }
        )
    )


if __name__ == "__main__":
    main()
