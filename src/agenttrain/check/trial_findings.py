"""What happened in a trial becomes findings: what would have ended a fit, how rollouts ended, what they asked for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from agenttrain.check.finding import Finding, counted, error, warning
from agenttrain.check.trial import Trial
from agenttrain.errors import EffectError, GraphError, RoleError
from agenttrain.promotion.summary import CUT
from agenttrain.records import Rollout, RolloutResult
from agenttrain.reward.status import WAITS_FOR_HUMAN, may_train

WASTEFUL: Mapping[str, str] = MappingProxyType(
    {
        "history_rewritten": "append to the history instead of rewriting it",
        "instruction_changed": "ask for one form of answer within a conversation",
        "template": "let a user's or a tool's message stand between a reply and the next call",
        "thinking_dropped": 'keep the thinking: renderer.history = "keep"',
        "tools_changed": "offer the same tools within a conversation",
    }
)
"""Causes of a prefix break that a graph, a template or renderer.history could do without, and how."""
REFUSED = ("EscapeError:", "EffectError:", "GraphError:", "RoleError:")
"""How the cause of a rollout begins that ended on what other findings tell."""
REFUSALS: Mapping[type[GraphError], str] = MappingProxyType(
    {RoleError: "selector_raises", EffectError: "tools_refused"}
)
"""What ends a fit, and its code; all else is a call that can't be answered."""
OWN_FUNCTIONS = ("setup=", "on_interrupt=")
"""How the word on a user's function begins that gave what no rollout can take."""
_PLACE = re.compile(r"(?P<model>.*?) was called (?P<nodes>.*?)on thread '.*?'(?P<line>.*)")
_ROOM = re.compile(r"room: the prompt has (?P<n>\d+) ids, the engine takes (?P<most>\d+)")
_NAMED = re.compile(r"'([^']*)'")


def trial_findings(trial: Trial, graph: str, *, waits: str) -> list[Finding]:
    """All that a trial found but its rewards.

    Args:
        graph: its name, for what can't be placed closer.
        waits: where it may wait for a human.
    """
    found = [*_escapes(trial), *_refusals(trial, graph), *_unmatched(trial)]
    is_whole = not any(finding.severity == "error" for finding in found)
    results = trial.results
    found += [*_interrupts(results, waits or graph), *_verifier_errors(results)]
    found += [*_environment(results, graph, follows_from_escapes=bool(trial.escapes)), *_lost(results, graph)]
    found += _no_room(results, graph)
    if is_whole:
        found += [*_untrained(results, graph), *_cut(results, graph)]
    return [*found, *_invalid_calls(results), *_missed(results), *_breaks(results)]


def never_began(result: RolloutResult) -> bool:
    """Whether it ended on a prompt that the engine can't take before any trained turn: its reward says nothing."""
    return bool(_ROOM.match(result.rollout.cause)) and not _is_trained(result)


def respelling_notes(results: Sequence[RolloutResult]) -> tuple[str, ...]:
    """Replies that the template would write otherwise; no finding, for they stay as they were sampled."""
    turns = [turn for result in results for turn in result.turns]
    counts = Counter(how for turn in turns for how in turn.respelled)
    return tuple(
        f"{n} of {len(turns)} prompts follow a reply that the template would write otherwise "
        f"({how.replace('_', ' ')}); it is kept as it was sampled."
        for how, n in sorted(counts.items())
    )


def _escapes(trial: Trial) -> Iterator[Finding]:
    """One finding a model and line, whatever the threads were called and what else ran meanwhile."""
    by_place: dict[str, str] = {}
    for where in trial.escapes:
        match = _PLACE.match(where)
        key = f"{match['model']}{match['line']}" if match else where
        by_place[key] = min(where, by_place.get(key, where), key=len)
    told = warning if trial.escapes_allowed else error
    for key, where in by_place.items():
        text = f"{where}, outside of any rollout."
        text += " Your own model answered." if trial.escapes_allowed else " A fit ends there."
        if len(by_place) == 1:
            text += f" {counted(trial.n_escapes, 'such call')} in this check."
        match = _PLACE.match(where)
        nodes = _NAMED.findall(match["nodes"]) if match else []
        yield told("escape", f"node {' or '.join(nodes)}" if nodes else key, text)


def _refusals(trial: Trial, graph: str) -> Iterator[Finding]:
    """One finding a text, with the number of rollouts that ended on it."""
    for (kind, text), n in Counter((type(each), str(each)) for each in trial.refusals).items():
        own = next((name for name in OWN_FUNCTIONS if text.startswith(name)), None)
        of_kind = next((code for refused, code in REFUSALS.items() if issubclass(kind, refused)), "unanswerable_call")
        code = "function_refused" if own else of_kind
        yield error(code, own or graph, f"{text} ({counted(n, 'rollout')} of {len(trial.results)})")


def _unmatched(trial: Trial) -> Iterator[Finding]:
    """A call that they match may come in another rollout; where none comes in a whole baseline, a fit ends."""
    for text in trial.unmatched:
        yield warning("selector_unmatched", text.partition(" matched")[0], text)


def _interrupts(results: Sequence[RolloutResult], where: str) -> Iterator[Finding]:
    waiting = [r for r in _rollouts(results) if r.cause.startswith(WAITS_FOR_HUMAN)]
    if waiting:
        yield error("unscripted_interrupt", where, f"{_of(waiting, results)} wait for a human, and nothing answers.")


def _verifier_errors(results: Sequence[RolloutResult]) -> Iterator[Finding]:
    failed = [rollout for rollout in _rollouts(results) if rollout.verifier_failed]
    if failed:
        text = f"{_of(failed, results)} have no reward. The commonest cause: {commonest_cause(failed)}"
        yield error("verifier_errors", "verifier", text)


def _environment(results: Sequence[RolloutResult], graph: str, *, follows_from_escapes: bool) -> Iterator[Finding]:
    """Failures of their own; those that follow from what other findings tell are left out."""
    failed = [
        rollout
        for rollout in _rollouts(results)
        if rollout.status == "environment_failure"
        and not rollout.verifier_failed
        and not rollout.cause.startswith((WAITS_FOR_HUMAN, *REFUSED))
    ]
    if failed and not follows_from_escapes:
        told = error if 2 * len(failed) >= len(results) else warning
        text = f"{_of(failed, results)} ended so. The commonest cause: {commonest_cause(failed)}"
        yield told("environment_failures", graph, text)


def _lost(results: Sequence[RolloutResult], graph: str) -> Iterator[Finding]:
    lost = [rollout for rollout in _rollouts(results) if rollout.status in ("incomplete", "aborted")]
    if lost:
        text = f"{_of(lost, results)} can't be trained. The commonest cause: {commonest_cause(lost)}"
        yield warning("lost_calls", graph, text)


def _no_room(results: Sequence[RolloutResult], graph: str) -> Iterator[Finding]:
    matches = [(result, match) for result in results if (match := _ROOM.match(result.rollout.cause))]
    if not matches:
        return
    told = error if any(never_began(result) for result, _ in matches) else warning
    longest = max((match for _, match in matches), key=lambda match: int(match["n"]))
    text = f"{_of(_rollouts([result for result, _ in matches]), results)} ended on a prompt that the engine can't take:"
    yield told("no_room", graph, f"{text} the longest has {longest['n']} ids, and it takes {longest['most']}.")


def _untrained(results: Sequence[RolloutResult], graph: str) -> Iterator[Finding]:
    ended = [result for result in results if may_train(result.rollout.status) and not never_began(result)]
    silent = [result for result in ended if not _is_trained(result)]
    if not silent:
        return
    told = error if len(silent) == len(ended) else warning
    text = f"{_of(_rollouts(silent), results)} made no call that is trained."
    reasons = Counter(turn.role_reason for result in silent for turn in result.turns)
    if not reasons:
        yield told("no_trained_call", graph, text)
        return
    made = ", ".join(f"{reason} ({n})" for reason, n in reasons.most_common())
    fix = "Let train=, frozen= and auxiliary= in @trainable leave some call to be trained."
    yield told("no_trained_call", graph, f"{text} Those that they made: {made}.", fix=fix)


def _cut(results: Sequence[RolloutResult], graph: str) -> Iterator[Finding]:
    cut = [each for each in _rollouts(results) if each.status in CUT and not _ROOM.match(each.cause)]
    if 2 * len(cut) > len(results):
        text = f"{_of(cut, results)} were cut. The commonest cause: {commonest_cause(cut)}"
        yield warning("most_cut", graph, text)


def _invalid_calls(results: Sequence[RolloutResult]) -> Iterator[Finding]:
    n_calls = sum(rollout.n_tool_calls for rollout in _rollouts(results))
    n_invalid = sum(rollout.n_invalid_tool_calls for rollout in _rollouts(results))
    if n_calls and 2 * n_invalid > n_calls:
        text = f"{n_invalid} of {counted(n_calls, 'tool call')} {'is' if n_invalid == 1 else 'are'} invalid."
        yield warning("invalid_tool_calls", "the policy", text)


def _missed(results: Sequence[RolloutResult]) -> Iterator[Finding]:
    turns = [turn for result in results for turn in result.turns]
    by_place = Counter((turn.site.node or "the graph", turn.missed) for turn in turns if turn.missed)
    for (node, missed), n in sorted(by_place.items()):
        yield warning("asked_and_missed", f"node {node}", f"{n} of {len(turns)} replies lack the {missed} asked for.")


def _breaks(results: Sequence[RolloutResult]) -> Iterator[Finding]:
    turns = [turn for result in results for turn in result.turns]
    counts = Counter(turn.break_cause for turn in turns if turn.break_cause in WASTEFUL)
    if counts:
        nodes = sorted({turn.site.node or "the graph" for turn in turns if turn.break_cause in WASTEFUL})
        causes = ", ".join(f"{str(cause).replace('_', ' ')} {n}" for cause, n in sorted(counts.items(), key=str))
        text = f"{counts.total()} of {len(turns)} turns began a new trajectory: {causes}."
        fix = ". ".join(f"{how[0].upper()}{how[1:]}" for cause, how in WASTEFUL.items() if cause in counts)
        yield warning("prefix_breaks", f"node {', '.join(nodes)}", text, fix=f"{fix}.")


def commonest_cause(rollouts: Sequence[Rollout]) -> str:
    """The cause that most have, whatever their tasks are called, and how many do."""
    causes = Counter(rollout.cause.replace(repr(rollout.task_id), "…") for rollout in rollouts)
    cause, n = causes.most_common(1)[0]
    return f"{cause.rstrip('.')} ({n})."


def _is_trained(result: RolloutResult) -> bool:
    return any(turn.role == "trained" for turn in result.turns)


def _rollouts(results: Sequence[RolloutResult]) -> list[Rollout]:
    return [result.rollout for result in results]


def _of(some: Sequence[Rollout], results: Sequence[RolloutResult]) -> str:
    return f"{len(some)} of {counted(len(results), 'rollout')}"
