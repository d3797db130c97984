"""All that only a GPU can tell about SGLang's servers, in one go of at most ten minutes. Not run on a GPU.

    python benchmarks/gpu_sglang.py --environment FOLDER [--model FOLDER] [--seconds 580]
    python benchmarks/gpu_sglang.py --smoke

Needs no network: FOLDER is a SGLang environment for CUDA that is there already, and the model is a random Qwen3 of 1 B
parameters in bfloat16, made here. `--smoke` does the same with a tiny model on the CPU, with the environment of
`agenttrain sglang setup`, in about three minutes: it shows that the script works, and its figures mean nothing.

Parts, each a process with a time limit of its own, whose findings are kept as they come:

- bfloat16: seconds until the server answers; |trainer - server| log probability over sampled tokens, the trainer in
  float32; tokens a second and the ratio to a bare client at each width (see sglang_overhead.py; without seeds, so both
  sides sample other ids); seconds and pause of a push of all weights by each way.
- float32: start and gap of a float32 server.
- mixture: gaps of a small mixture of experts with and without replay (see moe_replay.py).
- adapter: seconds of a push of a LoRA adapter alone, and the gap after it.
- seeds: the share of equal ids, and the speed, where each token is drawn from its seed.

Prints one JSON object: part to findings, with "error" where it failed or ran out of time. Exits 1 when a part did.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from moe_replay import gaps, made_mixture
from moe_replay import measured as measured_mixture
from sglang_overhead import compared, made_model, opened_bench, sizes_of

from agenttrain.config import resolve
from agenttrain.local.adapter import open_learnable
from agenttrain.local.learnable import Learnable
from agenttrain.local.policy import choose_device, load_model
from agenttrain.protocols import EngineContext
from agenttrain.records import Ids, RolloutResult, Sampling

WAYS = ("group", "tensor", "disk")
LIMITS_S = {"bfloat16": 300.0, "float32": 100.0, "mixture": 100.0, "adapter": 90.0, "seeds": 90.0}
"""Of each part, in the order in which they run."""
N_PUSHES = 3
RANK = 16


def tell(key: str, value: Any) -> None:
    """Keep a finding, whatever comes after."""
    print(json.dumps({key: value}), flush=True)


def guarded(key: str, find: Callable[[], Any]) -> None:
    """Keep a finding, or why there is none."""
    try:
        tell(key, find())
    except Exception as error:
        tell(key, {"error": f"{type(error).__name__}: {error}"})


class Part:
    """What the parts share: the model, the server's settings, and how much is asked of it."""

    def __init__(self, chosen: argparse.Namespace, scratch: Path) -> None:
        self.model, self.scratch = Path(chosen.model), scratch
        self.is_smoke: bool = chosen.smoke
        self.widths = (1, 4) if self.is_smoke else (1, 32, 256)
        self.turns = 2 if self.is_smoke else 8
        self.n_rounds = 1 if self.is_smoke else 2
        self.n_gap = 4 if self.is_smoke else 32
        self.sglang: dict[str, Any] = {"device": "cpu" if self.is_smoke else "cuda", "deterministic": self.is_smoke}
        if not self.is_smoke:
            self.sglang["arguments"] = ["--mem-fraction-static", "0.5"]
        if chosen.environment is not None:
            self.sglang["environment"] = str(chosen.environment)
        self.tables: dict[str, Any] = {"renderer": {}} if chosen.is_given else {}

    def bench(self, width: int, *, sglang: Mapping[str, Any] | None = None, **tables: Any) -> Any:
        """`opened_bench` with the settings of all parts."""
        all_tables = {**self.tables, "sglang": {**self.sglang, **(sglang or {})}, **tables}
        return opened_bench(self.model, self.scratch, width=width, turns=self.turns, tables=all_tables)

    # ── the parts ────────────────────────────────────────────────────────────────────────────────────────────────

    def bfloat16(self) -> None:
        began = time.perf_counter()
        with self.bench(max(self.widths), sglang={"dtype": "bfloat16"}) as bench:
            tell("start_s", time.perf_counter() - began)
            guarded("gap", lambda: summary(gaps(self.model, bench.rollouts(self.n_gap), replays=False)))
            for width in self.widths:
                guarded(f"at_{width}", lambda width=width: compared(bench, width, self.n_rounds))
            policy = Learnable(self.model, load_model(self.model, device=choose_device()))
            for way in WAYS:
                guarded(f"push_{way}", lambda way=way: self._pushed(bench.address, way, policy))

    def float32(self) -> None:
        began = time.perf_counter()
        with self.bench(self.n_gap, sglang={"dtype": "float32"}) as bench:
            tell("start_s", time.perf_counter() - began)
            guarded("gap", lambda: summary(gaps(self.model, bench.rollouts(self.n_gap), replays=False)))

    def mixture(self) -> None:
        small = {} if self.is_smoke else {"hidden_size": 512, "num_hidden_layers": 8, "moe_intermediate_size": 512}
        heads = {} if self.is_smoke else {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
        spread = 0.1 if self.is_smoke else 0.04
        model = made_mixture(self.scratch / "mixture", **small, **heads, initializer_range=spread)
        found = measured_mixture(
            model,
            self.scratch / "rollouts",
            rollouts=self.n_gap,
            turns=self.turns,
            sglang={**self.sglang, "dtype": "bfloat16"},
        )
        for key, value in found.items():
            tell(key, value)

    def adapter(self) -> None:
        trainer = {"adapter": "lora", "lora_rank": RANK}
        with self.bench(self.n_gap, trainer=trainer) as bench:
            policy = open_learnable(
                self.model, device=choose_device(), config=resolve(("benchmark", {"trainer": trainer}))
            )
            with torch.no_grad():
                for matrix in policy.parameters:
                    matrix.add_(0.02 * torch.randn_like(matrix))
            adapter = policy.adapter_weights()
            assert adapter is not None
            tell("bytes", sum(tensor.nbytes for tensor in adapter.tensors.values()))
            seconds = []
            for version in range(1, N_PUSHES + 1):
                before = bench.engine.stats()["update_s"]
                bench.engine.update_adapter(adapter, version)
                seconds.append(bench.engine.stats()["update_s"] - before)
            tell("push_s", seconds)
            results = bench.rollouts(self.n_gap)
            tell("versions", sorted(versions_of(results)))
            guarded("gap", lambda: summary(gaps(self.model, results, replays=False, learnable=policy)))

    def seeds(self) -> None:
        width = self.widths[-2] if len(self.widths) > 2 else self.widths[-1]
        began = time.perf_counter()
        with self.bench(width, sglang={"deterministic": True}) as bench:
            tell("start_s", time.perf_counter() - began)
            guarded(f"at_{width}", lambda: compared(bench, width, 1))

    def _pushed(self, address: str, way: str, policy: Learnable) -> dict[str, Any]:
        """Pushes into the server that is up, by an engine that takes it for somebody else's."""
        from agenttrain_sglang.engine import SglangEngine
        from agenttrain_sglang.plan import plan_of

        config = resolve(("benchmark", {"sglang": {"servers": [address], "transport": way}}))
        engine = SglangEngine(plan_of(EngineContext(config=config, model=str(self.model), run_dir=self.scratch / way)))
        try:
            seconds = []
            for version in range(1, N_PUSHES + 1):
                before = engine.stats()["update_s"]
                engine.update_weights(policy.published().items(), version)
                seconds.append(engine.stats()["update_s"] - before)
            prompt: Ids = (5, 9, 13, 17)
            sampling = Sampling(temperature=1.0, max_tokens=4, seed=0, stop_ids=())
            told = engine.generate(prompt, sampling, session="s").result(60).weight_versions
            return {
                "how": list(engine.news()),
                "push_s": seconds,
                "longest_pause_s": engine.stats()["pause_s"],
                "bytes_here": sum(tensor.nbytes for tensor in policy.published().values()),
                "answered_by": sorted(set(told)),
            }
        finally:
            engine.close()


def summary(each: torch.Tensor) -> dict[str, float]:
    return {"tokens": len(each), "mean": float(each.mean()), "max": float(each.max())}


def versions_of(results: Sequence[RolloutResult]) -> set[int]:
    return {version for result in results for turn in result.turns for version in turn.weight_versions}


# ── the process that runs them ───────────────────────────────────────────────────────────────────────────────────────


def found_by(part: str, arguments: Sequence[str], log: Path, limit_s: float) -> dict[str, Any]:
    """A part's findings, from a process that is ended when its time is up; its servers end with it."""
    if limit_s < 5:
        return {"error": "no time was left"}
    began = time.perf_counter()
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, __file__, "--part", part, *arguments],
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=limit_s)
            error = None if process.returncode == 0 else f"ended with {process.returncode}: {last_words(log)}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            error = f"took longer than {limit_s:.0f} s: {last_words(log)}"
    found: dict[str, Any] = {}
    for line in output.decode(errors="replace").splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    if error is not None:
        found["error"] = error
    return {"part_s": time.perf_counter() - began, **found}


def last_words(log: Path) -> str:
    return log.read_text(errors="replace")[-1500:]


def is_whole(found: Any) -> bool:
    return not isinstance(found, dict) or ("error" not in found and all(map(is_whole, found.values())))


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--environment", type=Path, help="SGLang's virtual environment")
    arguments.add_argument("--model", type=Path, help="a Hugging Face folder; else one is made")
    arguments.add_argument("--seconds", type=float, default=580.0, help="for all parts together")
    arguments.add_argument("--smoke", action="store_true", help="a tiny model on the CPU")
    arguments.add_argument("--only", nargs="+", choices=LIMITS_S, default=list(LIMITS_S))
    arguments.add_argument("--part", choices=LIMITS_S, help=argparse.SUPPRESS)
    arguments.add_argument("--is-given", action="store_true", help=argparse.SUPPRESS)
    chosen = arguments.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if chosen.part is not None:
            getattr(Part(chosen, Path(name)), chosen.part)()
            return 0
        return all_parts(chosen, Path(name))


def all_parts(chosen: argparse.Namespace, scratch: Path) -> int:
    end = time.monotonic() + chosen.seconds
    model = chosen.model
    if model is None:
        hidden, layers, dtype = (64, 2, "float32") if chosen.smoke else (2048, 20, "bfloat16")
        model = made_model(scratch / "model", dtype=dtype, **sizes_of(hidden, layers))
    given = ["--model", str(model), *(["--smoke"] if chosen.smoke else []), *(["--is-given"] if chosen.model else [])]
    if chosen.environment is not None:
        given += ["--environment", str(chosen.environment)]
    found = {
        part: found_by(part, given, scratch / f"{part}.log", min(limit_s, end - time.monotonic()))
        for part, limit_s in LIMITS_S.items()
        if part in chosen.only
    }
    print(json.dumps({"smoke": chosen.smoke, "gpu": gpu(), **found}))
    return int(not is_whole(found))


def gpu() -> str | None:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


if __name__ == "__main__":
    sys.exit(main())
