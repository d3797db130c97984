"""A run's policy becomes a Hugging Face folder with a model card and a fixed set of greedy answers."""

from __future__ import annotations
