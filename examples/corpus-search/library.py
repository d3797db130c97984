"""The library: a fixed corpus, searched by BM25.

Source: Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond" (2009), section 3; the inverse
document frequency has 1 added inside of its logarithm, so that no word counts against a document.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

K1, B = 1.2, 0.75
RESULTS = 3
SNIPPET_WORDS = 6


class Library:
    """Documents by id. Holds no state that a search or a read changes."""

    def __init__(self, documents: Mapping[str, str]) -> None:
        self._documents = dict(documents)
        self._counts = {id: Counter(words(text)) for id, text in documents.items()}
        self._lengths = {id: counts.total() for id, counts in self._counts.items()}
        self._mean_length = sum(self._lengths.values()) / max(1, len(documents))
        self._ids_by_word: dict[str, list[str]] = {}
        for id, counts in self._counts.items():
            for word in counts:
                self._ids_by_word.setdefault(word, []).append(id)

    @classmethod
    def load(cls, file: Path) -> "Library":
        """The library of a file with an id and a text on each line."""
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        return cls({row["id"]: row["text"] for row in rows})

    def search(self, query: str) -> list[str]:
        """Ids of the best documents, best first, at most RESULTS; of two that match alike the smaller id is first."""
        scores: Counter[str] = Counter()
        for word in set(words(query)):
            ids = self._ids_by_word.get(word, [])
            rarity = math.log(1 + (len(self._documents) - len(ids) + 0.5) / (len(ids) + 0.5))
            for id in ids:
                scores[id] += rarity * self._frequency(word, id)
        return sorted(scores, key=lambda id: (-round(scores[id], 9), id))[:RESULTS]

    def snippet(self, id: str) -> str:
        """How a document begins."""
        return " ".join(self._documents[id].split()[:SNIPPET_WORDS]) + " ..."

    def read(self, id: str) -> str | None:
        """The text of a document. None: there is none of that id."""
        return self._documents.get(id)

    def _frequency(self, word: str, id: str) -> float:
        """How much a word's count says of a document, from 0 to K1 + 1."""
        count, length = self._counts[id][word], self._lengths[id] / self._mean_length
        return count * (K1 + 1) / (count + K1 * (1 - B + B * length))


def words(text: str) -> list[str]:
    """The words and numbers of a text, in small letters."""
    return re.findall(r"\w+", text.lower())
