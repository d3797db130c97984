"""A model's folder and a graph, tried as a run would try them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agenttrain.doctor.policy import reads_tool_calls, try_graph, try_model
from agenttrain.testing import tiny_model
from agenttrain.testing.small_model import TEMPLATE


def test_a_model_that_fits(tmp_path: Path) -> None:
    """With its family named there is nothing to say."""
    tiny_model(tmp_path / "model")
    tried = try_model("model", tmp_path, family="default")
    assert tried.findings == ()
    assert tried.facts == {
        "model": str(tmp_path / "model"),
        "parameters": 9824,
        "family": "default",
        "append_only": True,
        "tool_calls": True,
    }


def test_a_guessed_family_is_a_warning(tmp_path: Path) -> None:
    """With the line that writes it down."""
    (finding,) = try_model(str(tiny_model(tmp_path / "model")), tmp_path).findings
    assert (finding.code, finding.severity) == ("family_guessed", "warning")
    assert finding.fix == 'write into agenttrain.toml: renderer.family = "default"'


REWRITING = """{%- for m in messages -%}
<|im_start|>{{ m.role }} {{ loop.length }}
{{ m.content }}<|im_end|>
{%- endfor -%}"""


@pytest.mark.parametrize(
    ("template", "code"),
    [
        (REWRITING, "model_refused"),
        ("", "model_refused"),
        (TEMPLATE.replace("<tool_call>", "[call]"), "tool_calls_unreadable"),
    ],
    ids=["rewrites its history", "none", "its own way of calling tools"],
)
def test_a_template_that_does_not_fit(tmp_path: Path, template: str, code: str) -> None:
    """Refused by the probe, or with tool calls that nobody reads back."""
    folder = tiny_model(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(template)
    codes = [finding.code for finding in try_model("model", tmp_path, family="default").findings]
    assert codes == [code]


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    """The message is the one that a fit would give."""
    (tmp_path / "model").mkdir()
    (finding,) = try_model("model", tmp_path).findings
    assert (finding.code, finding.severity) == ("model_refused", "error")
    assert "holds no config.json" in finding.seen


def test_a_graph_with_all_that_belongs_to_it(project: Any) -> None:
    """Tasks, model, family; few held-out tasks are a warning."""
    tried = try_graph("graph.py", project.folder, {})
    assert [finding.code for finding in tried.findings] == ["tasks_note"]
    assert tried.facts["tasks"] == {"train": 4, "held_out": 3}
    assert tried.facts["parameters"] == 868352
    assert tried.facts["tool_calls"] is True


def test_a_graph_that_could_not_be_trained(project: Any) -> None:
    """What prepare refuses, by its class."""
    (finding,) = try_graph("graph.py", project.folder, {"trainer": {"name": "nobody's"}}).findings
    assert (finding.code, finding.severity) == ("plugin_refused", "error")
    (finding,) = try_graph("nothing.py", project.folder, {}).findings
    assert finding.code == "graph_refused"


def test_tool_calls_are_read_back(policy_folder: Path) -> None:
    """By the renderer that a rollout would use."""
    from agenttrain.capture.render import open_renderer

    assert reads_tool_calls(open_renderer(str(policy_folder), family="default")) is True
