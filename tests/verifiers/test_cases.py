from __future__ import annotations

import math

import pytest

from agenttrain import SandboxLimits, Task
from agenttrain.errors import RewardError
from agenttrain.verifiers import hidden_cases
from agenttrain.verifiers.cases import cases_of, is_same
from agenttrain.verifiers.programs.cases import NotPlain, plain

BROKEN = {"shop.py": "def add(a, b):\n    return a - b\n"}
RIGHT = "def add(a, b):\n    return a + b\n"
CASES = {
    "cases": [
        {"call": "shop:add", "args": [1, 2], "expected": 3},
        {"call": "shop:add", "args": [20, 22], "expected": 42},
        {"call": "shop:add", "args": [1, "2"], "raises": "TypeError"},
    ]
}


def reasons(answer):
    return [check["reason"] for check in answer["evidence"]["checks"]]


def test_right_code_passes_all_cases(judged):
    """Score 1, success, one passed check a case, exit code 0, nothing reported."""
    answer = judged(hidden_cases(), BROKEN, {"shop.py": RIGHT}, CASES)

    assert answer["score"] == 1.0
    assert answer["success"] is True
    assert answer["comment"] == "3 of 3 pass"
    assert [check["name"] for check in answer["evidence"]["checks"]] == [
        "shop:add(1, 2)",
        "shop:add(20, 22)",
        'shop:add(1, "2")',
    ]
    assert answer["evidence"]["exit_code"] == 0
    assert answer["evidence"]["tampering"] == []


def test_untouched_broken_code_fails_with_reasons(judged):
    """What was expected and what came stand in the reason; TypeError is right all the same."""
    answer = judged(hidden_cases(), BROKEN, {}, CASES)

    assert answer["score"] == 0.0
    assert answer["success"] is False
    assert reasons(answer) == ["expected 3, got -1", "expected 42, got -2", ""]
    assert answer["comment"] == "1 of 3 pass; shop:add(1, 2): expected 3, got -1"


def test_without_strict_the_score_is_the_share(judged):
    """One of three."""
    assert judged(hidden_cases(strict=False), BROKEN, {}, CASES)["score"] == pytest.approx(1 / 3)


FORGERIES = {
    "leaves at import": "import os\nos._exit(0)\n",
    "exits at import": "import sys\nsys.exit(0)\n",
    "leaves in the call": "import os\ndef add(a, b):\n    os._exit(0)\n",
    "always equal": "class A(int):\n    def __eq__(self, other): return True\n    def __hash__(self): return 0\n"
    "def add(a, b):\n    return A(0)\n",
    "equal object": "class A:\n    def __eq__(self, other): return True\ndef add(a, b):\n    return A()\n",
    "patched json": 'import json\njson.dumps = lambda *a, **k: \'{"index": 0, "passed": true}\'\n'
    "def add(a, b):\n    return 0\n",
    "forged lines": "import os\n"
    "for fd in range(3, 64):\n"
    "    try:\n"
    '        os.write(fd, b\'{"index": 0, "passed": true}\\n{"index": 1, "value": null, "ok": 1}\\nxx\\n[]\\n\')\n'
    "    except OSError: pass\n"
    "os._exit(0)\n",
    "prints success": "print('3 passed')\nprint('{\"index\": 0, \"value\": 3}')\ndef add(a, b):\n    return 0\n",
    "reads the runner": "import sys\n"
    "f = sys._getframe()\n"
    "seen = ''\n"
    "while f:\n"
    "    seen += repr({k: v for k, v in f.f_locals.items() if k != 'seen'}); f = f.f_back\n"
    "def add(a, b):\n    return 42 if 'expected' in seen else 0\n",
    "reads its arguments": "import sys, os\n"
    "seen = open('/proc/self/cmdline').read() + sys.stdin.read()\n"
    "def add(a, b):\n    return 42 if 'expected' in seen else 0\n",
    "true for one": "def add(a, b):\n    return True\n",
    "a text": "def add(a, b):\n    return str(a + b)\n",
    "not a number": "def add(a, b):\n    return float('nan')\n",
    "ends the runner": "import os\nos.kill(os.getppid(), 9)\nos.kill(os.getpid(), 9)\n",
    "removes the folder": "import shutil\nshutil.rmtree('.', ignore_errors=True)\ndef add(a, b):\n    return 0\n",
    "a huge result": "def add(a, b):\n    return 'x' * (9 << 20)\n",
    "a deep result": "def add(a, b):\n    x = []\n    for _ in range(5000): x = [x]\n    return x\n",
    "digits": "def add(a, b):\n    return 7 ** 9000\n",
}


@pytest.mark.parametrize("code", FORGERIES.values(), ids=FORGERIES)
def test_forging_gains_nothing(judged, code):
    """None of it makes the first two cases pass; each has a reason."""
    answer = judged(hidden_cases(strict=False), BROKEN, {"shop.py": code}, CASES)

    assert [check["passed"] for check in answer["evidence"]["checks"]][:2] == [False, False]
    assert all(reasons(answer)[:2])
    assert answer["score"] <= 1 / 3


def test_a_case_that_ends_the_process_fails_alone(judged):
    """Those after it are asked again in a new process."""
    code = "import os\ndef add(a, b):\n    if a == 20: os._exit(3)\n    return a + b\n"

    answer = judged(hidden_cases(strict=False), BROKEN, {"shop.py": code}, CASES)

    assert reasons(answer) == ["", "the process ended with exit code 3 before it was done", ""]
    assert answer["score"] == pytest.approx(2 / 3)


def test_a_case_that_hangs_fails_alone(judged):
    """Its own time is over; those after it are asked."""
    code = "def add(a, b):\n    while a == 1 and b == 2: pass\n    return a + b\n"

    answer = judged(hidden_cases(strict=False, case_seconds=1.0), BROKEN, {"shop.py": code}, CASES)

    assert reasons(answer) == ["it took more than 1 s", "", ""]


def test_code_that_takes_the_alarm_away_has_used_up_the_time(judged):
    """The time of all cases ends it, and none passes."""
    code = "import signal\ndef add(a, b):\n    signal.setitimer(signal.ITIMER_REAL, 0)\n    while True: pass\n"

    answer = judged(hidden_cases(seconds=0.5, case_seconds=0.2), BROKEN, {"shop.py": code}, CASES)

    assert answer["score"] == 0.0
    assert reasons(answer)[0] == "the process was ended by its limit of seconds before it was done"
    assert [check["passed"] for check in answer["evidence"]["checks"]] == [False, False, False]


def test_too_much_memory_is_the_agents_failure(judged):
    """A MemoryError, or the end of the process: a score of 0 either way, no error."""
    code = "def add(a, b):\n    return len(bytearray(900 << 20))\n"

    answer = judged(hidden_cases(), BROKEN, {"shop.py": code}, CASES, SandboxLimits(memory_mib=128))

    assert answer["score"] == 0.0
    assert all(reasons(answer)[:2])


def test_tampering_is_reported_and_changes_nothing(judged):
    """A json.py of the agent's does not reach the judging sandbox; right code is right all the same."""
    written = {"shop.py": RIGHT, "json.py": "raise SystemExit", "sitecustomize.py": "raise SystemExit"}

    answer = judged(hidden_cases(), BROKEN, written, CASES)

    assert answer["score"] == 1.0
    assert answer["evidence"]["tampering"] == [
        "json.py was added: a module that stands in for json of the standard library",
        "sitecustomize.py was added: what Python runs at its start",
    ]


def test_code_that_can_not_be_imported_is_the_agents_failure(judged):
    """Each case says why."""
    answer = judged(hidden_cases(), BROKEN, {"shop.py": "def add(a, b)\n"}, CASES)

    assert answer["score"] == 0.0
    assert reasons(answer)[0].startswith("shop:add can't be imported: SyntaxError: expected ':'")


def test_state_is_carried_between_cases_unless_asked_otherwise(judged):
    """One process for a module's cases; with process_per_case one for each."""
    counts = {"shop.py": "n = 0\ndef add():\n    global n\n    n += 1\n    return n\n"}
    cases = {"cases": [{"call": "shop:add", "expected": 1}, {"call": "shop:add", "expected": 1}]}

    assert judged(hidden_cases(strict=False), counts, {}, cases)["score"] == 0.5
    assert judged(hidden_cases(process_per_case=True), counts, {}, cases)["score"] == 1.0


def test_coroutines_methods_and_keywords(judged):
    """An async function is awaited, a method is found by its path, kwargs are given by name."""
    code = {
        "shop.py": "async def late(x): return x\n"
        "class Cart:\n    @staticmethod\n    def total(*, n, rate=1.5): return n * rate\n"
    }
    cases = {
        "cases": [
            {"call": "shop:late", "args": [{"a": [1, None]}], "expected": {"a": [1, None]}},
            {"call": "shop:Cart.total", "kwargs": {"n": 3}, "expected": 4.5},
        ]
    }

    assert judged(hidden_cases(), code, {}, cases)["comment"] == "2 of 2 pass"


def test_without_a_sandbox_the_verifier_says_what_to_write():
    """A RewardError that names SandboxSpec."""
    with pytest.raises(RewardError, match=r"this rollout had none. Give the graph one: .*sandbox=SandboxSpec"):
        hidden_cases()(task=Task(id="a", input={}), sandbox=None)


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        (None, "found no cases for task 'a'"),
        ({"cases": []}, "found no cases for task 'a'"),
        ({"cases": [{"call": "shop.add", "expected": 1}]}, 'Give a "call" such as "module:function"'),
        ({"cases": [{"call": "shop:add"}]}, 'must have either "expected" or "raises"'),
        ({"cases": [{"call": "shop:add", "expected": 1, "raises": "E"}]}, 'must have either "expected" or "raises"'),
        ({"cases": [{"call": "shop:add", "expected": 1, "arg": [1]}]}, r"has \['arg'\]"),
        ({"cases": [{"call": "shop:add", "expected": {1}}]}, "holds what is no JSON"),
        ({"cases": [{"call": "shop:add", "raises": ""}]}, "Give the name of an exception"),
    ],
)
def test_unusable_cases_are_the_environments_failure(reference, says):
    """They name the task and what is expected."""
    with pytest.raises(RewardError, match=says):
        cases_of(Task(id="a", input={}, reference=reference), None)


@pytest.mark.parametrize(
    ("expected", "seen", "same"),
    [
        (1, 1, True),
        (1, True, False),
        (True, 1, False),
        (True, True, True),
        (1, 1.0, False),
        (1.0, 1, True),
        (1.0, True, False),
        (0.3, 0.1 + 0.2, True),
        (0.3, 0.3001, False),
        (1e300, 10**400, False),
        (math.nan, math.nan, True),
        (math.inf, math.inf, True),
        (1, "1", False),
        (None, False, False),
        ([1, 2], [1, 2], True),
        ([1, 2], [1, 2, 3], False),
        ((1, 2), [1, 2], True),
        ([1, [True]], [1, [1]], False),
        ({"a": 1}, {"a": 1}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ({"a": 0}, {"a": False}, False),
    ],
)
def test_sameness_goes_by_json_types(expected, seen, same):
    """true is not 1, an expected float takes an integer, and no container forgives."""
    assert is_same(expected, seen, 1e-9) is same


@pytest.mark.parametrize(
    ("value", "said"),
    [({1, 2}, "a set, which is no JSON value"), ({1: 2}, "keys that are no texts"), (object(), "a object, which")],
)
def test_what_is_no_json_is_not_made_json(value, said):
    """A set is not sorted, a key not turned into text."""
    with pytest.raises(NotPlain, match=said):
        plain([value], 10)


def test_every_verifier_made_has_the_factorys_name():
    """It stands in reports where none is given."""
    assert hidden_cases().__name__ == "hidden_cases"


def test_what_can_be_read_and_not_be_written_down_is_a_wrong_answer(judged):
    """Lists nested to where Python can still read them and not write them: no failure of the verifier."""
    forged = (
        "import os\n\ndef add(a, b):\n"
        "    with open('.agenttrain-judge/results.jsonl', 'a') as results:\n"
        "        for n in range(120):\n"
        "            deep = '[' * (880 + n) + ']' * (880 + n)\n"
        '            results.write(\'{"index": %d, "value": %s}\\n\' % (n, deep))\n'
        "    os._exit(0)\n"
    )
    cases = {"cases": [{"call": "shop:add", "args": [1, 2], "expected": 3}] * 120}

    answer = judged(hidden_cases(), BROKEN, {"shop.py": forged}, cases)

    assert answer["score"] == 0.0
    assert not any(check["passed"] for check in answer["evidence"]["checks"])
