"""A careless searcher: the demonstrations that the policy is made from, and, with nothing left to chance, the way to
every answer.

    Searcher(fact, question, library, rng).work() -> a conversation in OpenAI's form
"""

import json
import random
import re

import tasks
from graph import NOT_FOUND, SYSTEM, found
from library import Library

KEYWORDS = {"founded": "founded", "people": "people", "works": "works", "called": "works", "built": "built"}
"""The word that belongs into a query of a kind, beside the name. A builder is found without."""
VALUES = {
    "founded": r"founded in (\d+)",
    "built": r"built in (\d+)",
    "people": r"has (\d+) people",
    "works": r"works in (\w+ \w+)",
    "called": r"works in (\w+ \w+)",
    "builder": r"by (\w+ \w+)\.",
}
"""Where the answer to a kind stands in a document."""
HOPS = {"founded_where_works": ("works", "founded"), "builder_works": ("builder", "works")}


class Searcher:
    """Somebody at work on one question: searches, reads, and errs by chance.

    Attributes:
        messages: the conversation so far, in OpenAI's form, the system message first.
    """

    P_KEYWORD, P_HALF_A_NAME, P_WRONG_KEYWORD = 0.4, 0.12, 0.12
    """What a query is; else it is the name alone."""
    P_TRUSTS_SNIPPET = 0.5
    """How often the first snippet must do, where a number or a name stands in it."""
    P_CAREFUL = 0.3
    """How often it reads the document that it looked for; else mostly the first one."""
    P_FIRST = 0.75
    P_FOLLOWS_NEWER = 0.3
    P_GOES_ON = 0.45
    """How often it makes the second hop."""
    P_SEARCHES_AGAIN = 0.35
    """How often it tries once more when nothing was found."""
    P_GUESSES = 0.3
    """How often it answers with anything at all rather than say that it found nothing."""

    def __init__(self, fact: tasks.Fact, question: str, library: Library, rng: random.Random) -> None:
        self.fact, self.library, self.rng = fact, library, rng
        self.messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]

    def work(self) -> list[dict]:
        """The whole conversation, right or wrong."""
        answer = self.answer()
        self._say(NOT_FOUND if answer is None else f"The answer is {answer}.")
        return self.messages

    def answer(self) -> str | None:
        """What the searcher finds; None: gave up."""
        name = self.fact.about
        for at, kind in enumerate(HOPS.get(self.fact.kind, (self.fact.kind,))):
            if at and not self._chance(self.P_GOES_ON):
                return name
            name = self._look_up(kind, name)
            if name is None:
                return None
        return name

    def _look_up(self, kind: str, name: str) -> str | None:
        """What the searcher believes to be the answer for one name; None: gave up."""
        for _ in range(2):
            text = self._text(kind, name)
            value = re.search(VALUES[kind], text)
            if value:
                return value[1]
            if not self._chance(self.P_SEARCHES_AGAIN):
                break
        guesses = re.findall(r"\d{3,4}|[A-Z]\w+ [A-Z][a-z]\w+", text)
        return self.rng.choice(guesses) if guesses and self._chance(self.P_GUESSES) else None

    def _text(self, kind: str, name: str) -> str:
        """The snippet or the document that the searcher goes by."""
        query = self._query(kind, name)
        result = found(self.library, query)
        self._call("search", {"query": query}, result)
        ids = self.library.search(query)
        snippet = self.library.snippet(ids[0])
        if re.search(VALUES[kind], snippet) and self._chance(self.P_TRUSTS_SNIPPET):
            return snippet
        id = self._choice(kind, name, ids)
        while True:
            text = self.library.read(id)
            self._call("read", {"document_id": id}, text)
            newer = re.search(r"Newer count of .*: (D\d+)", text)
            if not newer or not self._chance(self.P_FOLLOWS_NEWER):
                return text
            id = newer[1]

    def _query(self, kind: str, name: str) -> str:
        draw = self.rng.random()
        if draw < self.P_KEYWORD:
            return f"{name} {KEYWORDS[kind]}" if kind in KEYWORDS else name
        if draw < self.P_KEYWORD + self.P_HALF_A_NAME:
            return self.rng.choice(name.split())
        if draw < self.P_KEYWORD + self.P_HALF_A_NAME + self.P_WRONG_KEYWORD:
            return f"{name} {self.rng.choice(['founded', 'people', 'works', 'built'])}"
        return name

    def _choice(self, kind: str, name: str, ids: list[str]) -> str:
        """Which of the documents found is read."""
        looked_for = [id for id in ids if self._is_about(kind, name, self.library.read(id))]
        if looked_for and self._chance(self.P_CAREFUL):
            return looked_for[0]
        return ids[0] if self._chance(self.P_FIRST) else self.rng.choice(ids)

    def _is_about(self, kind: str, name: str, text: str) -> bool:
        if kind == "called":
            trade, surname = name.split()
            return re.match(rf"\w+ {surname} is a {trade}", text) is not None
        return text.startswith(name) and re.search(VALUES[kind], text) is not None

    def _call(self, name: str, arguments: dict, result: str) -> None:
        call = {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        self.messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        self.messages.append({"role": "tool", "content": result})

    def _say(self, content: str) -> None:
        self.messages.append({"role": "assistant", "content": content})

    def _chance(self, probability: float) -> bool:
        return self.rng.random() < probability
