"""A task and its last state become LangSmith's Run and Example, and one of its evaluators a call.

What an evaluator that asks for `run` or `example` sees is what `langsmith.evaluate` would show it of this rollout. Of
its trace nothing is known here: the run has no children.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from agenttrain.records import Task


def run_and_example(task: Task, state: Any) -> dict[str, Any]:
    """`run`, `example` and `attachments`, by name; what is no mapping stands under "output".

    Example: reference "17" -> example.outputs == {"output": "17"}
    """
    from langsmith.schemas import Example, Run

    id, now = uuid4(), datetime.now(UTC)
    inputs = dict(task.input)
    run = Run(
        id=id, trace_id=id, name=task.id, run_type="chain", start_time=now, end_time=now, inputs=inputs,
        outputs=_outputs(state),
    )  # fmt: skip
    example = Example(
        id=uuid4(), inputs=inputs, outputs=_outputs(task.reference), metadata=dict(task.metadata), dataset_id=uuid4()
    )
    return {"run": run, "example": example, "attachments": {}}


def called(verifier: Any) -> Callable[..., Any]:
    """What is called of a verifier: of a LangSmith RunEvaluator the method that fits how it was written."""
    if not hasattr(verifier, "evaluate_run"):
        return verifier  # type: ignore[no-any-return]
    return verifier.aevaluate_run if getattr(verifier, "is_async", False) else verifier.evaluate_run  # type: ignore[no-any-return]


def _outputs(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {"output": value}
