"""What another model answered becomes the end of an auxiliary turn: its tokens and tool calls, as far as it told.

Only of a turn in the policy's place is kept what was said: an evaluation is looked through by it, as one of the policy
is by its ids, and what other models say in a rollout reaches the policy's own prompts where it matters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from agenttrain.capture.tool_calls import n_misfits
from agenttrain.records import OwnAnswer, Turn

MOST_SAID: Final = 4_000
"""Characters of an answer that a turn keeps."""


def answered_turn(
    began: Turn, error: BaseException | None, answer: OwnAnswer | None, tools: Sequence[Mapping[str, Any]]
) -> Turn:
    """The turn of a call that has ended.

    Args:
        answer: None: nothing was answered.
        tools: of the call, in OpenAI's function format; a call that doesn't fit them is invalid.
    """
    if answer is None:
        return replace(began, stop_reason="stop" if error is None else "aborted")
    n_unreadable = len(answer.invalid_tool_calls)
    return replace(
        began,
        stop_reason=answer.stop_reason if error is None else "aborted",
        said=said(answer) if began.stands_for is not None else "",
        n_prompt_tokens=answer.n_prompt_tokens,
        n_response_tokens=answer.n_response_tokens,
        n_tool_calls=len(answer.tool_calls) + n_unreadable,
        n_invalid_tool_calls=n_unreadable + n_misfits(answer.tool_calls, tools),
        parse_failed=n_unreadable > 0,
    )


def said(answer: OwnAnswer) -> str:
    """Text, then each tool call on a line of its own, at most 4,000 characters.

    Example: text "Let me see." and a call of price with {"item": "pen"} ->
    'Let me see.\\n{"name": "price", "arguments": {"item": "pen"}}'
    """
    made = [(call.name, call.arguments) for call in answer.tool_calls]
    broken = [(call.name, call.arguments) for call in answer.invalid_tool_calls]
    calls = [
        json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False, default=str)
        for name, arguments in (*made, *broken)
    ]
    whole = "\n".join(part for part in (answer.text, *calls) if part)
    return whole if len(whole) <= MOST_SAID else f"{whole[: MOST_SAID - 1]}…"
