"""What Ray raises where another process failed, told as what it was."""

from __future__ import annotations

from agenttrain.errors import AgenttrainError, EngineError
from ray.exceptions import RayActorError, RayTaskError


def own_error(error: BaseException, *, where: str) -> AgenttrainError:
    """An error of agenttrain's own with its own words, without Ray's account of the way it came.

    Args:
        where: what was asked, such as "replica 0".

    Returns:
        The error that the other process raised, where it was one of agenttrain's; else an EngineError that says what
        became of `where`.
    """
    if isinstance(error, RayTaskError):
        error = error.cause
    if isinstance(error, AgenttrainError):
        return error
    if isinstance(error, RayActorError):
        return EngineError(f"The process of {where} has died: {first_line(error)} See verl/ in the run's folder.")
    return EngineError(f"What was asked of {where} failed: {type(error).__name__}: {first_line(error)}")


def first_line(error: BaseException) -> str:
    """Ray's messages go on for dozens of lines."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
