"""verifiers/answers.py: an answer and a reference become 1 or 0, strictly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from pydantic import BaseModel

from agenttrain.errors import ConfigError, RewardError
from agenttrain.part import Part
from agenttrain.records import Task
from agenttrain.reward.score import score
from agenttrain.testing import VerifierContract
from agenttrain.verifiers import exact_answer, json_answer, numeric_answer

SCHEMA = {
    "type": "object",
    "properties": {"total": {"type": "number"}, "items": {"type": "array", "items": {"type": "string"}}},
    "required": ["total"],
    "additionalProperties": False,
}


def said(text: str) -> dict[str, Any]:
    """A state whose last message is the assistant's."""
    return {"messages": [HumanMessage("17?"), AIMessage(text)]}


def scored(verifier: Any, state: Any, reference: Any) -> float:
    task = Task(id="t", input={}, reference=reference)
    return score({"v": Part(verifier)}, task=task, state=state, timeout_s=5.0).score


@pytest.mark.parametrize(
    ("answer", "reference", "right"),
    [
        ("Paris", "Paris", 1),
        (" Paris\n", "Paris", 1),
        ("paris", "Paris", 0),
        ("Paris, France", "Paris", 0),
        ("The answer is Paris", "Paris", 0),
        ("17", 17, 0),
        ("Paris", ["Lyon", "Paris"], 1),
        ("P", ["Lyon", "Paris"], 0),
        ("", "", 1),
        ("Paris", None, 0),
    ],
)
def test_a_text_is_the_reference_or_wrong(answer: str, reference: Any, right: int) -> None:
    """As a whole; a list holds what will do."""
    assert scored(exact_answer(), said(answer), reference) == right


@pytest.mark.parametrize(
    ("answer", "reference", "right"),
    [
        (17, 17, 1),
        (17.0, 17, 1),
        (True, 1, 0),
        (0, False, 0),
        (True, True, 1),
        ("17", 17, 0),
        ([1, "a"], [1, "a"], 1),
        ([1, True], [1, 1], 0),
        ({"a": 1}, {"a": 1.0}, 1),
        ({"a": 1}, {"a": 1, "b": 2}, 0),
        (None, None, 0),
        (float("nan"), float("nan"), 0),
    ],
)
def test_other_values_are_compared_by_jsons_types(answer: Any, reference: Any, right: int) -> None:
    """true is not 1, and what is missing is never right."""
    assert scored(exact_answer(where="answer"), {"answer": answer}, reference) == right


def test_what_does_not_matter_in_a_text_is_the_users_to_say() -> None:
    verifier = exact_answer(normalise=lambda text: " ".join(text.casefold().split()))
    assert scored(verifier, said("NEW \n york"), "New York") == 1


class Found(BaseModel):
    name: str
    inner: dict[str, Any]


@pytest.mark.parametrize(
    ("where", "state", "right"),
    [
        ("answer", {"answer": "x"}, 1),
        ("out.answer", {"out": {"answer": "x"}}, 1),
        ("found.name", {"found": Found(name="x", inner={})}, 1),
        ("found.inner.a", {"found": Found(name="y", inner={"a": "x"})}, 1),
        (lambda state: state["all"][-1], {"all": ["y", "x"]}, 1),
        ("answer", {}, 0),
        ("answer", None, 0),
        ("out.answer", {"out": "text"}, 0),
        (None, {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "x"}]}, 1),
        (None, {"messages": [AIMessage([{"type": "text", "text": "x"}])]}, 1),
        (None, {"messages": [AIMessage("x"), HumanMessage("x")]}, 0),
        (None, {"messages": [AIMessage("x"), ToolMessage("x", tool_call_id="1")]}, 0),
        (None, {"messages": []}, 0),
        (None, {"messages": "x"}, 0),
    ],
)
def test_the_answer_is_where_it_was_said_to_be(where: Any, state: Any, right: int) -> None:
    """A key, a path, a function; else the last message, if the assistant said it: not a user's words, nor a tool's."""
    assert scored(exact_answer(where=where), state, "x") == right


@pytest.mark.parametrize("where", ["", 3, ["answer"]])
def test_a_place_that_is_none_is_refused(where: Any) -> None:
    for factory in (exact_answer, numeric_answer, json_answer):
        with pytest.raises(ConfigError, match=rf"{factory.__name__} got where=.*Name a key of the state"):
            factory(where=where)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("7", 1),
        ("It is 7.", 1),
        ("It is **7**!", 1),
        ("7.0", 1),
        ("07", 1),
        ("+7", 1),
        ("70e-1", 1),
        ("2 + 5 = 7", 1),
        ("Order A41 has 7 items", 1),
        ("7 items are in A41", 1),
        ("17", 0),
        ("77", 0),
        ("7.5", 0),
        (".7", 0),
        ("0.7", 0),
        ("-7", 0),
        ("−7", 0),
        ("1e7", 0),
        ("7 or 8", 0),
        ("not 7 but 8", 0),
        ("7, since 3/4 is left", 0),
        ("7 at 12:30", 0),
        ("7 in the 2nd box", 0),
        ("7 of 1,000", 0),
        ("7,5", 0),
        ("7%", 0),
        ("$7", 0),
        ("~7", 0),
        ("7-8", 0),
        ("7km", 0),
        ("x >=7", 0),
        ("7 ٣", 0),
        ("7 ½", 0),
        ("seven", 0),
        ("nan", 0),
        ("inf", 0),
        ("", 0),
        ("1 2 3 4 5 6 7 8 9", 0),
        ("7" * 400, 0),
        ("1e999999999", 0),
    ],
)
def test_the_last_number_counts_and_counts_whole(answer: str, right: int) -> None:
    """What can't be read as a number, and looks like one, is a wrong answer and not the number before it."""
    assert scored(numeric_answer(), said(answer), 7) == right


@pytest.mark.parametrize(
    ("settings", "answer", "reference", "right"),
    [
        ({"thousands": ","}, "1,234", 1234, 1),
        ({"thousands": ","}, "1234", 1234, 1),
        ({"thousands": ","}, "-1,234,567.5", -1234567.5, 1),
        ({"thousands": ","}, "12,34", 1234, 0),
        ({"thousands": ","}, "1,2345", 12345, 0),
        ({"thousands": ","}, "1_234", 1234, 0),
        ({"thousands": "_"}, "1_234", 1234, 1),
        ({"thousands": "'"}, "1'234", 1234, 1),
        ({"thousands": " "}, "It is 1 234 567.", 1234567, 1),
        ({"thousands": " "}, "In 2024 300 came", 300, 1),
        ({"units": ["km"]}, "12 km", 12, 1),
        ({"units": ["km"]}, "12km.", 12, 1),
        ({"units": ["km"]}, "12 km, on day 3", 12, 0),
        ({"units": ["km"]}, "12 m", 12, 0),
        ({"units": ["m"]}, "12 km", 12, 0),
        ({"units": ["km"]}, "12", 12, 0),
        ({"units": ["$", "USD"]}, "$12", 12, 1),
        ({"units": ["$", "USD"]}, "-$12", -12, 1),
        ({"units": ["$", "USD"]}, "USD 12", 12, 1),
        ({"units": ["$", "USD"]}, "12 USD", 12, 1),
        ({"units": ["%"]}, "50%", 50, 1),
        ({"units": ["%"]}, "50", 50, 0),
        ({"pattern": r"answer: (\S+)"}, "answer: 7 in the 2nd box", 7, 1),
        ({"pattern": r"answer: (\S+)"}, "answer: 8, no, answer: 7", 7, 1),
        ({"pattern": r"answer: (\S+)"}, "7", 7, 0),
        ({"pattern": r"answer: (.+)"}, "answer: 7 boxes", 7, 0),
        ({"pattern": r"\\boxed\{([^}]*)\}"}, r"\boxed{ 7 }", 7, 1),
        ({"tolerance": 0.5}, "7.5", 7, 1),
        ({"tolerance": 0.5}, "7.51", 7, 0),
        ({"tolerance": 0.1}, "0.3", 0.2, 1),
        ({"relative": 0.01}, "101", 100, 1),
        ({"relative": 0.01}, "-101", -100, 1),
        ({"relative": 0.01}, "101.01", 100, 0),
        ({"relative": 0.01, "tolerance": 2}, "102", 100, 1),
        ({}, "0.1", 0.1, 1),
        ({}, "9007199254740993", 9007199254740992, 0),
        ({}, "7", "7.0", 1),
        ({"thousands": ","}, "1,234", "1,234", 1),
        ({"units": ["km"]}, "12 km", "12 km", 1),
        ({"units": ["km"]}, "12 km", "12", 1),
    ],
)
def test_how_numbers_are_written_is_the_users_to_say(
    settings: dict[str, Any], answer: str, reference: Any, right: int
) -> None:
    """And how far off is right: to the digit, since nothing is rounded."""
    assert scored(numeric_answer(**settings), said(answer), reference) == right


@pytest.mark.parametrize(
    ("answer", "right"),
    [(7, 1), (7.0, 1), (True, 0), (float("nan"), 0), (float("inf"), 0), (None, 0), ([7], 0), ("7", 1)],
)
def test_a_number_in_the_state_is_taken_as_it_is(answer: Any, right: int) -> None:
    assert scored(numeric_answer(where="n"), {"n": answer}, 7) == right


@pytest.mark.parametrize("reference", [None, "seven", float("nan"), float("inf"), True, [7]])
def test_a_reference_that_is_no_number_is_no_fault_of_the_policy(reference: Any) -> None:
    """The rollout has no reward then."""
    with pytest.raises(RewardError, match=r"the reference of task 't' is .* and a finite number is expected"):
        scored(numeric_answer(), said("7"), reference)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tolerance": -1}, "numeric_answer got tolerance=-1, and a finite number of at least 0 is expected."),
        ({"relative": float("nan")}, "numeric_answer got relative=nan, and a finite number of at least 0 is expected."),
        (
            {"tolerance": float("inf")},
            "numeric_answer got tolerance=inf, and a finite number of at least 0 is expected.",
        ),
        ({"units": "km"}, "numeric_answer got units='km'. Write a list of words or signs: units=('km',)."),
        ({"units": ["square km"]}, "numeric_answer got units=['square km']. Write a list of words or signs: "),
        ({"thousands": "."}, "numeric_answer got thousands='.'. Accepted: ',', '_', \"'\", ' '."),
        ({"pattern": r"\d+"}, r"numeric_answer got pattern='\\d+' with 0 groups. Put the number"),
        ({"pattern": "("}, "numeric_answer got pattern='(', which is no regular expression: "),
    ],
)
def test_settings_that_can_not_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        numeric_answer(**settings)
    assert str(caught.value).startswith(message)


@given(st.text(st.characters(codec=None), max_size=200))
def test_whatever_is_written_is_0_or_1(text: str) -> None:
    """No text raises: a policy would learn to write it."""
    for verifier in (exact_answer(), numeric_answer(thousands=",", units=("km",)), json_answer(schema=SCHEMA)):
        assert scored(verifier, said(text), 7) in (0.0, 1.0)


@given(st.integers(-(10**12), 10**12), st.sampled_from(["{}", "It is {}.", "so 1 + 1 = {}", "**{}**", "1, 2, then {}"]))
def test_a_number_is_found_and_no_other_is(number: int, frame: str) -> None:
    text = frame.format(number)
    assert scored(numeric_answer(), said(text), number) == 1
    assert scored(numeric_answer(), said(text), number + 1) == 0


@pytest.mark.parametrize(
    ("answer", "reference", "failed"),
    [
        ('{"total": 7}', {"total": 7.0}, []),
        ('{"total": 8}', {"total": 7}, ["reference"]),
        ('{"total": "7"}', {"total": 7}, ["schema $.total", "reference"]),
        ('{"total": 7, "x": 1}', {"total": 7}, ["schema $", "reference"]),
        ('{"items": [1]}', {"total": 7}, ["schema $.items[0]", "schema $", "reference"]),
        ("Here: {}", {"total": 7}, ["json"]),
        ('```json\n{"total": 7}\n```', {"total": 7}, ["json"]),
        ('{"total": 8, "total": 7}', {"total": 7}, ["json"]),
        ('{"total": NaN}', {"total": 7}, ["json"]),
        ("", {"total": 7}, ["json"]),
        ("[" * 100_000, {"total": 7}, ["json"]),
        ("9" * 5000, {"total": 7}, ["json"]),
    ],
)
def test_json_fits_its_schema_and_equals_its_reference(answer: str, reference: Any, failed: list[str]) -> None:
    """Read as a whole; each check that failed is kept."""
    task = Task(id="t", input={}, reference=reference)
    (part,) = score({"v": Part(json_answer(schema=SCHEMA))}, task=task, state=said(answer), timeout_s=5.0).parts
    assert part.score == (not failed)
    assert sorted(check["name"] for check in part.evidence["checks"] if not check["passed"]) == sorted(failed)


def test_the_reasons_of_json_are_told() -> None:
    task = Task(id="t", input={}, reference={"total": 7})
    (part,) = score(
        {"v": Part(json_answer(schema=SCHEMA))}, task=task, state=said('{"total": "7"}'), timeout_s=5.0
    ).parts
    assert part.comment == (
        "schema $.total: '7' is not of type 'number'; reference: answered {'total': '7'}, expected {'total': 7}"
    )


def test_a_schema_alone_is_a_format_gate() -> None:
    """The reference is not asked; a value of the state and a pydantic model are taken as they are."""
    verifier = json_answer(schema=SCHEMA, reference=None, where="out")
    assert scored(verifier, {"out": {"total": 1}}, {"total": 2}) == 1
    assert scored(verifier, {"out": Found(name="x", inner={})}, None) == 0
    assert scored(json_answer(where="out"), {"out": Found(name="x", inner={})}, {"name": "x", "inner": {}}) == 1


@pytest.mark.parametrize("answer", ["1e999", "-1e999", "[1e999]", float("inf"), float("nan"), [float("nan")]])
def test_a_number_without_end_fails_and_raises_nothing(answer: Any) -> None:
    """jsonschema's multipleOf raises on it: an agent could make its failure the environment's."""
    schema = {"multipleOf": 0.01, "items": {"multipleOf": 0.01}}
    assert scored(json_answer(schema=schema, reference=None, where="out"), {"out": answer}, None) == 0


def test_a_schema_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"json_answer got a schema that is none, at \$\.type: 'text' is not valid"):
        json_answer(schema={"type": "text"})
    with pytest.raises(ConfigError, match="neither schema= nor reference=, and accepts anything"):
        json_answer(reference=None)


def test_a_schema_fetches_nothing_from_elsewhere() -> None:
    """A $ref to an address is an error of the verifier, and no request."""
    with pytest.raises(RewardError, match=r"raised .*Unresolvable"):
        scored(json_answer(schema={"$ref": "http://127.0.0.1:9/schema.json"}), said("{}"), {})


class OfAnswers(VerifierContract):
    @pytest.fixture
    def task(self) -> Task:
        return Task(id="t", input={}, reference=7)

    @pytest.fixture
    def state(self) -> dict[str, Any]:
        return said("7")


class TestExact(OfAnswers):
    """exact_answer keeps the contract of verifiers."""

    @pytest.fixture
    def verifier(self) -> Callable[..., Any]:
        return exact_answer(reference=lambda task: str(task.reference))


class TestNumeric(OfAnswers):
    """numeric_answer keeps the contract of verifiers."""

    @pytest.fixture
    def verifier(self) -> Callable[..., Any]:
        return numeric_answer()


class TestJson(OfAnswers):
    """json_answer keeps the contract of verifiers."""

    @pytest.fixture
    def verifier(self) -> Callable[..., Any]:
        return json_answer()
