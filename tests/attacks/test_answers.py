"""Attacks by what an agent writes: answers that a verifier could misread, or crash on into another attempt.

Whatever is written gets a score, by the way that a rollout's reward goes: never an error of the verifier's.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from attacks.harness import attack
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

from agenttrain import Task
from agenttrain.errors import RewardError
from agenttrain.records import Reward
from agenttrain.reward.layers import passes
from agenttrain.reward.score import score
from agenttrain.trainable import Part
from agenttrain.verifiers import exact_answer, json_answer, numeric_answer, tool_trajectory

KIND = "answers"
DEEP = 100_000


def answered(*texts: Any) -> dict[str, Any]:
    return {"messages": [HumanMessage("Question"), *(AIMessage(text) for text in texts)]}


def reward_for(verifier: Any, reference: Any, state: Any, **part: Any) -> Reward:
    task = Task(id="t", input={}, reference=reference)
    return score({"answer": Part(verifier, **part)}, task=task, state=state, timeout_s=60)


NUMBERS = [
    attack(
        KIND, "no finite number", "answers NaN, inf and their like", ["nan", "inf", "-inf", "NaN NaN", "1e999", "∞"]
    ),
    attack(
        KIND,
        "several numbers",
        "answers the right number among others, or all of them",
        ["42 or 43", "It is 42, maybe 7", "1 2 3 42 5", "42-43", "42/43", "41..43", "42 ± 5", "between 42 and 43"],
    ),
    attack(
        KIND,
        "other digits",
        "answers in full-width, Arabic and superscript digits, or by words",
        ["４２", "٤٢", "4²", "forty-two", "④②", "x42", "0x2a", "XLII"],
    ),
    attack(
        KIND,
        "numbers in disguise",
        "hides it in a longer number, a date, a version or an identifier",
        ["4242", "142", "42nd", "v42", "42.0.1", "1:42", "42%", "4 2", "42,000", "A42", "--42", "42e1", "$42x"],
    ),
    attack(
        KIND,
        "huge numbers",
        "answers with exponents and digits that take for ever",
        ["1e9999999999", "9" * 100_000, "1" + "0" * 5000, "4" * 5000 + "e-4999", "42e-999999999999", "." * 10000],
    ),
    attack(
        KIND,
        "texts that a pattern chokes on",
        "answers with long runs of signs and separators",
        ["1," * 20_000 + "x", "-" * 50_000, "(" * 50_000 + "42x", " 1" * 50_000 + " x", "1_" * 20_000 + "!"],
    ),
    attack(
        KIND,
        "no answer",
        "answers nothing, blanks, zero bytes and half of a character",
        ["", "   ", "\x00", "\ud800", "\udcff4", "\u202e24", "\n\n"],
    ),
]


@pytest.mark.parametrize("answers", NUMBERS)
def test_only_the_number_itself_counts(answers: list[str]) -> None:
    for form in (numeric_answer(), numeric_answer(relative=0.001), numeric_answer(pattern=r"(\S+)$")):
        for answer in answers:
            assert reward_for(form, 42, answered(answer)).score == 0.0, answer[:100]


def test_and_the_number_itself_does() -> None:
    for answer in ("42", "42.", "The answer is 42", "= 42", "42.0", "4.2e1", "+42"):
        assert reward_for(numeric_answer(), 42, answered(answer)).score == 1.0, answer


VALUES = [
    attack(
        KIND,
        "values in the state",
        "has the graph's state hold NaN, true, texts and objects in a number's place",
        [
            math.nan,
            math.inf,
            True,
            "NaN",
            None,
            [42],
            {"value": 42},
            complex(42),
            b"42",
            object(),
            10**5000,
            [10**5000],
        ],
    ),
    attack(
        KIND,
        "values that lie",
        "has the state hold an int and a text that are equal to everything",
        [
            type("Lies", (), {"__eq__": lambda self, other: True, "__hash__": None})(),
            type("Text", (str,), {"__eq__": lambda self, other: True, "__hash__": str.__hash__})("7"),
        ],
    ),
]


@pytest.mark.parametrize("values", VALUES)
def test_a_value_in_the_state_is_taken_for_what_it_is(values: list[Any]) -> None:
    for value in values:
        for verifier in (numeric_answer(where="answer"), exact_answer(where="answer"), json_answer(where="answer")):
            assert reward_for(verifier, 42, {"answer": value}).score == 0.0, repr(value)


EXACT = [
    attack(
        KIND,
        "like the right text",
        "answers with more, less, other letters that look the same, or every answer at once",
        [
            "Paris, France",
            "Par",
            "Раris",
            "paris",
            "Paris Rome Berlin",
            "P\u200baris",
            "Paris\x00",
            "['Paris']",
            "Parіs",
        ],
    ),
    attack(
        KIND,
        "who speaks last",
        "leaves the right text in a message that is not its answer",
        [
            {"messages": [AIMessage("Rome"), ToolMessage("Paris", tool_call_id="1")]},
            {"messages": [AIMessage("Rome"), HumanMessage("Paris")]},
            {"messages": [AIMessage("Paris"), AIMessage("Rome")]},
            {
                "messages": [
                    AIMessage(content=[{"type": "thinking", "thinking": "Paris"}, {"type": "text", "text": ""}])
                ]
            },
            {"messages": "Paris"},
            {"messages": [{"role": "tool", "content": "Paris"}]},
            {},
            None,
            [],
        ],
    ),
]


@pytest.mark.parametrize("answers", EXACT)
def test_only_the_text_itself_counts(answers: list[Any]) -> None:
    for answer in answers:
        state = answered(answer) if isinstance(answer, str) else answer
        for verifier in (exact_answer(), numeric_answer(), json_answer()):
            reference = 42 if verifier.__name__ == "numeric_answer" else "Paris"
            assert reward_for(verifier, reference, state).score == 0.0, repr(answer)[:100]


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
JSONS = [
    attack(
        KIND,
        "a key twice",
        "answers JSON in which the last, or the first, is right",
        ['{"n": 1, "n": 42}', '{"n": 42, "n": 1}'],
    ),
    attack(
        KIND,
        "JSON among words",
        "answers JSON with words, fences or another value around it",
        ['The answer: {"n": 42}', '```json\n{"n": 42}\n```', '{"n": 42} {"n": 1}', '{"n": 42},', '[{"n": 42}]'],
    ),
    attack(
        KIND,
        "JSON that is none",
        "answers NaN, Infinity, comments, single quotes and Python's own",
        [
            '{"n": NaN}',
            '{"n": Infinity}',
            "{'n': 42}",
            '{"n": 42 /* */}',
            "{n: 42}",
            "dict(n=42)",
            '{"n": 0x2a}',
            "NaN",
        ],
    ),
    attack(
        KIND,
        "other types in JSON",
        "answers a text, true and null in a number's place, and a key too many",
        [
            '{"n": "42"}',
            '{"n": true}',
            '{"n": null}',
            '{"n": [42]}',
            '{"n": 42, "m": 1}',
            '{"N": 42}',
            '{"n ": 42}',
            "42",
        ],
    ),
    attack(
        KIND,
        "JSON nested past any depth",
        "nests arrays and objects until a parser gives up",
        [
            "[" * DEEP,
            "[" * DEEP + "]" * DEEP,
            '{"n":' * DEEP + "42" + "}" * DEEP,
            '{"n": ' + "[" * 900 + "]" * 900 + "}",
        ],
    ),
    attack(
        KIND,
        "huge JSON",
        "answers numbers of thousands of digits, and exponents without end",
        ['{"n": ' + "9" * 5000 + "}", '{"n": 1e99999}', '{"n": 42e400}', '{"n": ' + "1" * 4300 + "}", '{"n": -0e9}'],
    ),
    attack(
        KIND,
        "JSON with half characters",
        "answers surrogates, zero bytes and a byte order mark",
        ['{"n": "\\ud800"}', '\ufeff{"n": 42}', '{"n": 42}\x00', '{"\\ud800": 42}', "\ud800", '{"n\\u0000": 42}'],
    ),
]


@pytest.mark.parametrize("answers", JSONS)
def test_only_the_json_itself_counts(answers: list[str]) -> None:
    for answer in answers:
        for verifier in (json_answer(), json_answer(schema=SCHEMA)):
            reward = reward_for(verifier, {"n": 42}, answered(answer))
            assert reward.score == 0.0, answer[:100]
            json.dumps([part.comment for part in reward.parts]).encode()


def test_and_the_json_itself_does() -> None:
    assert reward_for(json_answer(schema=SCHEMA), {"n": 42}, answered(' {"n":\n42} ')).score == 1.0


@pytest.mark.attack(
    kind=KIND,
    name="a gate of form",
    tried="gets past a gate with what crashes it: it is closed, and nothing behind it counts",
    outcome="contained",
)
@pytest.mark.parametrize("answer", ["[" * DEEP, '{"n": NaN}', "\ud800", "", '{"n": 1, "n": 42}', '{"n": 1e99999}'])
def test_a_gate_stays_closed(answer: str) -> None:
    task = Task(id="t", input={}, reference={"n": 42})
    verifiers = {
        "form": Part(json_answer(schema=SCHEMA, reference=None), kind="format", closed=-1.0),
        "answer": Part(lambda task, state: 1.0),
    }
    reward = score(verifiers, task=task, state=answered(answer), timeout_s=60)
    assert (reward.score, reward.closed, passes(reward)) == (-1.0, "form", False)


def calling(*calls: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [AIMessage("", tool_calls=list(calls), **more)]}


def called(name: str, args: Any) -> dict[str, Any]:
    return {"name": name, "args": args, "id": "1", "type": "tool_call"}


RIGHT = [{"name": "search", "args": {"q": "A41"}}]
BAD = {"name": "search", "args": '{"q": "A41"', "id": "1", "error": "broken", "type": "invalid_tool_call"}
CALLS = [
    attack(
        KIND,
        "calls that can't be read",
        "writes calls with broken, nested and huge arguments",
        [
            {"messages": [AIMessage("", invalid_tool_calls=[BAD])]},
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"name": "search", "arguments": "[" * DEEP}}]}
                ]
            },
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "search", "arguments": "{"}}]}]},
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 7, "arguments": "{}"}}]}]},
            {"messages": [{"role": "assistant", "tool_calls": "search"}]},
            {"messages": [{"role": "assistant", "tool_calls": [None, 7, "search"]}]},
        ],
    ),
    attack(
        KIND,
        "calls that are like the right one",
        "calls with another name, other arguments, twice, or tells of a call in words",
        [
            calling(called("Search", {"q": "A41"})),
            calling(called("search", {"q": "A41", "n": 1})),
            calling(called("search", {"q": "A4"})),
            calling(called("search", {"q": "A41"}), called("search", {"q": "A41"})),
            calling(called("search", {})),
            {"messages": [AIMessage('search({"q": "A41"})')]},
            {"messages": [ToolMessage("A41", tool_call_id="1", name="search")]},
        ],
    ),
    attack(
        KIND,
        "calls with odd values",
        "calls with NaN, half characters and numbers of thousands of digits",
        [
            calling(called("search", {"q": math.nan})),
            calling(called("search", {"q": "\ud800"})),
            calling(called("\ud800", {"q": "A41"})),
            calling(called("search", {"q": 10**5000})),
            calling(called("search", {"q": {"a": [1] * 1000}})),
        ],
    ),
]


@pytest.mark.parametrize("states", CALLS)
@pytest.mark.parametrize("mode", ["strict", "unordered", "subset"])
def test_only_the_calls_themselves_count(states: list[Any], mode: Any) -> None:
    for state in states:
        reward = reward_for(tool_trajectory(mode=mode), RIGHT, state)
        no_calls_are_a_subset = mode == "subset" and not has_calls(state)
        assert reward.score == float(no_calls_are_a_subset), repr(state)[:200]
        json.dumps([part.comment for part in reward.parts]).encode()


def has_calls(state: Any) -> bool:
    (message,) = state["messages"]
    calls = message.get("tool_calls") if isinstance(message, dict) else getattr(message, "tool_calls", None)
    return bool(calls) or bool(getattr(message, "invalid_tool_calls", None))


def test_and_the_calls_themselves_do() -> None:
    for mode in ("strict", "unordered", "subset", "superset"):
        assert reward_for(tool_trajectory(mode=mode), RIGHT, calling(called("search", {"q": "A41"}))).score == 1.0


@pytest.mark.attack(
    kind=KIND,
    name="a score that is none",
    tried="brings a verifier's own arithmetic to NaN or infinity, which would poison its group",
    outcome="reported",
)
@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        -math.inf,
        "1.0",
        None,
        [1.0],
        pytest.param(10**400, id="10**400"),
        pytest.param(10**5000, id="10**5000"),
    ],
)
def test_a_verifier_that_gives_no_finite_number_gives_no_reward(value: Any) -> None:
    """It is told as the verifier's failure, and the rollout is not trained."""
    with pytest.raises(RewardError, match="'answer' answered"):
        reward_for(lambda task, state: {"score": value}, 42, answered("42"))
