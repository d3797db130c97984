"""THE GATE: an ended fit becomes a policy that may serve, or a list of the rules that keep it from that."""

from __future__ import annotations
