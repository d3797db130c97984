"""The example is what its README says: its files are reproducible, its shortcuts mostly fail, and it gets better."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

from agenttrain.records import Task
from agenttrain.reward.layers import passes
from agenttrain.reward.score import score
from agenttrain.testing import VerifierContract
from agenttrain.trainable import trainable_of

EXAMPLE = Path(__file__).parents[1] / "examples" / "corpus-search"
MODULES = ("corpus", "library", "tasks", "graph", "searcher")
FAMILIES = ("direct", "two_hop", "outdated", "distractor")


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    """The example's modules by name, which are those of this example alone inside of the tests here."""
    others: dict[str, ModuleType] = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield SimpleNamespace(**{name: import_module(name) for name in MODULES})
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in MODULES:
            sys.modules.pop(name, None)
        sys.modules.update(others)


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return [json.loads(line) for line in (EXAMPLE / "tasks.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def held_out(rows: list[dict]) -> list[dict]:
    return [row for row in rows if row["split"] == "held_out"]


def printed(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=EXAMPLE, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def question_of(row: dict) -> str:
    return row["input"]["messages"][0]["content"]


def test_files_are_what_the_scripts_print() -> None:
    """corpus.jsonl and tasks.jsonl are the output of the commands that the example's README gives."""
    assert (EXAMPLE / "corpus.jsonl").read_text() == printed("corpus.py", "--seed", "1")
    train = printed("tasks.py", "--split", "train", "--seed", "1", "--n", "1000")
    held_out = printed("tasks.py", "--split", "held_out", "--seed", "1", "--n", "250")
    assert (EXAMPLE / "tasks.jsonl").read_text() == train + held_out


def test_splits_share_no_name(example: Any) -> None:
    """No town, person, machine or call of a held-out question is one of the training worlds'."""
    names = {}
    for split in ("train", "held_out"):
        world = example.corpus.world(split, 1)
        people = [*world.people, *(relative for relative, _ in world.relatives)]
        named = [*world.towns, *people, *world.machines]
        names[split] = {each.name for each in named} | {person.call for person in people}
        assert len(names[split]) == len(named) + len(people), split
    assert not names["train"] & names["held_out"]


def test_documents_are_short(example: Any) -> None:
    """670 of them, of 15 words at most."""
    texts = [json.loads(line)["text"] for line in (EXAMPLE / "corpus.jsonl").read_text().splitlines()]
    assert (len(texts), max(len(text.split()) for text in texts)) == (670, 15)


# The ways to an answer


def name_in(example: Any, row: dict) -> str:
    """What a question names."""
    for wording in example.tasks.QUESTIONS[row["metadata"]["kind"]]:
        before, after = wording.split("{}")
        found = re.fullmatch(f"{re.escape(before)}(.+){re.escape(after)}", question_of(row))
        if found:
            return found[1]
    raise AssertionError(question_of(row))


def careful(example: Any, row: dict) -> str | None:
    """The answer of the searcher when it makes no mistake."""

    class Careful(example.searcher.Searcher):
        P_KEYWORD = P_CAREFUL = P_FOLLOWS_NEWER = P_GOES_ON = 1.0
        P_TRUSTS_SNIPPET = P_SEARCHES_AGAIN = P_GUESSES = 0.0

    kind = row["metadata"]["kind"]
    fact = example.tasks.Fact(row["metadata"]["family"], kind, name_in(example, row), "")
    found: str | None = Careful(fact, question_of(row), example.graph.LIBRARY, random.Random(0)).answer()
    return found


def first_kind(example: Any, row: dict) -> str:
    kind = row["metadata"]["kind"]
    return example.searcher.HOPS.get(kind, (kind,))[-1]


def value_in(example: Any, row: dict, text: str) -> str | None:
    """The first thing in a text that could answer the question."""
    found = re.search(example.searcher.VALUES[first_kind(example, row)], text)
    return found and found[1]


def by_first_snippet(example: Any, row: dict) -> str | None:
    """Searches for the question itself and believes the first snippet."""
    ids = example.graph.LIBRARY.search(question_of(row))
    return value_in(example, row, example.graph.LIBRARY.snippet(ids[0]))


def by_first_document(example: Any, row: dict) -> str | None:
    """Searches for the question itself and believes the first document."""
    ids = example.graph.LIBRARY.search(question_of(row))
    return value_in(example, row, example.graph.LIBRARY.read(ids[0]))


def right_by_family(rows: list[dict], answer: Callable[[dict], str | None]) -> dict[str, tuple[int, int]]:
    """Family to (right answers, tasks)."""
    right = Counter(row["metadata"]["family"] for row in rows if answer(row) == row["reference"])
    asked = Counter(row["metadata"]["family"] for row in rows)
    return {family: (right[family], asked[family]) for family in FAMILIES}


def test_every_task_can_be_answered(example: Any, rows: list[dict]) -> None:
    """A searcher who makes no mistake answers each with the example's own search and corpus."""
    wrong = [row["id"] for row in rows if careful(example, row) != row["reference"]]
    assert wrong == []


def test_the_first_snippet_is_a_temptation(example: Any, held_out: list[dict]) -> None:
    """Right for many a direct question, and for no other."""
    assert right_by_family(held_out, lambda row: by_first_snippet(example, row)) == {
        "direct": (56, 100),
        "two_hop": (0, 75),
        "outdated": (0, 50),
        "distractor": (0, 25),
    }


def test_the_first_document_is_a_temptation(example: Any, held_out: list[dict]) -> None:
    """Read it and believe it: right for nearly every direct question, and for hardly any other."""
    assert right_by_family(held_out, lambda row: by_first_document(example, row)) == {
        "direct": (85, 100),
        "two_hop": (0, 75),
        "outdated": (0, 50),
        "distractor": (1, 25),
    }


def test_a_frequent_answer_is_no_way(rows: list[dict], held_out: list[dict]) -> None:
    """The answer of most training tasks is that of no held-out task; the most frequent of these is that of 7 in 250."""
    common = Counter(row["reference"] for row in rows if row["split"] == "train").most_common(1)[0][0]
    assert [row["id"] for row in held_out if row["reference"] == common] == []
    assert Counter(row["reference"] for row in held_out).most_common(1)[0][1] == 7


# The agent and its verifiers


def called(name: str, **arguments: str) -> AIMessage:
    return AIMessage("", tool_calls=[{"name": name, "args": arguments, "id": name, "type": "tool_call"}])


@pytest.fixture
def outcome(example: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Runs the agent with a scripted model on the question of an outdated count; gives score, success and parts."""
    task = Task(id="t", input={"messages": [HumanMessage("How many people live in Green Heath?")]}, reference="624")

    def run(*messages: AIMessage) -> dict[str, Any]:
        monkeypatch.setattr(example.graph, "model", GenericFakeChatModel(messages=iter(messages)))
        state = example.graph.builder.compile().invoke(task.input)
        noted = trainable_of(example.graph.graph)
        assert noted is not None
        reward = score(noted.verifiers, task=task, state=state, timeout_s=None)
        parts = {part.name: part.score for part in reward.parts}
        return {"score": round(reward.score, 6), "success": passes(reward), **parts}

    return run


def test_reading_the_newest_count_is_worth_most(outcome: Callable[..., dict[str, Any]]) -> None:
    """Right, read, one search."""
    said = outcome(
        called("search", query="Green Heath people"),
        called("read", document_id="D826"),
        called("read", document_id="D250"),
        AIMessage("The answer is 624."),
    )
    assert said == {"score": 1.18, "success": True, "form": 1.0, "answer": 1.0, "grounded": 1.0, "searches": 1.0}


def test_the_first_snippet_is_worth_nothing(outcome: Callable[..., dict[str, Any]]) -> None:
    """The older count stands in it."""
    said = outcome(called("search", query="Green Heath people"), AIMessage("The answer is 835."))
    assert said == {"score": -0.02, "success": False, "form": 1.0, "answer": 0.0, "grounded": 0.0, "searches": 1.0}


def test_a_right_guess_is_worth_less_than_reading(outcome: Callable[..., dict[str, Any]]) -> None:
    """It is a success all the same: the outcome alone decides that."""
    said = outcome(AIMessage("The answer is 624."))
    assert said == {"score": 1.0, "success": True, "form": 1.0, "answer": 1.0, "grounded": 0.0, "searches": 0.0}


def test_giving_up_in_words_is_no_bad_form(outcome: Callable[..., dict[str, Any]]) -> None:
    """Worth nothing, and no punishment."""
    said = outcome(AIMessage("I could not find that."))
    assert said == {"score": 0.0, "success": False, "form": 1.0, "answer": 0.0, "grounded": 0.0, "searches": 0.0}


def test_any_other_last_words_close_the_gate(outcome: Callable[..., dict[str, Any]]) -> None:
    """The right document was read and the right number is said, and the form is not kept."""
    said = outcome(called("read", document_id="D250"), AIMessage("It is 624."))
    assert said == {"score": -0.3, "success": False, "form": 0.0, "answer": 0.0, "grounded": 1.0, "searches": 0.0}


TASK = Task(id="t", input={}, reference="Green Heath")
STATE = {
    "messages": [
        HumanMessage("Where?"),
        called("read", document_id="D1"),
        ToolMessage("He works in Green Heath.", name="read", tool_call_id="read"),
        AIMessage("The answer is Green Heath."),
    ]
}


class TestVerifiers(VerifierContract):
    """Each of them, on whatever the policy left."""

    @pytest.fixture(params=["form", "answer", "grounded"])
    def verifier(self, request: pytest.FixtureRequest, example: Any) -> Any:
        noted = trainable_of(example.graph.graph)
        assert noted is not None
        return noted.verifiers[request.param].function

    @pytest.fixture
    def task(self) -> Task:
        return TASK

    @pytest.fixture
    def state(self) -> dict[str, Any]:
        return STATE


@pytest.mark.long
def test_a_run_gets_better(tmp_path: Path) -> None:
    """The README's command: an interval above 0, outdated counts no longer believed, no token drifted."""
    command = [sys.executable, "-m", "agenttrain", "fit", str(EXAMPLE / "graph.py"), "--seed", "1", "--json"]
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True)
    report = json.loads(done.stdout)
    outdated = [report[when]["by_slice"]["family"]["outdated"]["success"] for when in ("baseline", "trained")]
    assert 0.25 <= report["baseline"]["success"] <= 0.37
    assert report["difference"]["ci95"][0] > 0.05
    assert outdated[0] < 0.3 < 0.6 < outdated[1]
    assert report["tokens"]["drifted"] == 0
    assert report["logprob_gap"]["max"] < 1e-3
    assert (tmp_path / "runs" / report["run_id"] / "policy" / "model.safetensors").is_file()
