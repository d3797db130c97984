"""Tool calls and their tools' schemas become the number of calls that a tool will refuse.

A call that can be read goes to the graph even when its tool does not exist or its arguments do not fit: the graph
answers with an error message, as it does in production. Such a call still counts as invalid.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from agenttrain.records import ParsedCall


def n_misfits(calls: Sequence[ParsedCall], tools: Sequence[Mapping[str, Any]]) -> int:
    """How many calls name an unknown tool or break its JSON schema.

    Args:
        tools: in OpenAI's function format. None at all: nothing is known, so every call fits.

    Example: one call of an unknown tool and one that fits -> 1
    """
    if not calls or not tools:
        return 0
    schemas = {function["name"]: function.get("parameters") or {} for function in map(_function, tools)}
    return sum(1 for call in calls if call.name not in schemas or not fits_schema(call.arguments, schemas[call.name]))


def unknown_names(calls: Sequence[ParsedCall], tools: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The names that calls give and no tool has; empty where no tool is known."""
    known = {_function(tool)["name"] for tool in tools}
    return tuple(dict.fromkeys(call.name for call in calls if known and call.name not in known))


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function: Mapping[str, Any] = tool.get("function", tool)
    return function


def fits_schema(value: Mapping[str, Any], schema: Mapping[str, Any]) -> bool:
    """Whether an object fits a JSON schema; one that is no schema, or can't be applied, refuses nothing."""
    validator = _validator(json.dumps(schema, sort_keys=True, default=str))
    if validator is None:
        return True
    try:
        return bool(validator.is_valid(dict(value)))
    except Exception:  # the schema is the user's: a reference to nothing or to itself, a pattern of another dialect
        return True


@lru_cache(maxsize=256)
def _validator(schema: str) -> Any:
    """A validator. None: the schema itself is wrong, and refuses nothing."""
    from jsonschema import SchemaError
    from jsonschema.validators import validator_for

    loaded = json.loads(schema)
    kind = validator_for(loaded)
    try:
        kind.check_schema(loaded)
    except SchemaError:
        return None
    return kind(loaded)
