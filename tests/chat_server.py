"""A real OpenAI-compatible HTTP server in this process, whose answers a script decides."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

Script = Callable[[Mapping[str, Any]], Mapping[str, Any] | int]
"""A request's JSON becomes the assistant's message, or the status that refuses it."""
N_PROMPT, N_RESPONSE = 11, 3
"""Tokens that every call tells of."""


@dataclass
class ChatServer:
    """An address, and what it was asked."""

    script: Script
    models: list[str]
    key: str | None = None
    """None: any key, or none, will do."""
    address: str = ""
    requests: list[Mapping[str, Any]] = field(default_factory=list)
    """Bodies of the chat completions that were asked, in the order that they came."""

    @property
    def asked(self) -> list[Mapping[str, Any]]:
        """The same without the trial call before a run."""
        return [body for body in self.requests if body["messages"][0]["content"] != "Answer with the word yes."]

    async def list_models(self, request: Request) -> Response:
        if self._refuses(request):
            return _error(401)
        return JSONResponse({"object": "list", "data": [{"id": name, "object": "model"} for name in self.models]})

    async def complete(self, request: Request) -> Response:
        if self._refuses(request):
            return _error(401)
        body = await request.json()
        self.requests.append(body)
        said = self.script(body)
        if isinstance(said, int):
            return _error(said)
        return StreamingResponse(_events(body, said)) if body.get("stream") else JSONResponse(_completion(body, said))

    def _refuses(self, request: Request) -> bool:
        return self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}"


@contextmanager
def serve(script: Script, *, models: tuple[str, ...] = ("small-1",), key: str | None = None) -> Iterator[ChatServer]:
    """Listen on a free port of this machine for a block."""
    chat = ChatServer(script=script, models=list(models), key=key)
    routes = [
        Route("/v1/models", chat.list_models),
        Route("/v1/chat/completions", chat.complete, methods=["POST"]),
    ]
    server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), port=0, log_level="error", ws="none"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started and thread.is_alive():
            thread.join(0.01)
        chat.address = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
        yield chat
    finally:
        server.should_exit = True
        thread.join()


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """A message that calls one tool."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"content": None, "tool_calls": [{"id": "call-1", "type": "function", "function": function}]}


def _error(status: int) -> Response:
    return JSONResponse({"error": {"message": f"refused with {status}", "type": "refused"}}, status_code=status)


def _usage() -> dict[str, int]:
    return {"prompt_tokens": N_PROMPT, "completion_tokens": N_RESPONSE, "total_tokens": N_PROMPT + N_RESPONSE}


def _head(body: Mapping[str, Any], kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "object": kind, "created": 1, "model": body["model"]}


def _finish(said: Mapping[str, Any]) -> str:
    return str(said.get("finish_reason") or ("tool_calls" if said.get("tool_calls") else "stop"))


def _completion(body: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    message = {"role": "assistant", **{k: v for k, v in said.items() if k != "finish_reason"}}
    choice = {"index": 0, "message": message, "finish_reason": _finish(said)}
    return {**_head(body, "chat.completion"), "choices": [choice], "usage": _usage()}


def _events(body: Mapping[str, Any], said: Mapping[str, Any]) -> Iterator[str]:
    """Words one by one, then tool calls, then why it ended, then the usage where it is asked for."""
    words = str(said["content"]).split(" ") if said.get("content") else []
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": word if not i else f" {word}"} for i, word in enumerate(words)]
    deltas += [{"tool_calls": [{"index": i, **each}]} for i, each in enumerate(said.get("tool_calls") or ())]
    head = _head(body, "chat.completion.chunk")
    for delta in deltas:
        yield _event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    yield _event({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": _finish(said)}]})
    if (body.get("stream_options") or {}).get("include_usage"):
        yield _event({**head, "choices": [], "usage": _usage()})
    yield "data: [DONE]\n\n"


def _event(value: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"
