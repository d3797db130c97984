"""commands/reward_lines.py: what `inspect` says of a reward."""

from __future__ import annotations

from agenttrain.commands.reward_lines import reward_lines
from agenttrain.records import Reward, RewardPart


def test_each_part_is_shown_with_its_kind_and_its_evidence() -> None:
    """The gate that decided, what failed, what was changed, the end of the output, and what was left out."""
    tests = {
        "exit_code": 1,
        "output": "\n".join(f"line {n}" for n in range(12)),
        "checks": [
            {"name": "adds", "passed": True, "reason": ""},
            {"name": "divides", "passed": False, "reason": "expected 2"},
            {"name": "times out", "passed": False},
        ],
        "tampering": ["conftest.py was changed"],
        "seconds": 0.5,
    }
    parts = (
        RewardPart(name="no_secret", score=0.0, weight=0.0, kind="safety", comment="prints the key"),
        RewardPart(name="form", score=1.0, weight=0.0, kind="format"),
        RewardPart(name="tests", score=0.5, kind="outcome", comment="1 of 3", evidence=tests),
        RewardPart(name="turns", score=0.75, weight=-0.1, kind="cost"),
        RewardPart(name="style", score=0.0, weight=0.0, kind="process", error="the judge\nhung"),
    )
    assert reward_lines(Reward(score=-1.25, parts=parts, unfinished=-0.25, closed="no_secret")) == [
        "reward: -1.25, by the closed gate no_secret, unfinished -0.25",
        "  no_secret: safety 0, closed, prints the key",
        "  form: format 1, open",
        "  tests: outcome 0.5 × 1, 1 of 3",
        "    checks: 1 of 3 passed",
        "    failed: divides: expected 2",
        "    failed: times out",
        "    tampering: conftest.py was changed",
        "    exit code: 1",
        *(f"    output: line {n}" for n in range(2, 12)),
        "    seconds: 0.5",
        "  turns: cost 0.75 × -0.1",
        "  style: process, left out: the judge hung",
    ]


def test_what_a_part_decided_itself_stands_behind_it() -> None:
    """Whether it was a success has no line of its own; a part of the user's with weight 0 has."""
    parts = (
        RewardPart(name="tests", score=0.5, comment="1 of 2"),
        RewardPart(name="tests.success", score=0.0, weight=0.0),
        RewardPart(name="style", score=1.0, weight=0.0),
        RewardPart(name="lint", score=1.0),
        RewardPart(name="lint.success", score=1.0, weight=0.0),
    )
    assert reward_lines(Reward(score=1.5, parts=parts))[1:] == [
        "  tests: outcome 0.5 × 1, success: no, 1 of 2",
        "  style: outcome 1 × 0",
        "  lint: outcome 1 × 1, success: yes",
    ]


def test_what_an_agent_wrote_can_not_steer_the_terminal() -> None:
    """Control characters, and the sign that turns the direction of writing, are shown as what can't be shown."""
    part = RewardPart(name="v", score=0.0, comment="a\nb\x1b[2J\u202e", evidence={"output": "\x1b]0;title\x07"})
    assert reward_lines(Reward(score=0.0, parts=(part,)))[1:] == [
        "  v: outcome 0 × 1, a b\ufffd[2J\ufffd",
        "    output: \ufffd]0;title\ufffd",
    ]
