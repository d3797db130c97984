"""What a policy is expected to answer: greedy turns that go with it, and whether somebody else's weights answer so too.

`fixed_set.json` lies in an exported folder. A turn's answer is the same when every token is, or when the two tokens in
question are as likely up to rounding (a near tie, counted apart), and no log probability is more than `MAX_GAP` off.
Knows no model: who answers is handed in.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from agenttrain.errors import PromotionError
from agenttrain.records import Ids

FORMAT = 1
NAME = "fixed_set.json"
MAX_GAP = 1e-3
"""Largest difference of a log probability, at the temperature that it was recorded at."""
NEAR_TIE = 1e-4
"""Two tokens whose log probabilities differ by less are as likely: rounding decides which one is greedy."""
Form = Literal["merged", "adapter"]
Greedy = Callable[[Ids, int], tuple[Ids, Sequence[float]]]
"""(prompt ids, most tokens) to a greedy answer and the log probabilities of its ids; of fewer, where they aren't
known."""
TieGap = Callable[[Ids, int, int], float]
"""(prompt ids, one id, other id) to how far apart the two are in log probability as the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedTurn:
    """One greedy answer."""

    name: str
    """Where it is from, such as "task-4, turn 0"."""
    prompt_ids: Ids
    response_ids: Ids
    logprobs: tuple[float, ...]
    """[R] at temperature 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedSet:
    """The turns of an exported folder, and what they are answers of."""

    run_id: str
    """Empty: the policy is of no run."""
    form: Form
    source: str
    """Where prompts and answers are from, in words."""
    renderer: str
    """Identity of tokenizer, template and family that made the ids."""
    history: str
    """renderer.history that it was trained with and has to serve with."""
    weights: str
    """`folder_hash.policy_hash` of the policy that was exported."""
    files: Mapping[str, str]
    """Name of each exported file to the SHA-256 of its content; the card and this one are none of them."""
    base: str
    """Hub id or folder of what an adapter stands beside. Empty for the merged form."""
    turns: tuple[FixedTurn, ...]
    agreements: tuple[Mapping[str, Any], ...] = ()
    """`Agreement.as_dict` of whoever answered the turns when the folder was written."""

    @property
    def renderer_table(self) -> dict[str, str]:
        """Of the configuration: by which prompts are made as in training."""
        return {"family": self.renderer.partition(":")[0], "history": self.history}


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSeen:
    """What somebody made of one turn."""

    n_near_ties: int
    gap: float
    """Largest difference of a log probability over the tokens that are the same."""
    other: str = ""
    """Where the tokens part, in words. Empty: they don't."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What somebody made of all turns."""

    by: str
    """Who answered: "transformers" and others."""
    n_turns: int
    n_tokens: int
    n_same_turns: int
    """Every token the same."""
    n_near_ties: int
    """Tokens that differ where both are as likely up to rounding."""
    max_gap: float
    """Largest difference of a log probability."""
    first: str
    """What is not the same, the first of it in words; empty when all is."""

    @property
    def passed(self) -> bool:
        return not self.first

    @property
    def in_words(self) -> str:
        """Example: "transformers gives 32 of 32 turns again token by token; log probabilities within 2.4e-06"."""
        ties = f", {self.n_near_ties} of {self.n_tokens} tokens near ties" if self.n_near_ties else ""
        differs = f". {self.first}" if self.first else ""
        return (
            f"{self.by} gives {self.n_same_turns} of {self.n_turns} turns again token by token{ties}; "
            f"log probabilities within {self.max_gap:.1e}{differs}"
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which knows no NaN."""
        gap = self.max_gap if isfinite(self.max_gap) else None
        return {**asdict(self), "max_gap": gap, "passed": self.passed}


def agreement(by: str, turns: Sequence[FixedTurn], seen: Iterable[TurnSeen]) -> Agreement:
    """What somebody's answers come to.

    Args:
        seen: one for each turn.
    """
    each = list(zip(turns, seen, strict=True))
    wrong = [_wrong(turn, one) for turn, one in each]
    return Agreement(
        by=by,
        n_turns=len(each),
        n_tokens=sum(len(turn.response_ids) for turn, _ in each),
        n_same_turns=sum(not one.other and not one.n_near_ties for _, one in each),
        n_near_ties=sum(one.n_near_ties for _, one in each),
        max_gap=reduce(_larger, (one.gap for _, one in each), 0.0),
        first=next(filter(None, wrong), ""),
    )


def _wrong(turn: FixedTurn, seen: TurnSeen) -> str:
    if seen.other:
        return f"{turn.name}: {seen.other}"
    # Not `gap > MAX_GAP`, which lets a NaN pass.
    return "" if seen.gap <= MAX_GAP else f"{turn.name}: a log probability is {seen.gap:.1e} off, accepted {MAX_GAP:g}"


def scored_turn(
    turn: FixedTurn, *, likeliest: Ids, behind: Sequence[float], logprobs: Sequence[float], is_greedy: bool = True
) -> TurnSeen:
    """A turn by the scores that a model gives its ids.

    Args:
        likeliest: [R] what the model would have taken in each place.
        behind: [R] how much less likely the recorded id is.
        logprobs: [R] of the recorded ids.
        is_greedy: False: the ids were drawn, and need not be the likeliest.
    """
    places = [i for i, id in enumerate(turn.response_ids) if is_greedy and likeliest[i] != id]
    other = next((i for i in places if not behind[i] < NEAR_TIE), None)
    return TurnSeen(
        n_near_ties=len(places),
        gap=_largest_gap(turn.logprobs, logprobs),
        other="" if other is None else _parted(turn, other, likeliest[other], behind[other]),
    )


def answered_turn(turn: FixedTurn, answer: Greedy, *, tie_gap: TieGap) -> TurnSeen:
    """A turn by the answer that somebody gives to its prompt; after a near tie it goes on from the recorded id."""
    n_done, n_ties, gap = 0, 0, 0.0
    while (n_left := len(turn.response_ids) - n_done) > 0:
        prompt, rest = turn.prompt_ids + turn.response_ids[:n_done], turn.response_ids[n_done:]
        ids, logprobs = answer(prompt, n_left)
        n_same = next((i for i, (a, b) in enumerate(zip(ids, rest, strict=False)) if a != b), min(len(ids), n_left))
        gap = _larger(gap, _largest_gap(turn.logprobs[n_done : n_done + n_same], logprobs[:n_same]))
        n_done += n_same
        if n_same == n_left:
            break
        if n_same == len(ids):
            why = f"it ends after {n_done} of {len(turn.response_ids)} tokens"
            return TurnSeen(n_near_ties=n_ties, gap=gap, other=why)
        before = turn.prompt_ids + turn.response_ids[:n_done]
        apart = tie_gap(before, turn.response_ids[n_done], ids[n_same])
        if not apart < NEAR_TIE:
            return TurnSeen(n_near_ties=n_ties, gap=gap, other=_parted(turn, n_done, ids[n_same], apart))
        n_ties, n_done = n_ties + 1, n_done + 1
    return TurnSeen(n_near_ties=n_ties, gap=gap)


def _parted(turn: FixedTurn, place: int, other: int, apart: float) -> str:
    return (
        f"token {place} is {other} in place of {turn.response_ids[place]}, {apart:.1e} apart in log probability "
        f"(a near tie is below {NEAR_TIE:g})"
    )


def _largest_gap(recorded: Sequence[float], seen: Sequence[float]) -> float:
    gap = 0.0
    for a, b in zip(recorded, seen, strict=False):
        gap = _larger(gap, abs(a - b))
    return gap


def _larger(gap: float, other: float) -> float:
    """The larger one; a NaN is the largest."""
    return gap if gap >= other or gap != gap else other


def spread(n: int, n_wanted: int) -> list[int]:
    """Positions of at most n_wanted of n, evenly over all of them.

    Example: spread(10, 4) -> [0, 2, 5, 7]
    """
    return list(range(n)) if n <= n_wanted else [i * n // n_wanted for i in range(n_wanted)]


def as_json(fixed: FixedSet) -> str:
    """The content of fixed_set.json, a line for each turn."""
    table = {"agenttrain": "fixed set", "format": FORMAT, **asdict(fixed)}
    turns = table.pop("turns")
    head = json.dumps(table, indent=1).removesuffix("\n}")
    return head + ',\n "turns": [\n' + ",\n".join(f"  {json.dumps(turn)}" for turn in turns) + "\n ]\n}\n"


def read_fixed_set(folder: Path) -> FixedSet:
    """The fixed set of an exported folder.

    Raises:
        PromotionError: there is none, or it is damaged, or of a newer format.
    """
    path = folder / NAME
    if not folder.is_dir():
        raise PromotionError(
            f"{folder} isn't there. Name a folder that agenttrain export wrote (exports/RUN without --to)."
        )
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        is_ours = table.pop("agenttrain") == "fixed set"
        written = table.pop("format")
        if is_ours and written > FORMAT:
            raise PromotionError(
                f"{path} has format {written}, and this agenttrain reads up to {FORMAT}. Install the agenttrain that "
                "wrote it, or a newer one."
            )
        turns = [
            FixedTurn(
                name=turn["name"],
                prompt_ids=tuple(turn["prompt_ids"]),
                response_ids=tuple(turn["response_ids"]),
                logprobs=tuple(turn["logprobs"]),
            )
            for turn in table.pop("turns")
        ]
        return FixedSet(**{**table, "turns": tuple(turns), "agreements": tuple(table["agreements"])})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PromotionError(
            f"{folder} is no folder that agenttrain exported: {NAME} can't be read "
            f"({type(error).__name__}: {error}). Name one that holds it whole."
        ) from None
