"""verifiers/tampering.py: a gate on what the agent changed of what judges it."""

from __future__ import annotations

from functools import partial

import pytest

from agenttrain import Task
from agenttrain.errors import ConfigError, RewardError
from agenttrain.verifiers import command_exits, hidden_cases, hidden_tests, untampered

INITIAL = {"shop.py": "print(1 - 2)\n", "tests.py": "assert True\n"}


def test_what_the_agent_may_change_leaves_it_open(judged):
    answer = judged(untampered(), INITIAL, {"shop.py": "print(3)\n", "notes.txt": "done"})
    assert answer == {"score": 1.0, "comment": "", "evidence": {"tampering": []}}


@pytest.mark.parametrize("path", ["conftest.py", "sitecustomize.py", "pytest.ini", "tests/test_shop.py"])
def test_what_judges_closes_it_and_is_named(judged, path):
    """Also where hidden tests will lie."""
    verifier = untampered(files={"tests/test_shop.py": "def test(): ..."})
    answer = judged(verifier, INITIAL, {path: "x = 1\n"})
    assert answer["score"] == 0.0
    (line,) = answer["evidence"]["tampering"]
    assert path in line
    assert answer["comment"] == line


@pytest.mark.parametrize(
    ("verifier", "name"),
    [
        (hidden_tests, "include"),
        (hidden_tests, "expected"),
        (hidden_tests, "modules"),
        (hidden_tests, "roots"),
        (hidden_tests, "options"),
        (hidden_cases, "include"),
        (hidden_cases, "roots"),
        (partial(command_exits, ["true"]), "include"),
        (command_exits, "argv"),
        (untampered, "include"),
    ],
)
def test_a_text_in_a_lists_place_is_refused(verifier, name):
    """Of every verifier that judges in a sandbox: each letter would be taken for a pattern."""
    with pytest.raises(ConfigError, match=rf"got {name}='a\.py': a text, .* Write {name}=\['a\.py'\]\."):
        verifier(**{name: "a.py"})


def test_it_is_asked_of_a_sandbox():
    with pytest.raises(RewardError, match=r"untampered judges what an agent left in its sandbox, and this rollout had"):
        untampered()(task=Task(id="a", input={}), sandbox=None)
