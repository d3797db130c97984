"""SGLang 0.5.12, which veRL 0.9.1 needs: what differs from 0.5.23."""

from __future__ import annotations

VERSION = "0.5.12"
WITHOUT_GRAPHS = ("--disable-cuda-graph",)
