"""A socket becomes an address that is answered until a signal ends it.

The socket takes connections at once, and requests wait while the policy loads. On SIGTERM or Ctrl-C no new connection
is taken, what is in work may end for some seconds, and what is then left is refused; a second signal doesn't wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn

from agenttrain.address.app import Address
from agenttrain.errors import ConfigError, EngineError

ENDS_IN_S = 5.0
"""How long refused requests may take to be told so."""


class _Server(uvicorn.Server):
    """uvicorn's, with signals left to whoever runs it: its own would end the process by the signal itself."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listening(host: str, port: int) -> socket.socket:
    """A socket that takes connections.

    Args:
        port: to 65535; 0 for any free one.

    Raises:
        ConfigError: the address is taken, or not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"--host {host} --port {port} can't be listened at: {error}. Name another, or --port 0 for any free one."
        ) from None


def url_of(sock: socket.socket) -> str:
    """The address that clients are told, with /v1. Example: "http://127.0.0.1:8000/v1"."""
    host, port = sock.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def answer_until_ended(
    address: Address, sock: socket.socket, *, drain_s: float, on_ready: Callable[[], None]
) -> signal.Signals:
    """Answer until SIGTERM or SIGINT.

    Args:
        drain_s: how long requests in work may go on once a signal came.
        on_ready: called once, when the policy is loaded.

    Returns:
        The signal.

    Raises:
        AgenttrainError: the policy can't be loaded.
    """
    return asyncio.run(_answered(address, sock, drain_s=drain_s, on_ready=on_ready))


async def _answered(
    address: Address, sock: socket.socket, *, drain_s: float, on_ready: Callable[[], None]
) -> signal.Signals:
    server = _Server(
        uvicorn.Config(
            address.app(),
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=max(1, round(drain_s + ENDS_IN_S)),
        )
    )
    seen: list[signal.Signals] = []

    def end(number: signal.Signals) -> None:
        if seen:
            address.cut()
        seen.append(number)
        server.should_exit = True
        loop.call_later(drain_s, address.cut)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end, number)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    loading = asyncio.create_task(address.load())
    try:
        await asyncio.wait({serving, loading}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            await loading
            on_ready()
        await serving
    finally:
        server.should_exit = True
        address.cut()
        loading.cancel()
        await asyncio.gather(serving, loading, return_exceptions=True)
        address.close()
    if not seen:
        raise EngineError("The server ended by itself. Its log says why.")
    return seen[0]
