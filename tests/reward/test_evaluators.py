"""Evaluators of openevals, agentevals and LangSmith are verifiers as they are; the real packages, nothing replaced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from agentevals.trajectory.match import create_async_trajectory_match_evaluator, create_trajectory_match_evaluator
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langsmith.evaluation import EvaluationResult, EvaluationResults, RunEvaluator, run_evaluator
from langsmith.schemas import Example, Run
from openevals.exact import exact_match, exact_match_async
from openevals.json import create_async_json_match_evaluator, create_json_match_evaluator
from openevals.llm import create_async_llm_as_judge, create_llm_as_judge
from openevals.string.levenshtein import levenshtein_distance

from agenttrain.errors import RewardError
from agenttrain.part import Part
from agenttrain.records import RewardPart, Task
from agenttrain.reward.score import check_verifiers, score

INPUT, GOLD = {"question": "capital?"}, {"answer": "Paris", "country": "France"}
HALF = {"answer": "Paris", "country": "Spain"}


def part_of(verifier: Any, state: Any, reference: Any = GOLD) -> RewardPart:
    verifiers = {"v": Part(verifier)}
    check_verifiers(verifiers)
    task = Task(id="t", input=INPUT, reference=reference, metadata={"kind": "easy"})
    return score(verifiers, task=task, state=state, timeout_s=20.0).parts[0]


@pytest.mark.parametrize("evaluator", [exact_match, exact_match_async])
@pytest.mark.parametrize(("state", "value"), [(GOLD, 1.0), (HALF, 0.0)])
def test_exact_match_of_openevals(evaluator: Any, state: Any, value: float) -> None:
    """Sync and async; by its keywords outputs and reference_outputs."""
    assert part_of(evaluator, state).score == value


def test_levenshtein_of_openevals() -> None:
    """One letter of five: 0.8."""
    assert part_of(levenshtein_distance, "Pariz", "Paris").score == pytest.approx(0.8)


@pytest.mark.parametrize("create", [create_json_match_evaluator, create_async_json_match_evaluator])
def test_json_match_of_openevals(create: Any) -> None:
    """One result a key without an aggregator: their mean, each a check; one for all with it."""
    part = part_of(create(), HALF)
    assert part.score == 0.5
    assert [(check["name"], check["passed"]) for check in part.evidence["checks"]] == [
        ("json_match:answer", True),
        ("json_match:country", False),
    ]
    whole = part_of(create(aggregator="all"), HALF)
    assert (whole.score, whole.evidence) == (0.0, {})
    assert part_of(create(aggregator="average"), HALF).score == 0.5


def called(*names: str) -> dict[str, Any]:
    calls = [AIMessage("", tool_calls=[{"name": name, "args": {}, "id": "1", "type": "tool_call"}]) for name in names]
    return {"messages": [HumanMessage("?"), *calls]}


@pytest.mark.parametrize("create", [create_trajectory_match_evaluator, create_async_trajectory_match_evaluator])
@pytest.mark.parametrize(("mode", "value"), [("strict", 0.0), ("unordered", 1.0), ("subset", 1.0), ("superset", 1.0)])
def test_trajectory_match_of_agentevals(create: Any, mode: str, value: float) -> None:
    """The last state and the reference hold messages, as it wants them."""
    assert part_of(create(trajectory_match_mode=mode), called("a", "b"), called("b", "a")).score == value


class Judging(BaseChatModel):
    """Says what it was told to, by the tool that structured output asks for, and keeps what it was asked."""

    verdict: dict[str, Any]
    asked: list[str]

    @property
    def _llm_type(self) -> str:
        return "judging"

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Any:
        return self.bind(named=tools[0]["title"] if isinstance(tools[0], dict) else tools[0].__name__)

    def _generate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, *, named: str = "", **kwargs: Any
    ) -> ChatResult:
        self.asked.append(str(messages[-1].content))
        call: Any = {"name": named, "args": self.verdict, "id": "1", "type": "tool_call"}
        return ChatResult(generations=[ChatGeneration(message=AIMessage("", tool_calls=[call]))])


@pytest.mark.parametrize("create", [create_llm_as_judge, create_async_llm_as_judge])
def test_a_judge_of_openevals(create: Any) -> None:
    """Its score and its reasoning; the model sees input, output and reference."""
    judge = Judging(verdict={"reasoning": "It is right.", "score": True}, asked=[])
    prompt = "{inputs} -> {outputs}, expected {reference_outputs}"
    part = part_of(create(prompt=prompt, judge=judge, feedback_key="right"), {"answer": "Paris"}, "Paris")
    assert (part.score, part.comment) == (1.0, "It is right.")
    assert judge.asked == ['{"question": "capital?"} -> {"answer": "Paris"}, expected Paris']


def test_a_judge_without_a_number_is_no_score() -> None:
    """It raises, and is named."""
    judge = Judging(verdict={"reasoning": "Hm."}, asked=[])
    with pytest.raises(RewardError, match="Verifier 'v' raised KeyError"):
        part_of(create_llm_as_judge(prompt="{outputs}", judge=judge), "Paris")


def of_run_and_example(run: Run, example: Example) -> dict[str, Any]:
    assert isinstance(run, Run)
    assert isinstance(example, Example)
    assert run.inputs == example.inputs == INPUT
    assert example.metadata == {"kind": "easy"}
    right = (run.outputs or {}).get("answer") == (example.outputs or {}).get("answer")
    return {"key": "right", "score": right, "comment": "by run and example"}


def of_run_alone(run: Run) -> bool:
    return bool((run.outputs or {})["answer"] == "Paris")


def of_a_run_and_outputs(
    run: Run, outputs: dict[str, Any], reference_outputs: dict[str, Any], attachments: Any
) -> bool:
    return bool(run.outputs == outputs and outputs["answer"] == reference_outputs["answer"] and attachments == {})


def of_dicts(inputs: dict[str, Any], outputs: dict[str, Any], reference_outputs: dict[str, Any]) -> EvaluationResult:
    right = inputs == INPUT and outputs["answer"] == reference_outputs["answer"]
    return EvaluationResult(key="right", score=right, comment="by dicts")


async def in_time(outputs: dict[str, Any], reference_outputs: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "score": outputs.get(key) == gold} for key, gold in reference_outputs.items()]


def in_results(outputs: dict[str, Any]) -> EvaluationResults:
    return {"results": [EvaluationResult(key="a", score=1), EvaluationResult(key="b", score=0.5)]}


class Whole(RunEvaluator):
    """One that is no function."""

    def evaluate_run(self, run: Run, example: Example | None = None, evaluator_run_id: Any = None) -> EvaluationResult:
        return EvaluationResult(key="right", score=run.outputs == (example.outputs if example else None))


@run_evaluator
async def wrapped_async(run: Run, example: Example | None) -> dict[str, Any]:
    return {"key": "right", "score": bool(example and run.outputs == example.outputs), "comment": "in its time"}


@pytest.mark.parametrize(
    ("evaluator", "value", "comment"),
    [
        (of_run_and_example, 1.0, "by run and example"),
        (of_run_alone, 1.0, ""),
        (of_a_run_and_outputs, 1.0, ""),
        (of_dicts, 1.0, "by dicts"),
        (in_time, 0.5, "answer 1; country 0"),
        (in_results, 0.75, "a 1; b 0.5"),
        (run_evaluator(of_run_and_example), 1.0, "by run and example"),
        (run_evaluator(of_dicts), 1.0, "by dicts"),
        (wrapped_async, 0.0, "in its time"),
        (Whole(), 0.0, ""),
    ],
)
def test_evaluators_of_langsmith(evaluator: Any, value: float, comment: str) -> None:
    """By run and example or by dicts, plain or wrapped, async or not; a dict, a result, a list or {"results": …}."""
    part = part_of(evaluator, HALF)
    assert (part.score, part.comment) == (value, comment)


def test_what_is_no_mapping_stands_under_output() -> None:
    """In a run and an example, whose outputs are mappings."""

    def right(run: Run, example: Example) -> bool:
        return (run.outputs, example.outputs) == ({"output": "Paris"}, {"output": "Paris"})

    assert part_of(right, "Paris", "Paris").score == 1.0


def test_a_category_is_no_score() -> None:
    """LangSmith keeps a value without a number; a reward is a number."""
    with pytest.raises(RewardError, match=r"Verifier 'v' answered .*Answer with a bool, a finite number"):
        part_of(lambda outputs: {"key": "tone", "value": "kind"}, HALF)


def test_a_function_of_two_other_names_still_gets_task_and_state() -> None:
    """Though one of them is called as LangSmith calls its own."""
    assert part_of(lambda row, run: (row.id, run) == ("t", HALF), HALF).score == 1.0
