"""What servers will hold stands in the plan of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agenttrain.config import resolve
from agenttrain.protocols import ForecastContext

from agenttrain_sglang.forecast import PROGRAM_BYTES, forecast


def parts(model: Path, **table: Any) -> dict[str, int]:
    config = resolve(("the test", {"sglang": table}))
    found = forecast(ForecastContext(config=config, model=str(model), n_rollouts=8))
    return {part.name: part.n_bytes for part in found}


def test_a_server_holds_its_program_weights_and_cache(odd: Any, small_folder: Path) -> None:
    """As many of each as there are servers, and half the bytes in half precision."""
    found = parts(small_folder, environment=str(odd.folder), cache_tokens=1000)
    assert found["program"] == PROGRAM_BYTES
    assert found["weights"] == found["arriving weights"]
    assert found["weights"] % 4 == 0
    assert found["cache"] % (4 * 1000) == 0
    twice = parts(small_folder, environment=str(odd.folder), cache_tokens=1000, replicas=2)
    assert twice == {name: 2 * n_bytes for name, n_bytes in found.items()}
    half = parts(small_folder, environment=str(odd.folder), cache_tokens=1000, dtype="bfloat16")
    assert half["weights"] * 2 == found["weights"]


def test_servers_of_somebody_else_hold_nothing_here(small_folder: Path) -> None:
    assert parts(small_folder, servers=["http://h:1"]) == {}
