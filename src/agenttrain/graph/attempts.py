"""LangGraph's callbacks become the node executions around a call, and how often each of them was tried.

LangGraph tells a call the attempt of its own node alone, and 1.0 tells none; a node that calls a graph or a task may be
tried again as well, with all that was made in it. Counted is what raised: a node that asked a human runs again too, and
its answer was not thrown away. And a graph that a node calls with a thread_id of its own begins a namespace anew, which
knows nothing of that node.

Source: langgraph 1.0 to 1.2, pregel/_algo.py: a task's run has the tag `graph:step:N` and its namespace as metadata.
"""

from __future__ import annotations

import contextvars
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langgraph.errors import GraphBubbleUp

_OF_TASK = "graph:step:"


@dataclass(frozen=True, slots=True)
class _Run:
    """Something under way: a node execution, or anything else that may stand between two of them."""

    parent: UUID | None
    namespace: str | None
    """None: it is no node execution."""


class Attempts(BaseCallbackHandler):
    """LangChain callback handler; one per run of a graph."""

    run_inline = True
    ignore_llm = True
    ignore_chat_model = True
    ignore_agent = True
    ignore_retriever = True
    ignore_retry = True
    ignore_custom_event = True

    def __init__(self) -> None:
        self._under_way: dict[UUID, _Run] = {}
        self._failed = Counter[str]()
        self._begun = Counter[str]()
        self._steps: dict[str, str] = {}
        self._lock = threading.Lock()

    def on_chain_start(
        self,
        serialized: dict[str, Any] | None,
        inputs: Any,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tags: Sequence[str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """A node execution begins, or anything else."""
        is_node = any(tag.startswith(_OF_TASK) for tag in tags or ())
        namespace = str((metadata or {}).get("langgraph_checkpoint_ns")) if is_node else None
        with self._lock:
            self._under_way[run_id] = _Run(parent_run_id, namespace)
            if namespace is not None and metadata is not None:
                self._begun[namespace] += 1
                path = path_text(metadata.get("langgraph_path"))
                self._steps[namespace] = f"{metadata.get('langgraph_step')}/{path}"

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """It ended."""
        with self._lock:
            self._under_way.pop(run_id, None)

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """It raised; LangGraph's own signals, such as an interrupt, are no failure."""
        with self._lock:
            run = self._under_way.pop(run_id, None)
            if run is not None and run.namespace is not None and not isinstance(error, GraphBubbleUp):
                self._failed[run.namespace] += 1

    def namespaces(self, run_id: UUID | None) -> list[str]:
        """Of the node executions around a run, outermost first; one that another continues is left out.

        Example: node worker calls a graph of its own thread, whose node model calls -> ["worker:a1", "model:b2"]
        """
        found: list[str] = []
        with self._lock:
            while run_id is not None and (run := self._under_way.get(run_id)) is not None:
                outer = run.namespace
                if outer is not None and not (found and f"{found[0]}|".startswith(f"{outer}|")):
                    found.insert(0, outer)
                run_id = run.parent
        return found

    def nodes(self) -> set[str]:
        """Names of the nodes that are under way. Example: namespace "team:a1|model:b2" -> "model" """
        with self._lock:
            namespaces = [run.namespace for run in self._under_way.values() if run.namespace is not None]
        return {namespace.rpartition("|")[2].partition(":")[0] for namespace in namespaces}

    def at(self, checkpoint_ns: str) -> tuple[int, ...]:
        """The attempt, from 1, of each part of a namespace. Empty: nothing was tried again.

        Example: team raised once -> "team:a1|model:b2" gives (2, 1)
        """
        with self._lock:
            around = accumulate(checkpoint_ns.split("|"), lambda outer, inner: f"{outer}|{inner}")
            found = tuple(1 + self._failed[namespace] for namespace in around) if self._failed else ()
        return found if any(attempt > 1 for attempt in found) else ()

    def begun(self, checkpoint_ns: str) -> int:
        """How often a node execution began: again when it is tried again, and when a human has answered it."""
        with self._lock:
            return self._begun[checkpoint_ns]

    def place(self, checkpoint_ns: str) -> str:
        """A namespace with superstep and path in place of the ids: the same in every run of one graph on one input.

        Example: "team:a1|model:b2" -> "team@1/__pregel_pull/team|model@2/__pregel_pull/model"
        """
        parts, found = checkpoint_ns.split("|"), []
        with self._lock:
            for part, namespace in zip(parts, accumulate(parts, lambda outer, inner: f"{outer}|{inner}"), strict=True):
                found.append(f"{part.partition(':')[0]}@{self._steps.get(namespace, '')}")
        return "|".join(found)


def path_text(path: Any) -> str:
    """LangGraph's task path with "/" between its parts: the same in every run of one graph."""
    if isinstance(path, (tuple, list)):
        return "/".join(path_text(part) for part in path)
    return "" if path is None else str(path)


_attempts: contextvars.ContextVar[Attempts | None] = contextvars.ContextVar("agenttrain_attempts", default=None)
_open: dict[int, Attempts] = {}
"""Of the graphs that run in this process, by their id."""
_lock = threading.Lock()


@contextmanager
def counted_attempts() -> Iterator[Attempts]:
    """Count in a block, with what must stand among a graph's callbacks."""
    attempts = Attempts()
    token = _attempts.set(attempts)
    with _lock:
        _open[id(attempts)] = attempts
    try:
        yield attempts
    finally:
        with _lock:
            del _open[id(attempts)]
        _attempts.reset(token)


def running_nodes() -> set[str]:
    """Names of the nodes that are under way in this process, in whatever run."""
    with _lock:
        runs = list(_open.values())
    return {name for attempts in runs for name in attempts.nodes()}


def attempts_at(checkpoint_ns: str) -> tuple[int, ...]:
    """The attempt of each part of a namespace, in the run that this is called in. Empty: nothing was tried again."""
    attempts = _attempts.get()
    return attempts.at(checkpoint_ns) if attempts is not None else ()


def namespaces_around(run_id: UUID | None) -> list[str]:
    """Of the node executions around a run, outermost first. Empty: nothing is known of it."""
    attempts = _attempts.get()
    return attempts.namespaces(run_id) if attempts is not None else []


def begun_at(checkpoint_ns: str) -> int:
    """How often a node execution began in the run that this is called in. 0: nothing is known of it."""
    attempts = _attempts.get()
    return attempts.begun(checkpoint_ns) if attempts is not None else 0


def place_at(checkpoint_ns: str) -> str:
    """A namespace of the run that this is called in as it is in every run; as it is where nothing is known of it."""
    attempts = _attempts.get()
    return attempts.place(checkpoint_ns) if attempts is not None else checkpoint_ns
