"""A Sample becomes the fields of veRL's AgentLoopOutput, as plain data and without importing veRL.

Source: verl 0.9.1, verl/experimental/agent_loop/agent_loop.py, AgentLoopOutput and AgentLoopMetrics.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from agenttrain.records import RoutedExperts, Sample

FIELDS: Final = (
    "prompt_ids",
    "response_ids",
    "response_mask",
    "response_logprobs",
    "routed_experts",
    "multi_modal_data",
    "reward_score",
    "num_turns",
    "metrics",
    "extra_fields",
    "mm_processor_kwargs",
    "mm_processor_output",
)
"""All fields of AgentLoopOutput in verl 0.9.1."""

METRIC_FIELDS: Final = ("generate_sequences", "tool_calls", "compute_score", "num_preempted")
"""All fields of AgentLoopMetrics in verl 0.9.1; it takes a part of them."""


def as_agent_loop_output(sample: Sample) -> dict[str, Any]:
    """Keyword arguments for AgentLoopOutput.

    Returns:
        Every field that agenttrain fills, set explicitly, because veRL dumps with exclude_unset. Metrics that veRL
        does not know stand in `extra_fields["metrics"]`. `routed_experts` is there where they are known.
    """
    known = {name: value for name, value in sample.metrics.items() if name in METRIC_FIELDS}
    others = {name: value for name, value in sample.metrics.items() if name not in METRIC_FIELDS}
    experts = {} if sample.routed_experts is None else {"routed_experts": _of_every_id(sample.routed_experts)}
    return {
        **experts,
        "prompt_ids": list(sample.prompt_ids),
        "response_ids": list(sample.response_ids),
        "response_mask": list(sample.response_mask),
        "response_logprobs": list(sample.response_logprobs),
        "reward_score": sample.reward_score,
        "num_turns": sample.num_turns,
        "metrics": known,
        "extra_fields": {**sample.extra_fields, "metrics": others},
    }


def _of_every_id(experts: RoutedExperts) -> npt.NDArray[np.int16]:
    """[P + T, layers, chosen]; the last id was never read, and veRL wants zeros there."""
    rows = np.frombuffer(experts.data, "<u2").reshape(-1, experts.n_layers, experts.n_chosen)
    return np.pad(rows.astype(np.int16), ((0, 1), (0, 0), (0, 0)))
