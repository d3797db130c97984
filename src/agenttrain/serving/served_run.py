"""One run of a served graph: who answers its calls, what its tools may do, how it is marked, and how it went.

Its calls are answered by whatever answers its conversation at the time; its marks, stand-ins and sandbox are those that
it began with.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from agenttrain.capture.served import ServedCalls
from agenttrain.errors import ConfigError, PromotionError
from agenttrain.graph.effects import stand_ins_run
from agenttrain.graph.intercept import use_route
from agenttrain.promotion.outcomes import Source
from agenttrain.records import CallSite, ModelCall, OwnAnswer, Reply, Role, Task
from agenttrain.sandbox.making import SandboxMaker
from agenttrain.sandbox_protocol import Sandbox
from agenttrain.sandbox_spec import SandboxSpec
from agenttrain.serving.arm import Arm, OneRun
from agenttrain.serving.arms import Arms
from agenttrain.serving.canary_trial import CanaryTrial
from agenttrain.serving_mark import Served, current_serving_is
from agenttrain.trainable import Trainable, current_sandbox_is, function_name

_log = logging.getLogger(__name__)
Outcome = Callable[[Any, Any], "bool | float | None"]
"""A run's input and last state become whether it succeeded. None: that isn't known."""


class Answers(Protocol):
    """What answers the calls of conversations: `serving.Serving`."""

    def role(self, site: CallSite, *, conversation: str) -> tuple[Role, str]: ...

    def loaded_for(self, conversation: str) -> ServedCalls | None: ...

    def calls_for(self, conversation: str) -> ServedCalls: ...


class ServedRoute:
    """protocols.Route of what is served."""

    stays_on_loop = True

    def __init__(self, answers: Answers, conversation: Callable[[], str]) -> None:
        self._answers, self._conversation = answers, conversation

    def role(self, site: CallSite) -> tuple[Role, str]:
        return self._answers.role(site, conversation=self._conversation())

    def answer(self, call: ModelCall) -> Reply:
        return self._answers.calls_for(self._conversation()).answer(call)

    async def aanswer(self, call: ModelCall) -> Reply:
        conversation = self._conversation()
        calls = self._answers.loaded_for(conversation)
        if calls is None:
            calls = await asyncio.to_thread(self._answers.calls_for, conversation)
        return await calls.aanswer(call)

    def auxiliary_began(self, call: ModelCall) -> str:
        return ""

    def auxiliary_ended(self, turn_id: str, error: BaseException | None, answer: OwnAnswer | None) -> None:
        """Nothing is recorded where a policy serves."""


def served_by(arm: Arm, conversation: str) -> Served:
    """The mark of a conversation that an arm answers."""
    return Served(run_id=arm.source.run_id, is_canary=arm.is_canary, conversation=conversation)


@dataclass(slots=True, kw_only=True)
class GraphRun:
    """graph.served.ServedRun of one conversation."""

    answers: Answers
    arms: Arms
    conversation: str
    arm: Arm
    """That the conversation is answered by as the run begins."""
    trial: CanaryTrial | None
    """The canary under way as it begins."""
    outcome: Outcome | None
    noted: Callable[[Arm], Trainable | None]
    """What is noted of the graph that an arm serves."""
    _sandbox: Sandbox | None = None
    _stack: ExitStack = field(default_factory=ExitStack)

    @property
    def holds_back(self) -> bool:
        """External tools run their stand-ins."""
        return self.arm.is_canary and self.trial is not None and self.trial.table.tools == "stand_in"

    @property
    def tags(self) -> Sequence[str]:
        return ["agenttrain:canary"] if self.arm.is_canary else []

    @property
    def metadata(self) -> Mapping[str, Any]:
        if isinstance(self.arms, OneRun):
            return {}
        return {"agenttrain_run_id": self.arm.source.run_id, "agenttrain_canary": self.arm.is_canary}

    @property
    def is_judged(self) -> bool:
        return self.trial is not None or self.outcome is not None

    @property
    def blocks(self) -> bool:
        return self.holds_back

    def prepare(self) -> None:
        """Make the sandbox that a canary's tools run in."""
        if not self.holds_back:
            return
        noted = self.noted(self.arm)
        if noted is None or noted.sandbox is None:
            return
        try:
            self._sandbox = self._stack.enter_context(self._opened(noted.sandbox, Path(noted.file).parent))
        except Exception as error:
            self.arms.refuse(self.arm, error)
            self.arm = self.arms.incumbent

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around each step of the graph."""
        with (
            use_route(ServedRoute(self.answers, lambda: self.conversation)),
            current_serving_is(self._mark),
            current_sandbox_is(self._sandbox),
            self._held_back(),
        ):
            yield

    def ended(self, input: Any, state: Any) -> None:
        """Count how it went, by the user's function or else as a run that ended."""
        if self.outcome is None:
            self._record(True, "ended")
            return
        try:
            with current_serving_is(self._mark):
                success = self.outcome(input, state)
        except Exception:
            _log.exception("outcome=%s raised, so how this run went is not known", function_name(self.outcome))
            return
        self._record(success, "told")

    def failed(self, error: Exception) -> None:
        """Count it as a failure."""
        self._record(False, "raised", why=f"{type(error).__name__}: {error}"[:500])

    def close(self) -> None:
        """Leave what it was given, on a thread: to remove a sandbox may take its time, and no conversation waits."""
        if self._sandbox is not None:
            threading.Thread(target=self._leave, name="agenttrain-leave").start()

    def _leave(self) -> None:
        try:
            self._stack.close()
        except Exception:
            _log.exception("The sandbox of conversation %s could not be removed", self.conversation)

    def _mark(self) -> Served:
        return served_by(self.arm, self.conversation)

    def _record(self, success: bool | float | None, source: Source, *, why: str = "") -> None:
        if self.trial is None:
            return
        try:
            self.trial.record(self.conversation, success, source=source, why=why)
        except PromotionError as error:
            _log.error("How conversation %s went is not counted: %s", self.conversation, error)

    @contextmanager
    def _held_back(self) -> Iterator[None]:
        if not self.holds_back:
            yield
            return
        noted = self.noted(self.arm)
        with stand_ins_run(noted.tools if noted is not None else {}):
            yield

    def _opened(self, spec: SandboxSpec, folder: Path) -> contextlib.closing[Sandbox]:
        source = self.arm.source
        maker = SandboxMaker(spec=spec, folder=folder, backend_of=source.plugins.sandbox, table=source.config.sandbox)
        task = Task(id=self.conversation, input={})
        return contextlib.closing(maker.open(task, name=f"canary-{uuid.uuid4().hex[:12]}"))


def checked_outcome(outcome: Outcome | None) -> Outcome | None:
    """The same.

    Raises:
        ConfigError: it can't be called with an input and a state, or is async.
    """
    if outcome is None:
        return None
    if not callable(outcome):
        raise ConfigError(f"attach got outcome={outcome!r}. Name a function of (input, state).")
    if inspect.iscoroutinefunction(outcome):
        raise ConfigError(f"attach got outcome={function_name(outcome)}, which is async. Give a plain function.")
    try:
        inspect.signature(outcome).bind(None, None)
    except TypeError:
        raise ConfigError(f"outcome={function_name(outcome)} can't be called with (input, state).") from None
    except ValueError:
        pass
    return outcome
