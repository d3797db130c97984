"""veRL's agent loop "agenttrain": one session of a group becomes the rows of one rollout.

What is asked for stands in the group's row: a request for each session, and what earlier lives of the run, or a worker
that died before the group was done, made of them. Whatever a rollout does is no exception here: in veRL that fails its
whole group. The graph runs elsewhere, see `host`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from agenttrain.errors import TrainerError
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register

from agenttrain_verl.host import host_of_process

NAME: Final = "agenttrain"
"""In veRL's registry of agent loops, and of a group's row as `agent_name`."""
OURS: Final = "agenttrain_"
"""Before the name of every column that is for this loop alone."""
REQUESTS: Final = "agenttrain_requests"
"""[n] RolloutRequests, one for each session."""
KEPT: Final = "agenttrain_kept"
"""Session to the RolloutResult that an earlier life of the run, or of the worker, made."""


@register(NAME)
class GraphLoop(AgentLoopBase):  # type: ignore[misc]
    """Made by veRL for each session."""

    def __init__(self, **_: Any) -> None:
        """Take nothing of what veRL offers.

        Not super().__init__(): it builds veRL's own renderer of messages, which refuses tokenizers that it doesn't know
        (verl 0.9.1, utils/tokenizer/continuous_token_wiring.py); agenttrain renders by itself.
        """

    async def run(self, sampling_params: Mapping[str, Any], **row: Any) -> list[AgentLoopOutput]:
        """One output for each trajectory with a trained token; none for a rollout that may not be trained.

        Args:
            sampling_params: veRL's; the request has its own.
            row: the group's columns, and `session_id`.

        Raises:
            TrainerError: this is not a worker of `agenttrain fit --trainer verl`.
        """
        session, host = _session(row), host_of_process()
        result = row.get(KEPT, {}).get(session) or await host.roll_out(row[REQUESTS][session])
        return host.outputs(result) if result is not None else []


def _session(row: Mapping[str, Any]) -> int:
    """Place in the group.

    Raises:
        TrainerError: veRL's older trainers, and its fully asynchronous one, give none, and take one row a rollout.
    """
    if REQUESTS not in row or "session_id" not in row:
        raise TrainerError(
            f"A row without {REQUESTS} and session_id reached agenttrain's agent loop. It works with veRL's V1 trainer "
            "alone (sync, colocate_async, separate_async), which takes several rows of one rollout; not with "
            "trainer.use_v1=False, one_step_off_policy or fully_async_policy."
        )
    return int(row["session_id"])
