"""Servers that a real one never is: small HTTP servers that answer oddly. Each ends in one clear error."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch
from agenttrain.errors import EngineError
from agenttrain.protocols import AdapterWeights

from agenttrain_sglang.weights import SPOILED, Link, ServerSpoiled, WeightsRefused, push, push_adapter
from agenttrain_sglang.weights.choice import Choice, open_link

Answer = tuple[int, Any]
WEIGHTS = [("model.norm.weight", torch.ones(4)), ("lm_head.weight", torch.ones(4, 4))]


class OddServer:
    """Agrees to everything that `odd` does not answer, and remembers what it was told."""

    def __init__(self, odd: dict[str, Answer | None]) -> None:
        self.odd, self.paths, self.version = odd, list[str](), "what it was"
        self.bodies: list[Any] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.answer(self)

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever)
        self._thread.start()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers.get("Content-Length") or 0)) or b"{}")
        self.paths.append(handler.path)
        self.bodies.append(body)
        self.version = body.get("new_version") or body.get("weight_version") or self.version
        odd = self.odd.get(handler.path, (200, {"success": True, "weight_version": self.version}))
        if odd is None:
            handler.close_connection = True
            return
        text = odd[1] if isinstance(odd[1], bytes) else json.dumps(odd[1]).encode()
        handler.send_response(odd[0])
        handler.send_header("Content-Length", str(len(text)))
        handler.end_headers()
        handler.wfile.write(text)

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


@pytest.fixture
def odd() -> Iterator[Callable[..., OddServer]]:
    """Path to its odd answer; None: the connection is closed without one."""
    servers: list[OddServer] = []

    def start(answers: dict[str, Answer | None]) -> OddServer:
        servers.append(OddServer(answers))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def link_to(address: str, *, name: Any = "tensor", timeout_s: float = 5.0) -> Link:
    choice = Choice(name=name, backend="gloo", dtype=None, n_ranks=2, can_prove=True, why="as tested")
    return open_link(choice, address=address, timeout_s=timeout_s)


def outcome(link: Link, **how: Any) -> Any:
    return push([link], WEIGHTS, "agenttrain-run-7", bucket_mib=0.00003, **how)[link.address]


def test_what_a_server_is_told(odd: Any) -> None:
    """A copy for each rank; the cache is flushed and the version told with the last bucket only."""
    server = odd({})
    pushed = outcome(link_to(server.address))
    assert server.paths == [
        "/pause_generation",
        "/begin_weight_update",
        "/update_weights_from_tensor",
        "/update_weights_from_tensor",
        "/end_weight_update",
        "/model_info",
        "/weights_checker",
        "/continue_generation",
    ]
    first, last = server.bodies[2:4]
    assert (len(first["serialized_named_tensors"]), first["flush_cache"], first["weight_version"]) == (2, False, None)
    assert (last["flush_cache"], last["weight_version"]) == (True, "agenttrain-run-7")
    assert (pushed.n_buckets, pushed.n_compared) == (2, 0)


def test_a_version_that_does_not_move_is_an_error(odd: Any) -> None:
    """It says both; the server is told that its weights are spoiled, and goes on."""
    server = odd({"/model_info": (200, {"weight_version": "6"})})
    error = outcome(link_to(server.address))
    assert isinstance(error, ServerSpoiled)
    assert "calls them '6'; it was told 'agenttrain-run-7'" in str(error)
    assert server.version == SPOILED
    assert server.paths[-1] == "/continue_generation"


def test_other_numbers_than_those_sent_are_an_error(odd: Any) -> None:
    """By the checksums that the server tells."""
    held = {"model.norm.weight": "0" * 16}
    server = odd({"/weights_checker": (200, {"success": True, "ranks": [{"checksums": held}]})})
    error = outcome(link_to(server.address))
    assert isinstance(error, ServerSpoiled)
    assert "1 of 1 tensors compared are not what was sent, such as 'model.norm.weight'" in str(error)
    assert server.version == SPOILED


@pytest.mark.parametrize("path", ["/pause_generation", "/begin_weight_update"])
def test_a_server_that_takes_no_update_keeps_what_it_has(path: str, odd: Any) -> None:
    """Its own words, the way, the version and the next step; it is let go on."""
    server = odd({path: (400, {"success": False, "message": "not today"})})
    error = outcome(link_to(server.address))
    assert isinstance(error, WeightsRefused)
    for part in ("agenttrain-run-7", server.address, '"tensor"', "HTTP 400: not today", "look at its log"):
        assert part in str(error)
    assert server.version == "what it was"
    assert server.paths[-1] == "/continue_generation"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((400, {"success": False, "message": "no such name"}), "HTTP 400: no such name"),
        ((500, b"<h1>Internal Server Error</h1>"), "HTTP 500: <h1>Internal Server Error</h1>"),
        ((200, {"success": False, "message": "the cache was not flushed"}), "HTTP 200: the cache was not flushed"),
        (None, "RemoteDisconnected"),
    ],
)
def test_a_bucket_that_is_not_taken_spoils_the_server(answer: Answer | None, said: str, odd: Any) -> None:
    """It may hold a part of it."""
    server = odd({"/update_weights_from_tensor": answer})
    error = outcome(link_to(server.address))
    assert isinstance(error, ServerSpoiled)
    assert said in str(error)
    assert server.version == SPOILED


def test_a_server_that_does_not_join_the_group_is_told_at_once(odd: Any) -> None:
    """Nothing waits for it, and nothing was paused."""
    server = odd({"/init_weights_update_group": (400, {"success": False, "message": "no ports here"})})
    error = outcome(link_to(server.address, name="group", timeout_s=60.0))
    assert isinstance(error, WeightsRefused)
    assert "no ports here" in str(error)
    assert 'sglang.transport = "tensor"' in str(error)
    assert "/pause_generation" not in server.paths


def test_a_server_that_only_says_it_joined_is_no_group(odd: Any) -> None:
    """The time limit ends the wait for it."""
    server = odd({})
    error = outcome(link_to(server.address, name="group", timeout_s=0.5))
    assert isinstance(error, WeightsRefused)
    assert "did not come about" in str(error)


def test_nobody_there_is_an_error_of_the_server(odd: Any) -> None:
    """By every way; another server gets its weights."""
    other = odd({})
    gone = odd({})
    gone.close()
    for name in ("tensor", "group"):
        links = [link_to(gone.address, name=name), link_to(other.address)]
        results = push(links, WEIGHTS, "agenttrain-run-7", bucket_mib=1)
        assert isinstance(results[gone.address], ServerSpoiled)
        assert not isinstance(results[other.address], EngineError)


def test_files_need_a_snapshot(odd: Any) -> None:
    """There is nothing to name to the server otherwise."""
    error = outcome(link_to(odd({}).address, name="disk"))
    assert isinstance(error, WeightsRefused)
    assert "shared folder" in str(error)


@pytest.mark.parametrize(
    ("key", "value"), [("use_rslora", True), ("use_dora", True), ("fan_in_fan_out", True), ("bias", "all")]
)
def test_an_adapter_that_sglang_would_read_otherwise_is_refused(key: str, value: object, odd: Any) -> None:
    """Before anything is sent."""
    server = odd({})
    adapter = AdapterWeights(config={"r": 8, "lora_alpha": 8, key: value}, tensors={})
    with pytest.raises(WeightsRefused, match=key):
        push_adapter(server.address, adapter, "agenttrain-run-7", timeout_s=5)
    assert server.paths == []
