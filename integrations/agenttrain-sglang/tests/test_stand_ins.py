"""The stand-ins for what SGLang has on GPUs only, each imported in a process of its own, as a server does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from agenttrain_sglang.environment import STAND_INS, find_environment
from agenttrain_sglang.settings import SglangTable


def printed(code: str, *, python: str = sys.executable) -> Any:
    """What a program prints as JSON, with the stand-ins on its path."""
    environment = os.environ | {"PYTHONPATH": str(STAND_INS)}
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def murmur3(data: bytes) -> int:
    """MurmurHash3, 32 bits, seed 0, of whole blocks of four bytes; from its definition."""
    state = 0
    for start in range(0, len(data), 4):
        block = int.from_bytes(data[start : start + 4], "little") * 0xCC9E2D51 % 2**32
        block = (block << 15 | block >> 17) % 2**32 * 0x1B873593 % 2**32
        state ^= block
        state = ((state << 13 | state >> 19) % 2**32 * 5 + 0xE6546B64) % 2**32
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B % 2**32
    state = (state ^ state >> 13) * 0xC2B2AE35 % 2**32
    return state ^ state >> 16


def test_the_hash_of_seeded_sampling_is_murmurs() -> None:
    """Of seed, position and column; also for seeds that fill all 64 bits."""
    seeds, positions, n = [7, 2**64 - 3], [0, 123456], 3
    code = (
        "import json, torch, sgl_kernel\n"
        f"seeds = torch.tensor({seeds}, dtype=torch.uint64)\n"
        f"cells = torch.ops.sgl_kernel.murmur_hash32_cpu(seeds, torch.tensor({positions}), torch.arange({n}))\n"
        "print(json.dumps(cells.tolist()))"
    )
    assert printed(code) == [
        [murmur3(s.to_bytes(8, "little") + p.to_bytes(4, "little") + c.to_bytes(4, "little")) for c in range(n)]
        for s, p in zip(seeds, positions, strict=True)
    ]


def test_the_strongest_experts_are_chosen() -> None:
    """Softmax of log 1, 2, 3 and 4 is 0.1 to 0.4; a bias changes who is chosen, and not the weights."""
    code = (
        "import json, torch, sgl_kernel\n"
        "gate = torch.tensor([[1.0, 2.0, 3.0, 4.0]]).log()\n"
        "def route(*more):\n"
        "    weights, ids = torch.ops.sgl_kernel.topk_softmax_cpu(gate, gate, 2, *more)\n"
        "    return [[round(w, 6) for w in weights[0].tolist()], ids[0].tolist(), str(weights.dtype), str(ids.dtype)]\n"
        "bias = torch.tensor([1.0, 0.0, 0.0, 0.0])\n"
        "print(json.dumps([route(False), route(True), route(False, bias)]))"
    )
    kinds = ["torch.float32", "torch.int32"]
    assert printed(code) == [
        [[0.4, 0.3], [3, 2], *kinds],
        [[0.571429, 0.428571], [3, 2], *kinds],
        [[0.1, 0.4], [0, 3], *kinds],
    ]


@pytest.mark.parametrize("name", ["sgl_kernel.fp8_scaled_mm", "sgl_kernel.kvcacheio.transfer_kv_all_layer"])
def test_what_needs_a_gpu_raises_when_it_is_called(name: str) -> None:
    module, function = name.rsplit(".", 1)
    code = (
        f"import json\nfrom {module} import {function}\n"
        f"try:\n    {function}(1)\nexcept NotImplementedError as error:\n    print(json.dumps(str(error)))"
    )
    assert printed(code).startswith(f"sgl_kernel.{function} needs a GPU")


def test_kernels_of_triton_are_defined_and_never_run() -> None:
    """Whatever is imported and however a kernel is decorated; asking for the GPU fails as in triton."""
    code = """
import json
import triton, triton.language as tl
from triton.language.extra import libdevice
from triton.runtime.cache import get_cache_manager

@triton.autotune(configs=[triton.Config({"BLOCK": 16}, num_warps=4)], key=["n"])
@triton.jit
def kernel(x, n: tl.constexpr):
    pass

@triton.jit(do_not_specialize=["n"])
def other(x, n):
    pass

told = []
for call in (lambda: kernel[(1,)](1, n=2), lambda: other[(1,)](1, 2), lambda: triton.runtime.driver.active):
    try:
        call()
    except (NotImplementedError, RuntimeError) as error:
        told.append(type(error).__name__)
print(json.dumps([told, triton.cdiv(7, 2), [triton.next_power_of_2(n) for n in (1, 5, 8)]]))
"""
    assert printed(code) == [["NotImplementedError", "NotImplementedError", "RuntimeError"], 4, [1, 8, 8]]


@pytest.mark.sglang
def test_torchvision_is_the_real_one() -> None:
    """Beside a CPU build of torch, which can't load the library of a CUDA build."""
    python = str(find_environment(SglangTable(device="cpu")).python)
    code = "import json, torchvision, torchvision.transforms.v2; print(json.dumps(torchvision.__file__))"
    assert "site-packages" in printed(code, python=python)
