"""A user's `on_interrupt=` becomes the answers to a graph that waits for a human.

Invariant: what it raises is told as its own; only PolicyFailure passes as it is. Knows nothing of how a graph goes on.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from langgraph.types import Interrupt

from agenttrain.error_place import place_of_error
from agenttrain.errors import PolicyFailure, WorldError
from agenttrain.graph.named import call_with, check_call
from agenttrain.graph.run import Answer
from agenttrain.records import Task
from agenttrain.trainable import function_name

ASKED = ("task", "interrupt", "state", "context")
"""What an on_interrupt may ask for by name."""
POSITIONAL = ("task", "interrupt")
OnInterrupt = Callable[..., Any]


def answer_by(on_interrupt: OnInterrupt, *, task: Task, context: Any, go_on: Callable[[], None]) -> Answer:
    """What answers for the human in one rollout.

    Args:
        context: the graph's runtime context.
        go_on: called each time the graph was interrupted, at breakpoints too; raises where the rollout has to end.
    """
    what = on_interrupt_text(on_interrupt)

    def answer(interrupts: Sequence[Interrupt], state: Any) -> dict[str, Any]:
        go_on()
        answers = {}
        for interrupt in interrupts:
            values = {"task": task, "interrupt": interrupt, "state": state, "context": context}
            call = call_with(on_interrupt, values, positional=POSITIONAL, what=what)
            with _attributed(what, task):
                said = call()
            answers[interrupt.id] = _awaited(said, what, task) if inspect.isawaitable(said) else said
        return answers

    return answer


def check_on_interrupt(on_interrupt: OnInterrupt) -> None:
    """Refuse, before anything runs, one whose arguments can't be filled.

    Raises:
        GraphError: naming the argument.
    """
    check_call(on_interrupt, ASKED, positional=POSITIONAL, what=on_interrupt_text(on_interrupt))


def on_interrupt_text(on_interrupt: OnInterrupt) -> str:
    """As the user wrote it: `on_interrupt=human`."""
    return f"on_interrupt={function_name(on_interrupt)}"


async def _awaited(said: Awaitable[Any], what: str, task: Task) -> Any:
    with _attributed(what, task):
        return await said


@contextmanager
def _attributed(what: str, task: Task) -> Iterator[None]:
    try:
        yield
    except (PolicyFailure, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise WorldError(
            f"{what} raised {type(error).__name__} on task {task.id!r}: {error}{place_of_error(error)}. Handle it "
            "there; raise PolicyFailure when the policy itself did wrong."
        ) from error
