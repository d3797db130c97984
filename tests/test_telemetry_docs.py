"""docs/telemetry.md lists exactly the names that telemetry has, and its commands are commands."""

from __future__ import annotations

import re
from pathlib import Path

from typer.main import get_command

from agenttrain import telemetry
from agenttrain.cli import app
from agenttrain.telemetry import names

DOCS = (Path(__file__).parents[1] / "docs" / "telemetry.md").read_text(encoding="utf-8")


def table(heading: str) -> list[list[str]]:
    """The cells of the first table after a heading."""
    _, _, after = DOCS.partition(f"\n## {heading}\n")
    lines = re.search(r"(?:^\|.*\n)+", after, re.MULTILINE)
    assert lines is not None, heading
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[0].splitlines()[2:]]


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_every_span_with_what_stands_on_it() -> None:
    told = {
        kind: (set(quoted(always)), dict(re.findall(r"`([^`]+)` \(([^)]+)\)", sometimes)))
        for kinds, always, sometimes in table("Spans")
        for kind in quoted(kinds)
    }
    assert told == {kind: (set(known.always), dict(known.sometimes)) for kind, known in names.SPANS.items()}


def test_every_metric_with_its_unit() -> None:
    told = {quoted(name)[0]: (quoted(unit)[0], what) for name, unit, what in table("Metrics")}
    assert told == names.METRICS


def test_every_reason_of_a_mask() -> None:
    assert {quoted(reason)[0]: what for reason, what in table("Where tokens stand")} == names.MASK_REASONS


def test_links_and_events_are_named() -> None:
    for name in {name for links in names.LINKS.values() for name in links}:
        assert f"`{name}`" in DOCS
    for event in {event for known in names.SPANS.values() for event in known.events}:
        assert f"`{event}`" in DOCS
    assert names.CAPTURE_CONTENT_VARIABLE in DOCS


def test_the_package_draws_what_it_makes() -> None:
    """Each maker of spans stands in the docstring, and each kind of span in the list."""
    makers = [name for name in telemetry.__all__ if name.endswith(("_span", "_spans"))]
    assert makers
    for name in makers:
        assert name in (telemetry.__doc__ or ""), name


def test_its_commands_have_these_options() -> None:
    inspect = get_command(app).commands["inspect"]  # type: ignore[attr-defined]
    options = {option for parameter in inspect.params for option in parameter.opts}
    asked = set(re.findall(r"agenttrain inspect [^\n`]*?(--[a-z]+)", DOCS))
    assert asked
    assert asked <= options
