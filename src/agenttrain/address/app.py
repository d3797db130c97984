"""The paths of an address, and the policy behind them: what is asked over HTTP becomes calls that the engine batches.

Invariants: a request whose client has gone is ended in the engine; whatever is refused has OpenAI's error shape; at
most `most_open` requests are in work, and one more is told to come again. Knows nothing of sockets and signals.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from agenttrain import telemetry
from agenttrain.address.completion import as_json, chunks, completion, events
from agenttrain.address.conversation import HEADER, conversation_of, plain_id
from agenttrain.address.refusal import Refusal, refusal_of
from agenttrain.address.request import Asked, read_body, read_request
from agenttrain.errors import AgenttrainError, PromotionError
from agenttrain.records import ModelCall, Reply
from agenttrain.serving.attached import Serving
from agenttrain.serving_mark import Served, current_serving_is

_log = logging.getLogger(__name__)
T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]

CANARY: Final = "X-Canary"
"""Header of an answer that a canary gave: what its tool calls do may have to be held back."""
MOST_BYTES: Final = 16 * 2**20
"""Of a request's body."""
GONE: Final = 499
"""Status of what nobody reads any more; it never leaves the server."""
N_THREADS: Final = 8
"""In which the ledger is read and outcomes are counted; answers need none. As many others wait for loading policies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What whoever opens an address decides."""

    name: str
    """Of the model, in /v1/models."""
    key: str | None = None
    """What clients send as their API key. None: everybody is answered."""
    strict_model: bool = False
    """Refuse other model names."""
    most_open: int = 256
    """Requests in work at one time."""


class Address:
    """One policy's paths. Used by one event loop."""

    def __init__(self, serving: Serving, settings: Settings) -> None:
        """Take what answers; it is loaded by `load`, or by the first request."""
        self._serving, self._settings = serving, settings
        self._created = int(time.time())
        self._threads = ThreadPoolExecutor(N_THREADS, thread_name_prefix="agenttrain-address")
        self._loads = ThreadPoolExecutor(N_THREADS, thread_name_prefix="agenttrain-load")
        self._cut = asyncio.Event()
        self._n_open = 0
        self._is_loaded = False

    def app(self) -> Starlette:
        """The paths, for any ASGI server."""
        keyed = self._keyed
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/v1/chat/completions", keyed(self._chat), methods=["POST"]),
                Route("/v1/models", keyed(self._models)),
                Route("/v1/models/{name:path}", keyed(self._model)),
                Route("/v1/outcomes", keyed(self._outcomes), methods=["POST"]),
                Route("/v1/serving", keyed(self._described)),
            ],
            exception_handlers={
                Refusal: _refused,
                HTTPException: _no_path,
                ClientDisconnect: _gone_away,
                Exception: _failed,
            },
        )

    async def load(self) -> None:
        """Load the policy.

        Raises:
            AgenttrainError: it can't be loaded.
        """
        await self._in_thread(self._serving.calls, pool=self._loads)
        self._is_loaded = True

    def cut(self) -> None:
        """End every request in work, and every later one, by a refusal."""
        self._cut.set()

    def close(self) -> None:
        """Leave the threads; what they load is unloaded by `Serving.close`."""
        for pool in (self._threads, self._loads):
            pool.shutdown(wait=False, cancel_futures=True)

    # Paths

    async def _chat(self, request: Request) -> Response:
        body = await _body_of(request)
        asked = read_request(body)
        self._check_model(body.get("model"))
        id = conversation_of(request.headers.get(HEADER), body, asked.call.messages)
        headers = {HEADER: id} | _without_effect(asked)
        with self._place():
            answer = self._answer(asked.call, id, dict(request.headers))
            answered = await self._unless_gone(request, answer)
        if answered is None:
            return Response(status_code=GONE)
        reply, served = answered
        if served.is_canary:
            headers[CANARY] = "true"
        if not asked.stream:
            return _json(completion(reply), headers=headers)
        pieces = chunks(reply, include_usage=asked.include_usage)
        return StreamingResponse(
            _asynchronous(events(pieces)),
            media_type="text/event-stream",
            headers=headers | {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )

    async def _models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._model_card(self._settings.name)]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._check_model(name)
        return _json(self._model_card(name))

    async def _outcomes(self, request: Request) -> Response:
        conversation, success, why = _outcome(await _body_of(request))
        counts = await self._in_thread(self._serving.record_outcome, conversation, success, why=why)
        return _json({"conversation": conversation, "counts": counts})

    async def _described(self, request: Request) -> Response:
        return _json(await self._in_thread(self._serving.describe))

    async def _health(self, request: Request) -> Response:
        """ready, loading or failed, for whoever starts this server anew; it asks the engine.

        A policy that was promoted since is loaded first; conversations of the one before are answered meanwhile.
        """
        if not self._is_loaded:
            return _json({"status": "loading"}, status=503)
        try:
            calls = self._serving.loaded
            if calls is None:
                calls = await self._in_thread(self._serving.calls, pool=self._loads)
            await self._in_thread(calls.check)
        except AgenttrainError as error:
            return _json({"status": "failed", "error": str(error)}, status=503)
        return _json({"status": "ready"})

    # What they share

    async def _answer(self, call: ModelCall, conversation: str, headers: Mapping[str, str]) -> tuple[Reply, Served]:
        """The answer, and which policy gave it. One that fails counts for its arm while a canary is tried."""
        try:
            found = await self._in_thread(self._serving.answering_loaded, conversation)
            if found is None:
                found = await self._in_thread(self._serving.answering, conversation, pool=self._loads)
            calls, served = found
        except Exception as error:
            raise refusal_of(error) from error
        try:
            with current_serving_is(lambda: served), telemetry.continued_from(headers):
                return await calls.aanswer(call), served
        except Exception as error:  # of a chat template or a plugin
            refusal = refusal_of(error)
            if refusal.status >= 500:
                await self._in_thread(self._count_failure, conversation, type(error).__name__)
            raise refusal from error

    def _count_failure(self, conversation: str, why: str) -> None:
        """What can't be counted is no other answer to whoever asked."""
        try:
            self._serving.record_failure(conversation, why=why)
        except PromotionError as error:
            _log.error("That conversation %s failed is not counted: %s", conversation, error)

    async def _unless_gone(self, request: Request, answer: Coroutine[Any, Any, T]) -> T | None:
        """What is awaited. None: the client has gone; then, as on a cut, the engine is told to end the call."""
        answered = asyncio.ensure_future(answer)
        gone = asyncio.ensure_future(_gone(request))
        cut = asyncio.ensure_future(self._cut.wait())
        tasks: list[asyncio.Future[Any]] = [answered, gone, cut]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if answered.done():
                return answered.result()
            if gone.done():
                return None
            raise Refusal("The server ends. Ask again in a while.", 503, code="ending", headers={"Retry-After": "5"})
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @contextmanager
    def _place(self) -> Iterator[None]:
        """Count a request among those in work."""
        if self._n_open >= self._settings.most_open:
            raise Refusal(
                f"{self._n_open} requests are in work, and no more are taken at one time. Ask again in a while, or let "
                "agenttrain serve take more by --most-open.",
                429,
                code="rate_limit_exceeded",
                headers={"Retry-After": "1"},
            )
        self._n_open += 1
        try:
            yield
        finally:
            self._n_open -= 1

    async def _in_thread(
        self, function: Callable[..., T], *args: Any, pool: ThreadPoolExecutor | None = None, **kwargs: Any
    ) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(pool or self._threads, lambda: function(*args, **kwargs))

    def _keyed(self, handler: Handler) -> Handler:
        async def checked(request: Request) -> Response:
            self._check_key(request.headers.get("Authorization", ""))
            return await handler(request)

        return checked

    def _check_key(self, authorization: str) -> None:
        key = self._settings.key
        sent = authorization.removeprefix("Bearer ")
        if key is not None and not hmac.compare_digest(sent.encode(), key.encode()):
            raise Refusal("The API key is not this server's. Send it as OPENAI_API_KEY.", 401, code="invalid_api_key")

    def _check_model(self, name: object) -> None:
        if self._settings.strict_model and name != self._settings.name:
            message = f"The model {name!r} is not served here; {self._settings.name!r} is. Name it in the client."
            raise Refusal(message, 404, param="model", code="model_not_found")

    def _model_card(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": "agenttrain"}


async def _body_of(request: Request) -> dict[str, Any]:
    kind = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a page of another site can send any other without asking
        raise Refusal(f"Content-Type is {kind or 'missing'}; it has to be application/json.", 415)
    parts, n_bytes = [], 0
    async for part in request.stream():
        parts.append(part)
        n_bytes += len(part)
        if n_bytes > MOST_BYTES:
            raise Refusal(f"The body has more than {MOST_BYTES} bytes. Shorten the conversation.", 413)
    return read_body(b"".join(parts))


def _outcome(body: Mapping[str, Any]) -> tuple[str, bool | float | None, str]:
    """Conversation, success and why."""
    conversation, success, why = body.get("conversation"), body.get("success", ""), body.get("why", "")
    if not isinstance(conversation, str) or not conversation:
        raise Refusal(f"conversation is no id. Send what the answers had as {HEADER}.", param="conversation")
    if success is not None and not (isinstance(success, bool | int | float) and math.isfinite(success)):
        raise Refusal("success is no true, false, number or null.", param="success")
    if not isinstance(why, str):
        raise Refusal("why is no text.", param="why")
    return plain_id(conversation), success, why


async def _gone(request: Request) -> None:
    """Wait until the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _without_effect(asked: Asked) -> dict[str, str]:
    if not asked.without_effect:
        return {}
    return {"X-Without-Effect": json.dumps(", ".join(asked.without_effect))[1:-1]}


async def _asynchronous(parts: Iterator[bytes]) -> Any:
    for part in parts:
        yield part


def _json(value: Mapping[str, Any], *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(as_json(dict(value)), status, headers, "application/json")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return _json(error.body, status=error.status, headers=error.headers)


async def _no_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    hint = " ChatOpenAI(use_responses_api=False) asks for chat completions." if "responses" in request.url.path else ""
    message = (
        f"{request.method} {request.url.path} is not answered here. Paths: POST /v1/chat/completions, GET /v1/models, "
        f"POST /v1/outcomes, GET /v1/serving, GET /health.{hint}"
    )
    return await _refused(request, Refusal(message, error.status_code))


async def _gone_away(request: Request, error: Exception) -> Response:
    return Response(status_code=GONE)


async def _failed(request: Request, error: Exception) -> Response:
    return await _refused(request, Refusal("The server failed; its log says how.", 500))
