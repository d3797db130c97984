"""Results of rollouts to findings, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agenttrain.check.calls import own_calls_note
from agenttrain.check.reward_findings import Spread, reward_findings, spread_of
from agenttrain.check.trial import Trial, trial_tasks
from agenttrain.check.trial_findings import commonest_cause, never_began, respelling_notes, trial_findings
from agenttrain.check.verdict import Cost, cost_of
from agenttrain.config import resolve
from agenttrain.errors import GraphError, RoleError
from agenttrain.records import (
    CallSite,
    Credit,
    Reward,
    RewardPart,
    Rollout,
    RolloutRequest,
    RolloutResult,
    Task,
    Turn,
)


def turn(**fields: Any) -> Turn:
    given = {
        "id": "t",
        "rollout_id": "r",
        "index": 0,
        "role": "trained",
        "role_reason": "",
        "site": CallSite(node="agent"),
    }
    return Turn(**given | fields)


def result(task: str = "a", *, turns: tuple[Turn, ...] | None = None, score: float | None = 1.0, **fields: Any) -> Any:
    """A rollout that ended well with one trained turn, but for what is given."""
    request = RolloutRequest(task=Task(id=task, input={}), phase="check")
    part = RewardPart(name="v", score=score or 0.0)
    reward = None if score is None else Reward(score=score, parts=(part,))
    given: dict[str, Any] = {
        "id": request.rollout_id,
        "task_id": task,
        "phase": "check",
        "step": 0,
        "sibling": 0,
        "attempt": 0,
        "status": "completed",
        "reward": reward,
        "success": score == 1.0,
    }
    rollout = Rollout(**given | fields)
    turns = (turn(),) if turns is None else turns
    return RolloutResult(request=request, rollout=rollout, turns=turns, trajectories=(), samples=())


def trial(*results: RolloutResult, **fields: Any) -> Trial:
    given: dict[str, Any] = {
        "siblings": 2,
        "escapes": (),
        "n_escapes": 0,
        "escapes_allowed": False,
        "refusals": (),
        "second_models": (),
        "one_model": None,
        "unmatched": (),
        "wall_s": 1.0,
    }
    return Trial(results=results, **given | fields)


def told(*results: RolloutResult, **fields: Any) -> list[tuple[str, str, str, str]]:
    found = trial_findings(trial(*results, **fields), "graph.py:graph", waits="")
    return [(each.severity, each.code, each.where, each.cause) for each in found]


def failed(cause: str, **fields: Any) -> RolloutResult:
    return result(score=None, status="environment_failure", cause=cause, **fields)  # type: ignore[no-any-return]


def test_rollouts_that_end_well_are_no_finding() -> None:
    assert told(result(), result(score=0.0)) == []


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        (
            [failed("OSError: no network for 'a'"), failed("OSError: no network for 'b'", task="b"), result()],
            (
                "error",
                "environment_failures",
                "2 of 3 rollouts ended so. The commonest cause: OSError: no network for … (2).",
            ),
        ),
        (
            [failed("OSError: x"), result()],
            ("error", "environment_failures", "1 of 2 rollouts ended so. The commonest cause: OSError: x (1)."),
        ),
        (
            [failed("OSError: x"), result(), result()],
            ("warning", "environment_failures", "1 of 3 rollouts ended so. The commonest cause: OSError: x (1)."),
        ),
        (
            [failed("Verifier 'v' raised", verifier_failed=True), result()],
            (
                "error",
                "verifier_errors",
                "1 of 2 rollouts have no reward. The commonest cause: Verifier 'v' raised (1).",
            ),
        ),
        (
            [failed("the graph waits for a human, and nothing answers for one: add on_interrupt="), result()],
            ("error", "unscripted_interrupt", "1 of 2 rollouts wait for a human, and nothing answers."),
        ),
        (
            [result(status="incomplete", cause="the answers of 1 model calls were lost", score=None), result()],
            (
                "warning",
                "lost_calls",
                "1 of 2 rollouts can't be trained. The commonest cause: the answers of 1 model calls were lost (1).",
            ),
        ),
        (
            [result(turns=()), result(turns=(turn(role="frozen", role_reason="frozen: agent"),))],
            (
                "error",
                "no_trained_call",
                "2 of 2 rollouts made no call that is trained. Those that they made: frozen: agent (1).",
            ),
        ),
        (
            [result(turns=()), result()],
            ("warning", "no_trained_call", "1 of 2 rollouts made no call that is trained."),
        ),
        (
            [result(status="truncated", cause="cut"), result(status="truncated", cause="cut"), result()],
            ("warning", "most_cut", "2 of 3 rollouts were cut. The commonest cause: cut (2)."),
        ),
        (
            [result(n_tool_calls=3, n_invalid_tool_calls=2)],
            ("warning", "invalid_tool_calls", "2 of 3 tool calls are invalid."),
        ),
        (
            [result(n_tool_calls=1, n_invalid_tool_calls=1)],
            ("warning", "invalid_tool_calls", "1 of 1 tool call is invalid."),
        ),
        (
            [result(turns=(turn(missed="tool_choice"), turn()))],
            ("warning", "asked_and_missed", "1 of 2 replies lack the tool_choice asked for."),
        ),
        (
            [
                result(
                    turns=(turn(break_cause="first_turn"), turn(break_cause="template"), turn(break_cause="retry")),
                )
            ],
            ("warning", "prefix_breaks", "1 of 3 turns began a new trajectory: template 1."),
        ),
    ],
)
def test_how_rollouts_ended(results: list[RolloutResult], expected: tuple[str, str, str]) -> None:
    """One finding each; shares decide the severity, and a task's name doesn't make a cause another one."""
    assert [(severity, code, cause) for severity, code, _, cause in told(*results)] == [expected]


def test_breaks_have_the_fixes_of_their_causes() -> None:
    turns = (turn(break_cause="thinking_dropped"), turn(break_cause="tools_changed"))
    (found,) = trial_findings(trial(result(turns=turns)), "graph.py:graph", waits="")
    assert found.fix == ('Keep the thinking: renderer.history = "keep". Offer the same tools within a conversation.')


ROOM = "room: the prompt has {} ids, the engine takes 2048"


def test_prompts_without_room_are_an_error_before_any_trained_turn() -> None:
    """And neither cut nor without a trained call; a warning where they come later."""
    first = [result(status="budget_exhausted", cause=ROOM.format(n), turns=()) for n in (2100, 3540)]
    ((severity, code, where, cause),) = told(*first)
    assert (severity, code, where) == ("error", "no_room", "graph.py:graph")
    assert cause == (
        "2 of 2 rollouts ended on a prompt that the engine can't take: the longest has 3540 ids, and it takes 2048."
    )
    later = result(status="budget_exhausted", cause=ROOM.format(2049))
    assert [(severity, code) for severity, code, _, _ in told(later)] == [("warning", "no_room")]
    assert [never_began(each) for each in (*first, later)] == [True, True, False]


def test_half_of_the_rollouts_cut_is_no_finding() -> None:
    assert told(result(status="truncated", cause="cut"), result()) == []


WHERE = "ChatOpenAI 'm' was called while {nodes} ran, on thread 'T-{n}' at graph.py:{line} (ask)"


def test_escapes_are_told_by_their_line() -> None:
    """Whatever the thread was called and whatever else ran; what follows from them is not told again."""
    escapes = (
        WHERE.format(nodes="'a' and 'b'", n=1, line=3),
        WHERE.format(nodes="'a'", n=2, line=3),
        WHERE.format(nodes="'b'", n=3, line=9),
    )
    found = told(failed("EscapeError: …"), failed("KeyError: 'answer'"), escapes=escapes, n_escapes=5)
    assert [(severity, code, where) for severity, code, where, _ in found] == [
        ("error", "escape", "node a"),
        ("error", "escape", "node b"),
    ]
    assert found[0][3] == f"{escapes[1]}, outside of any rollout. A fit ends there."


def test_allowed_escapes_are_a_warning() -> None:
    """They are the user's wish."""
    where = WHERE.format(nodes="'a'", n=1, line=3)
    ((severity, code, _, cause),) = told(result(), escapes=(where,), n_escapes=2, escapes_allowed=True)
    assert (severity, code) == ("warning", "escape")
    assert cause == f"{where}, outside of any rollout. Your own model answered. 2 such calls in this check."


def test_what_would_end_a_fit_is_told_once_with_its_count() -> None:
    texts = ("an image", "an image", "setup=world yielded 1")
    refusals = (*map(GraphError, texts), RoleError("frozen=[p] raised"))
    assert told(*[failed("GraphError: an image")] * 4, refusals=refusals) == [
        ("error", "unanswerable_call", "graph.py:graph", "an image (2 rollouts of 4)"),
        ("error", "function_refused", "setup=", "setup=world yielded 1 (1 rollout of 4)"),
        ("error", "selector_raises", "graph.py:graph", "frozen=[p] raised (1 rollout of 4)"),
    ]


def test_an_unmatched_selector_is_a_warning() -> None:
    """A few rollouts may not go there."""
    text = "frozen=['judge'] matched no call. Nodes seen: agent."
    assert told(result(), unmatched=(text,)) == [("warning", "selector_unmatched", "frozen=['judge']", text)]


def test_respelled_replies_are_notes() -> None:
    turns = (turn(respelled=("thinking_dropped",)), turn(respelled=("thinking_dropped", "text_respelled")), turn())
    assert respelling_notes([result(turns=turns)]) == (
        "1 of 3 prompts follow a reply that the template would write otherwise (text respelled); "
        "it is kept as it was sampled.",
        "2 of 3 prompts follow a reply that the template would write otherwise (thinking dropped); "
        "it is kept as it was sampled.",
    )


def test_the_commonest_cause_is_told_without_its_task() -> None:
    rollouts = [failed(f"no {name!r}", task=name).rollout for name in ("a", "b")] + [failed("else").rollout]
    assert commonest_cause(rollouts) == "no … (2)."


def rewards(*scores: tuple[str, float | None]) -> list[RolloutResult]:
    return [result(task, score=score) for task, score in scores]


def test_rewards_that_are_all_zero() -> None:
    """Whatever is added for being cut."""
    cut = result(score=0.0, status="truncated")
    unfinished = Reward(score=-0.3, parts=(RewardPart(name="v", score=0.0),), unfinished=-0.3)
    cut = result(status="truncated", reward=unfinished, success=False)
    (found,) = reward_findings([*rewards(("a", 0.0), ("b", 0.0)), cut], "v", renderer=None)
    assert (found.severity, found.code, found.where) == ("error", "all_zero_rewards", "v")
    assert found.cause == "All 3 rollouts of this check got 0 from the verifiers."


def test_rewards_that_a_gate_decided_name_it() -> None:
    """Where all are 0, and where all are what the closed gate gives."""
    part = RewardPart(name="form", score=0.0, weight=0.0, kind="format")
    for closed, cause in (
        (0.0, "All 2 rollouts of this check got 0 from the verifiers. The gate 'form' was closed in 2 of 2."),
        (-1.0, "In each of 1 group all rewards are equal (-1 on the mean). The gate 'form' was closed in 2 of 2."),
    ):
        reward = Reward(score=closed, parts=(part,), closed="form")
        (found,) = reward_findings([result(reward=reward, success=False)] * 2, "v", renderer=None)
        assert found.cause == cause


def solved_in_turns(solved: float, turns: float, **fields: Any) -> RolloutResult:
    parts = (
        RewardPart(name="solved", score=solved),
        RewardPart(name="turns", score=-turns, weight=0.5, kind="cost"),
    )
    return result(reward=Reward(score=solved - 0.5 * turns, parts=parts), success=solved == 1, **fields)


def test_a_cost_does_not_hide_that_nothing_was_solved() -> None:
    """Whether the rewards differ or not, and not where one outcome gave anything."""
    cause = (
        "All 2 rollouts of this check got 0 from solved. What they got came from turns, and a fit would learn that "
        "alone."
    )
    (found,) = reward_findings([solved_in_turns(0, 1), solved_in_turns(0, 2)], "solved, turns", renderer=None)
    assert (found.severity, found.code, found.where, found.cause) == ("warning", "no_outcome", "solved", cause)
    both = reward_findings([solved_in_turns(0, 1), solved_in_turns(0, 1)], "solved, turns", renderer=None)
    assert [found.code for found in both] == ["no_outcome", "no_spread"]
    assert both[0].cause == cause
    assert reward_findings([solved_in_turns(0, 1), solved_in_turns(0.1, 2)], "solved, turns", renderer=None) == []
    (found,) = reward_findings([solved_in_turns(0, 0), solved_in_turns(0, 0)], "solved, turns", renderer=None)
    assert found.code == "all_zero_rewards"


class Letters:
    """Reads id 1 as "a", and so on; 0 ends a reply."""

    stop_ids = (0,)

    def decode(self, ids: Any) -> str:
        return "".join(chr(96 + id) for id in ids)


def test_zero_rewards_show_an_answer_beside_its_reference() -> None:
    """Of a rollout that was not cut, and its last reply; long ones are cut."""

    def replied(task: str, *ids: tuple[int, ...], **fields: Any) -> RolloutResult:
        turns = tuple(
            turn(response_ids=i, response_logprobs=(0.0,) * len(i), weight_versions=(0,) * len(i)) for i in ids
        )
        made = result(task, score=0.0, turns=turns, **fields)
        return replace(made, request=RolloutRequest(task=Task(id=task, input={}, reference="ab"), phase="check"))

    results = [replied("cut", (3,), status="truncated"), replied("done", (3, 0), (1, 2, 0), ())]
    (found,) = reward_findings(results, "v", renderer=Letters())  # type: ignore[arg-type]
    assert found.cause == (
        "All 2 rollouts of this check got 0 from the verifiers. "
        "Task 'done': the reference is 'ab', the last reply 'ab'."
    )
    assert found.fix.startswith("If this answer is right, mend the verifier. Else ")
    (found,) = reward_findings([replied("long", (1,) * 300)], "v", renderer=Letters())  # type: ignore[arg-type]
    assert found.cause.startswith("The one rollout of this check got 0 from the verifiers. ")
    assert found.cause.endswith(f"the last reply '{'a' * 199}….")


def test_rewards_that_are_equal_within_each_group() -> None:
    """Though they differ between groups: nothing is learned from that."""
    (found,) = reward_findings(rewards(("a", 1.0), ("a", 1.0), ("b", 0.5), ("b", 0.5)), "v", renderer=None)
    assert (found.severity, found.code) == ("warning", "no_spread")
    assert found.cause == "In each of 2 groups all rewards are equal (0.75 on the mean)."
    (found,) = reward_findings(rewards(("a", 1.0), ("a", 1.0)), "v", renderer=None)
    assert found.cause == "In each of 1 group all rewards are equal (1 on the mean): every rollout succeeded."


@pytest.mark.parametrize(
    "results",
    [
        rewards(("a", 1.0), ("a", 0.0)),
        rewards(("a", 1.0), ("b", 1.0)),
        rewards(("a", 0.0), ("a", None), ("b", None)),
        [],
    ],
    ids=["they differ", "no group", "most have none", "none"],
)
def test_rewards_of_which_nothing_is_said(results: list[RolloutResult]) -> None:
    assert reward_findings(results, "v", renderer=None) == []


def test_successes_teach_where_rewards_need_not_differ() -> None:
    """A success in a group of one does; without any that is a finding."""
    results = rewards(("a", 1.0), ("a", 1.0), ("b", 0.5), ("b", 0.4), ("c", 1.0))
    spread = spread_of(results, learns_from="successes")
    assert spread is not None
    assert (spread.groups, spread.groups_that_teach) == (3, 2)
    assert reward_findings(results, "v", renderer=None, learns_from="successes") == []
    (found,) = reward_findings(rewards(("a", 0.5), ("a", 0.4)), "v", renderer=None, learns_from="successes")
    assert (found.severity, found.code) == ("warning", "no_success")
    assert found.cause == "None of 2 rollouts of this check is a success."


def test_credit_of_parts_of_a_rollout_is_spread() -> None:
    """Equal scores, and turns that are told apart."""
    credited = Reward(score=1.0, parts=(RewardPart(name="v", score=1.0),), credit=Credit(by_turn={0: 1.0}))
    assert reward_findings([result(reward=credited), result(reward=credited)], "v", renderer=None) == []


def test_the_spread_counts_groups_that_teach() -> None:
    results = rewards(("a", 1.0), ("a", 0.0), ("b", 0.5), ("b", 0.5), ("c", 1.0), ("d", None))
    assert spread_of(results) == Spread(
        n=5, mean=0.6, std=pytest.approx(0.374, abs=1e-3), success=0.4, groups=2, groups_that_teach=1
    )
    assert spread_of(rewards(("a", None))) is None


def test_the_tasks_of_a_trial_come_from_all_over_the_file() -> None:
    tasks = [Task(id=str(i), input={}) for i in range(10)]
    assert [task.id for task in trial_tasks(tasks, 4)] == ["0", "2", "5", "7"]
    assert len(trial_tasks(tasks[:2], 4)) == 2


def test_what_a_fit_would_cost() -> None:
    """16 rollouts of 3 s in 4 s; 10 steps of 16 rollouts, 2 x 20 evaluated, 16 at once. Without a token, nothing."""
    config = resolve(("test", {"trainer": {"steps": 10, "tasks_per_step": 4, "group_size": 4}}))
    made = [result(n_sampled_ids=10, started_at=5.0, ended_at=8.0) for _ in range(16)]
    assert cost_of(trial(*made, wall_s=4.0), config, n_held_out=20) == Cost(
        rollouts=200,
        tokens=2000,
        own_calls={},
        minutes_low=round((200 + 0.6 * 160) * 3 / 16 / 60, 2),
        minutes_high=round((200 + 0.6 * 160) * 0.25 / 60, 2),
    )
    assert cost_of(trial(result()), config, n_held_out=20) is None


def test_a_fit_would_ask_the_users_own_models_as_often() -> None:
    """Calls a rollout, times its rollouts; the check's own calls are told in a note."""
    config = resolve(("test", {"trainer": {"steps": 10, "tasks_per_step": 4, "group_size": 4}}))
    judge = turn(role="auxiliary", site=CallSite(node="judge", model_class="ChatOpenAI", model_name="gpt-4o"))
    made = [result(turns=(turn(), judge, judge, judge), n_sampled_ids=10), result(n_sampled_ids=10)]
    cost = cost_of(trial(*made), config, n_held_out=20)
    assert cost is not None
    assert cost.own_calls == {"ChatOpenAI:gpt-4o": 300}
    assert own_calls_note(made) == ("This check made 3 calls of your own ChatOpenAI:gpt-4o.",)
    assert own_calls_note(made[1:]) == ()
