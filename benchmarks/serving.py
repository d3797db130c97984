"""What does HTTP cost over asking the served policy in process?

    python benchmarks/serving.py [--policy examples/order-desk/policy] [--rounds 6] [--requests 64] [--widths 1 8 32]

Both sides ask the same engine, in a process of its own, the same questions, greedily, side by side: A by
`ServedCalls.answer` from as many threads as the width, B over a kept-alive HTTP connection each. Rounds are interleaved
(A B B A …); each question is new to the conversations that are kept, and its prompt is rendered anew on both sides.
Told are the ratio of seconds a request, B over A, the median of neighbouring rounds, and the milliseconds of this
process's CPU: server and client are in it, the engine is not, so these hold on a machine that is shared too. B is
measured twice: with OpenAI's client, which costs more than the server, and with a bare connection. Prints one JSON
object. About a minute on two cores.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import uvicorn
from openai import OpenAI

from agenttrain.address.app import Address, Settings
from agenttrain.address.request import read_request
from agenttrain.address.server import listening, url_of
from agenttrain.serving.attached import Serving, open_serving

ROOT = Path(__file__).parents[1]
numbers = itertools.count(100_000)
Ask = Callable[[], None]


def body() -> dict[str, object]:
    """A question that was not asked before."""
    question = f"Price of one unit of what A{next(numbers)} contains?"
    return {"model": "desk", "messages": [{"role": "user", "content": question}], "max_tokens": 24}


@contextmanager
def served(serving: Serving) -> Iterator[str]:
    """The URL of an address over it."""
    address = Address(serving, Settings(name="desk"))
    with listening("127.0.0.1", 0) as sock:
        config = uvicorn.Config(address.app(), log_config=None, access_log=False, lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            yield url_of(sock)
        finally:
            server.should_exit = True
            thread.join()
            address.close()


def in_process(serving: Serving) -> Ask:
    """Asks without HTTP, from the plain data of a call on."""
    calls = serving.calls()
    return lambda: [calls.answer(read_request(body()).call), None][1]


def by_client(url: str) -> Ask:
    """Asks by OpenAI's client, one for all threads."""
    client = OpenAI(base_url=url, api_key="unused")
    return lambda: [client.chat.completions.create(**body()), None][1]  # type: ignore[call-overload]


def by_socket(url: str) -> Ask:
    """Asks by a bare connection for each thread."""
    host = url.removeprefix("http://").partition("/")[0]
    here = threading.local()

    def ask() -> None:
        if not hasattr(here, "connection"):
            here.connection = http.client.HTTPConnection(host)
        headers = {"Content-Type": "application/json"}
        here.connection.request("POST", "/v1/chat/completions", json.dumps(body()), headers)
        response = here.connection.getresponse()
        answer = response.read()
        assert response.status == 200, answer

    return ask


def took(ask: Ask, *, width: int, n_requests: int) -> tuple[float, float]:
    """Milliseconds of one request, and of this process's CPU, where as many as the width are in work."""
    with ThreadPoolExecutor(width) as threads:
        started, cpu = time.perf_counter(), time.process_time()
        for done in [threads.submit(ask) for _ in range(n_requests)]:
            done.result()
        scale = 1000 / n_requests
        return (time.perf_counter() - started) * scale, (time.process_time() - cpu) * scale


def side_by_side(a: Ask, b: Ask, *, width: int, rounds: int, n_requests: int) -> dict[str, float]:
    """How much longer B takes than A."""
    pairs = []
    for i in range(rounds):
        order = (a, b) if i % 2 == 0 else (b, a)
        by_ask = {ask: took(ask, width=width, n_requests=n_requests) for ask in order}
        pairs.append((by_ask[a], by_ask[b]))
    return {
        "in_process_ms": round(statistics.median(one[0] for one, _ in pairs), 2),
        "http_ms": round(statistics.median(other[0] for _, other in pairs), 2),
        "ratio": round(statistics.median(other[0] / one[0] for one, other in pairs), 3),
        "in_process_cpu_ms": round(statistics.median(one[1] for one, _ in pairs), 2),
        "http_cpu_ms": round(statistics.median(other[1] for _, other in pairs), 2),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default=str(ROOT / "examples" / "order-desk" / "policy"))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 8, 32])
    given = parser.parse_args()
    serving = open_serving(given.policy)
    try:
        with served(serving) as url:
            sides = {"bare client": by_socket(url), "OpenAI's client": by_client(url)}
            here = in_process(serving)
            for ask in (here, *sides.values()):
                took(ask, width=max(given.widths), n_requests=2 * max(given.widths))
            measured = {
                f"{name}, width {width}": side_by_side(
                    here, ask, width=width, rounds=given.rounds, n_requests=given.requests
                )
                for name, ask in sides.items()
                for width in given.widths
            }
    finally:
        serving.close()
    print(json.dumps({"load": os.getloadavg()[0], "measured": measured}, indent=1))


if __name__ == "__main__":
    main()
