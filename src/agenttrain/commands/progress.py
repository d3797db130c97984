"""What a person sees of a run: progress on standard error, the end on standard output."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from agenttrain.alarms import Alarm
from agenttrain.check.finding import counted
from agenttrain.commands.arguments import print_json
from agenttrain.forecast import as_dict, table
from agenttrain.prepare import Job
from agenttrain.protocols import Forecast
from agenttrain.records import RolloutResult
from agenttrain.report import eval_text, fit_text
from agenttrain.run_folder import RunFolder

PHASES = {"baseline": "baseline", "train": "training", "held_out": "held-out", "eval": "evaluation", "check": "check"}


@dataclass(slots=True)
class Progress:
    """Watches a run: a bar for rollouts, one line a step, alarms in red. All of it to standard error."""

    job: Job
    console: Console = field(default_factory=lambda: Console(stderr=True, highlight=False, soft_wrap=True))
    _bar: Bar | None = None
    _task: TaskID | None = None
    _phase: str = ""
    _alarms: Counter[str] = field(default_factory=Counter)
    """Alarm code to how often it came."""

    def starts(self, run: RunFolder, *, resumed: bool) -> None:
        """A fit begins, or goes on."""
        job = self.job
        verb = "resuming" if resumed else "run"
        self._say(f"{verb} {run.id}: {counted(len(job.train), 'training task')}, {len(job.held_out)} evaluated")
        self._say_notes()

    def starts_evaluation(self, run: RunFolder) -> None:
        """An eval begins: it trains on nothing."""
        other = self.job.in_place
        who = f", answered by {other.name}" if other is not None and other.model is not None else ""
        self._say(f"run {run.id}: {counted(len(self.job.held_out), 'task')}{who}")
        self._say_notes()

    def starts_check(self, run: RunFolder) -> None:
        """A check begins; its notes come with its findings."""
        self._say(f"run {run.id}")

    def _say_notes(self) -> None:
        for note in self.job.notes:
            self._say(f"note: {note}", "yellow")

    def began(self, phase: str, total: int) -> None:
        self._phase = phase
        self._end_bar()
        if self.console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Bar(*columns, console=self.console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task(PHASES[phase], total=None if phase == "train" else total)
        else:
            self._say(f"{PHASES[phase]}: {counted(total, 'step' if phase == 'train' else 'rollout')}")

    def rollout_done(self, result: RolloutResult) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task)

    def ended(self, phase: str, summary: Mapping[str, Any]) -> None:
        self._end_bar()
        n_failed = summary["environment_failures"]
        failed = f", {counted(n_failed, 'environment failure')}" if n_failed else ""
        if summary["reward"] is None:
            self._say(f"{PHASES[phase]}: nothing measured on {counted(summary['tasks'], 'task')}{failed}", "bold")
            return
        tokens = "" if summary["tokens"] is None else f", {summary['tokens']:.0f} tokens"
        self._say(
            f"{PHASES[phase]}: success {summary['success']:.3f} on {counted(summary['tasks'], 'task')}, "
            f"{summary['turns']:.1f} turns{tokens} a rollout{failed}",
            "bold",
        )

    def step_done(self, row: Mapping[str, Any], n_steps: int, seconds_left: float) -> None:
        reward = "none" if row["reward"] is None else f"{row['reward']:.3f} ± {row.get('reward_std') or 0:.3f}"
        groups = f"groups that teach {row.get('groups_trained', 0):.0f}/{row.get('groups', 0):.0f}"
        speed = row.get("tokens_per_s", 0.0) * row.get("rollout_s", 0.0) / max(row["wall_s"], 1e-9)
        self._say(
            f"step {row['step']:>3}/{n_steps}  reward {reward}  {groups}  "
            f"{speed:,.0f} tokens/s  {_duration(seconds_left)} left"
        )

    def alarm(self, alarm: Alarm) -> None:
        """Told when its code comes for the first time; the others are counted, and told at the end."""
        self._alarms[alarm.code] += 1
        if self._alarms[alarm.code] == 1:
            self._say(f"{alarm.severity}: {alarm.message}", "red" if alarm.severity == "loud" else "yellow")

    def stopped(self, run_id: str, why: str) -> str:
        """The run was saved before its end; gives the line that was said."""
        self.close()
        said = f"{why}. Saved; go on with: agenttrain fit --resume {run_id}"
        self._say(said, "bold")
        return said

    def close(self) -> None:
        self._end_bar()
        for code, n in self._alarms.items():
            if n > 1:
                self._say(f"alarm {code}: {n} times; metrics.jsonl and the report hold each", "yellow")
        self._alarms.clear()

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._task = None

    def _say(self, text: str, style: str = "") -> None:
        self.console.print(text, style=style, markup=False)


def print_report(report: Mapping[str, Any], run: RunFolder) -> None:
    """The end of a fit on standard output."""
    _print_text(fit_text(report))
    _print_text(f"report: {run.path / 'report.md'}\npolicy: {run.policy}")


def print_evaluation(report: Mapping[str, Any], run: RunFolder) -> None:
    """The end of an eval on standard output."""
    _print_text(eval_text(report))
    _print_text(f"report: {run.path / 'report.md'}")


def print_plan(job: Job, forecast: Forecast | None, *, as_json: bool) -> None:
    """What a fit would do and need; nothing has been started."""
    config = job.config
    plan = {
        "graph": job.loaded.name,
        "model": str(job.model),
        "trainer": config.trainer.name,
        "engine": config.engine.name,
        "train_tasks": len(job.train),
        "held_out_tasks": len(job.held_out),
        "steps": config.trainer.steps,
        "rollouts_per_step": config.trainer.tasks_per_step * config.trainer.group_size,
        "rollouts": config.trainer.steps * config.trainer.tasks_per_step * config.trainer.group_size
        + 2 * len(job.held_out) * config.eval.repeats,
        "forecast": as_dict(forecast) if forecast is not None else None,
        "notes": list(job.notes),
        "config": config.model_dump(),
    }
    if as_json:
        print_json(plan)
        return
    for key, value in plan.items():
        if key not in ("config", "notes", "forecast"):
            _print_text(f"{key.replace('_', ' ')}: {value}")
    for line in table(forecast) if forecast is not None else ():
        _print_text(line)
    for note in job.notes:
        _print_text(f"note: {note}")
    _print_text("Everything fits. Nothing was started (--dry-run).")


def _print_text(text: str) -> None:
    Console(highlight=False, soft_wrap=True).print(text, markup=False)


def _duration(seconds: float) -> str:
    return time.strftime("%M:%S" if seconds < 3600 else "%H:%M:%S", time.gmtime(max(0.0, seconds)))
