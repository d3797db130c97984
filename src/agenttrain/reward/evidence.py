"""What a verifier saw becomes evidence that a record can hold: JSON's types, and no more of it than people read.

A text keeps its beginning and its end, a list its beginning; a mark says what was left out. The agent has a hand in
most of what stands here, so nothing of its length may raise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from agenttrain.errors import RewardError

MOST_BYTES = 4096
"""Of one text, in UTF-8."""
MOST_ENTRIES = 200
"""Of one list or mapping."""
MOST_DEEP = 20
"""Lists and mappings in each other."""
MOST_BITS = 8192
"""Of a whole number: Python writes no more than 4300 digits."""
MOST_BYTES_OF_ALL = 16 * MOST_BYTES
"""Of all texts together: above it each is cut to a share."""
SHAPES = """"exit_code" a whole number, "output" a text, "checks" a list of {"name": text, "passed": bool, "reason": \
text}, "tampering" a list of texts"""


def evidence_in(name: str, given: Any) -> dict[str, Any]:
    """A verifier's evidence as it is kept; empty where it gives none.

    Args:
        name: of the verifier.
        given: under "evidence" in its answer.

    Raises:
        RewardError: it is no mapping, holds what JSON doesn't, or one of `SHAPES` otherwise.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise RewardError(f"Verifier {name!r} answered with evidence {shortened(given)}, and a mapping is expected.")
    plain: dict[str, Any] = _plain(name, "evidence", given, 0)
    _check_shapes(name, plain)
    n_bytes, n_texts = _size(plain)
    most = MOST_BYTES if n_bytes <= MOST_BYTES_OF_ALL else max(MOST_BYTES_OF_ALL // n_texts, 64)
    cut: dict[str, Any] = _cut(plain, most)
    return cut


def _plain(name: str, where: str, value: Any, depth: int) -> Any:
    """The same in dicts and lists."""
    if depth > MOST_DEEP:
        return "… nested deeper"
    if value is None or isinstance(value, bool | str):
        return value
    if type(value) is int:
        return value if value.bit_length() <= MOST_BITS else "a whole number of thousands of digits"
    if type(value) is float and math.isfinite(value):
        return value
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        some = list(value.items())[:MOST_ENTRIES]
        more = {"…": f"and {len(value) - len(some)} more"} if len(value) > len(some) else {}
        return {cut_text(key): _plain(name, f"{where}[{key!r}]", each, depth + 1) for key, each in some} | more
    if isinstance(value, list | tuple):
        kept = [_plain(name, f"{where}[{n}]", each, depth + 1) for n, each in enumerate(value[:MOST_ENTRIES])]
        return [*kept, *_rest(value[MOST_ENTRIES:])]
    raise RewardError(
        f"Verifier {name!r} answered with {where} {shortened(value)}, which JSON doesn't hold. Evidence is made of "
        "texts, finite numbers, true, false, null, lists, and mappings with texts as keys."
    )


def _rest(left_out: Sequence[Any]) -> list[Any]:
    """A mark of the same shape as the entries that were left out; none where none was."""
    if not left_out:
        return []
    text = f"… and {len(left_out)} more"
    if all(isinstance(each, Mapping) for each in left_out):
        return [{"name": text, "passed": all(each.get("passed") is True for each in left_out), "reason": ""}]
    return [text]


def _check_shapes(name: str, evidence: Mapping[str, Any]) -> None:
    code = evidence.get("exit_code")
    fits = (
        (code is None or type(code) is int)
        and isinstance(evidence.get("output", ""), str)
        and _all(_is_check, evidence.get("checks", []))
        and _all(_is_text, evidence.get("tampering", []))
    )
    if not fits:
        raise RewardError(f"Verifier {name!r} answered with evidence {shortened(dict(evidence))}. It holds {SHAPES}.")


def _all(holds: Any, values: Any) -> bool:
    return isinstance(values, list) and all(map(holds, values))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_check(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("name"), str)
        and isinstance(value.get("passed"), bool)
        and isinstance(value.get("reason", ""), str)
    )


def _size(value: Any) -> tuple[int, int]:
    """(bytes, number) of the texts in it, each counted no further than it is kept."""
    if isinstance(value, str):
        return min(len(value.encode(errors="replace")), MOST_BYTES), 1
    each = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    sizes = [_size(one) for one in each]
    return sum(size for size, _ in sizes), sum(n for _, n in sizes)


def _cut(value: Any, most: int) -> Any:
    if isinstance(value, str):
        return cut_text(value, most)
    if isinstance(value, list):
        return [_cut(each, most) for each in value]
    return {key: _cut(each, most) for key, each in value.items()} if isinstance(value, dict) else value


def cut_text(text: str, most: int = MOST_BYTES) -> str:
    """At most so many bytes of UTF-8: the beginning and the end, with a mark between them. Lone surrogates become "?".

    Example: 5,000 times "a" -> 2,032 of them, "… 936 bytes left out …" in the middle, and 2,032 of them.
    """
    raw = text.encode(errors="replace")
    if len(raw) <= most:
        return raw.decode()
    half = (most - 32) // 2
    head, tail = raw[:half].decode(errors="ignore"), raw[len(raw) - half :].decode(errors="ignore")
    return f"{head}… {len(raw) - 2 * half} bytes left out …{tail}"


def shortened(value: Any) -> str:
    """How messages show a value."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a whole number of more than 4300 digits, or lists nested too deep
        return f"a {type(value).__name__} that can't be written down"
    return text if len(text) <= 200 else f"{text[:200]}…"
