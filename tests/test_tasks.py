"""tasks.py: rows of a task file become Tasks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import AnyMessage, BaseMessage
from langgraph.graph import MessagesState, StateGraph, add_messages
from typing_extensions import TypedDict

from agenttrain.errors import TaskError
from agenttrain.records import Task
from agenttrain.tasks import (
    check_against_schema,
    few_tasks_warning,
    read_tasks,
    smallest_effect,
    split_of,
    split_tasks,
)


def write(folder: Path, *lines: Any) -> Path:
    path = folder / "tasks.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def refusal(folder: Path, *lines: Any) -> str:
    with pytest.raises(TaskError) as caught:
        read_tasks(write(folder, *lines))
    return str(caught.value)


def test_a_row_is_read_as_it_stands(tmp_path: Path) -> None:
    """All six keys arrive in the Task."""
    row = {
        "id": "a",
        "input": {"q": 1},
        "reference": [2],
        "split": "held_out",
        "metadata": {"kind": "x"},
        "context": {"user": "u"},
    }
    assert read_tasks(write(tmp_path, row)) == (
        Task(
            id="a",
            input={"q": 1},
            reference=[2],
            split="held_out",
            metadata={"kind": "x"},
            context={"user": "u"},
        ),
    )


def test_langsmith_names_are_taken(tmp_path: Path) -> None:
    """inputs and outputs stand for input and reference."""
    (task,) = read_tasks(write(tmp_path, {"id": "a", "inputs": {"q": 1}, "outputs": {"a": 2}}))
    assert (task.input, task.reference) == ({"q": 1}, {"a": 2})


EXAMPLE = {
    "id": "0b8e5c0e-1f3a-4a35-9d5c-1f0c7d3c1a10",
    "dataset_id": "7f6a4a52-6a0e-4c36-8f0b-52b41d1c8a11",
    "created_at": "2026-01-05T10:00:00Z",
    "modified_at": "2026-01-05T10:00:00Z",
    "source_run_id": None,
    "name": "#0b8e @ refunds",
    "attachments": None,
    "inputs": {"q": 1},
    "outputs": {"a": 2},
    "metadata": {"dataset_split": ["test", "hard"], "kind": "refund"},
}
"""One example of a dataset, as LangSmith exports it."""


@pytest.mark.parametrize("form", ["lines", "an array", "under examples"])
def test_an_export_of_langsmith_is_read_as_it_is(tmp_path: Path, form: str) -> None:
    """JSON lines or one JSON value, pretty-printed or not; what a task has no use for is passed over."""
    other = {**EXAMPLE, "id": "b", "metadata": {"dataset_split": ["train"]}}
    text = {
        "lines": json.dumps(EXAMPLE) + "\n" + json.dumps(other),
        "an array": json.dumps([EXAMPLE, other]),
        "under examples": json.dumps({"examples": [EXAMPLE, other]}, indent=2),
    }
    first, second = read_tasks(write(tmp_path, text[form]))
    assert first == Task(
        id=str(EXAMPLE["id"]),
        input={"q": 1},
        reference={"a": 2},
        split="held_out",
        metadata={"dataset_split": ["test", "hard"], "kind": "refund"},
    )
    assert (second.id, second.split) == ("b", "train")


@pytest.mark.parametrize(
    ("row", "split"),
    [
        ({"split": "test"}, "held_out"),
        ({"split": ["validation"]}, "held_out"),
        ({"split": ["base", "train"]}, "train"),
        ({"split": ["base"]}, None),
        ({"split": []}, None),
        ({"metadata": {"split": "train"}}, "train"),
        ({"metadata": {"dataset_split": ["base", "hard"]}}, None),
        ({"split": "train", "metadata": {"dataset_split": ["test"]}}, "train"),
    ],
)
def test_splits_under_langsmiths_names(tmp_path: Path, row: dict[str, Any], split: str | None) -> None:
    """Its test and validation are held out; base is none, and a row's own split is the first word."""
    rows = [{"id": str(i), "inputs": {}, **row} for i in range(50)]
    expected = [split or split_of(str(i)) for i in range(50)]
    assert [task.split for task in read_tasks(write(tmp_path, *rows))] == expected


def test_reference_outputs_stands_for_reference(tmp_path: Path) -> None:
    """As LangSmith's SDK calls what is uploaded."""
    (task,) = read_tasks(write(tmp_path, {"id": "a", "inputs": {}, "reference_outputs": {"a": 2}}))
    assert task.reference == {"a": 2}


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"split": ["train", "test"]}, "tasks.jsonl[2] is in the splits train, test: it can't be trained on and held"),
        ({"split": ["hard"]}, 'tasks.jsonl[2]: "split" is [\'hard\']. Write "train" or "held_out"'),
        ({"attachments": {"a.png": {}}}, "tasks.jsonl[2] has 'attachments', and a task holds no files. Put what"),
        ({"outputs": {}, "reference_outputs": {}}, "tasks.jsonl[2] has 'reference' twice"),
        ({"referenceoutputs": {}}, "Did you mean 'reference_outputs'?"),
        ({"id": "a"}, "tasks.jsonl[2] has the id 'a', which row 1 has too."),
    ],
)
def test_a_bad_row_of_an_array_is_named_by_its_place(tmp_path: Path, row: dict[str, Any], told: str) -> None:
    """From 1, as people count."""
    rows = [{"id": "a", "inputs": {}}, {"id": "b", "inputs": {}, **row}]
    assert told in refusal(tmp_path, json.dumps(rows))


def test_blank_lines_a_mark_and_line_separators_inside_text_are_no_rows(tmp_path: Path) -> None:
    """Only newlines end a row; a byte order mark at the front is nothing."""
    path = write(tmp_path, '\ufeff{"id": "a", "input": {"q": "x\u2028y"}}', "", "  ", {"id": "b", "input": {}})
    assert [task.id for task in read_tasks(path)] == ["a", "b"]


def test_a_missing_id_is_the_hash_of_the_row(tmp_path: Path) -> None:
    """The same row has the same id, whatever the order of its keys; another row has another."""
    first, second = read_tasks(write(tmp_path, '{"input": {"q": 1}, "reference": 2}', '{"input": {"q": 2}}'))
    (again,) = read_tasks(write(tmp_path, '{"reference": 2, "input": {"q": 1}}'))
    assert first.id == again.id != second.id
    assert len(first.id) == 16


def test_a_number_is_an_id(tmp_path: Path) -> None:
    assert read_tasks(write(tmp_path, {"id": 7, "input": {}}))[0].id == "7"


def test_null_keys_are_left_out_keys(tmp_path: Path) -> None:
    (task,) = read_tasks(write(tmp_path, {"id": "a", "input": {}, "metadata": None, "context": None, "split": None}))
    assert (task.metadata, task.context, task.split) == ({}, None, split_of("a"))


@pytest.mark.parametrize(
    ("row", "seen", "step"),
    [
        ("{", "tasks.jsonl:2 is not JSON", "one whole JSON object on each line"),
        ("9" * 5000, "tasks.jsonl:2 is not JSON", "one whole JSON object on each line"),
        ([1], "tasks.jsonl:2 is a list", "a row is an object"),
        ({"id": "a", "imput": {}}, "unknown key 'imput'", "Did you mean 'input'?"),
        ({"id": "b"}, "tasks.jsonl:2 has no 'input'", "Add it"),
        ({"id": "b", "input": "hi"}, '"input" is a string', 'Write "input": {…}'),
        ({"id": "b", "input": {}, "inputs": {}}, "has 'input' twice", "Keep one"),
        ({"id": True, "input": {}}, '"id" is True', 'Write "id": "1"'),
        ({"id": "", "input": {}}, "\"id\" is ''", 'Write "id": "1"'),
        ({"id": "b", "input": {}, "split": "tset"}, "\"split\" is 'tset'", 'Write "train" or "held_out"'),
        ({"id": "b", "input": {}, "metadata": [1]}, '"metadata" is a list', 'Write "metadata": {…}'),
        ({"id": "b", "input": {}, "context": 3}, '"context" is a number', 'Write "context": {…}'),
        ({"id": "a", "input": {}}, "tasks.jsonl:2 has the id 'a', which line 1 has too", "its own id"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, row: Any, seen: str, step: str) -> None:
    """Where, what was seen, and the next step."""
    message = refusal(tmp_path, {"id": "a", "input": {}}, row)
    assert "tasks.jsonl:2" in message
    assert seen in message
    assert step in message


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    assert "holds no tasks" in refusal(tmp_path, "", "")


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(TaskError, match="can't be read"):
            read_tasks(path)


def test_other_encodings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b'{"id": "\xff"}')
    with pytest.raises(TaskError, match="not UTF-8"):
        read_tasks(path)


def test_a_fifth_is_held_out_by_the_id_alone() -> None:
    """The split does not depend on the other rows."""
    held_out = sum(split_of(f"task-{n}") == "held_out" for n in range(10_000))
    assert 1_850 < held_out < 2_150


@given(st.text(min_size=1))
def test_any_text_has_a_split(task_id: str) -> None:
    assert split_of(task_id) in ("train", "held_out")


def test_split_tasks_keeps_the_order() -> None:
    tasks = [Task(id=i, input={}, split="train" if i in "ac" else "held_out") for i in "abcd"]
    train, held_out = split_tasks(tasks)
    assert [t.id for t in train] == ["a", "c"]
    assert [t.id for t in held_out] == ["b", "d"]


def test_smallest_effect_by_hand() -> None:
    """2.8016 * sqrt(2 * 0.25 / 100) = 0.198; four times the tasks show half of it; it never passes 1."""
    assert smallest_effect(100) == pytest.approx(0.1981, abs=1e-4)
    assert smallest_effect(400) == pytest.approx(smallest_effect(100) / 2)
    assert smallest_effect(1) == 1.0
    with pytest.raises(TaskError):
        smallest_effect(0)


def test_few_tasks_are_warned_of() -> None:
    """Under 100 held-out tasks; none at all is told apart."""
    assert few_tasks_warning(100) is None
    assert "Only 25 held-out tasks" in str(few_tasks_warning(25))
    assert "40 points" in str(few_tasks_warning(25))
    assert "No task is held out" in str(few_tasks_warning(0))


class State(MessagesState):
    topic: str
    answer: str


@dataclass
class Context:
    user: str


def schemas() -> tuple[dict[str, Any], dict[str, Any]]:
    graph = StateGraph(State, context_schema=Context)
    graph.add_node("a", lambda state: state)
    graph.set_entry_point("a")
    compiled = graph.compile()
    context = compiled.get_context_jsonschema()
    assert context is not None
    return compiled.get_input_jsonschema(), context


def task(name: str = "a", context: dict[str, Any] | None = None, **values: Any) -> Task:
    return Task(id=name, input=values, context=context)


@pytest.mark.parametrize(
    "messages", [[{"role": "user", "content": "hi"}], [["user", "hi"]], "hi", {"role": "user", "content": "hi"}]
)
def test_messages_may_be_written_in_every_form_langgraph_takes(messages: Any) -> None:
    """Only the key is asked for; a key that no task gives may be written by a node, and is warned of."""
    input_schema, context_schema = schemas()
    tasks = [task(messages=messages, topic="t", context={"user": "u"})]
    (warning,) = check_against_schema(tasks, input_schema, context_schema)
    assert "input key 'answer'" in warning


@pytest.mark.parametrize(
    ("misfit", "words"),
    [
        (task("b", mesages=[], topic="t"), ["Task 2 ('b'): input", "'mesages'", "Did you mean 'messages'?"]),
        (task("b", messages=[]), ["Task 2 ('b'): input", "'topic' is a required property"]),
        (task("b", messages=[], topic=3), ["Task 2 ('b'): input.topic", "3 is not of type 'string'"]),
        (task("b"), ["Task 2 ('b'): input is empty", "messages, topic, answer"]),
    ],
)
def test_the_first_misfit_is_named_by_row_and_path(misfit: Task, words: list[str]) -> None:
    input_schema, _ = schemas()
    with pytest.raises(TaskError) as caught:
        check_against_schema([task("a", messages=[], topic="t"), misfit], input_schema)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_context_is_checked_too() -> None:
    """An unknown key, a row that lacks what others give, and a context that the graph doesn't take."""
    input_schema, context_schema = schemas()
    good = task("a", {"user": "u"}, messages=[], topic="t")
    for bad, schema, words in [
        (task("b", {"usr": "u"}, messages=[], topic="t"), context_schema, "Did you mean 'user'?"),
        (task("b", None, messages=[], topic="t"), context_schema, "context is missing"),
        (task("b", {"user": "u"}, messages=[], topic="t"), None, "the graph takes none"),
    ]:
        with pytest.raises(TaskError, match=words.replace("?", r"\?")):
            check_against_schema([good, bad], input_schema, schema)


@pytest.mark.parametrize("annotation", [list[BaseMessage], Sequence[AnyMessage], list])
def test_messages_are_known_by_their_type(annotation: Any) -> None:
    """Under any name, as older and newer states write them."""
    state: Any = TypedDict("state", {"history": Annotated[annotation, add_messages]})  # type: ignore[misc]
    graph = StateGraph(state)
    graph.add_node("a", lambda state: state)
    graph.set_entry_point("a")
    tasks = [task(history=[{"role": "user", "content": "hi"}])]
    assert check_against_schema(tasks, graph.compile().get_input_jsonschema()) == ()


def test_a_schema_without_properties_takes_anything() -> None:
    """As an entrypoint over a plain dict has it."""
    assert check_against_schema([task(anything=1)], {"title": "LangGraphInput", "type": "object"}) == ()


def test_a_schema_behind_a_reference_is_followed() -> None:
    schema = {
        "$ref": "#/$defs/In",
        "$defs": {"In": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}},
    }
    assert check_against_schema([task(q="x")], schema) == ()
    with pytest.raises(TaskError, match=r"input\.q doesn't fit"):
        check_against_schema([task(q=1)], schema)


def test_a_graph_that_takes_no_object_is_refused() -> None:
    """An entrypoint over an int can't be given a row's input."""
    with pytest.raises(TaskError, match="is not of type 'integer'"):
        check_against_schema([task(q=1)], {"title": "LangGraphInput", "type": "integer"})


def test_a_small_file_without_splits_holds_a_fifth_out(tmp_path: Path) -> None:
    """Where chance holds no row out, the smallest hashes are, so that there is something to evaluate on."""
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(f'{{"id": "t{i}", "input": {{"x": {i}}}}}\n' for i in range(20)))
    train, held_out = split_tasks(read_tasks(path))
    assert (len(train), len(held_out)) == (16, 4)
