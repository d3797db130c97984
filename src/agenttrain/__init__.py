"""agenttrain: reinforcement-learning training for the LangGraph agents you already have.

The map of the flow, each stage a package that takes and returns `records`:

    graph.py ─ graph/ ─ capture/ ─ trajectory/ ─ reward/ ─ sample/ ─ trainer/ ─ promotion/
               load      a Turn     turns to      verifiers  to       to an      better than
               and gate  per call   token paths   and status Samples  update     the baseline?

`rollout.py` puts the stages together for one task, `pool.py` runs many at once, `fit.py` is the whole run. What it has
trained is let through or kept out by `gate/`, answers a user's graph by `serving/` and other clients by `address/`, and
becomes a folder for others by `export/`.
`records.py` holds the nouns, `protocols.py` the roles others may play, `hookspecs.py` the plugin points.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from agenttrain.part import Part
from agenttrain.sandbox_spec import SandboxLimits, SandboxSpec
from agenttrain.serving_mark import Served, current_serving
from agenttrain.tool_spec import External
from agenttrain.trainable import Limits, current_sandbox, current_task, trainable

if TYPE_CHECKING:
    from agenttrain.errors import PolicyFailure
    from agenttrain.graph.chat_model import chat_model
    from agenttrain.graph.idempotency import idempotency_key
    from agenttrain.markers import hookimpl
    from agenttrain.records import Task
    from agenttrain.sandbox.opening import open_sandbox
    from agenttrain.sandbox_protocol import SandboxRefusal
    from agenttrain.serving.attached import attach, record_outcome, use

__version__ = "0.1.0"
__all__ = [
    "External",
    "Limits",
    "Part",
    "PolicyFailure",
    "SandboxLimits",
    "SandboxRefusal",
    "SandboxSpec",
    "Served",
    "Task",
    "attach",
    "chat_model",
    "current_sandbox",
    "current_serving",
    "current_task",
    "hookimpl",
    "idempotency_key",
    "open_sandbox",
    "record_outcome",
    "trainable",
    "use",
]

# `trainable` is taken above, since the import of its module binds that name to the module here.
_homes = {
    "PolicyFailure": "agenttrain.errors",
    "SandboxRefusal": "agenttrain.sandbox_protocol",
    "Task": "agenttrain.records",
    "attach": "agenttrain.serving.attached",
    "chat_model": "agenttrain.graph.chat_model",
    "hookimpl": "agenttrain.markers",
    "idempotency_key": "agenttrain.graph.idempotency",
    "open_sandbox": "agenttrain.sandbox.opening",
    "record_outcome": "agenttrain.serving.attached",
    "use": "agenttrain.serving.attached",
}


def __getattr__(name: str) -> Any:
    """Load a public name from its module at first use (PEP 562)."""
    if name not in _homes:
        raise AttributeError(f"module 'agenttrain' has no attribute {name!r}. Public names: {', '.join(__all__)}.")
    value = getattr(importlib.import_module(_homes[name]), name)
    globals()[name] = value
    return value
