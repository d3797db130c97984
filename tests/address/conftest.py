"""An address on a port of this machine: a real server and the real prompts and parsers, its engine one that is told
what to say, or a small model's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from answered_address import answered
from openai import OpenAI
from tokenizers import Tokenizer

from agenttrain.address.app import Address, Settings
from agenttrain.capture.render import open_renderer
from agenttrain.capture.served import ServedCalls
from agenttrain.errors import EngineError, PromotionError
from agenttrain.records import Generation, Ids, Sampling
from agenttrain.serving_mark import Served
from agenttrain.testing import tiny_model


@dataclass
class ToldEngine:
    """protocols.Engine that says one text after the other, the last one for ever."""

    encode: Callable[[str], Ids]
    decode: Callable[[Ids], str]
    texts: list[str]
    name: str = "told"
    max_length: int = 1024
    weight_version: int = 1
    asked: list[tuple[Ids, Sampling]] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    holds: bool = False
    """Answer nothing, until released."""
    failed: str = ""
    """Why it answers no call. Empty: it does."""
    came: threading.Event = field(default_factory=threading.Event)
    went: threading.Event = field(default_factory=threading.Event)
    open: dict[str, Future[Generation]] = field(default_factory=dict)

    def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str) -> Future[Generation]:
        self.stats()
        future = self.open[session] = Future[Generation]()
        self.asked.append((prompt_ids, sampling))
        if not self.holds:
            text = self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]
            ids = (*self.encode(text), *sampling.stop_ids[:1])
            future.set_result(_generation(ids[: sampling.max_tokens], whole=len(ids) <= sampling.max_tokens))
        self.came.set()
        return future

    def release(self, session: str) -> None:
        future = self.open.pop(session)
        if not future.done():
            future.set_result(Generation(token_ids=(), logprobs=(), weight_versions=(), stop_reason="aborted"))
        self.released.append(session)
        self.went.set()

    def stats(self) -> Mapping[str, float]:
        if self.failed:
            raise EngineError(self.failed)
        return {}

    def update_weights(self, weights: Any, version: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing is open."""


def _generation(ids: Ids, *, whole: bool) -> Generation:
    return Generation(
        token_ids=ids,
        logprobs=(-0.5,) * len(ids),
        weight_versions=(1,) * len(ids),
        stop_reason="stop" if whole else "length",
        n_cached_ids=3,
    )


@dataclass
class ToldServing:
    """What serving.Serving is to an address, over one told engine."""

    answers: ServedCalls
    outcomes: list[tuple[str, object, str]] = field(default_factory=list)
    asked_for: list[str] = field(default_factory=list)
    is_canary: bool = False
    cannot_count: bool = False
    loads: threading.Event | None = None
    """What answers conversations that are named new-… is not loaded before."""
    all_wait: threading.Event = field(default_factory=threading.Event)
    """20 of them came."""

    def calls(self) -> ServedCalls:
        return self.answers

    @property
    def loaded(self) -> ServedCalls | None:
        return self.answers

    def answering_loaded(self, conversation: str) -> tuple[ServedCalls, Served] | None:
        self.asked_for.append(conversation)
        if sum(each.startswith("new-") for each in self.asked_for) == 20:
            self.all_wait.set()
        if conversation.startswith("new-") and self.loads is not None and not self.loads.is_set():
            return None
        return self.answering(conversation)

    def answering(self, conversation: str) -> tuple[ServedCalls, Served]:
        if conversation.startswith("new-") and self.loads is not None:
            assert self.loads.wait(60)
        return self.answers, Served(run_id="told-1", is_canary=self.is_canary, conversation=conversation)

    def record_outcome(self, conversation: str, success: bool | float | None, *, why: str = "") -> bool:
        self.outcomes.append((conversation, success, why))
        return True

    def record_failure(self, conversation: str, *, why: str) -> bool:
        if self.cannot_count:
            raise PromotionError("the disk is full")
        self.outcomes.append((conversation, False, why))
        return True

    def describe(self) -> dict[str, Any]:
        return {"serves": "told"}


@dataclass
class Desk:
    """An address that is answered, and what stands behind it."""

    url: str
    engine: ToldEngine
    serving: ToldServing
    address: Address
    http: httpx.Client
    client: OpenAI

    def hello(self) -> Generation:
        """What the engine would say, for a call that it holds."""
        _, sampling = self.engine.asked[-1]
        ids = (*self.engine.encode("Hello there."), *sampling.stop_ids[:1])
        return _generation(ids, whole=True)


Answered = Callable[[Address], AbstractContextManager[str]]
OpenDesk = Callable[..., AbstractContextManager[Desk]]


@pytest.fixture(scope="session", name="answered")
def answered_fixture() -> Answered:
    """Answers an address for a block."""
    return answered


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("address") / "model")


@pytest.fixture(scope="session")
def open_desk(model_folder: Path) -> OpenDesk:
    """Opens an address whose policy says the given texts; settings are those of `Settings`."""
    renderer = open_renderer(str(model_folder), family="default")
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))

    def encode(text: str) -> Ids:
        return tuple(tokenizer.encode(text).ids)

    @contextmanager
    def opened(*texts: str, tracer: Any = None, **settings: Any) -> Iterator[Desk]:
        engine = ToldEngine(encode, renderer.decode, list(texts or ("Hello there.",)))
        calls = ServedCalls(
            engine=engine, renderer=renderer, temperature=0, max_tokens=200, model_name="told-1", tracer=tracer
        )
        serving: Any = ToldServing(calls)
        address = Address(serving, Settings(name="told", **settings))
        with answered(address) as url, httpx.Client(base_url=url, verify=False) as http:
            client = OpenAI(base_url=url, api_key="unused", max_retries=0, http_client=http)
            yield Desk(url, engine, serving, address, http, client)

    return opened


@pytest.fixture(scope="module")
def desk(open_desk: OpenDesk) -> Iterator[Desk]:
    """An address that says hello; shared, so nothing of it is changed."""
    with open_desk() as opened:
        yield opened
