"""`agenttrain compare`: evaluations of the same tasks in one table, and what differs between them, with intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agenttrain.commands.arguments import RUNS, Json, check_choice, print_json
from agenttrain.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from agenttrain.promotion.measures import Evaluation

PLAIN_WIDTH = 220
"""Columns of a table that goes to a file or a pipe."""


def compare_command(
    runs: Annotated[
        list[str],
        typer.Argument(
            help="Runs of fit or eval; RUN:baseline is a fit before training. The first is held against.", metavar="RUN"
        ),
    ],
    slice_: Annotated[
        str | None, typer.Option("--slice", help="Only slices of this metadata key.", metavar="KEY")
    ] = None,
    json: Json = False,
) -> None:
    """Hold evaluations of the same tasks against the first one; a fit alone against its own baseline."""
    from agenttrain.evaluated import find_evaluation
    from agenttrain.promotion.comparison import compared, refuse_incomparable
    from agenttrain.promotion.comparison_text import as_dict

    base, *others = [find_evaluation(name, RUNS) for name in _sides(runs)]
    check_choice("--slice", slice_, _keys(base))
    _refuse_twice([each.name for each in (base, *others)])
    for other in others:  # all of them, before the first one is resampled
        refuse_incomparable(base, other)
    rows = [_row(evaluation) for evaluation in (base, *others)]
    found = [_of_slice(as_dict(compared(base, other)), slice_) for other in others]
    if json:
        print_json({"runs": rows, "comparisons": found})
    else:
        _print(rows, found)


def _sides(runs: Sequence[str]) -> Sequence[str]:
    """The names to compare: of a single fit, its baseline and what came after.

    Raises:
        ConfigError: a single run that is no fit.
    """
    from agenttrain.evaluated import BASELINE
    from agenttrain.run_folder import find_run

    if len(runs) > 1:
        return runs
    (run,) = runs
    if run.endswith(BASELINE) or "life" not in find_run(run, RUNS).read_config()[1]:
        raise ConfigError(f"{run} is one evaluation. Name the one it is held against: agenttrain compare OTHER {run}")
    return f"{run}{BASELINE}", run


def _refuse_twice(names: Sequence[str]) -> None:
    """Refuse an evaluation that would be held against itself.

    Raises:
        ConfigError: it is named twice.
    """
    from collections import Counter

    name, n = Counter(names).most_common(1)[0]
    if n > 1:
        raise ConfigError(f"{name} is named {n} times, and says nothing about itself. Name each run once.")


def _keys(evaluation: Evaluation) -> list[str]:
    from agenttrain.promotion.summary import slices

    return sorted(slices(evaluation.tasks))


def _of_slice(found: Mapping[str, Any], key: str | None) -> dict[str, Any]:
    """The same with the slices of one key; their simultaneous intervals still allow for all of them."""
    return {**found, "slices": [each for each in found["slices"] if key in (None, each["key"])]}


def _row(evaluation: Evaluation) -> dict[str, Any]:
    """What one evaluation came to, as JSON."""
    from agenttrain.promotion.comparison import means_of
    from agenttrain.promotion.summary import mean_pass_at_k

    return {
        "run": evaluation.name,
        "answered_by": evaluation.answered_by,
        "policy": evaluation.policy,
        "tasks": len(evaluation.tasks),
        "repeats": evaluation.repeats,
        "temperature": evaluation.temperature,
        "seed": evaluation.seed,
        **{str(measure): mean for measure, mean in means_of(evaluation).items()},
        "pass_at_k": mean_pass_at_k(evaluation.rollouts, evaluation.tasks, evaluation.repeats),
    }


def _print(rows: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]]) -> None:
    from rich.console import Console

    from agenttrain.promotion.comparison_text import verdict_line

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=PLAIN_WIDTH)
    _print_runs(console, rows)
    for each in found:
        _print_differences(console, each)
        _print_slices(console, each["slices"])
        _print_end(console, each)
    if len(found) > 1:
        console.print()
        for line in map(verdict_line, found):
            console.print(line, soft_wrap=True)


def _print_runs(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    from agenttrain.promotion.measures import MEASURES

    ks = [k for k in rows[0]["pass_at_k"] if k != "1" and all(k in row["pass_at_k"] for row in rows)]
    shown = [each for each in MEASURES if any(row[each] is not None for row in rows)]
    if all(row["cost"] == row["tokens"] for row in rows):
        shown = [each for each in shown if each != "cost"]
    heads = (each.replace("_", "\n", 1).replace("_", " ") for each in shown)  # two lines, so that 120 columns do
    table = _table("run", "answered by", *heads, *(f"pass@{k}" for k in ks))
    for row in rows:
        passes = (row["pass_at_k"][k] for k in ks)
        table.add_row(row["run"], row["answered_by"], *map(_number, (*(row[each] for each in shown), *passes)))
    said = {f"{_sampling(row)}, {row['repeats']} repeat{'s' if row['repeats'] > 1 else ''}" for row in rows}
    console.print(f"{rows[0]['tasks']} tasks, {' or '.join(sorted(said))}; means over tasks")
    console.print(table)


def _print_differences(console: Console, found: Mapping[str, Any]) -> None:
    from agenttrain.promotion.comparison_text import difference_rows, figures

    console.print(f"\n{found['other']} less {found['base']}")
    table = _table("", "base", "other", "difference", "95 % interval", "tasks left out")
    for label, each in difference_rows(found):
        value, interval = figures(each["difference"]) if each["difference"] is not None else ("not measured", "")
        table.add_row(label, _number(each["base"]), _number(each["other"]), value, interval, str(each["n_left_out"]))
    console.print(table)


def _print_slices(console: Console, slices: Sequence[Mapping[str, Any]]) -> None:
    from agenttrain.promotion.comparison_text import SHOWN, figures

    if not slices:
        return
    table = _table("slice", "tasks", "base", "other", "difference", "95 % interval", "all slices at once", "")
    for each in slices:
        value, interval = figures(each["difference"])
        table.add_row(
            f"{each['key']} = {each['value']}",
            str(each["n_tasks"]),
            _number(each["base"]),
            _number(each["other"]),
            value,
            interval,
            figures(each["simultaneous"])[1],
            SHOWN if each[SHOWN] else "",
        )
    console.print("success by slice")
    console.print(table)


def _print_end(console: Console, found: Mapping[str, Any]) -> None:
    """What the tasks can show, and what else is not the same."""
    from agenttrain.promotion.comparison_text import smallest_effect_line

    console.print(smallest_effect_line(found), soft_wrap=True)
    for note in found["notes"]:
        console.print(f"note: {note}", soft_wrap=True)


def _table(*columns: str) -> Any:
    """A table of right-aligned figures behind a first column of names, which are never cut."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for n, column in enumerate(columns):
        table.add_column(column, justify="left" if n == 0 else "right", overflow="fold")
    return table


def _number(value: float | None) -> str:
    """Example: None -> "none", 0.5 -> "0.500", 143.25 -> "143.2"."""
    from agenttrain.promotion.comparison_text import form_of

    return "none" if value is None else format(value, form_of(value))


def _sampling(row: Mapping[str, Any]) -> str:
    return "greedy" if row["temperature"] == 0 else f"sampled at {row['temperature']:g}"
