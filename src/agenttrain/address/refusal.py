"""What a request can't have becomes a status and a body in the shape that OpenAI's clients read.

Source: OpenAI's API reference, "Error codes"; clients pick their exception by the status.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from agenttrain.errors import AgenttrainError, EngineError, NoRoomError

_TYPES: Final[Mapping[int, str]] = {401: "authentication_error", 429: "rate_limit_error"}


@dataclass(slots=True)
class Refusal(Exception):
    """A request that gets no answer; the text says where and what, what is accepted, and the next step."""

    message: str
    status: int = 400
    param: str | None = None
    """Of the body, the name that is at fault. None: none alone is."""
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _TYPES.get(self.status, default)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def refusal_of(error: Exception) -> Refusal:
    """What a policy raised instead of an answer.

    An error that is none of ours comes from the policy's chat template: the engine's and the parser's are wrapped
    where they are called (capture/served.py).
    """
    if isinstance(error, NoRoomError):
        return Refusal(str(error), param="messages", code="context_length_exceeded")
    if isinstance(error, EngineError):
        return Refusal(str(error), 503, code="engine_unavailable", headers={"Retry-After": "5"})
    if isinstance(error, AgenttrainError):
        return Refusal(str(error), 500)
    return Refusal(
        f"The chat template of the policy can't write this conversation: {type(error).__name__}: {error}. Send "
        "messages and tools of the form that it was trained with.",
        param="messages",
        code="template_error",
    )
