"""A Job's provenance: equal exactly when what made the run is equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agenttrain.check.prepared import prepared
from agenttrain.errors import RewardError
from agenttrain.prepare import prepare, provenance

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
