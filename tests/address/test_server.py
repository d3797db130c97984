"""A server begins with its socket, ends by a signal, and lets what is in work end first."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai import OpenAI

from agenttrain.address.app import Address, Settings
from agenttrain.address.server import answer_until_ended, listening, url_of
from agenttrain.errors import ConfigError, ModelError

ASK: Any = [{"role": "user", "content": "How many lamps?"}]


class Asking(threading.Thread):
    """A client that asks once, and what it got."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url, self.text, self.error = url, "", None

    def run(self) -> None:
        client = OpenAI(base_url=self.url, api_key="unused", max_retries=0)
        try:
            answer = client.chat.completions.create(model="m", messages=ASK)
            self.text = answer.choices[0].message.content or ""
        except openai.OpenAIError as error:
            self.error = error


def ended_while_asked(desk: Any, *, drain_s: float, meanwhile: Callable[[], None]) -> tuple[Asking, signal.Signals]:
    """A server that is told to end while its engine holds a call; what happens then, and how both ended."""
    desk.engine.holds = True
    address = Address(desk.serving, Settings(name="told"))
    with listening("127.0.0.1", 0) as sock:
        asking = Asking(url_of(sock))

        def end() -> None:
            assert desk.engine.came.wait(20)
            os.kill(os.getpid(), signal.SIGTERM)
            meanwhile()

        ending = threading.Thread(target=end)

        def begin() -> None:
            asking.start()
            ending.start()

        ended = answer_until_ended(address, sock, drain_s=drain_s, on_ready=begin)
        asking.join()
        ending.join()
    return asking, ended


def test_what_is_in_work_may_end_first(open_desk: Any, url_is_closed: Callable[[str], bool]) -> None:
    with open_desk() as desk:

        def answer() -> None:
            (future,) = desk.engine.open.values()
            future.set_result(desk.hello())

        asking, ended = ended_while_asked(desk, drain_s=60, meanwhile=answer)
        assert (asking.text, asking.error, ended) == ("Hello there.", None, signal.SIGTERM)
        assert url_is_closed(asking.url)


def test_what_does_not_end_in_time_is_refused_and_ended(open_desk: Any) -> None:
    with open_desk() as desk:
        asking, _ = ended_while_asked(desk, drain_s=0, meanwhile=lambda: None)
        assert isinstance(asking.error, openai.InternalServerError)
        assert (asking.error.status_code, asking.error.code) == (503, "ending")
        assert desk.engine.open == {}


def test_a_second_signal_does_not_wait(open_desk: Any) -> None:
    with open_desk() as desk:
        asking, ended = ended_while_asked(desk, drain_s=600, meanwhile=lambda: os.kill(os.getpid(), signal.SIGINT))
        assert isinstance(asking.error, openai.InternalServerError)
        assert ended in (signal.SIGTERM, signal.SIGINT)


def test_a_policy_that_cannot_be_loaded_ends_the_server() -> None:
    class Broken:
        def calls(self) -> None:
            raise ModelError("policy can't be loaded. Train again.")

    serving: Any = Broken()
    with listening("127.0.0.1", 0) as sock, pytest.raises(ModelError, match="Train again"):
        answer_until_ended(Address(serving, Settings(name="a")), sock, drain_s=0, on_ready=lambda: None)


def test_an_address_that_is_taken_says_what_to_do() -> None:
    with listening("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--host 127.0.0.1 --port {port} can't be listened at: .*--port 0"):
            listening("127.0.0.1", port)
    with pytest.raises(ConfigError, match="can't be listened at"):
        listening("no-host.invalid", 0)


def test_an_address_of_the_newer_kind_is_written_in_brackets() -> None:
    try:
        sock = listening("::1", 0)
    except ConfigError:
        pytest.skip("this machine has no IPv6")
    with sock:
        assert url_of(sock) == f"http://[::1]:{sock.getsockname()[1]}/v1"


@pytest.fixture
def url_is_closed() -> Callable[[str], bool]:
    """Whether nobody listens any more."""

    def closed(url: str) -> bool:
        host, _, port = url.removeprefix("http://").removesuffix("/v1").partition(":")
        with socket.socket() as sock:
            return sock.connect_ex((host, int(port))) != 0

    return closed
