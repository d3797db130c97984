"""`agenttrain inspect RUN --turn ID` and `--token`: one model call's tokens, where they stand and what training made
of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from agenttrain.commands.arguments import print_json
from agenttrain.errors import ConfigError

if TYPE_CHECKING:
    from agenttrain.protocols import Renderer
    from agenttrain.trace_join import SampledRange


def parsed_place(token: str) -> tuple[int, int]:
    """Trajectory and position of `--token`.

    Raises:
        ConfigError: it is not two numbers.

    Example: "0:17" -> (0, 17)
    """
    trajectory, separator, position = token.partition(":")
    if not (separator and trajectory.isdecimal() and position.isdecimal()):
        raise ConfigError(
            f"--token is {token!r}; it takes TRAJECTORY:POSITION, two numbers from 0, such as 0:17. "
            "agenttrain inspect RUN ROLLOUT --logprobs lists positions."
        )
    return int(trajectory), int(position)


def show_range(found: SampledRange | None, renderer: Renderer | None, *, as_json: bool, logprobs: bool) -> None:
    """Print a call's range. None: the token asked for is context."""
    if as_json:
        print_json({"call": found.as_dict() if found is not None else None})
        return
    if found is None:
        typer.echo("context: no call sampled this token")
        return
    for line in _lines(found):
        typer.echo(line)
    if renderer is not None:
        typer.echo(repr(renderer.decode(found.turn.response_ids)))
    if logprobs:
        for line in _token_lines(found, renderer):
            typer.echo(line)


def _lines(found: SampledRange) -> list[str]:
    turn = found.turn
    traced = f"span {turn.span_id} of trace {turn.trace_id}" if turn.span_id else "not traced"
    lines = [f"turn {turn.id}: {traced}", f"node {turn.site.place}: {turn.role} ({turn.role_reason})"]
    if found.trajectory is not None:
        lines.append(
            f"trajectory {found.trajectory}, response tokens {found.start} to {found.end - 1}, sampled at weight "
            f"versions {turn.weight_versions[0]} to {turn.weight_versions[-1]}"
        )
    if found.step is None:
        return [*lines, f"not trained: {found.reason}"]
    told = f"trained in step {found.step}, which published weight version {found.weight_version}"
    return [*lines, f"{told}; staleness {found.staleness}", _advantage_text(found.advantages)]


def _advantage_text(advantages: tuple[float, ...]) -> str:
    if not advantages:
        return "advantage: the trainer did not tell"
    low, high = min(advantages), max(advantages)
    if low == high:
        return f"advantage: {low:.4f} for each token"
    return f"advantage: {low:.4f} to {high:.4f}, mean {sum(advantages) / len(advantages):.4f}"


def _token_lines(found: SampledRange, renderer: Renderer | None) -> list[str]:
    turn = found.turn
    credit = [f" {advantage:>9.4f}" for advantage in found.advantages] or [""] * len(turn.response_ids)
    sampled = zip(turn.response_ids, turn.response_logprobs, turn.weight_versions, credit, strict=True)
    return [
        f"{found.start + i:>5} {token:>7} {logprob:>9.4f}{advantage} v{version} {_text(token, renderer)}".rstrip()
        for i, (token, logprob, version, advantage) in enumerate(sampled)
    ]


def _text(token: int, renderer: Renderer | None) -> str:
    return repr(renderer.decode((token,))) if renderer is not None else ""
