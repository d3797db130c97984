"""One server's HTTP on the caller's thread: JSON in, JSON out, no call without a time limit.

Two faults only: `Refused` (it answered, and said no) and `Gone` (it did not answer). The caller gives them a meaning.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit


class Refused(Exception):
    """The server answered with an error, or with success false."""

    def __init__(self, status: int, message: str) -> None:
        """Keep what it said."""
        super().__init__(status, message)
        self.status, self.message = status, message

    def __str__(self) -> str:
        return f"HTTP {self.status}: {self.message}"


class Gone(Exception):
    """No connection, a connection that broke, or no answer within the time limit."""


class Http:
    """One connection per call; may be used from several threads."""

    def __init__(self, address: str, *, timeout_s: float) -> None:
        """Keep the address; nothing is sent.

        Args:
            address: such as "http://10.0.0.7:30000".
            timeout_s: how long a call may take where it says nothing else.
        """
        self.address, self.timeout_s = address.rstrip("/"), timeout_s
        self._parts = urlsplit(self.address)

    @property
    def host(self) -> str:
        """Name or number of the server's machine."""
        return self._parts.hostname or "127.0.0.1"

    def get(self, path: str, *, timeout_s: float | None = None) -> dict[str, Any]:
        """What the server tells there.

        Raises:
            Refused, Gone: it said no, or nothing.
        """
        return self._call("GET", path, None, timeout_s)

    def post(self, path: str, body: Mapping[str, Any], *, timeout_s: float | None = None) -> dict[str, Any]:
        """What the server answers to a body.

        Raises:
            Refused, Gone: it said no, or nothing.
        """
        return self._call("POST", path, json.dumps(body).encode(), timeout_s)

    def _call(self, method: str, path: str, body: bytes | None, timeout_s: float | None) -> dict[str, Any]:
        limit = timeout_s or self.timeout_s
        connection = self._connection(limit)
        try:
            connection.request(method, self._parts.path + path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
        except TimeoutError as error:
            raise Gone(f"{path} was not answered within {limit:.0f} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise Gone(f"{path}: {type(error).__name__} {error}".rstrip()) from error
        finally:
            connection.close()
        return _checked(answer.status, text)

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        return kind(self.host, self._parts.port, timeout=timeout_s)


def _checked(status: int, text: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(text) if text.strip() else {}
    except ValueError:
        answer = {"message": text.decode(errors="replace").strip()}
    if not isinstance(answer, dict):
        answer = {"answer": answer}
    if status != 200 or answer.get("success") is False:
        raise Refused(status, _message(answer))
    return answer


def _message(answer: Mapping[str, Any]) -> str:
    for key in ("message", "error_message", "detail", "error"):
        if answer.get(key):
            return str(answer[key]).strip()[:2000]
    return "no reason given"
