"""A Sample becomes the fields of veRL's AgentLoopOutput, as plain data and without importing veRL.

Source: verl 0.9.1, verl/experimental/agent_loop/agent_loop.py, AgentLoopOutput and AgentLoopMetrics.
"""

from __future__ import annotations

from typing import Any, Final

from agenttrain.records import Sample

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
        does not know stand in `extra_fields["metrics"]`.
    """
    known = {name: value for name, value in sample.metrics.items() if name in METRIC_FIELDS}
    others = {name: value for name, value in sample.metrics.items() if name not in METRIC_FIELDS}
    return {
        "prompt_ids": list(sample.prompt_ids),
        "response_ids": list(sample.response_ids),
        "response_mask": list(sample.response_mask),
        "response_logprobs": list(sample.response_logprobs),
        "reward_score": sample.reward_score,
        "num_turns": sample.num_turns,
        "metrics": known,
        "extra_fields": {**sample.extra_fields, "metrics": others},
    }
