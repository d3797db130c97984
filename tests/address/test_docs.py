"""docs/serve.md says of each parameter what the code does."""

from __future__ import annotations

from pathlib import Path

from agenttrain.address.parameters import ASKS_NOTHING, FOLLOWED, REFUSED, SAMPLING, WITHOUT_EFFECT

TABLE = Path(__file__).parents[2] / "docs" / "serve.md"


def rows() -> list[str]:
    """The rows of the table, as the code has them."""
    followed = [f"| `{name}` | followed: {says} |" for name, says in FOLLOWED.items()]
    idle = [f"| `{name}` | no effect, told in a header{_warned(name)} |" for name in WITHOUT_EFFECT]
    refused = [f"| `{name}` | 400: {says} |" for name, says in REFUSED.items()]
    return [*followed, *idle, *refused]


def _warned(name: str) -> str:
    return " and once in the server's log" if name in SAMPLING else ""


def test_the_table_is_the_codes() -> None:
    text = TABLE.read_text(encoding="utf-8").splitlines()
    assert [line for line in text if line.startswith("| `")] == rows()


def test_a_parameter_stands_in_one_table() -> None:
    assert not (FOLLOWED.keys() & WITHOUT_EFFECT.keys() | FOLLOWED.keys() & REFUSED.keys())
    assert not WITHOUT_EFFECT.keys() & REFUSED.keys()
    assert ASKS_NOTHING.keys() <= REFUSED.keys()
    assert set(SAMPLING) <= WITHOUT_EFFECT.keys()
