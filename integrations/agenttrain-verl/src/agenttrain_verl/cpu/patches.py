"""The functions of veRL 0.9.1 that know no CPU, replaced; each is known by the hash of its text.

P1  utils/distributed.py initialize_global_process_group_ray   names a backend for "cpu" twice, which torch refuses
P2  engine/fsdp/transformer_impl.py CPUOffloadPolicy           pins memory (in `engines`, while a module is wrapped)
P3  utils/model.py load_valuehead_model                        loads a critic with flash_attention_2 alone
P4  utils/torch_functional.py logprobs_from_logits_v2          one call a token, a fifth of an update's time on the CPU

P1 is also where the engines for the CPU are registered: it is the first thing a training process does, and before any
engine is chosen. All other needs of the CPU are met by registration and configuration.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import verl.utils.distributed as distributed
import verl.utils.model as model
import verl.utils.torch_functional as functional
from agenttrain.errors import TrainerError
from verl.utils.device import get_device_name

from agenttrain_verl.known import changed
from agenttrain_verl.versions import SUPPORTED, installed

MARK = "_agenttrain"
PATCHED = (
    "verl.utils.distributed.initialize_global_process_group_ray",
    "verl.utils.model.load_valuehead_model",
    "verl.utils.torch_functional.logprobs_from_logits_v2",
)


def apply() -> None:
    """Put the patches in; safe twice.

    Raises:
        TrainerError: the installed veRL is another than they are made for.
    """
    if hasattr(distributed.initialize_global_process_group_ray, MARK):
        return
    _check()
    distributed.initialize_global_process_group_ray = _process_group(distributed.initialize_global_process_group_ray)
    model.load_valuehead_model = functools.wraps(model.load_valuehead_model)(load_valuehead_model)
    functional.logprobs_from_logits_v2 = functools.wraps(functional.logprobs_from_logits_v2)(logprobs_from_logits)


def _check() -> None:
    if found := changed(*PATCHED):
        raise TrainerError(
            f"veRL {installed('verl')} has another {', '.join(found)} than agenttrain replaces on the CPU. Install "
            f"verl{SUPPORTED['verl']}."
        )


def _process_group(original: Any) -> Any:
    @functools.wraps(original)
    def initialize(timeout_second: int | None = None, backend: str | None = None) -> None:
        if backend is None and get_device_name() == "cpu":
            from agenttrain_verl.cpu import engines

            engines.register()
            backend = "cpu:gloo"
        original(timeout_second=timeout_second, backend=backend)

    setattr(initialize, MARK, True)
    return initialize


def load_valuehead_model(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
    """A token classifier of one label over the policy's body, with the attention that its configuration names."""
    from transformers import AutoModelForTokenClassification

    return AutoModelForTokenClassification.from_pretrained(
        local_path,
        dtype=torch_dtype,
        config=model_config,
        attn_implementation=model_config._attn_implementation,
        trust_remote_code=trust_remote_code,
    )


def logprobs_from_logits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Log probabilities of some ids, all at once: [..., vocabulary], [...] -> [...]."""
    each = torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
    return -each.view(labels.shape)
