"""A run's policy becomes a folder that other people load, and proof that it is the policy that was measured.

Invariant: what is said of a policy's answers comes from the weights as transformers loads them, never from the engine
or the trainer that made them.
"""

from __future__ import annotations

from dataclasses import dataclass

from agenttrain.run_folder import RunFolder

MAX_GAP = 1e-3
"""Largest difference of a log probability, of the reloaded weights against what was recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportCheck:
    """What the weights of policy/, loaded anew, make of turns that the held-out evaluation recorded."""

    n_turns: int
    """Turns that were scored again."""
    n_same_tokens: int
    """Turns of which every token is the likeliest again; all that were sampled at a temperature above 0."""
    n_near_ties: int
    """Turns, none of them counted before, whose other tokens are as likely up to rounding."""
    max_gap: float | None
    """Largest difference of a log probability. None: no turn was scored."""
    hash_same: bool
    """Whether the folder holds the bytes that fit exported."""
    why: str
    """What differs, with its figure; empty when nothing does."""

    @property
    def passed(self) -> bool:
        """Whether the policy of the run is the one that was measured."""
        return not self.why


def export_check(run: RunFolder, *, n_turns: int = 32) -> ExportCheck:
    """Hold the policy of a fit against what its held-out evaluation recorded: first its bytes, then its answers.

    Args:
        n_turns: how many recorded turns are scored again, spread over the tasks.

    Raises:
        RunError: the run has no policy, no report, or no recorded turn.
        ModelError: the policy can't be loaded.
    """
    raise NotImplementedError
