"""What veRL gets: its own field names, set explicitly, as JSON could hold them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from agenttrain.records import RolloutResult, RoutedExperts
from agenttrain.sample.agent_loop_output import FIELDS, as_agent_loop_output


def test_it_is_what_verl_takes(result: Callable[..., RolloutResult]) -> None:
    output = as_agent_loop_output(result().samples[0])
    assert set(output) <= set(FIELDS)
    assert json.loads(json.dumps(output)) == {
        "prompt_ids": [1, 2],
        "response_ids": [3, 4, 5, 6, 7, 8, 9],
        "response_mask": [1, 1, 0, 0, 0, 1, 1],
        "response_logprobs": [-0.375, -0.5, 0.0, 0.0, 0.0, -1.0, -1.125],
        "reward_score": 0.75,
        "num_turns": 3,
        "metrics": {},
        "extra_fields": {
            "rollout_id": "train-1-t-0-0",
            "task_id": "t",
            "trajectory": 0,
            "group_id": "train-1-t",
            "min_global_steps": 5,
            "max_global_steps": 6,
            "reward_extra_info": {"answer": 1.0},
            "status": "completed",
            "metrics": {"seconds": 2.5, "n_tool_calls": 2.0, "n_invalid_tool_calls": 0.0},
        },
    }


def test_routed_experts_are_of_every_id_with_zeros_for_the_last(result: Callable[..., RolloutResult]) -> None:
    """veRL takes an array of [prompt and response ids, layers, experts a token] by absolute position."""
    told = np.arange(8 * 2 * 3, dtype="<u2").reshape(8, 2, 3) + 200
    experts = RoutedExperts(start=0, n_layers=2, n_chosen=3, data=told.tobytes())
    output = as_agent_loop_output(replace(result().samples[0], routed_experts=experts))
    array = output["routed_experts"]
    assert set(output) <= set(FIELDS)
    assert (array.shape, array.dtype) == ((9, 2, 3), np.int16)
    assert array[0].tolist() == [[200, 201, 202], [203, 204, 205]]
    assert array[7].tolist() == [[242, 243, 244], [245, 246, 247]]
    assert array[8].tolist() == [[0, 0, 0], [0, 0, 0]]
    assert "routed_experts" not in as_agent_loop_output(result().samples[0])
