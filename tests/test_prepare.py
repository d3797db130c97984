"""A Job's provenance: equal exactly when what made the run is equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agenttrain.check.prepared import prepared
from agenttrain.errors import RewardError
from agenttrain.prepare import hidden_digests, model_hash, prepare, provenance

SEPARATE = """
import importlib.util
spec = importlib.util.spec_from_file_location("scoring", {path!r})
scoring = importlib.util.module_from_spec(spec)
spec.loader.exec_module(scoring)
score = scoring.score
builder.add_node("agent", agent)
builder.set_entry_point("agent")
"""


def hashes(project: Any) -> dict[str, Any]:
    found: dict[str, Any] = provenance(prepare(project.graph, cwd=project.folder, flags={}))["hashes"]
    return found


def test_the_tasks_hash_is_of_all_that_a_task_holds(project: Any, task_rows: list[dict[str, Any]]) -> None:
    """Another reference under the same ids is another task file."""
    before = hashes(project)
    task_rows[0]["reference"] = "another"
    project.write_tasks(task_rows)
    after = hashes(project)
    assert {name for name in before if before[name] != after[name]} == {"tasks"}


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "pytorch_model.bin"])
def test_the_model_hash_is_of_weights_and_shape(name: str, tmp_path: Path) -> None:
    """In either of the formats that a base may stand in; a card beside them says nothing."""
    for file in ("config.json", "model.safetensors", "pytorch_model.bin", "README.md"):
        (tmp_path / file).write_text(file)
    before = model_hash(tmp_path)
    (tmp_path / "README.md").write_text("other")
    assert model_hash(tmp_path) == before
    (tmp_path / name).write_text("other")
    assert model_hash(tmp_path) != before


def test_the_verifier_hash_is_of_its_source(new_project: Any, tmp_path: Path) -> None:
    """Of a verifier that stands in a file of its own, outside of graph.py's folder."""
    seen = []
    project = None
    for body in ("return 0.0", "return 1.0"):
        path = tmp_path / f"scoring{len(seen)}.py"
        path.write_text(f"def score(task, state):\n    {body}\n")
        if project is None:
            project = new_project(SEPARATE.format(path=str(path)))
            seen.append(hashes(project)["verifier"])
        else:
            project.write("graph2.py", Path(project.graph).read_text().replace("scoring0.py", path.name))
            job = prepare(str(project.folder / "graph2.py"), cwd=project.folder, flags={})
            seen.append(provenance(job)["hashes"]["verifier"])
    assert seen[0] != seen[1]


def test_the_verifier_hash_is_of_its_part_too(new_project: Any) -> None:
    """What a Part declares changes what is rewarded; a bare function is a Part of which nothing is said."""
    decorated = """
from agenttrain import Part

@trainable(model=POLICY, tasks="tasks.jsonl", verifiers={"score": PART})
def graph():
    return builder.compile()
"""
    project = new_project(decorated=decorated.replace("PART", "score"))
    seen = {"score": hashes(project)["verifier"]}
    for part in ("Part(score)", "Part(score, high=1.0)", "Part(score, high=0.5)"):
        file = project.write(f"graph{len(seen)}.py", Path(project.graph).read_text().replace(": score}", f": {part}}}"))
        seen[part] = provenance(prepare(str(file), cwd=project.folder, flags={}))["hashes"]["verifier"]
    assert seen["Part(score)"] == seen["score"]
    assert len(set(seen.values())) == 3


HIDDEN = """
from agenttrain import SandboxSpec
from agenttrain.verifiers import hidden_tests

tests = hidden_tests(folder=FOLDER)

def softly(task, sandbox):
    return 0.5 * tests(task, sandbox)["score"]

@trainable(model=POLICY, tasks="tasks.jsonl", verifier=VERIFIER, sandbox=SandboxSpec())
def graph():
    return builder.compile()
"""


@pytest.mark.parametrize("verifier", ["tests", "softly"])
def test_the_verifier_hash_is_of_the_hidden_files_of_what_is_evaluated(new_project: Any, verifier: str) -> None:
    """Those of training tasks have a hash of their own: two runs that evaluate the same tasks are comparable."""
    decorated = HIDDEN.replace("FOLDER", "lambda task: f'hidden/{task.id}'").replace("VERIFIER", verifier)
    project = new_project(decorated=decorated)
    for n in range(7):
        (project.folder / "hidden" / f"task-{n}").mkdir(parents=True)
        project.write(f"hidden/task-{n}/test_a.py", "def test_a(): pass\n")
    first = hashes(project)
    assert hashes(project) == first
    assert changed_by(project, "hidden/task-5/test_a.py", first) == {"verifier"}
    assert changed_by(project, "hidden/task-1/test_a.py", first) == {"verifier_in_training"}
    (project.folder / "hidden" / "task-5" / "test_a.py").chmod(0o755)
    assert {name for name, value in hashes(project).items() if value != first[name]} == {"verifier"}
    (project.folder / "hidden" / "task-5" / "test_a.py").unlink()  # a rollout of it will tell what is missing
    assert {name for name, value in hashes(project).items() if value != first[name]} == {"verifier"}


def changed_by(project: Any, file: str, before: dict[str, Any]) -> set[str]:
    """The hashes that are others while a file is another."""
    text = (project.folder / file).read_text()
    project.write(file, f"{text}# more\n")
    after = hashes(project)
    project.write(file, text)
    return {name for name in before if before[name] != after[name]}


def test_hidden_files_of_all_tasks_are_of_both_hashes(new_project: Any) -> None:
    """One folder for every task, which is read once; the ids of the tasks are not of the verifier's hash."""
    project = new_project(decorated=HIDDEN.replace("FOLDER", "'hidden'").replace("VERIFIER", "tests"))
    (project.folder / "hidden").mkdir()
    project.write("hidden/test_a.py", "def test_a(): pass\n")
    first = hashes(project)
    assert changed_by(project, "hidden/test_a.py", first) == {"verifier", "verifier_in_training"}
    rows = [json.loads(line) for line in (project.folder / "tasks.jsonl").read_text().splitlines()]
    project.write_tasks([{**row, "id": f"other-{row['id']}"} for row in rows])
    assert {name for name, value in hashes(project).items() if value != first[name]} == {"tasks"}


def test_cases_that_a_function_gives_are_of_the_verifier_hash(new_project: Any) -> None:
    """They may come from anywhere; those of the reference are of the tasks."""
    decorated = HIDDEN.replace("hidden_tests", "hidden_cases").replace("FOLDER", "GIVEN").replace("VERIFIER", "tests")
    imports, given = "import json\nfrom pathlib import Path\n", "json.loads(Path('cases.json').read_text())"
    project = new_project(decorated=imports + decorated.replace("folder=GIVEN", f"cases=lambda task: {given}"))
    project.write("cases.json", '[{"call": "a:f", "expected": 1}]')
    first = hashes(project)
    project.write("cases.json", '[{"call": "a:f", "expected": 2}]')
    assert {name for name, value in hashes(project).items() if value != first[name]} == {
        "verifier",
        "verifier_in_training",
    }


def test_what_judges_by_no_hidden_file_has_the_hash_of_its_source() -> None:
    """The repair shop's cases stand in its tasks' references, of which the tasks' hash is."""
    file = Path(__file__).parents[1] / "examples" / "code-repair" / "graph.py"
    job = prepare(str(file), cwd=file.parent, flags={})
    assert set(provenance(job)["hashes"]) == {"graph", "tasks", "verifier", "renderer", "model"}
    noted = job.loaded.trainable
    assert noted is not None
    assert [hidden_digests(part.function, job.held_out) for part in noted.verifiers.values()] == [[], []]


def test_a_verifier_that_may_need_more_time_than_it_has_is_refused(new_project: Any) -> None:
    """An agent's code that hangs would end as the environment's failure, and be tried again. check says the same."""
    decorated = """
from agenttrain import SandboxLimits, SandboxSpec
from agenttrain.verifiers import hidden_tests

@trainable(
    model=POLICY,
    tasks="tasks.jsonl",
    sandbox=SandboxSpec(limits=SandboxLimits(seconds=40.0)),
    verifier=hidden_tests(files={"test_a.py": "def test_a(): pass"}),
)
def graph():
    return builder.compile()
"""
    project = new_project(decorated=decorated)
    said = "Verifier 'hidden_tests' may take 70 s where the agent's code hangs, and limits.verifier_seconds is 60: "
    with pytest.raises(RewardError, match=said):
        prepare(project.graph, cwd=project.folder, flags={})
    found = prepared(project.graph, cwd=project.folder, flags={}, runs=project.folder / "runs").findings
    assert [each.code for each in found if each.where == "verifier hidden_tests"] == ["function_refused"]
    prepare(project.graph, cwd=project.folder, flags={"limits": {"verifier_seconds": 70}})
