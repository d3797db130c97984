"""reward/answer.py: several results of one evaluator become one answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agenttrain.errors import RewardError
from agenttrain.reward.answer import Answer, answer_in

RESULTS = [
    {"key": "polite", "score": True, "comment": "very"},
    SimpleNamespace(key="short", score=0.5, comment=None),
]


@pytest.mark.parametrize("result", [RESULTS, tuple(RESULTS), {"results": RESULTS}])
def test_several_results_are_their_mean_and_each_is_a_check(result: Any) -> None:
    """A list, and LangSmith's {"results": […]}; full marks only where each has them."""
    assert answer_in("judge", result) == Answer(
        score=0.75,
        comment="polite 1; short 0.5",
        evidence={
            "checks": [
                {"name": "polite", "passed": True, "reason": "very"},
                {"name": "short", "passed": False, "reason": ""},
            ]
        },
    )


def test_a_result_without_a_key_goes_by_its_place() -> None:
    assert answer_in("judge", [{"score": 1}, {"score": 0}]).comment == "result 0 1; result 1 0"


def test_a_single_result_in_a_list_is_that_result() -> None:
    """On any scale, with its own comment."""
    assert answer_in("judge", [{"key": "a", "score": 532, "comment": "long"}]) == Answer(score=532.0, comment="long")


def test_results_of_another_scale_are_not_averaged() -> None:
    with pytest.raises(RewardError) as caught:
        answer_in("judge", [{"key": "right", "score": 1}, {"key": "tokens", "score": 532}])
    assert str(caught.value) == (
        "Verifier 'judge' answered 2 results, and 'tokens' is 532. Their mean is the score, so each must lie in 0 to "
        "1. Wrap it in a function that gives the one you mean."
    )


@pytest.mark.parametrize("result", [[], [1.0], {"results": []}, {"results": [1]}, [{"key": "a", "value": "good"}]])
def test_a_list_without_scores_is_none(result: Any) -> None:
    """A category is no number either."""
    with pytest.raises(RewardError, match=r"Verifier 'judge' answered .*finite number"):
        answer_in("judge", result)
