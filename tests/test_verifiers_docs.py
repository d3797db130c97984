"""docs/verifiers.md tells the truth: its Python runs and scores as it says, its kinds, verifiers and alarms exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage

from agenttrain import alarms, verifiers
from agenttrain.part import OnError, PartKind, part_of
from agenttrain.promotion.parts import reward_parts
from agenttrain.promotion.parts_text import parts_lines
from agenttrain.records import Reward, RewardPart, Rollout, Task, TurnView
from agenttrain.reward.layers import passes
from agenttrain.reward.score import check_verifiers, score
from agenttrain.trainable import trainable_of

pytest.importorskip("agentevals", reason="agentevals is optional: the extra `evals`")

DOC = (Path(__file__).parents[1] / "docs" / "verifiers.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", DOC, re.DOTALL)
CALL: Any = {"name": "search", "args": {"q": "A41"}, "id": "1", "type": "tool_call"}
TASK = Task(id="t", input={}, reference={"total": 7, "calls": [{"name": "search", "args": {"q": "A41"}}]})


def scored(names: dict[str, Any], said: str) -> Reward:
    """What the page's verifiers say of a rollout of four turns that ends with this message."""
    noted = trainable_of(names["graph"])
    assert noted is not None
    turns = [
        TurnView(index=n, node=None, role="trained", text="", n_tool_calls=0, stop_reason="stop") for n in range(4)
    ]
    state = {"messages": [HumanMessage("?"), AIMessage("", tool_calls=[CALL]), AIMessage(said)]}
    return score(noted.verifiers, task=TASK, state=state, timeout_s=20.0, views=lambda: turns)


def test_the_example_of_all_kinds_scores_as_it_says() -> None:
    """1.2 and a success; -1 and none where a key is shown; 0 where the form is wrong."""
    names: dict[str, Any] = {"builder": None, "total_of": lambda state: 7}
    exec(compile(PYTHON[0], "verifiers.md", "exec"), names)
    good = scored(names, '{"total": 7}')
    assert (good.score, good.closed, passes(good)) == (pytest.approx(1.2), "", True)
    leaked = scored(names, '{"total": 7, "note": "sk-1"}')
    assert (leaked.score, leaked.closed, passes(leaked)) == (-1.0, "no_key_shown", False)
    assert (scored(names, "7").score, scored(names, "7").closed) == (0.0, "form")


def test_the_evaluators_of_others_are_taken() -> None:
    """As they are made there."""
    names: dict[str, Any] = {"judge_model": FakeListChatModel(responses=["unused"])}
    exec(compile(PYTHON[1], "verifiers.md", "exec"), names)
    check_verifiers({name: part_of(name, given) for name, given in names["verifiers"].items()})


def test_every_python_block_is_tested_here() -> None:
    """A new one needs a test of its own."""
    assert len(PYTHON) == 2


def test_the_histogram_is_what_the_report_draws() -> None:
    """Line by line."""

    def of(*scores: float) -> list[Rollout]:
        parts = [(RewardPart(name="total", score=each),) for each in scores]
        return [
            Rollout(
                id=str(n), task_id="t", phase="eval", step=0, sibling=n, attempt=0, status="completed",
                reward=Reward(score=0.0, parts=each),
            )
            for n, each in enumerate(parts)
        ]  # fmt: skip

    tables = reward_parts({"total": part_of("total", print)}, of(0, 0, 0, 1), of(0, 1, 1, 1))
    drawn = "\n".join(parts_lines(dict(zip(("before", "after"), tables, strict=True)))[1:-1])
    assert drawn in DOC


def test_kinds_failures_and_alarms_are_all_there() -> None:
    """Each kind has its row, each way to fail its column, each alarm of parts its line."""
    layers = DOC.partition("## Layers")[2].partition("## What a failure does")[0]
    assert [kind for kind in get_args(PartKind) if f"`{kind}`" not in layers] == []
    assert [how for how in get_args(OnError) if f'`on_error="{how}"`' not in DOC] == []
    told = re.findall(r"^\| `(\w+)` \| (?:loud|note) \|", DOC, re.MULTILINE)
    source = Path(alarms.__file__).read_text()
    assert told == ["safety_violations", "terms_outweigh_outcome", "part_left_out"]
    assert [code for code in told if f'"{code}"' not in source] == []


def test_verifiers_named_are_built_in() -> None:
    """Each can be imported."""
    table = DOC.partition("## Built in")[2].partition("**How to be strict.**")[0]
    named = set(re.findall(r"`([a-z]+_[a-z_]+)[(`]", table))
    assert named >= {"exact_answer", "numeric_answer", "json_answer", "tool_trajectory", "turns_used"}
    assert [name for name in sorted(named) if not hasattr(verifiers, name)] == []
