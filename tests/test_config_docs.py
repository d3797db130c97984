"""docs/configuration.md lists every key of the configuration, with its type, default and meaning.

`python tests/test_config_docs.py` writes the tables anew.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from agenttrain.config import Config, Table

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
BEGIN, END = "<!-- keys -->\n", "<!-- /keys -->"


def meanings(table: type[Table]) -> dict[str, str]:
    """Field to the docstring under it; empty where it has none."""
    body = ast.parse(textwrap.dedent(inspect.getsource(table))).body[0]
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for line, after in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            found[line.target.id] = " ".join(after.value.value.split()) if is_text else ""  # type: ignore[union-attr]
    return found


def accepted(name: str, table: type[Table]) -> str:
    """The type as it is written, and the range."""
    written = re.search(rf"^    {name}: (.*?) = ", inspect.getsource(table), re.MULTILINE)
    assert written is not None
    words = {"gt": "above", "ge": "from", "lt": "below", "le": "to"}
    field: FieldInfo = table.model_fields[name]
    bounds = [f"{words[key]} {getattr(rule, key)}" for rule in field.metadata for key in words if hasattr(rule, key)]
    return ", ".join([written[1].replace("|", "\\|"), *bounds])


def default(field: FieldInfo) -> str:
    value: Any = field.get_default(call_default_factory=True)
    return "" if value is None else f"`{str(value).lower() if isinstance(value, bool) else repr(value)}`"


def rows(table: type[Table], path: str) -> Iterator[str]:
    known = meanings(table)
    for name, field in table.model_fields.items():
        if not (isinstance(field.annotation, type) and issubclass(field.annotation, Table)):
            yield f"| `{path}{name}` | {accepted(name, table)} | {default(field)} | {known[name]} |"


def tables() -> str:
    heading = ["| key | accepted | default | meaning |", "|---|---|---|---|"]
    lines = [*heading, *rows(Config, "")]
    for name, field in Config.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Table):
            lines += ["", f"## [{name}]", *heading, *rows(kind, f"{name}.")]
    return "\n".join(lines) + "\n"


def test_every_key_stands_in_the_page() -> None:
    text = PAGE.read_text()
    assert text[text.index(BEGIN) + len(BEGIN) : text.index(END)] == tables()
    assert "|  |\n" not in tables()  # each has a meaning


if __name__ == "__main__":
    text = PAGE.read_text()
    PAGE.write_text(text[: text.index(BEGIN) + len(BEGIN)] + tables() + text[text.index(END) :])
