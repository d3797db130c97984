"""Two calls through each funnel of the installed langchain-core say whether the gate stands in front of all of them."""

from __future__ import annotations

import asyncio
import importlib.metadata
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, cast

from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import HumanMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult

from agenttrain.errors import GraphError, RolloutStop
from agenttrain.graph.intercept import LATER_FUNNELS, open_serving_gate, use_route
from agenttrain.records import CallSite, ModelCall, OwnAnswer, Reply, Role


class _ProbeModel(BaseChatModel):
    """A user's model that must never be reached."""

    @property
    def _llm_type(self) -> str:
        return "agenttrain-probe"

    def _generate(self, *args: Any, **kwargs: Any) -> ChatResult:
        raise _GotPast

    async def _agenerate(self, *args: Any, **kwargs: Any) -> ChatResult:
        raise _GotPast

    def _stream(self, *args: Any, **kwargs: Any) -> Iterator[ChatGenerationChunk]:
        raise _GotPast

    async def _astream(self, *args: Any, **kwargs: Any) -> AsyncIterator[ChatGenerationChunk]:
        raise _GotPast
        yield


class _GotPast(Exception):
    """A probe reached the user's model."""


class _ProbeRoute:
    """Answers every call with one word, or ends the rollout, and counts."""

    def __init__(self, stop: RolloutStop | None = None) -> None:
        self.stop = stop
        self.n_answers = 0

    def role(self, site: CallSite) -> tuple[Role, str]:
        return "frozen", "probe"

    def answer(self, call: ModelCall) -> Reply:
        self.n_answers += 1
        if self.stop is not None:
            raise self.stop
        return Reply(call_id=f"probe-{self.n_answers}", text="caught", model="probe")

    async def aanswer(self, call: ModelCall) -> Reply:
        return self.answer(call)

    def auxiliary_began(self, call: ModelCall) -> str:
        return "probe"

    def auxiliary_ended(self, turn_id: str, error: BaseException | None, answer: OwnAnswer | None) -> None:
        return None


def self_test() -> None:
    """Send two calls through each funnel of the installed langchain-core: one is answered, one ends the rollout.

    Raises:
        GraphError: naming the first funnel that reaches the user's model or holds the end back.
    """
    probes: dict[str, Callable[[BaseChatModel], Any]] = {
        "_generate_with_cache": lambda model: model.invoke("x"),
        "_agenerate_with_cache": lambda model: asyncio.run(_awaited(model.ainvoke("x"))),
        "stream": lambda model: list(model.stream("x")),
        "astream": lambda model: asyncio.run(_listed(model.astream("x"))),
    }
    if hasattr(BaseChatModel, LATER_FUNNELS[0]):
        probes[LATER_FUNNELS[0]] = lambda model: model.stream_events([HumanMessage("x")], version="v3").output
    if hasattr(BaseChatModel, LATER_FUNNELS[1]):
        probes[LATER_FUNNELS[1]] = lambda model: asyncio.run(_v3_output(model))
    with open_serving_gate():
        for name, probe in probes.items():
            _probe(name, probe, _ProbeRoute(), None)
            _probe(name, probe, _ProbeRoute(RolloutStop("probe")), RolloutStop)


def _probe(
    name: str, probe: Callable[[BaseChatModel], Any], route: _ProbeRoute, expected: type[BaseException] | None
) -> None:
    raised = _raised_by(probe, route)
    if route.n_answers == 1 and (type(raised) is expected if expected else raised is None):
        return
    seen = f"was answered {route.n_answers} times"
    if raised is not None:
        past = isinstance(raised, _GotPast)
        seen = "reached the user's model" if past else f"raised {type(raised).__name__}: {raised}"
    elif expected:
        seen = f"held back {expected.__name__}"
    version = importlib.metadata.version("langchain-core")
    raise GraphError(
        f"A call through BaseChatModel.{name} {seen} with langchain-core {version}, and the policy must answer it once "
        "or end the rollout. Install the langchain-core version of constraints.txt."
    ) from raised


def _raised_by(probe: Callable[[BaseChatModel], Any], route: _ProbeRoute) -> BaseException | None:
    """What a probe raised, run on a thread of its own, since the caller's may be running an event loop."""
    raised: list[BaseException] = []

    def send() -> None:
        try:
            with use_route(route):
                probe(_ProbeModel())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=send, name="agenttrain-self-test")
    thread.start()
    thread.join()
    return raised[0] if raised else None


async def _awaited(call: Any) -> Any:
    return await call


async def _listed(pieces: AsyncIterator[Any]) -> list[Any]:
    return [piece async for piece in pieces]


async def _v3_output(model: BaseChatModel) -> Any:
    stream = await cast(Any, model.astream_events([HumanMessage("x")], version="v3"))
    return await stream.output
