"""`agenttrain plugins`: what is installed and what it brings."""

from __future__ import annotations

from typing import Any

from agenttrain import __version__


def test_the_built_ins_come_through_the_same_door(command: Any) -> None:
    """One plugin, with an engine, a trainer and the estimators."""
    listed = command("plugins", "--json").json
    assert listed["loaded"] == [{"name": "local", "version": __version__, "distribution": "agenttrain"}]
    assert (listed["engines"], listed["trainers"], listed["problems"]) == (["local"], ["local"], [])
    said = command("plugins").out
    assert said.endswith("engines: local\ntrainers: local\nadvantage estimators: centered, group\n")


def test_only_what_is_named_is_loaded(command: Any, monkeypatch: Any) -> None:
    """AGENTTRAIN_PLUGINS empty loads none."""
    monkeypatch.setenv("AGENTTRAIN_PLUGINS", "")
    assert command("plugins", "--json").json["loaded"] == []
