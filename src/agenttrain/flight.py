"""A rollout under way: who may still write its record, its world, and the human it asks.

Invariant: one caller writes the record, whoever comes first of the graph that ended and the pool that gave it up; a
world that was entered is left either way.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from agenttrain.capture.recorder import ENDED, Recorder
from agenttrain.errors import GraphError, RolloutStop
from agenttrain.graph.human import OnInterrupt, answer_by
from agenttrain.graph.run import Answer
from agenttrain.graph.world import Given, Setup, World, setup_text
from agenttrain.records import RolloutRequest


@dataclass(slots=True)
class Flight:
    """One execution of the graph on one task, from take-off to its record."""

    request: RolloutRequest
    recorder: Recorder
    closed: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    world: World | None = None
    """None: the task has none, it is not entered yet, or it has been left."""
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
