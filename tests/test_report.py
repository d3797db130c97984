import json
import math
from typing import Any

import pytest

from agenttrain.promotion.compare import Difference
from agenttrain.promotion.comparison import Compared, MeasureDifference, SliceDifference
from agenttrain.promotion.summary import summarize
from agenttrain.records import Reward, Rollout, Task
from agenttrain.report import RunFacts, eval_report, eval_text, fit_report, fit_text, logprob_gap, per_success, verdict

FACTS = RunFacts(
    run_id="order-desk-20250102-030405-ab12",
    graph="graph.py:graph",
    trainer="local",
    algorithm="grpo",
    engine="local",
    seed=7,
    base="policies/tiny",
    n_parameters=1234567,
    replaces="ChatOpenAI gpt-4o-mini",
    n_train=400,
    n_held_out=4,
)
SUMMARY_KEYS = {
    "temperature",
    "tasks",
    "rollouts",
    "success",
    "reward",
    "turns",
    "tool_calls",
    "invalid_tool_calls",
    "tokens",
    "seconds",
    "gates_closed",
    "safety_violations",
    "policy_failures",
    "unfinished",
    "environment_failures",
    "by_slice",
}
HEAD_KEYS = {"run_id", "graph", "trainer", "algorithm", "engine", "seed", "model", "tasks"}


def evaluation(*, successes: int, temperature: float = 0.0) -> dict[str, Any]:
    """Four tasks, the first so many of them successes; each rollout has 2 turns, 3 tool calls, 50 tokens, 4 seconds."""
    tasks = [Task(id=f"t{n}", input={}, metadata={"kind": "easy" if n < 2 else "hard"}) for n in range(4)]
    rollouts = [
        Rollout(
            id=f"eval-0-t{n}-0-0",
            task_id=f"t{n}",
            phase="eval",
            step=0,
            sibling=0,
            attempt=0,
            status="completed",
            reward=Reward(score=float(n < successes), parts=()),
            success=n < successes,
            n_turns=2,
            n_tool_calls=3,
            n_sampled_ids=50,
            started_at=100.0,
            ended_at=104.0,
        )
        for n in range(4)
    ]
    return summarize(rollouts, tasks, 1, temperature=temperature)


def compared(value: float, low: float, high: float) -> Compared:
    """Of four tasks: success as given, one more measure, and the slice of the easy ones."""
    success = Difference(value=value, low=low, high=high, n_tasks=4)
    easy = Difference(value=0.5, low=-0.25, high=1.0, n_tasks=2)
    reward = Difference(value=-0.25, low=-0.5, high=0.125, n_tasks=3)
    return Compared(
        base="before",
        other="after",
        n_tasks=4,
        measures={
            "success": MeasureDifference(measure="success", base=0.25, other=0.75, difference=success, n_left_out=0),
            "reward": MeasureDifference(measure="reward", base=0.5, other=0.25, difference=reward, n_left_out=1),
            "safety_violations": MeasureDifference(
                measure="safety_violations", base=None, other=None, difference=None, n_left_out=4
            ),
        },
        slices=(
            SliceDifference(
                key="kind", value="easy", n_tasks=2, base=0.5, other=1.0, difference=easy, simultaneous=success
            ),
        ),
        pass_at_k={},
        smallest_effect=0.75,
        notes=(),
    )


def report_of(**changes: Any) -> dict[str, Any]:
    """A fit that went from 1 to 3 successes of 4."""
    given: dict[str, Any] = {
        "baseline": evaluation(successes=1),
        "trained": evaluation(successes=3),
        "compared": compared(0.5, 0.125, 0.875),
        "tokens": {
            "sampled": 12345,
            "trained": 12000,
            "frozen": 300,
            "dropped": 45,
            "masked": 900,
            "drifted": 0,
            "prefix_breaks": {"history_rewritten": 2, "retry": 1},
            "respelled": {"arguments_respelled": 3, "thinking_dropped": 1200},
            "dropped_by_cause": {"status environment_failure": 40, "all rewards equal": 5},
        },
        "steps": [
            {"logprob_gap_mean": 1e-6, "logprob_gap_max": 2e-5, "tokens_trained": 4000},
            {"logprob_gap_mean": 4e-6, "logprob_gap_max": 1e-5, "tokens_trained": 8000},
        ],
        "wall_s": {"total": 100.00049, "rollout": 60.0, "train": 25.0, "evaluate": 10.0, "sync": 1.5},
        "cpu_hours": 0.05,
        "gpu_hours": 0.0,
        "lives": 1,
        "alarms": [{"code": "all_succeed", "severity": "note", "step": 2, "message": "Every rollout succeeded."}],
    }
    return fit_report(FACTS, **{**given, **changes})


GOLDEN_FIT = """\
# order-desk-20250102-030405-ab12

The agent got better: success on held-out tasks went from 0.250 to 0.750, and the whole 95 % interval of the \
difference is above 0.

| on 4 held-out tasks (greedy) | before | after |
|---|---|---|
| success | 0.25 | 0.75 |
| reward | 0.25 | 0.75 |
| turns | 2 | 2 |
| tool calls | 3 | 3 |
| invalid tool calls | 0 | 0 |
| tokens | 50 | 50 |
| policy failures | 0 | 0 |
| cut by a limit | 0 | 0 |
| environment failures | 0 | 0 |

Difference in success: +0.500, 95 % interval +0.125 to +0.875 (paired bootstrap over tasks).

| after less before | difference | 95 % interval |
|---|---|---|
| reward | -0.250 | -0.500 to +0.125 (1 task left out) |

4 tasks that vary like these can show a difference in success of 0.750 or more (paired, as measured; 95 %, power 80 %).

| slice | tasks | before | after | 95 % interval of the difference |
|---|---|---|---|---|
| kind = easy | 2 | 0.500 | 1.000 | -0.250 to +1.000, shown |
| kind = hard | 2 | 0.000 | 0.500 |  |

## How it was trained
- policy: policies/tiny, 1,234,567 parameters, in place of ChatOpenAI gpt-4o-mini
- 2 steps of grpo by the local trainer on the local engine, seed 7, 400 training tasks
- tokens sampled 12,345 = trained 12,000 + frozen 300 + dropped 45; drifted 0
  - dropped 5: all rewards equal
  - dropped 40: status environment_failure
- prefix breaks, each a new trajectory with its history as context: 2 history_rewritten (an earlier message was \
changed or left out), 1 retry (LangGraph ran the node again)
- turns after a reply that the template would write otherwise, kept as it was sampled: 1,200 thinking_dropped \
(without its thinking), 3 arguments_respelled (with its calls spelled in another way)
- log probability, engine against trainer: mean 3.0e-06, max 2.0e-05
- 100 s: rollouts 60, training 25, evaluation 10, publishing 1.5

## Alarms
- note, step 2: Every rollout succeeded.
"""

GOLDEN_EVAL = """\
# order-desk-20250102-030405-ab12

| policies/tiny on 4 tasks (sampled at 0.7) | |
|---|---|
| success | 0.5 |
| reward | 0.5 |
| turns | 2 |
| tool calls | 3 |
| invalid tool calls | 0 |
| tokens | 50 |
| policy failures | 0 |
| cut by a limit | 0 |
| environment failures | 0 |

No alarms.
"""


def test_the_text_of_a_fit() -> None:
    """What people read first: better or not, the figures, where every token went, the alarms."""
    assert fit_text(report_of()) == GOLDEN_FIT


def test_gates_and_parts_are_in_the_text_where_there_are_some() -> None:
    """Under the figures, and after the slices; before against after in the same bins."""
    part = {"kind": "outcome", "weight": 1.0, "low": None, "high": None, "n": 4, "errors": 0}
    before = {**part, "mean": 0.25, "histogram": {"edges": [0.0, 0.5, 1.0], "counts": [3, 1]}}
    after = {**part, "mean": 0.75, "histogram": {"edges": [0.0, 0.5, 1.0], "counts": [1, 3]}}
    gates = {"gates_closed": 2, "safety_violations": 1}
    text = fit_text(
        report_of(
            baseline={**evaluation(successes=1), **gates, "reward_parts": {"tests": before}},
            trained={**evaluation(successes=3), **gates, "reward_parts": {"tests": after}},
        )
    )
    assert "| environment failures | 0 | 0 |\n| closed by a gate | 2 | 2 |\n| safety violations | 1 | 1 |\n\n" in text
    assert text.partition("| kind = hard | 2 | 0.000 | 0.500 |  |\n\n")[2].startswith("""\
## Parts of the reward
```
tests: outcome, weight 1; mean 0.250 before, 0.750 after
     before                  after
  0  ███████████      75 %   ████             25 %
  1  ████             25 %   ███████████      75 %
```

## How it was trained
""")


def test_the_text_of_an_eval() -> None:
    """The figures of one evaluation, and how it sampled."""
    result = evaluation(successes=2, temperature=0.7)
    assert (
        eval_text(eval_report(FACTS, result=result, wall_s=3.0, cpu_hours=0.01, gpu_hours=0.0, alarms=[]))
        == GOLDEN_EVAL
    )


def test_the_keys_of_a_fits_json() -> None:
    """Other programs read these; `steps` and `difference.tasks` are told besides."""
    report = report_of()
    assert set(report) == HEAD_KEYS | {
        "baseline",
        "trained",
        "difference",
        "compared",
        "tokens",
        "logprob_gap",
        "wall_s",
        "cost",
        "alarms",
        "steps",
        "lives",
    }
    assert set(report["model"]) == {"base", "parameters", "replaces"}
    assert set(report["tasks"]) == {"train", "held_out"}
    assert set(report["baseline"]) == set(report["trained"]) == SUMMARY_KEYS
    assert set(report["difference"]) == {"success", "ci95", "tasks"}
    assert set(report["logprob_gap"]) == {"mean", "max"}
    assert set(report["wall_s"]) == {"total", "rollout", "train", "evaluate", "sync"}
    assert set(report["cost"]) == {"cpu_hours", "gpu_hours", "per_success"}
    assert set(report["cost"]["per_success"]) == {"tokens", "tool_calls", "seconds"}
    assert set(report["alarms"][0]) == {"code", "severity", "step", "message"}


def test_the_tokens_of_the_account_are_told_as_they_are() -> None:
    """The report adds nothing to them and leaves nothing out."""
    tokens = report_of()["tokens"]
    assert {"sampled", "trained", "frozen", "dropped", "masked", "drifted", "prefix_breaks", "respelled"} <= set(tokens)
    assert tokens["sampled"] == tokens["trained"] + tokens["frozen"] + tokens["dropped"]


def test_the_keys_of_an_evals_json() -> None:
    """`result` stands where a fit has `baseline` and `trained`."""
    report = eval_report(
        FACTS, result=evaluation(successes=2), wall_s=3.00049, cpu_hours=0.01, gpu_hours=0.002, alarms=[]
    )
    assert set(report) == HEAD_KEYS | {"result", "wall_s", "cost", "alarms"}
    assert set(report["result"]) == SUMMARY_KEYS
    assert report["wall_s"] == {"total": 3.0, "evaluate": 3.0}
    assert (report["cost"]["cpu_hours"], report["cost"]["gpu_hours"]) == (0.01, 0.002)


def test_a_report_is_json() -> None:
    """It comes back from JSON as it was."""
    report = report_of()
    assert json.loads(json.dumps(report)) == report


def test_what_one_success_took() -> None:
    """All that four rollouts used, over the three that succeeded."""
    assert per_success(evaluation(successes=3)) == {
        "tokens": pytest.approx(200 / 3),
        "tool_calls": pytest.approx(4.0),
        "seconds": pytest.approx(16 / 3),
    }


def test_without_a_success_there_is_no_cost_of_one() -> None:
    """None, never zero and never infinity."""
    none = {"tokens": None, "tool_calls": None, "seconds": None}
    assert per_success(evaluation(successes=0)) == none
    assert report_of(trained=evaluation(successes=0))["cost"]["per_success"] == none


def test_an_evaluation_in_which_nothing_ran_has_no_means() -> None:
    """They are shown as none, and no success is counted."""
    result = summarize([], [Task(id="t0", input={})], 1)
    text = eval_text(eval_report(FACTS, result=result, wall_s=0.0, cpu_hours=0.0, gpu_hours=0.0, alarms=[]))
    assert per_success(result) == {"tokens": None, "tool_calls": None, "seconds": None}
    assert "| success | 0 |" in text
    assert "| reward | none |" in text


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (
            0.01,
            0.9,
            "The agent got better: success on held-out tasks went from 0.250 to 0.750, "
            "and the whole 95 % interval of the difference is above 0.",
        ),
        (
            -0.9,
            -0.01,
            "The agent got worse: success on held-out tasks went from 0.250 to 0.750, "
            "and the whole 95 % interval of the difference is below 0.",
        ),
        (
            -0.1,
            0.9,
            "No difference is shown: success on held-out tasks went from 0.250 to 0.750, "
            "and the 95 % interval of the difference holds 0.",
        ),
    ],
)
def test_the_verdict_says_no_more_than_the_interval(low: float, high: float, expected: str) -> None:
    """Better, worse, or not shown."""
    assert verdict(report_of(compared=compared(0.5, low, high))) == expected


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.5), (-0.5, 0.0), (0.0, 0.0)])
def test_an_interval_that_ends_at_zero_shows_no_difference(low: float, high: float) -> None:
    """The bound must be past 0, as the promotion gate asks."""
    text = verdict(report_of(compared=compared(0.0, low, high)))
    assert text.startswith("No difference is shown")


def test_the_gap_is_a_mean_over_tokens_and_a_maximum_over_steps() -> None:
    """A step of more tokens weighs more; a step that trained nothing weighs nothing."""
    steps = [
        {"logprob_gap_mean": 1.0, "logprob_gap_max": 3.0, "tokens_trained": 1},
        {"logprob_gap_mean": 5.0, "logprob_gap_max": 2.0, "tokens_trained": 3},
        {"reward": 0.0},
    ]
    assert logprob_gap(steps) == {"mean": 4.0, "max": 3.0}
    assert logprob_gap([]) == {"mean": 0.0, "max": 0.0}


@pytest.mark.parametrize("gaps", [(2e-5, math.nan), (math.nan, 2e-5)])
def test_a_gap_that_is_no_number_is_the_largest(gaps: tuple[float, float]) -> None:
    """In whichever step it was: a later sound one doesn't hide it."""
    steps = [{"logprob_gap_mean": gap, "logprob_gap_max": gap, "tokens_trained": 1} for gap in gaps]
    assert math.isnan(logprob_gap(steps)["max"])


def test_a_users_text_stays_in_its_cell() -> None:
    """A metadata value with a bar or a line break doesn't break the table."""
    sliced = {"kind": {"a|b\nc": {"tasks": 1, "success": 0.5}}}
    base = {**evaluation(successes=1), "by_slice": sliced}
    after = {**evaluation(successes=1), "by_slice": sliced}
    assert "| kind = a\\|b c | 1 | 0.500 | 0.500 |" in fit_text(report_of(baseline=base, trained=after))


def test_a_run_that_was_resumed_says_so() -> None:
    """In the line that says how it was trained, and only there."""
    assert "400 training tasks, in 3 lives: the run was stopped and resumed" in fit_text(report_of(lives=3))
    assert "lives" not in fit_text(report_of())


def test_a_report_without_slices_has_no_table_of_them() -> None:
    """Tasks without metadata."""
    plain = {**evaluation(successes=1), "by_slice": {}}
    assert "| slice |" not in fit_text(report_of(baseline=plain, trained=plain))


def test_an_alarm_of_many_steps_is_one_line() -> None:
    """By its code and severity, with the message that came first."""
    steps = [
        *((step, "loud", "equal", f"All rewards are {step}.") for step in range(1, 9)),
        (3, "note", "equal", "Note."),
    ]
    steps += [(5, "loud", "gap", "Gap at 5."), (4, "loud", "gap", "Gap at 4."), (0, "note", "lost", "Lost.")]
    alarms = [{"step": s, "severity": v, "code": c, "message": m} for s, v, c, m in steps]
    text = eval_text(
        eval_report(FACTS, result=evaluation(successes=2), wall_s=0.0, cpu_hours=0.0, gpu_hours=0.0, alarms=alarms)
    )
    assert text.partition("## Alarms\n")[2].splitlines() == [
        "- loud, 8 steps from 1 to 8: All rewards are 1.",
        "- note, step 3: Note.",
        "- loud, steps 4, 5: Gap at 5.",
        "- note, step 0: Lost.",
    ]
