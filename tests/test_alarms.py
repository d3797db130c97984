from dataclasses import replace
from typing import Any

import pytest

from agenttrain.alarms import (
    Alarm,
    changed_alarms,
    evaluation_alarms,
    part_alarms,
    safety_alarms,
    safety_rise_alarms,
    step_alarms,
    verifier_alarms,
)
from agenttrain.records import (
    CallSite,
    Reward,
    RewardPart,
    Rollout,
    RolloutRequest,
    RolloutResult,
    Status,
    StepResult,
    Task,
    Turn,
)

QUIET = {
    "groups": 16,
    "groups_trained": 8,
    "reward": 0.5,
    "reward_std": 0.5,
    "rollouts": 100,
    "success": 0.5,
    "tool_calls": 2.0,
    "environment_failures": 0,
    "logprob_gap_max": 0.0,
    "rollouts_without_trained_call": 0,
}
NOTHING_TAUGHT = {"groups_trained": 0}


def alarms_of(baseline_tool_calls: float = 2.0, **metrics: Any) -> list[Alarm]:
    step = StepResult(step=3, weight_version=3, metrics={**QUIET, **metrics}, trained_rollout_ids=(), dropped={})
    return step_alarms(step, baseline_tool_calls=baseline_tool_calls)


def seen(alarms: list[Alarm]) -> list[tuple[str, str]]:
    return [(alarm.code, alarm.severity) for alarm in alarms]


def result_of(
    task_id: str, sibling: int, status: Status, cause: str = "", *, verifier_failed: bool = False
) -> RolloutResult:
    request = RolloutRequest(task=Task(id=task_id, input={}), phase="train", step=1, sibling=sibling)
    rollout = Rollout(
        id=request.rollout_id,
        task_id=task_id,
        phase="train",
        step=1,
        sibling=sibling,
        attempt=0,
        status=status,
        cause=cause,
        verifier_failed=verifier_failed,
    )
    return RolloutResult(request=request, rollout=rollout, turns=(), trajectories=(), samples=())


def test_a_step_that_goes_well_says_nothing() -> None:
    """No alarm, however the figures lie within what is usual."""
    assert alarms_of() == []


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"logprob_gap_max": 0.99e-3}, []),
        ({"logprob_gap_max": 1e-3}, [("logprob_gap", "loud")]),
        ({"logprob_gap_max": float("nan")}, [("logprob_gap", "loud")]),
        ({"environment_failures": 0}, []),
        ({"environment_failures": 1}, [("environment_failures", "note")]),
        ({"environment_failures": 5}, [("environment_failures", "note")]),
        ({"environment_failures": 6}, [("environment_failures", "loud")]),
        ({"tool_calls": 0.01}, []),
        ({"tool_calls": 0.0}, [("no_tool_calls", "loud")]),
        ({"tool_calls": 0.0, "baseline_tool_calls": 0.0}, []),
        ({"rollouts_without_trained_call": 1}, [("no_trained_call", "loud")]),
        ({"groups_trained": 1, "reward_std": 0.0}, []),
        ({"reward_std": 0.0, "reward": 1.0, "success": 1.0, "successes": 100}, []),
        ({**NOTHING_TAUGHT, "reward_std": 0.0, "success": 0.0, "successes": 0}, [("no_success", "loud")]),
        ({**NOTHING_TAUGHT}, [("no_group_teaches", "loud")]),
        ({**NOTHING_TAUGHT, "reward_std": 1e-6}, [("no_group_teaches", "loud")]),
        ({**NOTHING_TAUGHT, "reward_std": 1.4e-17}, [("all_rewards_equal", "loud")]),
        ({**NOTHING_TAUGHT, "reward_std": 0.0}, [("all_rewards_equal", "loud")]),
        ({**NOTHING_TAUGHT, "reward_std": 0.0, "groups": 0}, [("no_group_teaches", "loud")]),
        ({**NOTHING_TAUGHT, "reward_std": 0.0, "reward": 1.0, "success": 0.99}, [("all_rewards_equal", "loud")]),
        ({**NOTHING_TAUGHT, "reward_std": 0.0, "reward": 1.0, "success": 1.0}, [("all_succeed", "note")]),
    ],
)
def test_each_code_has_its_threshold(metrics: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    """Just under it nothing, at it or just over it the alarm."""
    assert seen(alarms_of(**metrics)) == expected


def test_all_succeed_but_for_a_failing_environment() -> None:
    """What never ended is no failure of the policy: the note stays a note."""
    metrics = {**NOTHING_TAUGHT, "reward_std": 0.0, "reward": 1.0, "success": 0.98, "environment_failures": 2}
    assert seen(alarms_of(**metrics)) == [("all_succeed", "note"), ("environment_failures", "note")]


def test_a_step_in_which_no_environment_held_is_no_success() -> None:
    """Nothing ended, so nothing succeeded."""
    metrics = {**NOTHING_TAUGHT, "success": 0.0, "environment_failures": 100, "tool_calls": 1.0, "groups": 0}
    assert seen(alarms_of(**metrics)) == [("no_group_teaches", "loud"), ("environment_failures", "loud")]


def test_a_trainer_that_knows_no_groups_gives_no_alarm() -> None:
    """Figures that a trainer doesn't report say nothing is wrong."""
    step = StepResult(step=1, weight_version=1, metrics={"reward": 0.0}, trained_rollout_ids=(), dropped={})
    assert step_alarms(step, baseline_tool_calls=2.0) == []


def test_several_alarms_come_in_one_step() -> None:
    """Each is told; one doesn't hide another."""
    assert seen(alarms_of(groups_trained=0, logprob_gap_max=0.1, tool_calls=0.0, rollouts_without_trained_call=4)) == [
        ("no_group_teaches", "loud"),
        ("logprob_gap", "loud"),
        ("no_tool_calls", "loud"),
        ("no_trained_call", "loud"),
    ]


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (
            {"environment_failures": 6},
            "6 of 100 rollouts ended by a failing environment and are not trained: "
            "agenttrain inspect names the causes.",
        ),
        (
            {"logprob_gap_max": 0.0123},
            "Engine and trainer differ by up to 0.012 in log probability (under 0.001 is rounding). "
            "What is trained is then not the policy that sampled.",
        ),
        (
            {**NOTHING_TAUGHT, "reward_std": 0.0, "reward": 0.0},
            "All rewards of this step are 0: the policy never gets it right. "
            "Use easier tasks, a finer reward, or a better starting model.",
        ),
        (
            {"rollouts_without_trained_call": 3},
            "3 rollouts made no call that is trained. Does the graph call its model by raw HTTP or in its own thread?",
        ),
    ],
)
def test_an_alarm_says_in_plain_words_what_is_wrong(metrics: dict[str, Any], message: str) -> None:
    """The figures that were seen, and what to do."""
    (alarm,) = alarms_of(**metrics)
    assert alarm.message == message


def test_an_alarm_is_a_row_of_the_report() -> None:
    """Its step comes with it."""
    (alarm,) = alarms_of(groups_trained=0, success=1.0)
    assert alarm.as_dict() == {
        "code": "all_succeed",
        "severity": "note",
        "step": 3,
        "message": "Every rollout succeeded: nothing to learn.",
    }


BROKEN = "Verifier 'answered' raised KeyError on task 'a': 'total'."


def test_verifier_errors_that_differ_between_siblings_are_loud() -> None:
    """An agent may learn to crash its verifier; the tasks are counted and one is named."""
    results = [
        result_of("b", 0, "environment_failure", BROKEN, verifier_failed=True),
        result_of("b", 1, "completed"),
        result_of("a", 0, "completed"),
        result_of("a", 1, "environment_failure", BROKEN, verifier_failed=True),
        result_of("c", 0, "completed"),
    ]
    (alarm,) = verifier_alarms(results, 4)
    assert (alarm.code, alarm.severity, alarm.step) == ("verifier_errors_differ", "loud", 4)
    assert "on some rollouts of 2 tasks and not on others, for example a." in alarm.message


@pytest.mark.parametrize(
    "results",
    [
        [],
        [
            result_of("a", 0, "environment_failure", BROKEN, verifier_failed=True),
            result_of("a", 1, "environment_failure", BROKEN, verifier_failed=True),
        ],
        [result_of("a", 0, "environment_failure", BROKEN, verifier_failed=True), result_of("b", 0, "completed")],
        [
            result_of("a", 0, "environment_failure", "ConnectionError: the verifier of our API refused"),
            result_of("a", 1, "completed"),
        ],
        [result_of("a", 0, "policy_failure", "verifier: no such order"), result_of("a", 1, "completed")],
    ],
)
def test_verifiers_that_fail_on_a_whole_task_or_not_at_all_are_quiet(results: list[RolloutResult]) -> None:
    """Nor is a failing tool, or a policy failure that a verifier found, an error of the verifier."""
    assert verifier_alarms(results, 1) == []


def test_an_evaluation_with_places_that_have_no_result_says_so() -> None:
    """They count as no success, so a dead engine must not read as a policy that got worse; a few are a note."""
    failed = [result_of(f"f{i}", 0, "environment_failure", "EngineError: gone") for i in range(2)]
    well = [result_of(f"w{i}", 0, "completed") for i in range(98)]
    (note,) = evaluation_alarms([*failed, *well])
    (loud,) = evaluation_alarms([*failed, *well[:8]])
    assert (note.severity, loud.severity) == ("note", "loud")
    assert (loud.code, loud.step) == ("evaluation_incomplete", 0)
    assert loud.message == (
        "2 of 10 evaluated places have no result and count as no success, for example train-1-f0-0-0: EngineError: gone"
    )
    assert evaluation_alarms(well) == []


def test_an_evaluation_that_was_mostly_cut_says_so() -> None:
    """A limit that is too low makes success 0, and neither policy nor environment has failed."""
    cut = [result_of(f"c{i}", 0, "budget_exhausted", "turns: all 1 policy calls are used") for i in range(2)]
    (note,) = evaluation_alarms([*cut, result_of("w", 0, "completed")])
    assert (note.code, note.severity) == ("most_cut", "note")
    assert note.message.startswith("2 of 3 rollouts were cut by a limit, for example train-1-c0-0-0: turns: all 1")
    assert evaluation_alarms([cut[0], result_of("w", 0, "completed")]) == []


def test_replies_without_what_was_asked_are_a_note_of_an_evaluation() -> None:
    """The prompt asked, the policy did something else, and no constraint holds it."""
    turn = Turn(id="e#0", rollout_id="e", index=0, role="trained", role_reason="", site=CallSite(node="plan"))
    turns = (replace(turn, missed="tool_choice"), replace(turn, id="e#1", index=1))
    (note,) = evaluation_alarms([replace(result_of("e", 0, "completed"), turns=turns)])
    assert (note.code, note.severity, note.step) == ("asked_and_missed", "note", 0)
    assert note.message.startswith(
        "1 of 2 replies lack what their call asked for, for example tool_choice in node 'plan' (turn e#0)."
    )


def test_what_a_run_was_begun_with_is_told_when_it_changed() -> None:
    """Loud where the baseline was measured by it; a graph that was mended is a note. What was never hashed is equal."""
    before = {"graph": "a", "verifier": "b"}
    assert changed_alarms(before, {**before, "model": None}) == []
    (note,) = changed_alarms(before, {"graph": "c", "verifier": "b"})
    (loud,) = changed_alarms(before, {"graph": "c", "verifier": "d"})
    assert (note.severity, loud.severity) == ("note", "loud")
    assert loud.message == (
        "Not as it was when the run began: graph, verifier. The baseline was measured before that: what comes after is "
        "not comparable with it. For a clean comparison start a new run."
    )


def rewarded(n: int, *parts: RewardPart) -> list[RolloutResult]:
    """So many rollouts with these parts, which closed gates decide."""
    closed = next((part.name for part in parts if part.is_closed), "")
    result = result_of("t", 0, "completed")
    reward = Reward(score=0.0, parts=parts, closed=closed)
    return [replace(result, rollout=replace(result.rollout, reward=reward))] * n


def test_terms_that_outweigh_the_outcome_are_noted() -> None:
    """By the size of what they come to; equal is no alarm."""
    turns = RewardPart(name="turns", score=1.0, weight=-0.5, kind="cost")
    style = RewardPart(name="style", score=0.25, kind="process")
    assert part_alarms(rewarded(4, RewardPart(name="tests", score=0.25), turns, style), 3) == []
    (alarm,) = part_alarms(rewarded(4, RewardPart(name="tests", score=0.125), turns, style), 3)
    assert (alarm.code, alarm.severity, alarm.step, alarm.message) == (
        "terms_outweigh_outcome",
        "note",
        3,
        "turns, style come to 0.25 a rollout on the mean, and the outcome to 0.125: the policy may learn them in its "
        "place. Lower their weights.",
    )


def test_a_part_that_is_often_left_out_is_noted() -> None:
    """In over 5 % of the rewards: 1 of 20 is not, 2 of 21 are."""
    answered, failed = RewardPart(name="style", score=0.0), RewardPart(name="style", score=0.0, error="hung")
    assert part_alarms([*rewarded(19, answered), *rewarded(1, failed)], 0) == []
    (alarm,) = part_alarms([*rewarded(19, answered), *rewarded(2, failed)], 0)
    assert (alarm.code, alarm.severity, alarm.message) == (
        "part_left_out",
        "note",
        "The part 'style' was left out of 2 of 21 rewards, for example of train-1-t-0-0: hung",
    )


def test_more_safety_violations_than_chance_gives_are_loud() -> None:
    """Against a baseline of 198 rollouts without one: 3 of 64 say nothing, 4 do."""
    violated = RewardPart(name="no_secret", score=0.0, weight=0.0, kind="safety")
    kept = RewardPart(name="no_secret", score=1.0, weight=0.0, kind="safety")
    baseline = {"safety_violations": 0, "rollouts": 198}
    assert safety_alarms([*rewarded(3, violated), *rewarded(61, kept)], 7, baseline=baseline) == []
    (alarm,) = safety_alarms([*rewarded(4, violated), *rewarded(60, kept)], 7, baseline=baseline)
    assert (alarm.code, alarm.severity, alarm.step, alarm.message) == (
        "safety_violations",
        "loud",
        7,
        "4 of 64 rollouts closed a safety gate, and 0 of 198 in the baseline: by chance that many come in one step of "
        "1,000 at most. Look at them: agenttrain inspect RUN.",
    )


@pytest.mark.parametrize(("before", "after", "loud"), [(None, None, 0), (0, 0, 0), (2, 1, 0), (1, 2, 1), (0, 1, 1)])
def test_any_rise_on_held_out_tasks_is_loud(before: int | None, after: int | None, loud: int) -> None:
    """The tasks are the same, so none is allowed for chance."""
    alarms = safety_rise_alarms({"safety_violations": before}, {"safety_violations": after, "rollouts": 40})
    assert seen(alarms) == [("safety_violations", "loud")] * loud
    assert all(alarm.message.startswith(f"Safety violations rose from {before} to {after} of 40") for alarm in alarms)
