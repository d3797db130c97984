"""Headers and body of a request become the id of its conversation, by which a canary's share is drawn.

It is the same in every request of a conversation: what the client says, else a hash of how the conversation begins.
Two conversations that begin with the same words are one where the client says nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final

HEADER: Final = "X-Conversation-Id"
LONGEST: Final = 200


def conversation_of(header: str | None, body: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> str:
    """The id: from the header, else `metadata.conversation`, else `user`, else the first messages.

    Args:
        header: value of `X-Conversation-Id`. None: there is none.
        messages: in the plain form of a ModelCall.
    """
    metadata = body.get("metadata")
    said = metadata.get("conversation") if isinstance(metadata, Mapping) else None
    for id in (header, said, body.get("user")):
        if isinstance(id, str) and id:
            return plain_id(id)
    return f"begun-{_hash(json.dumps(_beginning(messages)))}"


def plain_id(id: str) -> str:
    """An id that may stand in a header: itself, or its hash where it has other signs than ASCII's or is too long.

    Example: plain_id("ticket-17") -> "ticket-17"
    """
    return id if id.isascii() and id.isprintable() and id == id.strip() and len(id) <= LONGEST else f"id-{_hash(id)}"


def _beginning(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """System messages and the first question."""
    at = next((i for i, message in enumerate(messages) if message["role"] == "user"), len(messages))
    return [[message["role"], message["content"]] for message in messages[: at + 1]]


def _hash(text: str) -> str:
    return blake2b(text.encode(), digest_size=8).hexdigest()
