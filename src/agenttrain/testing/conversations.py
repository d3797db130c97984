"""Random conversations, and the places where they go on: what a renderer is held against second opinions on."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from agenttrain.protocols import Renderer
from agenttrain.records import Ids

Message = Mapping[str, Any]
Messages = tuple[Message, ...]

TEXTS: Final = (
    "Where is A41?",
    "In row four.",
    "grüße, 東京 und 🚀",
    " led by a space and followed by two  ",
    "\nled by a line break",
    "one\n\ntwo\n",
    '{"item": "lamp", "n": 3}',
    "[1, 2]",
    "a <b> & 'c' \"d\"",
    "1234567890",
    "Yes",
    ".",
    "user",
    "\t",
)
"""What people, tools and policies say: other scripts, JSON, white space at both ends."""
VALUES: Final = ("A41", "grüße", 7, -1.5, True, None, ["a", "b"], {"x": {"y": 1}}, 'it\'s "so"', "")
TOOLS: Final[Messages] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": {"id": {"type": "string"}, "n": {"type": "integer"}}},
        },
    }
    for name, description in (("look_up", "Find an order."), ("add", "Add, the second to the first."))
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """A place where a conversation goes on after a reply."""

    before: Messages
    reply: Message
    new: Messages
    """What answers the reply: results, or the user's next question."""
    tools: Messages

    @property
    def messages(self) -> Messages:
        return (*self.before, self.reply, *self.new)

    def ids(self, renderer: Renderer) -> tuple[Ids, Ids, Ids]:
        """The prompt of the reply, the reply as the template writes it, and the whole.

        Raises:
            ValueError: the prompt is written otherwise once it was answered, or the reply has no end.
        """
        prompt = renderer.render(self.before, self.tools)
        whole = renderer.render(self.messages, self.tools)
        rest = whole[len(prompt) :]
        end = next((i for i, id in enumerate(rest) if id in renderer.stop_ids), None)
        if whole[: len(prompt)] != prompt or end is None:
            raise ValueError(f"{renderer.identity} writes the prompt otherwise once it was answered")
        return prompt, rest[: end + 1], whole


def random_conversation(
    rng: random.Random, *, system: bool = True, tools: bool = True, most_calls: int = 3
) -> tuple[Messages, Messages]:
    """A conversation of one to four questions, each with replies and maybe calls and results in between.

    Args:
        system: a system message may stand first.
        tools: there may be tools and calls of them.
        most_calls: in one reply.

    Returns:
        Its messages, the last of them a reply, and its tools.
    """
    given = TOOLS if tools and rng.random() < 0.8 else ()
    messages: list[Message] = []
    if system and rng.random() < 0.6:
        messages.append({"role": "system", "content": rng.choice(TEXTS)})
    for _ in range(rng.randint(1, 4)):
        messages.append({"role": "user", "content": rng.choice(TEXTS)})
        for _ in range(rng.randint(0, 3) if given else 0):
            messages += _round(rng, len(messages), most_calls)
        messages.append({"role": "assistant", "content": rng.choice(TEXTS)})
    return tuple(messages), given


def _round(rng: random.Random, at: int, most_calls: int) -> list[Message]:
    """A reply that calls, and the results."""
    calls: list[dict[str, Any]] = [
        {
            "id": f"call_{at:04x}{i:04x}",
            "type": "function",
            "function": {
                "name": rng.choice(("look_up", "add")),
                "arguments": {name: rng.choice(VALUES) for name in rng.sample(("id", "n", "why"), rng.randint(0, 3))},
            },
        }
        for i in range(rng.randint(1, most_calls))
    ]
    said: Message = {"role": "assistant", "content": rng.choice(("", "I look.")), "tool_calls": calls}
    heard: list[Message] = [
        {
            "role": "tool",
            "content": rng.choice(TEXTS),
            "tool_call_id": call["id"],
            "name": call["function"]["name"],
        }
        for call in calls
    ]
    return [said, *heard]


def continuations(messages: Messages, tools: Messages) -> Iterator[Continuation]:
    """Every place of a conversation where something answers a reply."""
    for at, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        end = next((i for i in range(at + 1, len(messages)) if messages[i]["role"] == "assistant"), len(messages))
        if end > at + 1:
            yield Continuation(before=messages[:at], reply=message, new=messages[at + 1 : end], tools=tools)
