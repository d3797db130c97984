"""One server's HTTP, for its calls: generate, abort, facts, health, counters.

JSON goes out, parsed JSON comes in; what it means is `wire`'s. A call either gives the whole answer, or raises:
ServerGone where the connection broke and nothing was kept, ServerRefused where the server said no. Knows of no other
server, and tries nothing twice.

Source: sglang 0.5.23, srt/entrypoints/http_server.py; 0.5.12 answers these paths alike.
"""

from __future__ import annotations

import asyncio
import io
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from agenttrain.errors import ConfigError, EngineError
from agenttrain.records import Ids, Sampling
from prometheus_client.parser import text_string_to_metric_families

from agenttrain_sglang.versions import SUPPORTED, TESTED, is_supported

CONNECT_S = 10.0
"""How long a connection may take; an answer may take any time."""
QUESTION_S = 30.0
"""How long the answer to anything but a generation may take."""
LARGE_BYTES = 1_000_000
"""An answer, with routed experts mostly, from which it is read beside the loop."""
SAMPLED = "sglang:generation_tokens_total"


class ServerGone(Exception):
    """The connection failed or broke before a whole answer came: nothing was kept."""


class ServerRefused(Exception):
    """The server answered, and not with what was asked."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, message)
        self.status = status
        """Of HTTP."""
        self.message = message
        """What the server said."""

    def __str__(self) -> str:
        return f"{self.status}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What a server says of itself."""

    version: str
    """Of SGLang."""
    model_path: str
    """As the server's machine names it."""
    model_type: str
    dtype: str
    device: str
    tensor_parallel: int
    data_parallel: int
    """Copies of the model behind one address."""
    max_length: int
    """Positions that a prompt and its response may always take together."""
    caches_prefixes: bool
    takes_adapters: bool
    tells_experts: bool
    takes_seeds: bool
    """Whether equal (prompt, seed) give equal ids."""


class ServerClient:
    """Speaks to one server, on the event loop of the session."""

    def __init__(self, address: str, session: aiohttp.ClientSession) -> None:
        """Connect to nothing yet.

        Args:
            address: such as "http://10.0.0.7:30000".
            session: with unlimited connections; whoever made it closes it.

        Raises:
            ConfigError: the address is none.
        """
        self.address = checked_address(address)
        self._session = session

    async def generate(self, body: Mapping[str, Any], *, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
        """The answer to `wire.generate_body`; there is no time limit, since a long queue is no fault.

        Args:
            headers: sent with it, such as traceparent.

        Raises:
            ServerGone: the connection failed or broke.
            ServerRefused: the server said no.
            EngineError: what answered is no SGLang server.
        """
        content, where = await self._ask("POST", "/generate", body, headers=headers), f"{self.address}/generate"
        if len(content) > LARGE_BYTES:
            return await asyncio.to_thread(_table, content, where)
        return _table(content, where)

    async def abort(self, rid: str) -> None:
        """End a call in flight, which then answers with what it has.

        A server forgets the abort of a request that has not reached it yet: abort again while no answer comes.

        Raises:
            ServerGone, ServerRefused: as `generate`.
        """
        await self._ask("POST", "/abort_request", {"rid": rid}, total_s=QUESTION_S)

    async def facts(self, *, within_s: float = QUESTION_S) -> ServerFacts:
        """What the server says of itself, once it is ready.

        Args:
            within_s: how long each of its two answers may take.

        Raises:
            ServerGone: nothing listens there, or it doesn't answer.
            EngineError: it is no SGLang server, or of a version that is not supported.
        """
        try:
            server = _table(await self._ask("GET", "/server_info", total_s=within_s), f"{self.address}/server_info")
            model = _table(await self._ask("GET", "/model_info", total_s=within_s), f"{self.address}/model_info")
        except ServerRefused as error:
            raise EngineError(f"{self.address} is no SGLang server that is ready: it answered {error}.") from error
        check_version(server.get("version"), self.address)
        return facts_of(server, model, address=self.address)

    async def is_healthy(self, timeout_s: float) -> bool:
        """Whether the server, its scheduler included, answers within a time."""
        try:
            await self._ask("GET", "/health", total_s=timeout_s)
        except (ServerGone, ServerRefused):
            return False
        return True

    async def weight_version(self) -> str:
        """The name of the weights that it has now; "default" before the first push.

        Raises:
            ServerGone, ServerRefused, EngineError: as `generate`.
        """
        model = _table(await self._ask("GET", "/model_info", total_s=QUESTION_S), f"{self.address}/model_info")
        return str(model.get("weight_version"))

    async def sampled_tokens(self) -> float | None:
        """The server's own count of ids that it sampled since it started. None: it was started without metrics.

        Calls are counted as they end, aborted ones too; those that are aborted while they wait are not, even where they
        had begun before and were taken back.

        Raises:
            ServerGone, ServerRefused: as `generate`.
        """
        try:
            text = await self._ask("GET", "/metrics", total_s=QUESTION_S)
        except ServerRefused as error:
            if error.status == 404:
                return None
            raise
        samples = [each for family in text_string_to_metric_families(text.decode()) for each in family.samples]
        return sum(each.value for each in samples if each.name == SAMPLED)

    async def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        total_s: float | None = None,
    ) -> bytes:
        """The body of an answer with status 200."""
        limit = aiohttp.ClientTimeout(total=total_s, sock_connect=CONNECT_S)
        data = None if body is None else io.BytesIO(json.dumps(body).encode())
        all_headers = {**(headers or {}), "Content-Type": "application/json"}
        try:
            async with self._session.request(
                method, self.address + path, data=data, headers=all_headers, timeout=limit, allow_redirects=False
            ) as response:
                content = await response.read()
        except TimeoutError as error:
            raise ServerGone(f"{self.address}{path} took longer than {total_s or CONNECT_S:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerGone(f"{self.address}{path}: {type(error).__name__}: {error}") from error
        if response.status != 200:
            raise ServerRefused(response.status, said(content))
        return content


def new_rid() -> str:
    """An id for one request, 32 characters long.

    A server aborts every request whose id begins with the given one: ids of one length can't hit each other.
    """
    return uuid.uuid4().hex


def check_prompt(prompt_ids: Ids, sampling: Sampling, *, session: str, n_vocabulary: int, max_length: int) -> None:
    """Refuse what a server must not be sent; one id outside of the vocabulary ends a whole server.

    Raises:
        EngineError: the prompt is empty, holds an id outside of the vocabulary or leaves no room.
    """
    n = len(prompt_ids)
    if n == 0:
        raise EngineError(f"The prompt of session {session} is empty. Give at least one id.")
    if sampling.max_tokens < 1:
        raise EngineError(f"max_tokens is {sampling.max_tokens} in session {session}. Ask for at least 1.")
    if n + sampling.max_tokens > max_length:
        raise EngineError(
            f"Session {session} asks for {n} prompt ids and {sampling.max_tokens} new ones, and the server takes "
            f"{max_length} together. Lower limits.tokens, or shorten the prompt."
        )
    if min(prompt_ids) < 0 or max(prompt_ids) >= n_vocabulary:
        bad = next(i for i in prompt_ids if not 0 <= i < n_vocabulary)
        raise EngineError(
            f"The prompt of session {session} holds id {bad}, and the model's vocabulary has {n_vocabulary} ids. Use "
            "the tokenizer of the model's own folder."
        )


def checked_address(address: str) -> str:
    """The address without a slash at its end.

    Raises:
        ConfigError: it is no http address of a host.
    """
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(f"{address!r} is no address of a server. Write one such as http://10.0.0.7:30000.")
    return address.rstrip("/")


def said(content: bytes) -> str:
    """What a server wants to say with an answer that is none, in at most 300 characters.

    Example: b'{"error": {"message": "no room"}}' -> "no room"
    """
    text = content.decode(errors="replace").strip()
    try:
        told = json.loads(text)
    except ValueError:
        return text[:300]
    while isinstance(told, dict):
        told = next((told[key] for key in ("error", "message", "detail") if key in told), text)
    return str(told)[:300]


def check_version(version: Any, address: str) -> None:
    """Refuse a version of SGLang that is not supported.

    Raises:
        EngineError: naming both.
    """
    if version is None:
        raise EngineError(f"{address} says no version, and SGLang servers say one such as {TESTED}. Check the address.")
    if not is_supported(version):
        raise EngineError(
            f"The server at {address} is SGLang {version}, and {SUPPORTED} is supported ({TESTED} is tested). Serve "
            "with another version: `agenttrain sglang setup` installs the tested one."
        )


def facts_of(server: Mapping[str, Any], model: Mapping[str, Any], *, address: str) -> ServerFacts:
    """What /server_info and /model_info say.

    A server takes prompts shorter than max_req_input_len, and prompts with their responses up to 4 positions more than
    it: max_length is what both allow.

    Raises:
        EngineError: what is needed is not told.
    """
    try:
        return ServerFacts(
            version=str(server["version"]),
            model_path=str(model["model_path"]),
            model_type=str(model.get("model_type") or ""),
            dtype=str(server["dtype"]),
            device=str(server["device"]),
            tensor_parallel=int(server["tp_size"]),
            data_parallel=int(server.get("dp_size") or 1),
            max_length=int(server["max_req_input_len"]),
            caches_prefixes=not server.get("disable_radix_cache"),
            takes_adapters=bool(server.get("enable_lora")),
            tells_experts=bool(server.get("enable_return_routed_experts")),
            takes_seeds=bool(server.get("enable_deterministic_inference")),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(
            f"{address} does not say what a SGLang server says ({type(error).__name__}: {error}). Check the address, "
            f"and that SGLang {TESTED} serves there."
        ) from error


def _table(content: bytes, where: str) -> dict[str, Any]:
    """Parsed JSON.

    Raises:
        EngineError: it is no JSON table.
    """
    try:
        table = json.loads(content)
    except ValueError:
        table = None
    if not isinstance(table, dict):
        raise EngineError(
            f"{where} answered {said(content)!r}, and a SGLang server answers with a JSON table. Check the address."
        )
    return table
