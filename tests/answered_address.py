"""A real address over HTTP, answered on a thread of this process for a block."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from agenttrain.address.app import Address
from agenttrain.address.server import listening, url_of


@contextmanager
def answered(address: Address) -> Iterator[str]:
    """Answer an address; gives its URL, on a free port."""
    with listening("127.0.0.1", 0) as sock:
        config = uvicorn.Config(address.app(), log_config=None, log_level="warning", access_log=False, lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            yield url_of(sock)
        finally:
            server.should_exit = True
            thread.join()
            address.close()
