"""A text becomes the JSON it is as a whole, read strictly; anything else says why it is none."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from agenttrain.verifiers.equality import shown


def json_in(answer: Any) -> tuple[Any, str]:
    """(value, "") of a text that is JSON or of a value of JSON's types, else (None, why it is none)."""
    if answer is None:
        return None, "there is no answer"
    if hasattr(answer, "model_dump"):
        return answer.model_dump(mode="json"), ""
    if not isinstance(answer, str):
        return answer, ""
    try:
        return json.loads(answer, object_pairs_hook=_without_twins, parse_constant=_refused, parse_float=_finite), ""
    except RecursionError:
        return None, "nested too deep"
    except ValueError as error:
        return None, f"not JSON: {error} in {shown(answer)}"


def _without_twins(pairs: list[tuple[str, Any]]) -> Mapping[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice")
    return found


def _finite(number: str) -> float:
    if not math.isfinite(found := float(number)):
        raise ValueError(f"{number[:40]} is too large a number")
    return found


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")
