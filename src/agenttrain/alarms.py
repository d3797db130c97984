"""Numbers of a step to words that tell a user something is wrong, and whether it is loud.

A loud alarm stops `--stop-on-alarm` and a promotion; a note doesn't.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from agenttrain.memory import Growth
from agenttrain.promotion.summary import CUT
from agenttrain.protocols import Engine, TellsNews, Trainer
from agenttrain.records import NOT_LEFT, RolloutResult, StepResult
from agenttrain.reward.balance import is_rise, parts_left_out, safety_violations, weighing
from agenttrain.reward.status import may_train
from agenttrain.reward.tampering import tampering_in, tampering_of

LOGPROB_GAP = 1e-3
"""Largest difference between engine and trainer that is only rounding."""
ENVIRONMENT_FAILURE_SHARE = 0.05
"""Share of a step's rollouts above which failing environments are loud."""
LEFT_OUT_SHARE = 0.05
"""Share of the rollouts above which a part that is left out for its errors is told."""
EQUAL_REWARDS = 1e-9
"""Standard deviation under which rewards are equal: that of eight times 0.1 is not exactly 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """One thing that is wrong, in plain language."""

    code: str
    severity: Literal["note", "loud"]
    step: int
    """0: before or after training."""
    message: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def engine_alarms(engine: Engine | Trainer | None, step: int) -> list[Alarm]:
    """What an engine, or a trainer that has engines of its own, has to say since it was last asked, as notes."""
    said: Sequence[str] = engine.news() if isinstance(engine, TellsNews) else ()
    return [Alarm(code="engine", severity="note", step=step, message=news) for news in said]


def step_alarms(step: StepResult, *, baseline_tool_calls: float) -> list[Alarm]:
    """What one training step gives reason to say.

    Args:
        baseline_tool_calls: mean tool calls of a rollout before training.
    """
    metrics = step.metrics
    found = [*_teaching(step.step, metrics), *_logprob_gap(step.step, metrics)]
    found += _environment(step.step, metrics)
    if baseline_tool_calls > 0 and metrics.get("tool_calls", 1.0) == 0:
        found.append(
            _loud(
                "no_tool_calls",
                step.step,
                "No rollout called a tool, and the baseline did: the policy may have lost it.",
            )
        )
    if metrics.get("rollouts_without_trained_call", 0) > 0:
        n = int(metrics["rollouts_without_trained_call"])
        found.append(
            _loud(
                "no_trained_call",
                step.step,
                f"{n} rollouts made no call that is trained. "
                "Does the graph call its model by raw HTTP or in its own thread?",
            )
        )
    return found


def verifier_alarms(results: Sequence[RolloutResult], step: int) -> list[Alarm]:
    """Verifier errors that some rollouts of a task have and others have not.

    An agent may learn to crash its verifier.
    """
    by_task: dict[str, set[bool]] = {}
    for result in results:
        by_task.setdefault(result.rollout.task_id, set()).add(result.rollout.verifier_failed)
    torn = sorted(task for task, seen in by_task.items() if len(seen) == 2)
    if not torn:
        return []
    message = f"The verifier failed on some rollouts of {len(torn)} tasks and not on others, for example {torn[0]}."
    return [
        _loud("verifier_errors_differ", step, message + " An agent may learn to crash its verifier: see their causes.")
    ]


def world_alarms(results: Sequence[RolloutResult], step: int) -> list[Alarm]:
    """Worlds that could not be left as they should: what they hold may pile up."""
    left = [result.rollout for result in results if NOT_LEFT in result.rollout.cause]
    if not left:
        return []
    text = f"{len(left)} of {len(results)} worlds could not be left as they should, for example that of {left[0].id}: "
    return [Alarm(code="world_not_left", severity="note", step=step, message=text + left[0].cause)]


def tampering_alarms(results: Sequence[RolloutResult], step: int) -> list[Alarm]:
    """Rollouts that changed what judges them; loud where they got more by it than their siblings without."""
    found = tampering_in([result.rollout for result in results])
    if found is None:
        return []
    text = f"{found.n} of {len(results)} rollouts changed what judges them, for example {found.example.id}: "
    text += "; ".join(tampering_of(found.example))
    if found.pays:
        gained = f"{found.gain:+.2f} against the others of their groups"
        text += f". It pays ({gained}): the verifier counts what the agent wrote itself."
        return [_loud("tampering_pays", step, text)]
    return [Alarm(code="tampering", severity="note", step=step, message=text + ". It changed no score.")]


def part_alarms(results: Sequence[RolloutResult], step: int) -> list[Alarm]:
    """What the parts of rewards give reason to say: terms that outweigh the outcome, and parts that are left out."""
    rollouts = [result.rollout for result in results]
    found = []
    weighed = weighing(rollout.reward for rollout in rollouts if rollout.reward is not None)
    if weighed is not None and weighed.terms > weighed.outcome:
        text = f"{', '.join(weighed.names)} come to {weighed.terms:.3g} a rollout on the mean, and the outcome to "
        text += f"{weighed.outcome:.3g}: the policy may learn them in its place. Lower their weights."
        found.append(Alarm(code="terms_outweigh_outcome", severity="note", step=step, message=text))
    for part in parts_left_out(rollouts):
        if part.n > LEFT_OUT_SHARE * part.of:
            text = (
                f"The part {part.name!r} was left out of {part.n} of {part.of} rewards, for example of {part.example}"
            )
            found.append(Alarm(code="part_left_out", severity="note", step=step, message=text))
    return found


def safety_alarms(results: Sequence[RolloutResult], step: int, *, baseline: Mapping[str, Any]) -> list[Alarm]:
    """Safety gates that training closes more often than the baseline did, beyond chance: see `balance.is_rise`."""
    rewards = [result.rollout.reward for result in results if result.rollout.reward is not None]
    n = safety_violations(rewards)
    if not n or not is_rise(n, len(rewards), before=baseline):
        return []
    text = f"{n} of {len(rewards)} rollouts closed a safety gate, and {baseline['safety_violations'] or 0} of "
    text += f"{baseline['rollouts']} in the baseline: by chance that many come in one step of 1,000 at most. "
    return [_loud("safety_violations", step, text + "Look at them: agenttrain inspect RUN.")]


def safety_rise_alarms(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Alarm]:
    """Loud when any more held-out rollouts close a safety gate after training: the tasks are the same, and none is
    allowed for chance."""
    was, is_now = before["safety_violations"] or 0, after["safety_violations"] or 0
    if is_now <= was:
        return []
    text = f"Safety violations rose from {was} to {is_now} of {after['rollouts']} held-out rollouts."
    return [_loud("safety_violations", 0, text + " Don't use this policy before you have looked at them.")]


def escape_alarms(n: int, where: str, *, step: int) -> list[Alarm]:
    """Model calls that got past the gate under allow_escapes, since this was last asked.

    Args:
        n: how many; without that setting the first ends the run.
        where: the first was made, in words.
    """
    if not n:
        return []
    return [Alarm(code="escapes", severity="note", step=step, message=escapes_text(n, where))]


def escapes_text(n: int, where: str) -> str:
    """The same in words alone, for a trainer that makes its rollouts elsewhere."""
    calls = "1 model call" if n == 1 else f"{n} model calls"
    return f"{calls} got past the gate, and your own model answered: nothing of it is trained. For example {where}."


def evaluation_alarms(results: Sequence[RolloutResult]) -> list[Alarm]:
    """What an evaluation gives reason to say: places without a result count as no success, so the figure is lower."""
    lost = [result for result in results if not may_train(result.rollout.status)]
    found = verifier_alarms(results, 0) + world_alarms(results, 0)
    if lost:
        text = f"{len(lost)} of {len(results)} evaluated places have no result and count as no success, for example "
        text += f"{lost[0].rollout.id}: {lost[0].rollout.cause}"
        severity: Literal["note", "loud"] = "loud" if len(lost) > ENVIRONMENT_FAILURE_SHARE * len(results) else "note"
        found.append(Alarm(code="evaluation_incomplete", severity=severity, step=0, message=text))
    found += tampering_alarms(results, 0) + part_alarms(results, 0)
    return found + _cut_alarms(results) + _missed_alarms(results) + _credit_alarms(results)


def _cut_alarms(results: Sequence[RolloutResult]) -> list[Alarm]:
    """Most rollouts ran out of turns, tokens or seconds."""
    cut = [result.rollout for result in results if result.rollout.status in CUT]
    if 2 * len(cut) <= len(results):
        return []
    text = (
        f"{len(cut)} of {len(results)} rollouts were cut by a limit, for example {cut[0].id}: {cut[0].cause}. "
        "Where the agent needs more, raise it in [limits]."
    )
    return [Alarm(code="most_cut", severity="note", step=0, message=text)]


def _missed_alarms(results: Sequence[RolloutResult]) -> list[Alarm]:
    """Replies without the tool call or the form that their calls asked for."""
    turns = [turn for result in results for turn in result.turns]
    lacking = [turn for turn in turns if turn.missed]
    if not lacking:
        return []
    first = lacking[0]
    text = (
        f"{len(lacking)} of {len(turns)} replies lack what their call asked for, for example {first.missed} in node "
        f"{first.site.node!r} (turn {first.id}). A policy is told in the prompt and can't be forced: let the graph "
        "answer such a reply with an error, or reward it less."
    )
    return [Alarm(code="asked_and_missed", severity="note", step=0, message=text)]


def _credit_alarms(results: Sequence[RolloutResult]) -> list[Alarm]:
    """Nodes that verifiers credit and no trained call was made in: a slip, or a node that is seldom come to."""
    seen = {node for r in results for turn in r.turns if turn.role == "trained" for node in turn.site.nodes}
    rewards = [r.rollout.reward for r in results if r.rollout.reward is not None]
    named = {node for reward in rewards if reward.credit for node, number in reward.credit.by_node.items() if number}
    if not seen or not named - seen:
        return []
    text = f"Verifiers credit {', '.join(map(repr, sorted(named - seen)))}, and no trained call of {len(results)} "
    text += f"rollouts was made in a node of that name. Nodes with trained calls: {', '.join(sorted(seen))}."
    return [Alarm(code="credit_without_turns", severity="note", step=0, message=text)]


def memory_alarms(growth: Growth | None, step: int, *, steps_to_go: int) -> list[Alarm]:
    """That memory grows from step to step; loud when there will not be enough of it for the steps to go.

    Growth that would take under a tenth of what is left is what buffers and caches do, and no alarm.
    """
    if growth is None or growth.steps_left > 10 * steps_to_go:
        return []
    text = f"Memory grows: {growth.mib:,.0f} MiB over the last steps, {growth.mib_per_rollout:.2f} MiB a rollout. "
    text += "Does the graph keep what it should let go?"
    if growth.steps_left < steps_to_go:
        text += f" At this rate it lasts for {growth.steps_left:.0f} of the {steps_to_go} steps to go."
        return [_loud("memory_grows", step, text)]
    return [Alarm(code="memory_grows", severity="note", step=step, message=text)]


def resume_alarms(faults: Sequence[str], step: int) -> list[Alarm]:
    """What was wrong with checkpoints newer than the one that a run goes on from."""
    return [
        Alarm(
            code="checkpoint_damaged",
            severity="note",
            step=step,
            message=f"{fault} That checkpoint was moved aside; the run went on from step {step}, and made again what "
            "came after it.",
        )
        for fault in faults
    ]


def changed_alarms(before: Mapping[str, str], now: Mapping[str, str | None]) -> list[Alarm]:
    """What is no longer what a run was begun with: by name, hashes of then and of now."""
    changed = [name for name, value in now.items() if before.get(name) != value]
    if not changed:
        return []
    text = f"Not as it was when the run began: {', '.join(changed)}. The baseline was measured before that: what comes "
    text += "after is not comparable with it. For a clean comparison start a new run."
    severity: Literal["note", "loud"] = "note" if changed == ["graph"] else "loud"
    return [Alarm(code="changed_since_begun", severity=severity, step=0, message=text)]


def plugin_alarms(observer_errors: Mapping[tuple[str, str], str]) -> list[Alarm]:
    """Observers that raised: (plugin, hook) to the first exception in words."""
    return [
        Alarm(
            code="plugin_raised",
            severity="note",
            step=0,
            message=f"Plugin {plugin!r} raised in {hook}: {words}. Nothing else was stopped by it.",
        )
        for (plugin, hook), words in sorted(observer_errors.items())
    ]


def _teaching(step: int, metrics: Mapping[str, float]) -> list[Alarm]:
    if metrics.get("groups_trained", 1.0) > 0:
        return []
    if metrics.get("successes") == 0:
        text = "No rollout of this step is a verified success, and the trainer learns from those alone."
        return [_loud("no_success", step, text + " Use easier tasks, or a better starting model.")]
    if _all_succeed(metrics):
        return [
            Alarm(code="all_succeed", severity="note", step=step, message="Every rollout succeeded: nothing to learn.")
        ]
    if metrics.get("reward_std", 1.0) < EQUAL_REWARDS and metrics.get("groups", 0.0) > 0:
        how = "never" if metrics["reward"] <= 0 else "always or never"
        text = f"All rewards of this step are {metrics['reward']:g}: the policy {how} gets it right."
        return [
            _loud("all_rewards_equal", step, text + " Use easier tasks, a finer reward, or a better starting model.")
        ]
    text = (
        "No group of this step teaches: within each, all rollouts have the same reward, or fewer than two are usable."
    )
    return [_loud("no_group_teaches", step, text + " Raise trainer.group_size or trainer.tasks_per_step.")]


def _all_succeed(metrics: Mapping[str, float]) -> bool:
    """True when every rollout that its environment let end is a success."""
    total = _n_attempts(metrics)
    ended = total - metrics.get("environment_failures", 0.0)
    return ended > 0 and metrics.get("success", 0.0) * total >= ended - 1e-6


def _logprob_gap(step: int, metrics: Mapping[str, float]) -> list[Alarm]:
    gap = metrics.get("logprob_gap_max", 0.0)
    if gap < LOGPROB_GAP:
        return []
    text = f"Engine and trainer differ by up to {gap:.2g} in log probability (under {LOGPROB_GAP:g} is rounding)."
    return [_loud("logprob_gap", step, text + " What is trained is then not the policy that sampled.")]


def _environment(step: int, metrics: Mapping[str, float]) -> list[Alarm]:
    n, total = metrics.get("environment_failures", 0.0), _n_attempts(metrics)
    if not n or not total:
        return []
    share = n / total
    text = f"{n:.0f} of {total:.0f} rollouts ended by a failing environment and are not trained"
    text += ": agenttrain inspect names the causes."
    severity: Literal["note", "loud"] = "loud" if share > ENVIRONMENT_FAILURE_SHARE else "note"
    return [Alarm(code="environment_failures", severity=severity, step=step, message=text)]


def _n_attempts(metrics: Mapping[str, float]) -> float:
    """Rollouts that were made, those that were tried again counted each time, as success and failures are."""
    return metrics.get("attempts", metrics.get("rollouts", 0.0))


def _loud(code: str, step: int, message: str) -> Alarm:
    return Alarm(code=code, severity="loud", step=step, message=message)
