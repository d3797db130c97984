"""What is declared of a graph's tools, held against those that are seen and those that ran, becomes findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from agenttrain.check.finding import Finding, counted, error, warning
from agenttrain.errors import ConfigError
from agenttrain.graph.tools import Tools, check_declared, runs_itself, undeclared_tools
from agenttrain.records import RolloutResult
from agenttrain.tool_spec import Declared, External

WHERE = "tools="
CHOICES = (
    'For … write "read_only" where the tool changes nothing, "sandboxed" where all that it changes lies in the '
    "rollout's sandbox, External(stand_in=function) where it writes or sends elsewhere."
)


def declaration_findings(declared: Mapping[str, Declared], tools: Tools) -> tuple[list[Finding], tuple[str, ...]]:
    """(declarations that can't be true of the tools that are seen, notes on names that no tool has yet)."""
    findings, notes = list[Finding](), list[str]()
    try:
        notes += check_declared(declared, tools)
    except ConfigError as refused:
        findings.append(error("tools_refused", WHERE, str(refused)))
    permitted = [name for name, what in declared.items() if isinstance(what, External) and what.permitted]
    if permitted:
        text = f"{_named(permitted)} external and permitted: what a rollout does by it is really done, in a check too."
        findings.append(warning("external_permitted", WHERE, text))
    return findings, tuple(notes)


def undeclared_findings(
    declared: Mapping[str, Declared], seen: Sequence[str], results: Sequence[RolloutResult]
) -> tuple[list[Finding], tuple[str, ...]]:
    """(tools that are seen or ran, and of which nothing is declared; the same as a note where nothing is at all).

    Args:
        seen: names of the tools that can be seen before the graph runs.
        results: of the trial; empty where there was none.
    """
    ran = {name for result in results for name in result.rollout.tools_run}
    left = undeclared_tools(declared, sorted({*seen, *ran}))
    if not left:
        return [], ()
    text = runs_itself(left)
    fix = f"Add to @trainable: {line_to_paste(left)}. {CHOICES}"
    return ([warning("undeclared_tools", WHERE, text, fix=fix)], ()) if declared else ([], (f"{text} {fix}",))


def line_to_paste(names: Sequence[str]) -> str:
    """What a tool does is left to who knows it. Example: ["search"] -> 'tools={"search": …}'."""
    entries = ", ".join(f'"{name}": …' for name in names)
    return f"tools={{{entries}}}"


def tool_notes(results: Sequence[RolloutResult]) -> tuple[str, ...]:
    """What ran in a trial, and how often."""
    ran, stood_in = Counter[str](), Counter[str]()
    for result in results:
        ran.update(result.rollout.tools_run)
        stood_in.update(result.rollout.stand_ins_run)
    said = [f"{name} ran {counted(n, 'time')}" for name, n in sorted(ran.items())]
    said += [f"the stand-in of {name} {counted(n, 'time')}" for name, n in sorted(stood_in.items())]
    return (f"Tools in this check: {', '.join(said)}.",) if said else ()


def _named(names: Sequence[str]) -> str:
    one = len(names) == 1
    return f"{'The tool' if one else 'The tools'} {', '.join(map(repr, names))} {'is' if one else 'are'}"
