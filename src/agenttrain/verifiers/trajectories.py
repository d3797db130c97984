"""The tool calls of a last state and those of the reference become 1 or 0, by agentevals' matchers.

What counts as a match is theirs; here both sides are only brought into one form. agentevals is optional: the extra
`evals`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from agenttrain.errors import ConfigError
from agenttrain.records import Task
from agenttrain.verifiers.equality import shown
from agenttrain.verifiers.final_state import Reference, messages_of, of_task, role_of, text_of

Mode = Literal["strict", "unordered", "subset", "superset"]
Message = dict[str, Any]


def tool_trajectory(
    *,
    mode: Mode = "strict",
    tool_args: Literal["exact", "ignore", "subset", "superset"] = "exact",
    overrides: Mapping[str, Any] | None = None,
    reference: Reference = of_task,
) -> Callable[[Task, Any], dict[str, Any]]:
    """A verifier: 1 where the agent called the tools that the reference calls.

    The reference is a list of calls, {"name": …, "args": {…}}, each a turn of its own, and a list of calls within it
    where one turn makes several; then only turns with calls are compared. Or it is a list of messages (or {"messages":
    […]}), in OpenAI's format or LangChain's; then "strict" compares every message's role too, as agentevals does.
    A call that the agent wrote and that can't be read is a wrong one, except under "superset".

    Args:
        mode: strict: the same calls in the same turns. unordered: the same calls in any order. subset: no call but
            those of the reference. superset: all calls of the reference, and maybe others.
        tool_args: how the arguments of two calls are compared.
        overrides: tool to how its arguments are: a mode, a list of keys that count, or a function of the agent's and
            the reference's arguments.
        reference: gives what is expected of a task. Default: its reference.

    Raises:
        ConfigError: agentevals is not installed, or doesn't know the mode.

    Example: reference [{"name": "search", "args": {"q": "A41"}}], mode="superset", tool_args="ignore"
    """
    matches = _matcher(mode, tool_args, overrides)

    def tool_trajectory(task: Task, state: Any) -> dict[str, Any]:
        expected, is_shorthand = _expected(task.id, reference(task))
        made, unreadable = _made(messages_of(state), only_calls=is_shorthand)
        if unreadable and mode != "superset":
            return {"score": 0.0, "comment": f"a call that can't be read: {unreadable}"}
        right = bool(matches(outputs=made, reference_outputs=expected)["score"])
        return {"score": float(right), "comment": f"called {_in_words(made)}; expected {_in_words(expected)}"}

    return tool_trajectory


def _matcher(mode: str, tool_args: str, overrides: Mapping[str, Any] | None) -> Callable[..., Any]:
    try:
        from agentevals.trajectory.match import create_trajectory_match_evaluator
    except ImportError as error:
        raise ConfigError(
            f"tool_trajectory needs agentevals, which can't be imported here ({error}). Install it: "
            "pip install 'agenttrain[evals]'"
        ) from error
    given = dict(overrides) if overrides is not None else None
    try:
        return create_trajectory_match_evaluator(  # type: ignore[no-any-return]
            trajectory_match_mode=mode, tool_args_match_mode=tool_args, tool_args_match_overrides=given
        )
    except ValueError as error:
        raise ConfigError(f"tool_trajectory got mode={mode!r} and tool_args={tool_args!r}: {error}") from error


def _expected(task_id: str, reference: Any) -> tuple[list[Message], bool]:
    """(messages, whether the reference was calls alone).

    Raises:
        ValueError: it is neither, which is no fault of the policy.
    """
    given = reference.get("messages") if isinstance(reference, Mapping) else reference
    if isinstance(given, list | tuple) and all(map(_is_step, given)):
        steps = [step if isinstance(step, list | tuple) else [step] for step in given]
        return [_message("assistant", "", [_expected_call(call) for call in step]) for step in steps], True
    if isinstance(given, list | tuple) and all(map(role_of, given)):
        made, unreadable = _made(given, only_calls=False)
        if not unreadable:
            return made, False
    raise ValueError(
        f"the reference of task {task_id!r} is {str(reference)[:200]}, and a list of calls "
        '{"name": …, "args": {…}} or of messages is expected'
    )


def _expected_call(call: Mapping[str, Any]) -> tuple[str, str]:
    return call["name"], json.dumps(call.get("args", {}))


def _is_step(value: Any) -> bool:
    """A call, or several of one turn."""
    if isinstance(value, list | tuple):
        return bool(value) and all(map(_is_step, value))
    return isinstance(value, Mapping) and isinstance(value.get("name"), str) and "role" not in value


def _made(messages: Sequence[Any], *, only_calls: bool) -> tuple[list[Message], str]:
    """(messages in OpenAI's format, the first call that can't be read)."""
    made, unreadable = [], ""
    for message in messages:
        calls, bad = _calls(message)
        unreadable = unreadable or bad
        if calls or not only_calls:
            made.append(_message(_role(message), text_of(message), calls))
    return made, unreadable


def _role(message: Any) -> str:
    """One that agentevals takes; of messages that are neither of these, such as a removed one, "system"."""
    role = role_of(message)
    return role if role in ("user", "assistant", "tool") else "system"


def _message(role: str, text: str, calls: Sequence[tuple[str, str]]) -> Message:
    """agentevals 0.0.9 takes "tool_calls": [] for a message with calls: that key stands only where there are some."""
    message: Message = {"role": role, "content": text}
    if role == "tool":
        message["tool_call_id"] = ""
    if calls:
        message["tool_calls"] = [
            {"id": str(n), "type": "function", "function": {"name": name, "arguments": args}}
            for n, (name, args) in enumerate(calls)
        ]
    return message


def _calls(message: Any) -> tuple[list[tuple[str, str]], str]:
    """([(name, arguments)] of a message, the first that can't be read)."""
    bad = _field(message, "invalid_tool_calls") or ()
    unreadable = [shown(_field(call, "name") or _field(call, "args") or call) for call in bad]
    calls = []
    for call in _field(message, "tool_calls") or ():
        read = _read(call)
        if read is None:
            unreadable.append(shown(call))
        else:
            calls.append(read)
    return calls, next(iter(unreadable), "")


def _read(call: Any) -> tuple[str, str] | None:
    """(name, arguments as JSON) of a call as LangChain or OpenAI write it. None: it can't be read."""
    function = _field(call, "function")
    name = _field(function if function is not None else call, "name")
    args = _field(call, "args") if function is None else _field(function, "arguments")
    try:
        args = json.loads(args) if isinstance(args, str) else args
        return (name, json.dumps(args, default=repr)) if isinstance(name, str) and isinstance(args, dict) else None
    except (TypeError, ValueError, RecursionError):
        return None


def _field(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, Mapping) else getattr(value, key, None)


def _in_words(messages: Sequence[Message]) -> str:
    """Example: "search({"q": "A41"}), refund({})"."""
    calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    return ", ".join(f"{call['name']}({call['arguments']})"[:120] for call in calls[:20]) or "nothing"
