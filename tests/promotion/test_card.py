"""The model card of an exported folder, as people read it: model_card.md beside this file.

Write it anew with: python tests/promotion/test_card.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from agenttrain.promotion.card import CardFacts, model_card
from agenttrain.promotion.fixed_set import FixedSet, FixedTurn, TurnSeen, agreement
from agenttrain.promotion_record import LedgerEntry

GOLDEN = Path(__file__).with_name("model_card.md")
TURNS = tuple(
    FixedTurn(name=f"task-{n}, turn 0", prompt_ids=(1, 2), response_ids=(3, 4), logprobs=(-0.1, -0.2)) for n in range(3)
)
SEEN = [TurnSeen(n_near_ties=0, gap=2e-6), TurnSeen(n_near_ties=1, gap=0.0), TurnSeen(n_near_ties=0, gap=0.0)]


def measured(success: float, **others: Any) -> dict[str, Any]:
    return {
        "temperature": 0.0,
        "rollouts": 500,
        "success": success,
        "reward": success - 0.1,
        "turns": 3.5,
        "tool_calls": 2.25,
        "invalid_tool_calls": 0.0,
        "tokens": 96.5,
        "seconds": 0.125,
        "policy_failures": 4,
        "unfinished": 1,
        "environment_failures": 0,
        "safety_violations": 2,
        "by_slice": {"kind": {"a|b <i>": {"tasks": 120, "success": success}}},
        **others,
    }


REPORT: dict[str, Any] = {
    "run_id": "desk-20260101-120000-abcd",
    "graph": "graph.py:graph",
    "trainer": "local",
    "algorithm": "grpo",
    "engine": "local",
    "seed": 7,
    "model": {
        "base": "/models/base",
        "parameters": 1_234_567,
        "replaces": "ChatOpenAI gpt-4o",
        "trained_parameters": 1_000,
        "adapter": {"kind": "lora", "rank": 16},
    },
    "tasks": {"train": 1000, "held_out": 500},
    "baseline": measured(0.5),
    "trained": measured(0.75, safety_violations=1),
    "difference": {"success": 0.25, "ci95": [0.2, 0.3], "tasks": 500},
    "tokens": {"sampled": 12_345, "trained": 12_000, "frozen": 300, "dropped": 45, "drifted": 0},
    "logprob_gap": {"mean": 2e-7, "max": 3e-6},
    "steps": 16,
    "alarms": [
        {"code": "cut", "severity": "note", "step": 3, "message": "3 of 4 rollouts\nwere cut."},
        {"code": "cut", "severity": "note", "step": 4, "message": "4 of 4 rollouts were cut."},
        {"code": "gap", "severity": "loud", "step": 5, "message": "The gap is 0.01."},
    ],
}
FIXED = FixedSet(
    run_id="desk-20260101-120000-abcd",
    form="merged",
    source="turns of the run's held-out evaluation, which was greedy",
    renderer="qwen3:aaaa:bbbb",
    history="template",
    weights="c" * 64,
    files={"config.json": "dd"},
    base="",
    turns=TURNS,
    agreements=(agreement("transformers", TURNS, SEEN).as_dict(),),
)
FACTS = CardFacts(
    name="desk",
    base="owner/base-0.6B",
    fixed=FIXED,
    report=REPORT,
    verdict="The agent got better: success on held-out tasks went from 0.500 to 0.750.",
    made_by={
        "python": "3.11.7",
        "versions": {"agenttrain": "0.1.0", "torch": "2.13.0"},
        "hashes": {"graph": "1111", "verifier": None, "renderer": "qwen3:aaaa:bbbb", "model": "2222"},
    },
    ledger=(
        LedgerEntry(
            number=1,
            at=0.0,
            deed="promoted",
            graph="/desk/graph.py:graph",
            run_id="desk-20260101-120000-abcd",
            policy="/desk/policy",
            weights="c" * 64,
            why="all rules hold",
        ),
    ),
    license="apache-2.0",
    stop_ids=(2, 7),
    max_tokens=640,
)


def test_the_card_says_how_the_policy_was_made_and_measured() -> None:
    assert model_card(FACTS) == GOLDEN.read_text(encoding="utf-8")


def test_an_adapter_names_its_base_where_the_hub_and_a_server_look_for_it() -> None:
    card = model_card(replace(FACTS, fixed=replace(FIXED, form="adapter", base="owner/base-0.6B")))
    assert "\nbase_model: owner/base-0.6B\n" in card
    assert "\nbase_model_relation: adapter\n" in card
    assert "\nlibrary_name: peft\n" in card
    assert "--model-path owner/base-0.6B --dtype float32 --enable-lora --lora-paths policy=FOLDER" in card


def test_what_was_not_measured_is_said() -> None:
    """A base that is a folder is no name for the hub; no safety part, no alarm and no promotion are named as such."""
    report = {**REPORT, "alarms": [], "trained": measured(0.75, safety_violations=None)}
    card = model_card(replace(FACTS, base="/models/base", report=report, ledger=(), license=None))
    assert "base_model" not in card
    assert "license" not in card
    for said in (
        "| safety violations | 2 | not measured |",
        "No part of the reward is declared as safety: nothing was measured.",
        "No alarms.",
        "Not promoted when this was written.",
    ):
        assert said in card
    alone = model_card(CardFacts(name="model", base="/models/base", fixed=replace(FIXED, run_id="")))
    assert "It is of no run: nothing is known of it." in alone
    assert alone.count("Not measured.") == 2


if __name__ == "__main__":
    GOLDEN.write_text(model_card(FACTS), encoding="utf-8")
