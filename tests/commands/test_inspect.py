"""`agenttrain inspect`: a run's rollouts as a list, and one of them token by token."""

from __future__ import annotations

import io
import json
import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from agenttrain.capture.render import open_renderer
from agenttrain.capture.store import SqliteStore
from agenttrain.commands.inspect import CONTEXT, FROZEN, TRAINED, response_text
from agenttrain.records import RoutedExperts, Turn
from agenttrain.sample.build import build_samples
from agenttrain.trajectory.tree import trajectories

TWICE = """
builder.add_node("draft", agent)
builder.add_node("agent", agent)
builder.set_entry_point("draft")
builder.add_edge("draft", "agent")
"""


@pytest.fixture
def fitted(new_project: Any, command: Any) -> Any:
    """A project after a fit of one step, of a graph that calls twice and freezes the first call."""
    project = new_project(
        TWICE,
        decorated="graph = trainable(builder, model=POLICY, tasks='tasks.jsonl', verifier=score, frozen=['draft'])\n",
    )
    done = command("fit", "graph.py", "--set", "trainer.steps=1")
    assert done.code == 0, done.err
    return project


def test_a_run_is_listed(fitted: Any, command: Any) -> None:
    """Counts by phase and status, then the newest rollouts; --json has all of them."""
    run = fitted.run.id
    listed = command("inspect", run, "--json").json
    assert len(listed["rollouts"]) == 3 + 4 + 3
    assert listed["lost_calls"] == []
    assert {row["status"] for row in listed["rollouts"]} <= {"completed", "truncated"}
    assert len(command("inspect", run, "--json", "--phase", "train").json["rollouts"]) == 4
    assert command("inspect", run, "--json", "--status", "aborted").json["rollouts"] == []
    said = command("inspect", fitted.run.path, "--limit", "2").out
    assert said.startswith("baseline: ")
    assert said.endswith("the last 2 of 10; --limit shows more, --status, --phase and --failed choose\n")
    without = {rollout.id for rollout in fitted.store.rollouts() if not rollout.success}
    assert {row["id"] for row in command("inspect", run, "--failed", "--json").json["rollouts"]} == without
    assert 0 < len(without) < 10


def test_a_rollout_is_shown(fitted: Any, command: Any) -> None:
    """Its status, reward and parts, each turn with its role, and each trajectory with its tokens."""
    trained = {sample.extra_fields["rollout_id"] for sample in fitted.store.trained_samples()}
    rollout = next(r for r in fitted.store.rollouts() if r.id in trained)
    rollout_id, turns = rollout.id, fitted.store.turns(rollout.id)
    said = command("inspect", fitted.run.id, rollout_id, "--logprobs").out
    assert said.startswith(f"{f'{rollout_id}: {rollout.status} {rollout.cause}'.rstrip()}\nreward: ")
    part = rollout.reward.parts[0]
    assert f"\n  score: outcome {part.score:g} × 1\n" in said
    assert "\ntrained in step 1\n" in said
    assert f"turn 0 draft: frozen (frozen: draft), {len(turns[0].prompt_ids)} + 6 tokens, length" in said
    assert "turn 1 agent: trained (the graph's one model)" in said
    assert "\ntrajectory 0 (first_turn), turn 1: prompt " in said
    assert "), turn 0: prompt " in said
    assert said.count(" v0 '") == sum(len(turn.response_ids) for turn in turns if turn.role == "trained")
    assert said.endswith("⟦…⟧ is trained, ⟨…⟩ is frozen or dropped, the rest is context\n")
    shown = command("inspect", fitted.run.id, rollout_id, "--json").json
    assert [turn["role"] for turn in shown["turns"]] == ["frozen", "trained"]
    assert shown["closed"] == ""
    assert [(each["name"], each["kind"], each["score"]) for each in shown["reward_parts"]] == [
        ("score", "outcome", part.score)
    ]
    assert [list(turn.response_ids) for turn in turns] == [turn["response_ids"] for turn in shown["turns"]]


def test_tokens_are_coloured_by_what_they_are(fitted: Any, policy_folder: Any) -> None:
    """Trained ones green, frozen ones yellow, context grey; together the whole response."""
    renderer = open_renderer(str(policy_folder), family="default", history="keep")
    rollout_id = next(r.id for r in fitted.store.rollouts() if r.phase == "train")
    frozen, trained = fitted.store.turns(rollout_id)
    styles: dict[str, str] = {}
    for path in fitted.store.trajectories(rollout_id):
        text = response_text(path, renderer)
        assert text.plain == renderer.decode(path.response_ids)
        for span in text.spans:
            styles[str(span.style)] = styles.get(str(span.style), "") + text.plain[span.start : span.end]
    assert styles[TRAINED] == renderer.decode(trained.response_ids)
    assert styles[FROZEN] == renderer.decode(frozen.response_ids)
    assert styles.keys() <= {TRAINED, FROZEN, CONTEXT}
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=200)
    console.print(text)
    assert "\x1b[" in console.file.getvalue()  # type: ignore[attr-defined]


def test_tokens_are_marked_where_there_are_no_colours(
    fitted: Any, command: Any, policy_folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through a pipe and with NO_COLOR, brackets say what colours say elsewhere, and the legend says which."""
    renderer = open_renderer(str(policy_folder), family="default", history="keep")
    rollout_id = next(r.id for r in fitted.store.rollouts() if r.phase == "train")
    frozen, trained = (renderer.decode(turn.response_ids) for turn in fitted.store.turns(rollout_id))
    shown = (fitted.run.id, rollout_id)
    monkeypatch.setenv("COLUMNS", "80")
    piped = command("inspect", *shown).out
    assert piped.count(f"⟦{trained}⟧") == 1
    assert piped.count(f"⟨{frozen}⟩") == 1
    assert (piped.count("⟦"), piped.count("⟨")) == (2, 2)  # one of each is the legend's
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    coloured = command("inspect", *shown).out
    assert "green is trained, yellow is frozen or dropped, grey is context" in coloured
    assert "⟦" not in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    grey = command("inspect", *shown).out
    assert (grey.count("⟦"), grey.count("⟨"), "green is trained" in grey) == (2, 2, False)


def test_the_list_in_a_narrow_terminal(fitted: Any, command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids and numbers are whole however long a cause is; it comes last, in one line, and cut."""
    plain = next(fitted.store.results(lambda rollout: rollout.phase == "train"))
    long_id = f"train-1-{'order-' * 10}0-0"
    failed = replace(
        plain.rollout,
        id=long_id,
        status="environment_failure",
        cause="ValueError: one\n  two " + "x" * 300,
        reward=None,
    )
    store = SqliteStore(fitted.run.rollouts)
    request = replace(plain.request, task=replace(plain.request.task, id="order-" * 10))
    store.put_result(replace(plain, request=request, rollout=failed, turns=(), trajectories=(), samples=()))
    store.close()
    monkeypatch.setenv("COLUMNS", "80")
    lines = command("inspect", fitted.run.id, "--phase", "train").out.splitlines()
    heading = next(line for line in lines if line.startswith("rollout"))
    assert heading.split() == ["rollout", "status", "reward", "success", "turns", "tools", "tokens", "cause"]
    (row,) = (line for line in lines if line.startswith(long_id))
    before, _, cause = row.partition("ValueError")
    success = "yes" if failed.success else "no"
    numbers = [str(n) for n in (failed.n_turns, failed.n_tool_calls, failed.n_sampled_ids)]
    assert before.split() == [long_id, "environment_failure", "none", success, *numbers]
    assert len(before) == heading.index("cause")
    assert f"ValueError{cause}" == f"ValueError: one two {'x' * 139}…"
    whole = next(line for line in lines if line.startswith(plain.rollout.id))
    assert whole.split()[2] == f"{plain.rollout.reward.score:.3f}"  # type: ignore[union-attr]


def test_an_ambiguous_or_unknown_rollout(fitted: Any, command: Any) -> None:
    """The start of an id is enough while it fits one; else some that fit are named."""
    run = fitted.run.id
    done = command("inspect", run, "train-")
    assert done.code == 2
    assert done.err.startswith("RunError: 4 rollouts begin with 'train-', for example train-1-task-")
    done = command("inspect", run, "nothing")
    assert done.err.startswith("RunError: No rollout is named 'nothing' in this run. agenttrain inspect RUN lists them")
    assert command("inspect", run, "baseline-0-task-4").out.startswith("baseline-0-task-4-0-0: ")


def test_names_that_look_like_markup(new_project: Any, command: Any, task_rows: list[dict[str, Any]]) -> None:
    """Ids and causes are a user's own text, and are shown as they are."""
    row = {**task_rows[-1], "id": "[/red] [bold]x[/bold]"}
    decorated = """
def broken(task, state):
    raise ValueError("[/closed] what was never opened")
graph = trainable(builder, model=POLICY, tasks="tasks.jsonl", verifier=broken)
"""
    project = new_project(decorated=decorated, tasks=[row])
    assert command("eval", "graph.py").code == 1
    done = command("inspect", project.run.id)
    assert done.code == 0
    assert "[/red]" in done.out
    assert "eval: 3 environment_failure\n" in done.out


def test_a_lost_call_is_named(fitted: Any, command: Any) -> None:
    """A call that was begun and never answered, as a killed process leaves it."""
    store = SqliteStore(fitted.run.rollouts)
    store.put_intent(turn_id="train-1-task-0-[/x]#0", rollout_id="train-1-task-0-[/x]", started_at=0.0)
    store.close()
    assert command("inspect", fitted.run.id, "--json").json["lost_calls"] == ["train-1-task-0-[/x]"]
    assert "calls whose answer was lost: 1, in train-1-task-0-[/x]\n" in command("inspect", fitted.run.id).out


def test_where_prompts_broke_or_replies_stayed_as_sampled(fitted: Any, command: Any) -> None:
    """By cause and in words: of all that is listed, of one rollout, and of each of its turns."""
    plain = next(fitted.store.results(lambda rollout: rollout.phase == "train"))
    first = plain.turns[0]
    prompt = (*first.prompt_ids, *first.response_ids, 5)
    extends = {"extends": first.id, "break_cause": None, "respelled": ("thinking_dropped", "arguments_respelled")}
    site = replace(first.site, node="model", checkpoint_ns="worker:a1|1|model:b2")
    second = replace(plain.turns[1], prompt_ids=prompt, site=site, **extends)
    third = replace(plain.turns[1], id=f"{plain.rollout.id}#2", index=2, break_cause="tools_changed")
    turns = (first, second, third)
    store = SqliteStore(fitted.run.rollouts)
    for turn in turns:
        store.put_turn(turn)
    store.put_result(replace(plain, turns=turns, trajectories=trajectories(turns), samples=()))
    store.close()
    said = command("inspect", fitted.run.id, plain.rollout.id).out
    breaks = "prefix breaks, each a new trajectory: 1 tools_changed (other tools were offered)\n"
    kept = (
        "kept as sampled, where the template would write: 1 arguments_respelled (with its calls spelled in another "
        "way), 1 thinking_dropped (without its thinking)\n"
    )
    assert breaks + kept in said
    assert "\nturn 1 worker:model: " in said
    assert "\ntrajectory 0 (first_turn), turn 2: prompt " in said
    assert "\ntrajectory 1 (tools_changed), turns 0, 1: prompt " in said
    of_call = command("inspect", fitted.run.id, "--turn", second.id).out
    assert "\nnode worker:model: trained (" in of_call
    assert f", extends {first.id}, which stays as sampled (thinking_dropped, arguments_respelled)" in said
    assert ", new trajectory: tools_changed" in said
    listed = command("inspect", fitted.run.id).out
    assert "1 tools_changed (other tools were offered)" in listed
    assert kept in listed
    told = command("inspect", fitted.run.id, "--phase", "train", "--json").json
    assert told["respelled"] == {"arguments_respelled": 1, "thinking_dropped": 1}
    assert told["prefix_breaks"]["tools_changed"] == 1
    measured = command("inspect", fitted.run.id, "--phase", "baseline", "--json").json
    assert (measured["respelled"], measured["prefix_breaks"].get("tools_changed")) == ({}, None)


def test_what_was_not_trained_says_why(fitted: Any, command: Any) -> None:
    """A rollout that was only measured, one that its step left out, and one whose step the run was stopped in."""
    said = command("inspect", fitted.run.id, "baseline-0-task-4").out
    assert "\nmeasured for the baseline, and never trained\n" in said
    assert ", trainable " in said
    assert said.endswith("⟦…⟧ would be trained, ⟨…⟩ is frozen or dropped, the rest is context\n")
    row = fitted.run.metrics()[0]
    rollout = next(r for r in fitted.store.rollouts() if r.phase == "train")
    metrics = fitted.run.path / "metrics.jsonl"
    trained = fitted.store.trained_samples()[0].extra_fields["rollout_id"]
    metrics.write_text("")
    undone = command("inspect", fitted.run.id, trained, "--json").json["fate"]
    assert undone == "not trained: step 1 has not ended; the run is under way, or was stopped in it"
    metrics.write_text(json.dumps({**row, "life": row["life"] + 1}) + "\n")
    undone = command("inspect", fitted.run.id, trained, "--json").json["fate"]
    assert undone == "not trained: sampled from weights that were lost when the run stopped"
    row["dropped"] = {rollout.id: "all rewards equal"}
    with sqlite3.connect(next(fitted.run.rollouts.glob("*.db"))) as store:
        store.execute("DELETE FROM trained")
    metrics.write_text(json.dumps(row) + "\n")
    assert "\nnot trained: all rewards equal\n" in command("inspect", fitted.run.id, rollout.id).out
    metrics.write_text("")
    told = command("inspect", fitted.run.id, rollout.id, "--json").json["fate"]
    assert told == "not trained: step 1 has not ended; the run is under way, or was stopped in it"


def test_routed_experts_are_told_and_not_listed(fitted: Any, command: Any) -> None:
    """Where an engine told them, by their layers and how many tokens they are of."""
    plain = next(fitted.store.results(lambda rollout: rollout.phase == "train"))
    turns = tuple(_told(turn, plain.turns) for turn in plain.turns)
    paths = trajectories(turns)
    samples = build_samples(plain.rollout, paths)
    store = SqliteStore(fitted.run.rollouts)
    for turn in turns:
        store.put_turn(turn)
    store.put_result(replace(plain, turns=turns, trajectories=paths, samples=samples))
    store.close()
    n_read = [len(path.prompt_ids) + len(path.response_ids) - 1 for path in paths]
    said = command("inspect", fitted.run.id, plain.rollout.id).out
    assert f"\nrouted experts: 2 in 3 layers, of {n_read[0]} tokens\n" in said
    shown = command("inspect", fitted.run.id, plain.rollout.id, "--json").json["trajectories"]
    assert [path["routed_experts"] for path in shown] == [
        {"start": 0, "n_layers": 3, "n_chosen": 2, "end": n} for n in n_read
    ]


def _told(turn: Turn, turns: Sequence[Turn]) -> Turn:
    parent = next((each for each in turns if each.id == turn.extends), None)
    start = len(parent.prompt_ids) + len(parent.response_ids) - 1 if parent else 0
    n = len(turn.prompt_ids) + len(turn.response_ids) - 1 - start
    return replace(turn, routed_experts=RoutedExperts(start=start, n_layers=3, n_chosen=2, data=bytes(12 * n)))
