"""How far are the trainer's log probabilities from SGLang's for a mixture of experts, with and without replay?

    python benchmarks/moe_replay.py [--rollouts 24] [--turns 4] [--write docs/moe-replay.md]

A random Qwen3-MoE (8 experts in every layer, 2 of them a token) is served in float32 and in bfloat16; rollouts of
several turns go the whole path of training, and the experts of every token come with the answers. What was sampled is
then read from the run's store as Samples and given to the local trainer's own passes (float32, weights unchanged), once
through the experts that the server told and once routing anew. Told are |trainer - server| log probability of all
trained tokens, and the share of (token, layer) pairs whose two experts are other ones than those that the trainer would
choose, over prompts and responses.

Needs the server of `agenttrain sglang setup`. Prints one JSON object; exits 1 when the largest gap is above 1e-3 with
replay of a float32 server, when replay makes a bfloat16 server's mean gap larger, or when a sample has no experts.
About a minute on two cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang_overhead import machine, made_model, opened_bench

from agenttrain.config import Config, resolve
from agenttrain.local.learnable import Learnable
from agenttrain.local.passes import Passes
from agenttrain.local.policy import choose_device, load_model
from agenttrain.local.routing import Replay
from agenttrain.records import RolloutResult, Sample
from agenttrain.trainer.batches import Lesson

DTYPES = ("float32", "bfloat16")
LARGEST_GAP = 1e-3
N_EXPERTS = 8
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
"""The spread of its first numbers is wide enough for experts to matter."""
SPREAD = 0.1


def made_mixture(folder: Path, **sizes: Any) -> Path:
    """A mixture that SGLang 0.5.23 answers rightly: of Qwen's it knows neither dense layers nor tied embeddings."""
    for_sglang = {"mlp_only_layers": [], "tie_word_embeddings": False}
    return made_model(folder, experts=N_EXPERTS, **({"initializer_range": SPREAD} | SIZES | for_sglang | sizes))


def rolled_out(
    model: Path, scratch: Path, *, rollouts: int, turns: int, sglang: Mapping[str, Any]
) -> list[RolloutResult]:
    """Rollouts of a server, as the run's store gives them."""
    from agenttrain.capture.store import read_store

    scratch.mkdir()
    with opened_bench(model, scratch, width=rollouts, turns=turns, tables={"sglang": sglang}) as bench:
        bench.rollouts(rollouts)
    return list(read_store(bench.rollouts_folder).results())


def gaps(
    model: Path, results: Sequence[RolloutResult], *, replays: bool, learnable: Learnable | None = None
) -> torch.Tensor:
    """[N] |trainer - server| log probability of the trained tokens, by the local trainer's passes.

    Args:
        learnable: what is held against the server. None: the model's folder.
    """
    config: Config = resolve(("benchmark", {"trainer": {"replay_experts": replays}}))
    passes = Passes(learnable or Learnable(model, load_model(model, device=choose_device())), config)
    batches = passes.laid_out([Lesson(result=result, advantage=1.0) for result in results], weight_version=0)

    def gap(batch: Any) -> torch.Tensor:
        batch = batch.to(passes.device)
        with torch.no_grad():
            return (passes.log_probabilities(batch) - batch.recorded_logprobs).abs().cpu()

    try:
        return torch.cat(list(passes.each(gap, batches)))
    finally:
        passes.close()


def other_experts(model: Path, samples: Sequence[Sample]) -> float:
    """Share of (token, layer) pairs that the server sent through other experts than the trainer would."""
    policy = load_model(model, device=choose_device())
    routers = Replay(policy).routers
    chosen: dict[int, torch.Tensor] = {}
    for router in routers:
        router.module.register_forward_hook(
            lambda _m, _a, output, place=router.place: chosen.update({place: output[2].cpu()})
        )
    n_other = n = 0
    for sample in samples:
        told = sample.routed_experts
        assert told is not None
        rows = np.frombuffer(told.data, "<u2").reshape(-1, told.n_layers, told.n_chosen).astype(np.int64)
        with torch.no_grad():
            ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids][:-1]])
            policy(input_ids=ids.to(policy.device), use_cache=False)
        for router in routers:
            theirs = rows[:, router.place if told.n_layers == len(routers) else router.layer]
            ours = chosen[router.place].numpy()
            n_other += int((np.sort(theirs, axis=1) != np.sort(ours, axis=1)).any(axis=1).sum())
            n += len(ours)
    return n_other / n


def measured(model: Path, scratch: Path, *, rollouts: int, turns: int, sglang: Mapping[str, Any]) -> dict[str, Any]:
    """One server's figures."""
    results = rolled_out(model, scratch, rollouts=rollouts, turns=turns, sglang=sglang)
    samples = [sample for result in results for sample in result.samples]
    without = sum(sample.routed_experts is None for sample in samples)
    found: dict[str, Any] = {"samples": len(samples), "samples_without_experts": without}
    found["turns"] = sum(len(result.turns) for result in results)
    for name, replays in (("replayed", True), ("anew", False)):
        each = gaps(model, results, replays=replays)
        found["tokens"] = len(each)
        found[name] = {
            "mean": float(each.mean()),
            "p99": float(each.double().quantile(0.99)),
            "max": float(each.max()),
        }
    if not without:
        found["other_experts"] = other_experts(model, samples)
    return found


def holds(found: Mapping[str, Any]) -> bool:
    exact, rough = found["float32"], found["bfloat16"]
    return (
        exact["replayed"]["max"] <= LARGEST_GAP
        and rough["replayed"]["mean"] <= rough["anew"]["mean"]
        and not any(found[dtype]["samples_without_experts"] for dtype in DTYPES)
    )


def page(found: Mapping[str, Any]) -> str:
    """docs/moe-replay.md"""
    lines = [
        "# Replaying the experts of a mixture",
        "",
        f"Made by `python benchmarks/moe_replay.py` on {date.today()}, {found['machine']}. Not written by hand.",
        "",
        f"A random Qwen3-MoE: {SIZES['num_hidden_layers']} layers of {N_EXPERTS} experts, 2 a token, hidden size "
        f"{SIZES['hidden_size']}. SGLang samples on the CPU; the local trainer reads the same tokens in float32, once "
        "through the experts that the server told, once through those that it chooses itself. *Gap*: |trainer - "
        "server| log probability of the trained tokens. *Other experts*: (token, layer) pairs of which the trainer "
        "would have chosen others.",
        "",
        "| server | trained tokens | other experts | gap with replay: mean, 99 %, max | gap without: mean, 99 %, max |",
        "|---|---|---|---|---|",
    ]
    for dtype in DTYPES:
        row = found[dtype]
        with_replay, without = (
            ", ".join(f"{row[name][which]:.2g}" for which in ("mean", "p99", "max")) for name in ("replayed", "anew")
        )
        share = f"{100 * row['other_experts']:.2f} %" if "other_experts" in row else "not told"
        lines.append(f"| {dtype} | {row['tokens']} | {share} | {with_replay} | {without} |")
    lines += ["", "A run says the same of its first update: `logprob_gap_*` and `logprob_gap_unreplayed_*`.", ""]
    return "\n".join(lines)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rollouts", type=int, default=24)
    arguments.add_argument("--turns", type=int, default=4)
    arguments.add_argument("--write", type=Path, help="file for the table")
    chosen = arguments.parse_args()
    found: dict[str, Any] = {"machine": machine()}
    with tempfile.TemporaryDirectory() as name:
        model = made_mixture(Path(name) / "model")
        for dtype in DTYPES:
            found[dtype] = measured(
                model,
                Path(name) / dtype,
                rollouts=chosen.rollouts,
                turns=chosen.turns,
                sglang={"dtype": dtype},
            )
    found["holds"] = holds(found)
    print(json.dumps(found))
    if chosen.write is not None:
        chosen.write.write_text(page(found), encoding="utf-8")
    return int(not found["holds"])


if __name__ == "__main__":
    sys.exit(main())
