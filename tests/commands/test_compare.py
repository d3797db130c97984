"""`agenttrain compare`: which runs are taken, what the tables and the JSON say, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agenttrain.capture.store import SqliteStore
from agenttrain.records import Phase, Reward, Rollout, RolloutRequest, RolloutResult, Task
from agenttrain.run_folder import RunFolder

N_TASKS = 12


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """runs/ is of the current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rollouts(phase: Phase, signs: str) -> list[Rollout]:
    return [
        Rollout(
            id=f"{phase}-t{n:02}",
            task_id=f"t{n:02}",
            phase=phase,
            step=0,
            sibling=0,
            attempt=0,
            status="completed",
            reward=Reward(score=float(sign), parts=()),
            success=sign == "1",
            n_turns=2,
            n_sampled_ids=10,
            ended_at=1.5,
        )
        for n, sign in enumerate(signs)
    ]


def written(
    name: str, evaluations: dict[Phase, str], *, verifier: str = "v", tables: dict[str, Any] | None = None
) -> RunFolder:
    """The folder of an ended run, as fit (of two phases) or eval leaves it: a sign a task, 1 a success."""
    run = RunFolder(Path("runs", name).absolute())
    for folder in (run.path, run.rollouts):
        folder.mkdir(parents=True)
    life = {"life": 0} if "baseline" in evaluations else {"answered_by": "own models", "policy": "as-is"}
    run.write_config(
        {"model": "base-model", "seed": 0, **(tables or {})}, {"hashes": {"graph": "g", "verifier": verifier}, **life}
    )
    n_tasks = len(next(iter(evaluations.values())))
    kinds = ("easy", "hard")
    run.write_tasks(
        run.evaluated_tasks, [Task(id=f"t{n:02}", input={}, metadata={"kind": kinds[n % 2]}) for n in range(n_tasks)]
    )
    store = SqliteStore(run.rollouts)
    for phase, signs in evaluations.items():
        for each in rollouts(phase, signs):
            request = RolloutRequest(task=Task(id=each.task_id, input={}), phase=phase)
            store.put_result(RolloutResult(request=request, rollout=each, turns=(), trajectories=(), samples=()))
    store.flush()
    store.close()
    run.write_report({"run_id": name}, "")
    return run


def fitted(name: str = "desk-1") -> RunFolder:
    """A fit in which every task was gained."""
    return written(name, {"baseline": "0" * N_TASKS, "held_out": "1" * N_TASKS})


def test_a_fit_alone_is_held_against_its_own_baseline(command: Any) -> None:
    """All 12 gained: an equal gain leaves 1 - 0.025^(1/12) = 0.265 of other tasks open, which may lose."""
    fitted()
    done = command("compare", "desk-1", "--json")
    assert (done.code, done.err) == (0, "")
    assert [(row["run"], row["success"], row["tokens"]) for row in done.json["runs"]] == [
        ("desk-1:baseline", 0.0, 10.0),
        ("desk-1", 1.0, 10.0),
    ]
    (only,) = done.json["comparisons"]
    assert (only["base"], only["other"], only["notes"]) == ("desk-1:baseline", "desk-1", [])
    assert only["measures"]["success"]["difference"] == {
        "value": 1.0,
        "low": pytest.approx(0.4707, abs=1e-4),
        "high": 1.0,
        "n_tasks": 12,
    }
    assert [(each["value"], each["n_tasks"], each["shown"]) for each in only["slices"]] == [
        ("easy", 6, False),
        ("hard", 6, False),
    ]


def test_the_first_run_is_the_one_that_the_others_are_held_against(command: Any) -> None:
    fitted()
    written("eval-as-is", {"eval": "01" * 6})
    done = command("compare", "eval-as-is", "desk-1:baseline", "desk-1", "--json")
    assert [row["answered_by"] for row in done.json["runs"]] == ["own models", "policy", "policy"]
    assert [(each["base"], each["other"]) for each in done.json["comparisons"]] == [
        ("eval-as-is", "desk-1:baseline"),
        ("eval-as-is", "desk-1"),
    ]
    values = [each["measures"]["success"]["difference"]["value"] for each in done.json["comparisons"]]
    assert values == [-0.5, 0.5]


def test_the_tables(command: Any) -> None:
    """A row a run, then the differences, the slices, what the tasks can show, and what else is not the same."""
    fitted()
    written("eval-hot", {"eval": "01" * 6}, tables={"eval": {"temperature": 0.5}})
    done = command("compare", "desk-1", "eval-hot")
    assert done.code == 0
    rows = {line.split("  ")[0].strip(): line.split() for line in done.out.splitlines() if line.strip()}
    assert done.out.startswith("12 tasks, greedy, 1 repeat or sampled at 0.5, 1 repeat; means over tasks\n")
    assert rows["desk-1"][1:] == [
        "policy",
        "1.000",
        "1.000",
        "10.0",
        "2.000",
        "0.000",
        "0.000",
        "1.500",
    ]
    assert "cost" not in done.out
    assert "safety" not in done.out
    assert rows["eval-hot"][1:4] == ["own", "models", "0.500"]
    assert "eval-hot less desk-1\n" in done.out
    assert rows["success"][:4] == ["success", "1.000", "0.500", "-0.500"]
    assert rows["turns"][1:4] == ["2.000", "2.000", "+0.000"]
    assert rows["kind = easy"][:7] == ["kind", "=", "easy", "6", "1.000", "0.000", "-1.000"]
    assert "\n12 tasks that vary like these can show a difference in success of 0.464 or more" in done.out
    assert done.out.endswith("note: temperature: 0 in desk-1, 0.5 in eval-hot\n")


def test_the_runs_fit_120_columns_with_names_as_long_as_they_get(command: Any) -> None:
    """With prices, so that cost is a column of its own."""
    names = [f"eval-order-desk-20261130-21181{n}-7221" for n in range(2)]
    for name in names:
        written(name, {"eval": "01" * 6}, tables={"cost": {"own_prompt_token": 1.0, "tool_call": 1.0, "second": 2.0}})
    lines = command("compare", *names).out.splitlines()
    table = [line for line in lines[1 : lines.index(f"{names[1]} less {names[0]}")] if line.strip()]
    assert [line.split()[0] for line in table[-2:]] == names
    assert any("cost" in line for line in table)
    assert max(map(len, table)) <= 120


def test_several_runs_end_with_a_line_each(command: Any) -> None:
    """Whether success is shown to be better or worse than the first's."""
    fitted()
    written("eval-same", {"eval": "0" * N_TASKS})
    done = command("compare", "desk-1:baseline", "desk-1", "eval-same")
    assert done.out.splitlines()[-2:] == [
        "desk-1: shown to be better than desk-1:baseline in success, +1.000 (+0.471 to +1.000)",
        "eval-same: not shown to be better or worse than desk-1:baseline in success, +0.000 (-0.265 to +0.265)",
    ]
    worse = command("compare", "desk-1", "desk-1:baseline", "eval-same").out
    assert worse.endswith("\neval-same: shown to be worse than desk-1 in success, -1.000 (-1.000 to -0.471)\n")


def test_a_run_is_not_held_against_itself(command: Any) -> None:
    fitted()
    done = command("compare", "desk-1", "runs/desk-1")
    assert (done.code, done.err) == (
        2,
        "ConfigError: desk-1 is named 2 times, and says nothing about itself. Name each run once.\n",
    )


def test_slices_of_one_key(command: Any) -> None:
    fitted()
    assert "kind = easy" in command("compare", "desk-1", "--slice", "kind").out
    done = command("compare", "desk-1", "--slice", "color")
    assert (done.code, done.err) == (2, "ConfigError: --slice is 'color'; it takes kind.\n")


def test_one_evaluation_needs_another_one(command: Any) -> None:
    fitted()
    written("eval-1", {"eval": "0" * N_TASKS})
    for name in ("eval-1", "desk-1:baseline"):
        done = command("compare", name)
        assert done.code == 2
        assert f"{name} is one evaluation. Name the one it is held against" in done.err


def test_runs_of_other_tasks_or_verifiers_are_refused(command: Any) -> None:
    fitted()
    written("eval-few", {"eval": "010"})
    written("eval-other", {"eval": "0" * N_TASKS}, verifier="w")
    done = command("compare", "desk-1", "eval-few", "--json")
    assert (done.code, done.json["error"]["type"]) == (2, "TaskError")
    assert "evaluated 9 of the tasks (t03, t04, t05 …)" in done.err
    assert "scored by different verifiers (v and w)" in command("compare", "desk-1", "eval-other").err


def test_runs_without_an_ended_evaluation_are_refused(command: Any) -> None:
    """Stopped, of an older agenttrain that wrote no tasks/, or not there."""
    run = fitted()
    run.evaluated_tasks.unlink()
    done = command("compare", "desk-1")
    assert done.code == 2
    assert "desk-1 has no tasks/evaluated.jsonl" in done.err
    run.report_json.unlink()
    assert "agenttrain fit --resume desk-1 ends it" in command("compare", "desk-1").err
    assert "No run is named 'desk-2'" in command("compare", "desk-2").err
