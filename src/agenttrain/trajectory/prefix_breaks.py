"""Turns become counts of prefix breaks: how often a prompt no longer extended what was sampled, and why.

A break is a trajectory other than the rollout's first. It costs context that is computed again and never a token: the
sampled ids before it stay trained where they are. Where only the template would write an answered reply otherwise,
nothing breaks: the reply stays in the prompt as it was sampled, which is counted apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from agenttrain.records import BreakCause, Respelling, Turn
from agenttrain.trajectory.tree import trajectories

BREAKS_IN_WORDS: Final[Mapping[str, str]] = {
    "other_conversation": "another conversation, such as a sub-agent's",
    "history_rewritten": "an earlier message was changed or left out",
    "tools_changed": "other tools were offered",
    "instruction_changed": "another form of answer was asked for",
    "parallel_sibling": "a prompt was asked again: in parallel, or later",
    "retry": "LangGraph ran the node again",
    "truncated_turn": "the reply before was cut at its length",
    "thinking_dropped": "the template drops thinking (renderer.history = template)",
    "template": "the renderer could not append",
}
RESPELLED_IN_WORDS: Final[Mapping[str, str]] = {
    "thinking_dropped": "without its thinking",
    "arguments_respelled": "with its calls spelled in another way",
    "text_respelled": "with other white space or a cut text",
    "tokens_respelled": "in other tokens of the same text",
}


def prefix_breaks(turns: Sequence[Turn]) -> dict[BreakCause, int]:
    """How many trajectories began for each cause; the first of a rollout is no break.

    Args:
        turns: of one rollout.

    Example: two parallel calls on one prompt -> {"parallel_sibling": 1}
    """
    causes = Counter(trajectory.break_cause for trajectory in trajectories(turns))
    causes.pop("first_turn", None)
    return dict(sorted(causes.items()))


def respelled_turns(turns: Iterable[Turn]) -> dict[Respelling, int]:
    """How many turns kept the reply before them as sampled though the template would write it otherwise, by how.

    A turn may count for several.
    """
    return dict(sorted(Counter(how for turn in turns for how in turn.respelled).items()))


def in_words(counts: Mapping[str, int], words: Mapping[str, str]) -> str:
    """Counts by cause as people read them, the most first.

    Example: {"retry": 2} -> "2 retry (LangGraph ran the node again)"
    """
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{n:,} {cause} ({words.get(cause, cause)})" for cause, n in ordered)
