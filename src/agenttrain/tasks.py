"""Rows of a task file become Tasks, split into train and held out.

A row is refused by file and line, never skipped: every line that is not blank gives one Task, and every id is given
once. Knows nothing of the graph; its schemas are handed in as plain JSON schema.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agenttrain.effect import smallest_effect as smallest_effect
from agenttrain.errors import TaskError
from agenttrain.promotion_record import CASE_KEY
from agenttrain.records import Split, Task

HELD_OUT_SHARE = 0.2
"""Share of the rows without a split that are held out."""
FEW_TASKS = 100
"""Fewer held-out tasks than this are worth a warning."""
ROW_KEYS = ("id", "input", "reference", "split", "metadata", "context")
LANGSMITH_NAMES = {"inputs": "input", "outputs": "reference", "reference_outputs": "reference"}
"""LangSmith's names, each to ours."""
LANGSMITH_RECORDS = ("dataset_id", "dataset_name", "created_at", "modified_at", "source_run_id", "name", "runs")
"""What LangSmith's export of an example also holds, of which a task needs nothing."""
LANGSMITH_ATTACHMENTS = ("attachments", "attachment_urls")
"""Its files, which no task can hold; a key without any is passed over."""
LANGSMITH_SPLITS: Mapping[str, Split | None] = {
    "train": "train",
    "held_out": "held_out",
    "test": "held_out",
    "validation": "held_out",
    "base": None,
}
"""Names of splits, ours and LangSmith's usual ones, each to ours; "base" is its name for no split."""

_KINDS = {dict: "an object", list: "a list", str: "a string", bool: "a bool", int: "a number", float: "a number"}


def read_tasks(path: Path) -> tuple[Task, ...]:
    """The tasks of a file, in file order: JSON lines, a JSON array of rows, or an object with them under "examples".

    A row is `{"id", "input", "reference", "split", "metadata", "context"}`. LangSmith's export of a dataset is read as
    it is: `inputs` for `input`, `outputs` or `reference_outputs` for `reference`, and its splits "test" and
    "validation" for held_out, in `split` or in `metadata.split` or `metadata.dataset_split`, alone or in a list. A row
    without an id is named by its hash, one without a split is held out by the hash of its id with a chance of 20 %.
    Where no row names a split and chance holds none out, a fifth is, the smallest hashes.

    Raises:
        TaskError: naming file and line, what was seen, what is accepted and what to do.
    """
    tasks: list[Task] = []
    place_by_id: dict[str, str] = {}
    named: set[str] = set()
    for place, where, read in _rows(path):
        row = _under_own_names(read, where)
        task = _task(row, where)
        if _named_split(row, where) is not None:
            named.add(task.id)
        if task.id in place_by_id:
            raise TaskError(
                f"{where} has the id {task.id!r}, which {place_by_id[task.id]} has too. "
                "Give each row its own id (a row without one is named by its content)."
            )
        place_by_id[task.id] = place
        tasks.append(task)
    if not tasks:
        raise TaskError(f'{path} holds no tasks. Write one JSON object a line: {{"id": "1", "input": {{…}}}}.')
    return _with_some_held_out(tasks, named)


def split_tasks(tasks: Sequence[Task]) -> tuple[tuple[Task, ...], tuple[Task, ...]]:
    """(train, held out), each in the order given."""
    return (
        tuple(task for task in tasks if task.split == "train"),
        tuple(task for task in tasks if task.split == "held_out"),
    )


def split_of(task_id: str) -> Split:
    """The split of a row that names none: a function of its id alone, so that adding rows moves no other row."""
    return "held_out" if _hash(task_id) < HELD_OUT_SHARE * 2**64 else "train"


def _with_some_held_out(tasks: Sequence[Task], named: Collection[str]) -> tuple[Task, ...]:
    """The tasks, with a fifth of a small file held out where its hashes fell on one side."""
    if named or len(tasks) < 2 or any(task.split == "held_out" for task in tasks):
        return tuple(tasks)
    by_hash = sorted(tasks, key=lambda task: _hash(task.id))
    chosen = {task.id for task in by_hash[: max(1, round(HELD_OUT_SHARE * len(tasks)))]}
    return tuple(replace(task, split="held_out") if task.id in chosen else task for task in tasks)


def _hash(task_id: str) -> int:
    """64 bits of an id, the same in every process."""
    return int.from_bytes(hashlib.sha256(task_id.encode("utf-8", "surrogatepass")).digest()[:8], "big")


def few_tasks_warning(n_held_out: int) -> str | None:
    """What too few held-out tasks mean for the result, or None from 100 on."""
    if n_held_out >= FEW_TASKS:
        return None
    if n_held_out < 1:
        return 'No task is held out, so nothing can be proved. Mark rows with "split": "held_out", or add rows.'
    percent = 100 * smallest_effect(n_held_out)
    return (
        f"Only {n_held_out} held-out tasks: they can show a difference in success of {percent:.0f} points or more. "
        f"Hold out {FEW_TASKS} for {100 * smallest_effect(FEW_TASKS):.0f} points."
    )


def check_against_schema(
    tasks: Sequence[Task], input_schema: Mapping[str, Any], context_schema: Mapping[str, Any] | None = None
) -> tuple[str, ...]:
    """Refuse the first task that doesn't fit the graph's schemas; give warnings about keys that no task holds.

    A key that the graph doesn't have is refused, so is a wrong type, and a required key that other tasks hold. A
    required key that no task holds is a warning: LangGraph lists every key of a TypedDict state as required, also those
    that a node writes. Lists of messages are not looked into, since LangGraph takes dicts, tuples and plain text there.

    Args:
        tasks: in file order; a misfit is named by its row in that order and its id.
        input_schema: JSON schema of the graph's input.
        context_schema: JSON schema of its runtime context; None: it takes none.

    Raises:
        TaskError: the first misfit, with its row, id, key and the accepted keys.
    """
    misfits, warnings = schema_misfits(tasks, input_schema, context_schema)
    for misfit in misfits:
        raise TaskError(f"{misfit.place}{misfit.text}")
    return warnings


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """One row that doesn't fit the graph's schemas."""

    row: int
    """From 1, in the order given."""
    task_id: str
    what: str
    """input or context."""
    text: str
    """What is wrong and what to do; goes on from `place`."""

    @property
    def place(self) -> str:
        return f"Task {self.row} ({self.task_id!r}): {self.what}"


def schema_misfits(
    tasks: Sequence[Task], input_schema: Mapping[str, Any], context_schema: Mapping[str, Any] | None = None
) -> tuple[tuple[Misfit, ...], tuple[str, ...]]:
    """(each misfit that `check_against_schema` would refuse, its warnings); of one row the first of each kind."""
    inputs = [(row, task, dict(task.input)) for row, task in enumerate(tasks, 1)]
    contexts = [(row, task, dict(task.context)) for row, task in enumerate(tasks, 1) if task.context is not None]
    misfits, warnings = _misfits(inputs, input_schema, "input")
    if context_schema is not None:
        misfits += _without_context(tasks, context_schema)
        more, of_contexts = _misfits(contexts, context_schema, "context")
        return (*misfits, *more), warnings + of_contexts
    given = " is given, and the graph takes none. Build the graph with context_schema=…, or take `context` out of the "
    given += "rows."
    misfits += [Misfit(row=row, task_id=task.id, what="context", text=given) for row, task, _ in contexts]
    return tuple(misfits), warnings


def _rows(path: Path) -> Iterator[tuple[str, str, Any]]:
    """Each row's place in the file, the same with the file, and its JSON value."""
    text = _text(path)
    examples = _examples(text)
    if examples is not None:
        for number, row in enumerate(examples, 1):
            yield f"row {number}", f"{path}[{number}]", row
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"{path}:{number}"
            try:
                yield f"line {number}", where, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise TaskError(f"{where} is not JSON ({error}). Write one whole JSON object on each line.") from error


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise TaskError(f"{path} can't be read ({error.strerror}). Name the task file: tasks='tasks.jsonl'.") from error
    except UnicodeDecodeError as error:
        raise TaskError(f"{path} is not UTF-8 text ({error}). Save it as UTF-8.") from error


def _examples(text: str) -> list[Any] | None:
    """The rows of a text that is one JSON array, or one object with "examples". None: it is JSON lines."""
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(whole, dict) and isinstance(whole.get("examples"), list):
        whole = whole["examples"]
    return whole if isinstance(whole, list) and all(isinstance(row, dict) for row in whole) else None


def _under_own_names(row: Any, where: str) -> dict[str, Any]:
    """A row under our own names."""
    if not isinstance(row, dict):
        raise TaskError(f'{where} is {_kind(row)}, and a row is an object: {{"id": "1", "input": {{…}}}}.')
    named: dict[str, Any] = {}
    for key, value in row.items():
        name = LANGSMITH_NAMES.get(key, key)
        if name in (CASE_KEY, *LANGSMITH_RECORDS) or (name in LANGSMITH_ATTACHMENTS and not value):
            continue
        if name in LANGSMITH_ATTACHMENTS:
            raise TaskError(f"{where} has {key!r}, and a task holds no files. Put what the graph needs into its input.")
        if name not in ROW_KEYS:
            raise TaskError(f"{where} has the unknown key {key!r}. {_accepted(key, (*ROW_KEYS, *LANGSMITH_NAMES))}")
        if name in named:
            raise TaskError(f"{where} has {name!r} twice, once under LangSmith's name. Keep one.")
        named[name] = value
    return named


def _task(row: Mapping[str, Any], where: str) -> Task:
    """A row as a Task."""
    task_id = _task_id(row, where)
    return Task(
        id=task_id,
        input=_table(row, "input", where),
        reference=row.get("reference"),
        split=_split(row, task_id, where),
        metadata=_table(row, "metadata", where) if row.get("metadata") is not None else {},
        context=_table(row, "context", where) if row.get("context") is not None else None,
    )


def _task_id(row: Mapping[str, Any], where: str) -> str:
    """The row's id; a number is taken as its text, a missing one is the hash of the row."""
    given = row.get("id")
    if given is None:
        return hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()[:16]
    if isinstance(given, bool) or not isinstance(given, str | int) or given == "":
        raise TaskError(f'{where}: "id" is {given!r}, and an id is text that is not empty. Write "id": "1".')
    return str(given)


def _split(row: Mapping[str, Any], task_id: str, where: str) -> Split:
    """The row's split, or the one its id falls into."""
    return _named_split(row, where) or split_of(task_id)


def _named_split(row: Mapping[str, Any], where: str) -> Split | None:
    """The split that a row names. None: it names none."""
    given = row.get("split")
    metadata = row.get("metadata")
    if given is None and isinstance(metadata, Mapping):
        return _split_in_metadata(metadata, where)
    names = given if isinstance(given, list) else [] if given is None else [given]
    for name in names:
        if not isinstance(name, str) or name not in LANGSMITH_SPLITS:
            raise TaskError(f'{where}: "split" is {given!r}. Write "train" or "held_out", or leave it out.')
    return _one_split(names, where)


def _split_in_metadata(metadata: Mapping[str, Any], where: str) -> Split | None:
    """LangSmith keeps splits among the metadata; names of other splits there only slice the report."""
    given = metadata.get("dataset_split", metadata.get("split"))
    names = given if isinstance(given, list) else [given]
    return _one_split([name for name in names if isinstance(name, str) and name in LANGSMITH_SPLITS], where)


def _one_split(names: Sequence[str], where: str) -> Split | None:
    """The split that all these names stand for."""
    splits = {split for name in names if (split := LANGSMITH_SPLITS[name]) is not None}
    if len(splits) > 1:
        raise TaskError(f"{where} is in the splits {', '.join(names)}: it can't be trained on and held out. Keep one.")
    return next(iter(splits), None)


def _table(row: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    """The JSON object under a key."""
    if key not in row:
        raise TaskError(f'{where} has no {key!r}. Add it: "{key}": {{…}}, as the graph takes it.')
    value = row[key]
    if not isinstance(value, dict):
        raise TaskError(f'{where}: "{key}" is {_kind(value)}, and an object is needed. Write "{key}": {{…}}.')
    return value


def _without_context(tasks: Sequence[Task], context_schema: Mapping[str, Any]) -> list[Misfit]:
    """Rows without a context where others give one and the schema requires keys of it."""
    without = [(row, task) for row, task in enumerate(tasks, 1) if task.context is None]
    if len(without) == len(tasks) or not _object_schema(context_schema).get("required"):
        return []
    text = " is missing, and other rows give one. Add it to the row."
    return [Misfit(row=row, task_id=task.id, what="context", text=text) for row, task in without]


def _misfits(
    values: Sequence[tuple[int, Task, dict[str, Any]]], schema: Mapping[str, Any], what: str
) -> tuple[list[Misfit], tuple[str, ...]]:
    """(misfits, warnings) of (row, task, value) against one schema."""
    if not values:
        return [], ()
    body = _object_schema(schema)
    given = set[str]().union(*(value for *_, value in values))
    never_given = [key for key in body.get("required", ()) if key not in given]
    first_misfit = _misfit_finder(schema, skipped=never_given)
    misfits = []
    for row, task, value in values:
        text = _key_misfit(value, body)
        if text is None and (misfit := first_misfit(value)) is not None:
            text = f"{misfit} Change the row, or the graph's {what} schema."
        if text is not None:
            misfits.append(Misfit(row=row, task_id=task.id, what=what, text=text))
    return misfits, tuple(
        f"No task gives {what} key {key!r}, which the graph's schema lists as required. "
        "Fine when a node writes it; else add it to each row."
        for key in never_given
    )


def _key_misfit(value: Mapping[str, Any], body: Mapping[str, Any]) -> str | None:
    """What is wrong with a key that the schema doesn't have, or with a value that has no key of it at all."""
    known = body.get("properties")
    if not known or body.get("additionalProperties"):
        return None
    for key in value:
        if key not in known:
            return f" has the key {key!r}, which the graph doesn't take. {_accepted(key, known)}"
    if not value and body.get("required"):
        return f" is empty. The graph takes {', '.join(known)}; give it what it starts from."
    return None


def _misfit_finder(schema: Mapping[str, Any], skipped: Sequence[str]) -> Callable[[Mapping[str, Any]], str | None]:
    """A function from a value to its first misfit in words, blind to messages and to the skipped required keys."""
    import jsonschema

    body = _object_schema(schema)
    properties = {
        key: {} if key == "messages" or _holds_messages(part) else part
        for key, part in body.get("properties", {}).items()
    }
    required = [key for key in body.get("required", ()) if key not in skipped]
    checked = {**schema, **body, "properties": properties, "required": required}
    checked.pop("$ref", None)
    validator = jsonschema.Draft202012Validator(checked)

    def first_misfit(value: Mapping[str, Any]) -> str | None:
        error = next(iter(sorted(validator.iter_errors(value), key=lambda error: list(map(str, error.path)))), None)
        if error is None:
            return None
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.path)
        return f"{path} doesn't fit: {_short(error.message)}."

    return first_misfit


def _object_schema(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema that lists the properties, behind a `$ref` if it is only pointed at."""
    pointed = str(schema.get("$ref", ""))
    if pointed.startswith("#/$defs/"):
        found: Mapping[str, Any] = schema.get("$defs", {}).get(pointed.removeprefix("#/$defs/"), {})
        return found
    return schema


def _holds_messages(part: Mapping[str, Any]) -> bool:
    """True for a property that LangGraph fills from messages in any of the forms it accepts."""
    text = json.dumps(part, default=str)
    return any(f'"#/$defs/{name}"' in text for name in ("BaseMessage", "HumanMessage"))


def _kind(value: Any) -> str:
    """A JSON value's type in words."""
    return _KINDS.get(type(value), "null")


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}…"


def _accepted(key: str, known: Any) -> str:
    """The accepted keys, and the nearest one to what was written."""
    close = difflib.get_close_matches(key, list(known), n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"Accepted: {', '.join(known)}.{hint}"
