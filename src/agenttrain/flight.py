"""A rollout under way: who may still write its record, its sandbox, its world, and the human it asks.

Invariant: one caller writes the record, whoever comes first of the graph that ended and the pool that gave it up; a
world that was entered is left either way, and a sandbox closed.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from agenttrain.capture.recorder import ENDED, Recorder
from agenttrain.errors import GraphError, RolloutStop
from agenttrain.graph.effects import Effects
from agenttrain.graph.human import OnInterrupt, answer_by
from agenttrain.graph.run import Answer
from agenttrain.graph.world import Given, Setup, World, setup_text
from agenttrain.records import Isolation, RolloutRequest
from agenttrain.sandbox.making import SandboxMaker
from agenttrain.sandbox_protocol import Sandbox


@dataclass(slots=True)
class Flight:
    """One execution of the graph on one task, from take-off to its record."""

    request: RolloutRequest
    recorder: Recorder
    closed: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    world: World | None = None
    """None: the task has none, it is not entered yet, or it has been left."""
    sandbox: Sandbox | None = None
    """None: it has none, or it has been closed."""
    isolation: Isolation | None = None
    """Of its sandbox, closed or not."""
    effects: Effects | None = None
    """What its tools did. None: nothing is counted."""
    context: Any = None
    """The graph's runtime context, for the verifiers."""
    n_interrupts: int = 0

    def close(self) -> bool:
        """True for the one caller that may write the record; calls that the graph left in flight are not in it."""
        with self.lock:
            first, self.closed = not self.closed, True
        if first:
            self.recorder.close()
        return first

    def open_sandbox(self, maker: SandboxMaker | None) -> Sandbox | None:
        """A new one for the graph; closed at once if the rollout was abandoned meanwhile. None: the graph has none.

        Raises:
            AgenttrainError: none can be made.
        """
        if maker is None:
            return None
        sandbox = maker.open(self.request.task, name=self.request.rollout_id)
        self.isolation = sandbox.isolation
        with self.lock:
            abandoned = self.closed
            if not abandoned:
                self.sandbox = sandbox
        if abandoned:
            sandbox.close()
        return sandbox

    def close_sandbox(self) -> None:
        """End what runs in it and remove its files."""
        with self.lock:
            sandbox, self.sandbox = self.sandbox, None
        if sandbox is not None:
            sandbox.close()

    def enter_world(self, setup: Setup | None, input_keys: tuple[str, ...]) -> Given:
        """What the task's own world gives to its graph; it is let go at once if the rollout was abandoned meanwhile.

        Args:
            setup: the user's. None: the task has no world of its own, and nothing is given.
            input_keys: of the graph's input. Empty: LangGraph knows none.

        Raises:
            WorldError: the setup raised.
            GraphError: it gave something that no rollout of this graph can take.
        """
        if setup is None:
            return Given()
        self.world = world = World(setup, self.request.task)
        if self.closed:
            world.let_go()
        for key in world.given.state if input_keys else ():
            if key not in input_keys:
                raise GraphError(
                    f"{setup_text(setup)} yielded state {key!r}, which the graph doesn't take. "
                    f"Accepted: {', '.join(input_keys)}."
                )
        return world.given

    def leave_world(self, timeout_s: float) -> str:
        """What went wrong, in words; empty when nothing did, or when there is no world any more."""
        world, self.world = self.world, None
        return world.leave(timeout_s) if world is not None else ""

    def let_world_go(self) -> None:
        """Have it left by itself: nobody waits for what uses it."""
        world, self.world = self.world, None
        if world is not None:
            world.let_go()

    def answer(self, on_interrupt: OnInterrupt | None, max_interrupts: int) -> Answer | None:
        """What answers for a human in this rollout, within its limits. None: nobody does."""
        if on_interrupt is None:
            return None
        return answer_by(
            on_interrupt, task=self.request.task, context=self.context, go_on=lambda: self._go_on(max_interrupts)
        )

    def _go_on(self, max_interrupts: int) -> None:
        """Count an interrupt.

        Raises:
            RolloutStop: there were too many, the time is over, or the rollout was stopped.
        """
        self.n_interrupts += 1
        if self.n_interrupts > max_interrupts:
            self.recorder.stop(f"interrupts: the graph was interrupted more than {max_interrupts} times")
        if self.recorder.overrun is not None:
            self.recorder.stop(self.recorder.overrun)
        if self.recorder.stopped is not None or self.closed:
            raise RolloutStop(self.recorder.stopped or ENDED)
