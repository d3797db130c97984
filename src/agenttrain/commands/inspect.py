"""`agenttrain inspect`: what was sampled, what of it is trained, and what it was worth, in the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from agenttrain.commands.arguments import RUNS, Json, check_choice, print_json
from agenttrain.commands.reward_lines import reward_lines
from agenttrain.errors import ConfigError, RunError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from agenttrain.capture.store import StoreView
    from agenttrain.protocols import Renderer
    from agenttrain.records import Rollout, Trajectory, Turn
    from agenttrain.run_folder import RunFolder

CAUSE_WIDTH = 160
"""Characters of a cause in the list; a rollout's own view has all of it."""
PHASES = {
    "baseline": "the baseline",
    "held_out": "the held-out tasks after training",
    "eval": "an evaluation",
    "check": "a check",
}
TRAINED, FROZEN, CONTEXT = "bold green", "yellow", "dim"
MARKS = {TRAINED: "⟦⟧", FROZEN: "⟨⟩", CONTEXT: ""}
"""What stands around a text where there are no colours."""


def inspect_command(
    run: Annotated[str, typer.Argument(help="Id of a run, or the start of one, or its path.", metavar="RUN")],
    rollout: Annotated[
        str | None, typer.Argument(help="Id of a rollout, or the start of one.", metavar="ROLLOUT")
    ] = None,
    status: Annotated[str | None, typer.Option("--status", help="Only rollouts with this status.")] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only rollouts without success.")] = False,
    phase: Annotated[str | None, typer.Option("--phase", help="baseline, train, held_out, eval or check.")] = None,
    limit: Annotated[int, typer.Option("--limit", help="Rollouts listed.", min=1)] = 20,
    logprobs: Annotated[
        bool, typer.Option("--logprobs", help="A line per trained token with its log probability.")
    ] = False,
    turn: Annotated[
        str | None,
        typer.Option("--turn", help="One model call, by its turn's or its span's id: where its tokens stand."),
    ] = None,
    token: Annotated[
        str | None, typer.Option("--token", help="TRAJECTORY:POSITION of a ROLLOUT: the model call that sampled it.")
    ] = None,
    json: Json = False,
) -> None:
    """List a run's rollouts, or show one: tokens coloured by mask, log probabilities, rewards, trajectories."""
    from agenttrain.capture.store import read_store
    from agenttrain.records import Phase, Status
    from agenttrain.run_folder import find_run

    check_choice("--status", status, get_args(Status))
    check_choice("--phase", phase, get_args(Phase))
    folder = find_run(run, RUNS)
    view = read_store(folder.rollouts)
    if turn is not None or token is not None:
        _show_range(folder, view, rollout, turn, token, as_json=json, logprobs=logprobs)
        return
    if rollout is None:
        rollouts = [r for r in view.rollouts() if status in (None, r.status) and phase in (None, r.phase)]
        if failed:
            rollouts = [r for r in rollouts if not r.success]
        _list(rollouts, view, limit, as_json=json)
        return
    found = find_rollout(view, rollout)
    paths = view.trajectories(found.id)
    renderer = None if json or not paths else _renderer(folder.read_config()[0])
    fate = fate_of(found, folder, view)
    _show(found, fate, view.turns(found.id), paths, renderer, as_json=json, logprobs=logprobs)


def fate_of(rollout: Rollout, folder: RunFolder, view: StoreView) -> str:
    """Whether a rollout was trained, or why not."""
    from agenttrain.figures import why_untrained

    if rollout.phase != "train":
        return f"measured for {PHASES[rollout.phase]}, and never trained"
    rows = folder.metrics()
    lives = {row["step"]: row["life"] for row in rows}
    if steps := [sample.step for sample in view.trained(rollout.id) if sample.life == lives.get(sample.step)]:
        return f"trained in step {steps[-1]}"
    if all(row["step"] != rollout.step for row in rows):
        return f"not trained: step {rollout.step} has not ended; the run is under way, or was stopped in it"
    return f"not trained: {why_untrained([rollout], rows, ()).get(rollout.id, 'no reason was written down')}"


def _show_range(
    folder: RunFolder,
    view: StoreView,
    rollout: str | None,
    turn: str | None,
    token: str | None,
    *,
    as_json: bool,
    logprobs: bool,
) -> None:
    """Join a call with its tokens: from the call, or from a token of a rollout.

    Raises:
        ConfigError: it is not clear from which.
        RunError: there is no such call or token.
    """
    from agenttrain.commands.sampled_range import parsed_place, show_range
    from agenttrain.trace_join import TraceJoin

    if (token is not None) != (rollout is not None) or (token is not None and turn is not None):
        raise ConfigError("--turn takes a RUN alone, and --token a RUN and a ROLLOUT. Give one of the two.")
    join = TraceJoin(view, folder.metrics())
    if rollout is not None and token is not None:
        found = join.of_token(find_rollout(view, rollout).id, *parsed_place(token))
    else:
        found = join.of_call(turn or "")
    show_range(found, None if as_json else _renderer(folder.read_config()[0]), as_json=as_json, logprobs=logprobs)


def find_rollout(view: StoreView, name: str) -> Rollout:
    """The rollout of an id, or the only one whose id begins so.

    Raises:
        RunError: none does, or several.
    """
    matches = [rollout for rollout in view.rollouts() if rollout.id.startswith(name)]
    exact = [rollout for rollout in matches if rollout.id == name]
    if exact or len(matches) == 1:
        return (exact or matches)[0]
    if not matches:
        raise RunError(
            f"No rollout is named {name!r} in this run. agenttrain inspect RUN lists them, with --failed "
            "those without success."
        )
    some = ", ".join(rollout.id for rollout in matches[:5])
    raise RunError(f"{len(matches)} rollouts begin with {name!r}, for example {some}. Give more of the id.")


def _renderer(tables: dict[str, Any]) -> Renderer | None:
    """To decode ids; None when the model's folder is gone: ids are shown then."""
    from agenttrain.capture.render import open_renderer
    from agenttrain.errors import ModelError

    table = tables.get("renderer", {})
    try:
        return open_renderer(tables["model"], family=table.get("family"), history=table.get("history", "keep"))
    except (KeyError, ModelError):
        return None


def _list(rollouts: Sequence[Rollout], view: StoreView, limit: int, *, as_json: bool) -> None:
    lost = [call.rollout_id for call in view.lost_calls()]
    breaks, respelled = _summed(view.prefix_breaks(), rollouts), _summed(view.respelled(), rollouts)
    if as_json:
        rows = [_row(rollout) for rollout in rollouts]
        print_json({"rollouts": rows, "lost_calls": lost, "prefix_breaks": breaks, "respelled": respelled})
        return
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    counts = Counter((rollout.phase, rollout.status) for rollout in rollouts)
    for (phase, status), count in sorted(counts.items()):
        console.print(f"{phase}: {count} {status}")
    if lost:
        named = ", ".join(sorted(set(lost))[:5])
        console.print(f"calls whose answer was lost: {len(lost)}, in {named}", style="red", markup=False)
    for line in _history_lines(breaks, respelled):
        console.print(line, markup=False)
    for line in _table(rollouts[-limit:]):
        console.print(line, markup=False)
    if len(rollouts) > limit:
        console.print(f"the last {limit} of {len(rollouts)}; --limit shows more, --status, --phase and --failed choose")


def _table(rollouts: Sequence[Rollout]) -> list[str]:
    """Lines as wide as they must be, the cause last: a terminal breaks them, and ids stay whole to be typed again."""
    heading = ("rollout", "status", "reward", "success", "turns", "tools", "tokens")
    rows = [(heading, "cause"), *((_cells(rollout), _short_cause(rollout)) for rollout in rollouts)]
    widths = [max(map(len, column)) for column in zip(*(cells for cells, _ in rows), strict=True)]
    lines = []
    for cells, cause in rows:
        texts = [cell.ljust(width) for cell, width in zip(cells[:2], widths[:2], strict=True)]
        numbers = [cell.rjust(width) for cell, width in zip(cells[2:], widths[2:], strict=True)]
        lines.append("  ".join([*texts, *numbers, cause]).rstrip())
    return lines


def _cells(rollout: Rollout) -> tuple[str, ...]:
    tokens = rollout.n_sampled_ids if rollout.tokens_told else "untold"
    numbers = (rollout.n_turns, rollout.n_tool_calls, tokens)
    reward = "none" if rollout.reward is None else f"{rollout.reward.score:.3f}"
    return (rollout.id, rollout.status, reward, "yes" if rollout.success else "no", *map(str, numbers))


def _short_cause(rollout: Rollout) -> str:
    """In one line."""
    cause = " ".join(rollout.cause.split())
    return cause if len(cause) <= CAUSE_WIDTH else f"{cause[: CAUSE_WIDTH - 1]}…"


def _summed(by_rollout: Mapping[str, Counter[str]], rollouts: Sequence[Rollout]) -> Counter[str]:
    return sum((by_rollout.get(rollout.id, Counter()) for rollout in rollouts), Counter[str]())


def _history_lines(breaks: Mapping[str, int], respelled: Mapping[str, int]) -> list[str]:
    """Where prompts did not go on as the calls before them ended, and what was done."""
    from agenttrain.trajectory.prefix_breaks import BREAKS_IN_WORDS, RESPELLED_IN_WORDS, in_words

    lines = []
    if breaks:
        lines.append(f"prefix breaks, each a new trajectory: {in_words(breaks, BREAKS_IN_WORDS)}")
    if respelled:
        lines.append(f"kept as sampled, where the template would write: {in_words(respelled, RESPELLED_IN_WORDS)}")
    return lines


def _row(rollout: Rollout) -> dict[str, Any]:
    return {
        "id": rollout.id,
        "task": rollout.task_id,
        "phase": rollout.phase,
        "step": rollout.step,
        "status": rollout.status,
        "cause": rollout.cause,
        "reward": None if rollout.reward is None else rollout.reward.score,
        "success": rollout.success,
        "turns": rollout.n_turns,
        "tool_calls": rollout.n_tool_calls,
        "invalid_tool_calls": rollout.n_invalid_tool_calls,
        "tokens": rollout.n_sampled_ids if rollout.tokens_told else None,
        "seconds": rollout.seconds,
    }


def _show(
    rollout: Rollout,
    fate: str,
    turns: Sequence[Turn],
    paths: Sequence[Trajectory],
    renderer: Renderer | None,
    *,
    as_json: bool,
    logprobs: bool,
) -> None:
    from dataclasses import asdict

    if as_json:
        print_json(
            {
                **_row(rollout),
                "fate": fate,
                "closed": rollout.reward.closed if rollout.reward is not None else "",
                "sandbox": asdict(rollout.isolation) if rollout.isolation is not None else None,
                "tools_run": dict(rollout.tools_run),
                "stand_ins_run": dict(rollout.stand_ins_run),
                "reward_parts": [asdict(part) for part in rollout.reward.parts] if rollout.reward is not None else [],
                "turns": [_as_plain(turn) | {"credit": _credit(rollout, turn)} for turn in turns],
                "trajectories": [_as_plain(path) for path in paths],
            }
        )
        return
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{rollout.id}: {rollout.status} {rollout.cause}".rstrip(), style="bold", markup=False)
    _show_reward(console, rollout)
    for line in _surroundings(rollout):
        console.print(line, markup=False)
    console.print(fate, markup=False)
    breaks = Counter[str](path.break_cause for path in paths if path.break_cause != "first_turn")
    for line in _history_lines(breaks, Counter[str](how for turn in turns for how in turn.respelled)):
        console.print(line, markup=False)
    for turn in turns:
        credit = _credit(rollout, turn)
        console.print(_turn_line(turn) + (f", credit {credit:+g}" if credit is not None else ""), markup=False)
    trained = fate.startswith("trained")
    indices = {turn.id: turn.index for turn in turns}
    for path in paths:
        made_of = [indices[span.turn_id] for span in path.spans]
        _show_path(console, path, made_of, renderer, trained=trained, logprobs=logprobs)
    if not paths:
        return
    kept, dropped, rest = ("green", "yellow", "grey") if _has_colours(console) else ("⟦…⟧", "⟨…⟩", "the rest")
    becomes = "is trained" if trained else "would be trained"
    console.print(f"{kept} {becomes}, {dropped} is frozen or dropped, {rest} is context", style="dim", markup=False)


def _has_colours(console: Console) -> bool:
    """False through a pipe, on a terminal that has none, and with NO_COLOR."""
    return console.color_system is not None and not console.no_color


def _as_plain(record: Turn | Trajectory) -> dict[str, Any]:
    """All of a record; of routed experts only where they are known."""
    from dataclasses import asdict

    plain, experts = asdict(record), record.routed_experts
    if experts is not None:
        del plain["routed_experts"]["data"]
        plain["routed_experts"]["end"] = experts.end
    return plain


def _show_reward(console: Console, rollout: Rollout) -> None:
    if rollout.reward is None:
        console.print("reward: none (the status gives none)")
        return
    for line in reward_lines(rollout.reward):
        console.print(line, markup=False)


def _surroundings(rollout: Rollout) -> list[str]:
    """What kept its sandbox apart, and which tools ran or were stood in for; nothing where it had neither."""
    lines = [f"sandbox: {rollout.isolation.in_words}"] if rollout.isolation is not None else []
    for label, counts in (("tools", rollout.tools_run), ("stand-ins", rollout.stand_ins_run)):
        if counts:
            lines.append(f"{label}: {', '.join(f'{name} × {n}' for name, n in sorted(counts.items()))}")
    return lines


def _credit(rollout: Rollout, turn: Turn) -> float | None:
    """What a trained turn is worth beside the score. None: no verifier credited nodes or turns of the rollout."""
    credit = rollout.reward.credit if rollout.reward is not None else None
    return credit.of(turn) if credit is not None and turn.role == "trained" else None


def _turn_line(turn: Turn) -> str:
    if turn.role == "auxiliary":
        return _other_line(turn)
    mean = sum(turn.response_logprobs) / len(turn.response_logprobs) if turn.response_logprobs else 0.0
    kept = f", which stays as sampled ({', '.join(turn.respelled)})" if turn.respelled else ""
    follows = f"extends {turn.extends}{kept}" if turn.extends else f"new trajectory: {turn.break_cause}"
    return (
        f"turn {turn.index} {turn.site.place}: {turn.role} ({turn.role_reason}), {len(turn.prompt_ids)} + "
        f"{len(turn.response_ids)} tokens, {turn.stop_reason}, mean log probability {mean:.3f}, {follows}"
    )


def _other_line(turn: Turn) -> str:
    """A call that another model answered, and under it what it said in the policy's place."""
    told = ["untold" if n is None else str(n) for n in (turn.n_prompt_tokens, turn.n_response_tokens)]
    calls = f", {turn.n_tool_calls} tool calls" if turn.n_tool_calls else ""
    invalid = f" ({turn.n_invalid_tool_calls} invalid)" if turn.n_invalid_tool_calls else ""
    head = (
        f"turn {turn.index} {turn.site.place}: {turn.role} ({turn.role_reason}), {told[0]} + {told[1]} tokens, "
        f"{turn.stop_reason}{calls}{invalid}"
    )
    return "\n".join([head, *(f"  {line}" for line in turn.said.splitlines())])


def _show_path(
    console: Console,
    path: Trajectory,
    made_of: Sequence[int],
    renderer: Renderer | None,
    *,
    trained: bool,
    logprobs: bool,
) -> None:
    """One trajectory, made of these turns; with `trained` it was in the loss, else its mask only says what could be."""
    from rich.text import Text

    n, length = sum(path.response_mask), len(path.response_ids)
    console.print(
        f"\ntrajectory {path.index} ({path.break_cause}), {_named_turns(made_of)}: prompt {len(path.prompt_ids)}, "
        f"response {length}, {'trained' if trained else 'trainable'} {n}, masked {length - n}",
        style="bold",
    )
    if (experts := path.routed_experts) is not None:
        console.print(f"routed experts: {experts.n_chosen} in {experts.n_layers} layers, of {experts.end} tokens")
    text = Text(_decoded(path.prompt_ids, renderer), style=CONTEXT)
    text.append_text(response_text(path, renderer, marked=not _has_colours(console)))
    console.print(text)
    if logprobs:
        for position, (token, kept) in enumerate(zip(path.response_ids, path.response_mask, strict=True)):
            if kept:
                version = path.weight_versions[position]
                shown = _decoded((token,), renderer)
                console.print(
                    f"{position:>5} {token:>7} {path.response_logprobs[position]:>9.4f} v{version} {shown!r}",
                    markup=False,
                )


def _named_turns(indices: Sequence[int]) -> str:
    """Example: [0, 2, 3] -> "turns 0, 2, 3"."""
    return f"turn{'' if len(indices) == 1 else 's'} {', '.join(map(str, indices))}"


def response_text(path: Trajectory, renderer: Renderer | None, *, marked: bool = False) -> Text:
    """The response with each run of equal standing in its colour, and with `marked` in its brackets."""
    from rich.text import Text

    sampled = [False] * len(path.response_ids)
    for span in path.spans:
        sampled[span.start : span.end] = [True] * (span.end - span.start)
    text, start = Text(), 0
    standing = [TRAINED if m else FROZEN if s else CONTEXT for m, s in zip(path.response_mask, sampled, strict=True)]
    for end in range(1, len(standing) + 1):
        if end == len(standing) or standing[end] != standing[start]:
            style, decoded = standing[start], _decoded(path.response_ids[start:end], renderer)
            marks = MARKS[style] if marked else ""
            text.append(f"{marks[:1]}{decoded}{marks[1:]}", style=style)
            start = end
    return text


def _decoded(ids: Sequence[int], renderer: Renderer | None) -> str:
    return renderer.decode(ids) if renderer is not None else f" {' '.join(map(str, ids))}"
