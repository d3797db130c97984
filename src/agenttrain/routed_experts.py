"""Which experts of a mixture some positions of a token path went through, as recorded and replayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from agenttrain.errors import CaptureError


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedExperts:
    """Which experts a mixture of experts sent some positions of a token path through.

    Row i is of position `start + i`; positions count from the first prompt id. The last id of a path was never read, so
    it has no row.
    """

    start: int
    n_layers: int
    """Layers that route, in the model's order; or all layers, with anything where one does not route."""
    n_chosen: int
    """Experts that each such layer chose for a position."""
    data: bytes
    """[rows, n_layers, n_chosen] expert numbers, little-endian uint16, row after row."""

    def __post_init__(self) -> None:
        if self.start < 0 or self.row_bytes < 2 or len(self.data) % self.row_bytes:
            raise CaptureError(
                f"Routed experts from position {self.start} hold {len(self.data)} bytes for {self.n_layers} layers of "
                f"{self.n_chosen} experts. Give whole rows of 2 bytes an expert."
            )

    @property
    def row_bytes(self) -> int:
        return 2 * self.n_layers * self.n_chosen

    @property
    def end(self) -> int:
        """The position after the last row."""
        return self.start + len(self.data) // self.row_bytes

    @staticmethod
    def of_path(parts: Sequence[RoutedExperts | None]) -> RoutedExperts | None:
        """The rows of turns that extend one another, from position 0 on, as one.

        Args:
            parts: of each turn of a path, its first turn's first.

        Returns:
            None where a turn has none, where a position between them has none, and where their layers differ.

        Example: rows of positions 0 to 4 and of 5 to 8 -> rows of positions 0 to 8
        """
        known = [part for part in parts if part is not None]
        if not known or len(known) < len(parts) or known[0].start:
            return None
        for before, after in pairwise(known):
            alike = (before.n_layers, before.n_chosen) == (after.n_layers, after.n_chosen)
            if before.end != after.start or not alike:
                return None
        return known[0] if len(known) == 1 else replace(known[0], data=b"".join(part.data for part in known))
