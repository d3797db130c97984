"""The README of the distribution tells the truth: its keys are keys, its paths are there, its counters are counted."""

from __future__ import annotations

import re
from pathlib import Path

import typer
from typer.main import get_command

from agenttrain_sglang.calls import COUNTED
from agenttrain_sglang.commands import register
from agenttrain_sglang.settings import SglangTable

FOLDER = Path(__file__).parents[1]
ROOT = FOLDER.parents[1]
README = (FOLDER / "README.md").read_text(encoding="utf-8")
SETTINGS = README.partition("## Settings")[2].partition("## Watching it")[0]


def test_every_key_stands_in_the_table_of_settings() -> None:
    """And nothing else does."""
    rows = [line.split("|")[1] for line in SETTINGS.splitlines() if line.startswith("| `")]
    assert {key for row in rows for key in re.findall(r"`(\w+)`", row)} == set(SglangTable.model_fields)


def test_keys_named_in_the_text_are_keys() -> None:
    named = set(re.findall(r"`sglang\.([a-z_]+)", README)) - {"launch_server"}
    assert named <= set(SglangTable.model_fields)


def test_paths_named_are_there() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    assert [path for path in links if not (FOLDER / path).resolve().exists()] == []
    assert (FOLDER / "src" / "agenttrain_sglang" / "stand_ins").is_dir()
    assert (ROOT / "benchmarks" / "gpu_sglang.py").is_file()


def test_counters_named_are_counted() -> None:
    """Those of `engine_counts`, beside the servers' own."""
    told = README.partition("`engine_counts` holds")[2].partition("\n\n")[0]
    named = set(re.findall(r"`(\w+)`", told))
    assert named - {"server_sampled_ids", "restarts", "update_s", "pause_s"} <= set(COUNTED)
    assert "server_sampled_ids" in named


def test_commands_named_exist() -> None:
    """In this README and in the repository's."""
    app = typer.Typer()
    register(app)
    known = set(get_command(app).commands["sglang"].commands)  # type: ignore[attr-defined]
    both = README + (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\$ agenttrain sglang (\w+)", both, re.MULTILINE))
    assert "setup" in named
    assert named <= known
