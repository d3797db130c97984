"""What a server is told its weights are called: the version, and the run that made it.

A server keeps one string for its weights and puts it on every answer. A bare number would do within one run; with
the run beside it, the weights that an earlier run left in a server that goes on can't pass for those of this one.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from agenttrain.errors import EngineError

SPOILED = "agenttrain-spoiled"
"""Of a server whose weights are neither the old nor the new ones; no run takes what it samples."""


@dataclass(frozen=True, slots=True)
class Tags:
    """Versions of one run to strings and back."""

    run: str = field(default_factory=lambda: secrets.token_hex(4))
    """Tells this run from every other."""

    def of(self, version: int) -> str:
        """What weights of that version are called."""
        return f"agenttrain-{self.run}-{version}"

    def version(self, tag: str) -> int:
        """The version that a server said.

        Raises:
            EngineError: weights that this run did not push.
        """
        front, _, number = tag.rpartition("-")
        if front != f"agenttrain-{self.run}" or not number.isdecimal():
            raise EngineError(
                f"A server answered from weights it calls {tag!r}, and those of this run are called "
                f"{self.of(0).removesuffix('0')}…. Someone else pushed weights to it, or it was started again; push "
                "the weights of now to it, and let one run use it at a time."
            )
        return int(number)
