"""A plugin of SGLang's (entry-point group `sglang.srt.plugins`): four places that take a GPU for granted, without one.

SGLang calls `activate` once in each of its processes, before any model is made. Where there is a GPU it does nothing.
"""

from __future__ import annotations

import functools

FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "tensor", "zeros", "zeros_like")


def activate() -> None:
    """Make LoRA, the capture of routed experts and seeded sampling possible on a CPU."""
    import torch

    if torch.cuda.is_available():
        return
    _ignore_pinning(torch)
    _allocate_plainly(torch)
    _allow_seeds()
    _hash_without_triton(torch)


def _ignore_pinning(torch):
    """LoRA's batches ask for pinned memory (srt/lora/backend), which only a GPU can read faster."""

    def unpinned(make):
        @functools.wraps(make)
        def made(*args, pin_memory=False, **others):
            return make(*args, **others)

        return made

    for name in FACTORIES:
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self


def _allocate_plainly(torch):
    """The host's buffer of routed experts is registered with CUDA by default (srt/mem_cache)."""
    try:
        from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS
    except ImportError:  # 0.5.12
        from sglang.srt.mem_cache.memory_pool_host import ALLOC_MEMORY_FUNCS

    def allocate(shape, dtype, device, **_):
        return torch.empty(shape, dtype=dtype, device=device)

    ALLOC_MEMORY_FUNCS["cpu"] = allocate


def _allow_seeds():
    """A server takes seeds only with --enable-deterministic-inference, which refuses CPU attention.

    With one that it doesn't know it would also work without its prefix cache. Its matrix products that give the same
    result at every batch width are triton kernels; here they stay PyTorch's: seeds hold, and the width still changes
    float sums.
    """
    from sglang.srt import batch_invariant_ops

    try:
        from sglang.srt.arg_groups import choices
    except ImportError:  # 0.5.12
        from sglang.srt import server_args as choices
    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    batch_invariant_ops.enable_batch_invariant_mode = lambda *_, **__: None


def _hash_without_triton(torch):
    """0.5.12 hashes seeds by a triton kernel on a CPU too; 0.5.23 asks sgl_kernel there."""
    try:
        from sglang.srt.layers.utils import hash as hashing
    except ImportError:  # 0.5.23
        return
    import sgl_kernel  # noqa: F401

    hashing.murmur_hash32 = torch.ops.sgl_kernel.murmur_hash32_cpu
