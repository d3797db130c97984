from __future__ import annotations

import pytest

from agenttrain import SandboxLimits, Task
from agenttrain.errors import RewardError
from agenttrain.sandbox_protocol import SandboxFile
from agenttrain.verifiers import hidden_tests
from agenttrain.verifiers.suites import is_of_pytest, names_of_tests

BROKEN = {"shop.py": "def add(a, b):\n    return a - b\n"}
RIGHT = "def add(a, b):\n    return a + b\n"
SUITE = {
    "tests/test_shop.py": """
import pytest
from shop import add

def test_small():
    assert add(1, 2) == 3

@pytest.mark.parametrize("n", [4, 5])
def test_many(n):
    assert add(n, n) == 2 * n
"""
}
IDS = ["tests/test_shop.py::test_small", "tests/test_shop.py::test_many[4]", "tests/test_shop.py::test_many[5]"]
ALWAYS_EQUAL = """
class Always:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __gt__ = __le__ = __ge__ = __lt__
    def __contains__(self, item): return True
    def __bool__(self): return True
    def __hash__(self): return 3
def add(a, b):
    return Always()
"""
ATTACKS = {
    "always equal": ALWAYS_EQUAL,
    "leaves at import": "import os\nos._exit(0)\n",
    "leaves in the call": "import os\ndef add(a, b):\n    os._exit(0)\n",
    "exits at import": "import sys\nsys.exit(0)\n",
    "exits in the call": "def add(a, b):\n    raise SystemExit(0)\n",
    "skips": "import pytest\ndef add(a, b):\n    pytest.skip('later')\n",
    "skips the file": "import pytest\npytest.skip('later', allow_module_level=True)\n",
    "ends pytest": "import pytest\ndef add(a, b):\n    pytest.exit('done', returncode=0)\n",
    "prints success": "print('3 passed in 0.01s')\ndef add(a, b):\n    print('PASSED')\n",
    "replaces runtest": "import _pytest.python\n_pytest.python.Function.runtest = lambda self: None\n"
    "def add(a, b):\n    return 0\n",
    "replaces reports": """
from _pytest.reports import TestReport
real = TestReport.from_item_and_call.__func__
def forged(cls, item, call):
    call.excinfo = None
    return real(cls, item, call)
TestReport.from_item_and_call = classmethod(forged)
def add(a, b):
    return 0
""",
    "replaces the results": "import glob, os, json\n"
    "for path in glob.glob('.agenttrain-judge/*') + ['.agenttrain-judge/results.json']:\n"
    "    try: open(path, 'w').write(json.dumps({'exit_code': 0, 'tests': {}}))\n"
    "    except OSError: pass\n"
    "os._exit(0)\n",
    "rewrites the tests": "import os\n"
    "for name in ('tests/test_shop.py', 'tests/conftest.py'):\n"
    "    try: open(name, 'w').write('def test_small(): pass')\n"
    "    except OSError: pass\n"
    "def add(a, b):\n    return 0\n",
    "a plugin": """
import _pytest.assertion.util as util
class Forger:
    def pytest_pyfunc_call(self, pyfuncitem): return True
def add(a, b):
    config = util._config
    if config is not None and not config.pluginmanager.has_plugin('forger'):
        config.pluginmanager.register(Forger(), 'forger')
    return 0
""",
}


QUICK = ("always equal", "leaves in the call", "replaces reports")
"""The others are tried where whole runs are."""


def each(attacks, *without):
    """Attacks as parameters, under their names."""
    marks = {name: () if name in QUICK else (pytest.mark.slow,) for name in attacks}
    return [pytest.param(name, marks=marks[name], id=name) for name in attacks if name not in without]


def checks(answer):
    return {check["name"]: check["reason"] for check in answer["evidence"]["checks"]}


def both(judged, initial, written, files, **more):
    """What is answered apart, and in one process."""
    return [
        judged(hidden_tests(files=files, apart=True, **more), initial, written),
        judged(hidden_tests(files=files, apart=False, **more), initial, written),
    ]


def test_right_code_passes_all_hidden_tests_in_either_way(judged):
    """All ids with parameters, exit code 0, nothing reported."""
    for answer in both(judged, BROKEN, {"shop.py": RIGHT}, SUITE):
        assert answer["comment"] == "3 of 3 pass"
        assert (answer["score"], answer["success"]) == (1.0, True)
        assert list(checks(answer)) == IDS
        assert answer["evidence"]["exit_code"] == 0
        assert answer["evidence"]["tampering"] == []
        assert "3 passed" in answer["evidence"]["output"]


@pytest.mark.slow
def test_wrong_code_fails_with_the_assertion(judged):
    """Exit code 1, and pytest's own words as the reason; the share counts where strict is off."""
    for answer in both(judged, BROKEN, {"shop.py": "def add(a, b):\n    return 3\n"}, SUITE, strict=False):
        assert answer["score"] == pytest.approx(1 / 3)
        assert answer["success"] is False
        assert answer["evidence"]["exit_code"] == 1
        assert checks(answer)[IDS[0]] == ""
        assert checks(answer)[IDS[1]].startswith("call failed: assert 3 == (2 * 4)")


@pytest.mark.parametrize("name", each(ATTACKS))
def test_attacks_gain_nothing_apart(judged, name):
    """Whatever the agent's code does to its own process, no test passes."""
    answer = judged(hidden_tests(files=SUITE, strict=False), BROKEN, {"shop.py": ATTACKS[name]})

    assert answer["score"] == 0.0
    assert all(checks(answer).values())


@pytest.mark.parametrize("name", each(ATTACKS, "always equal"))
def test_attacks_gain_nothing_in_one_process(judged, name):
    """What touches pytest is reported and scores 0; what only leaves early has passed nothing."""
    answer = judged(hidden_tests(files=SUITE, apart=False, strict=False), BROKEN, {"shop.py": ATTACKS[name]})

    assert answer["score"] == 0.0
    assert list(checks(answer)) == IDS
    told = {
        "replaces runtest": "_pytest.python.Function.runtest was replaced while the agent's code was judged",
        "replaces reports": "_pytest.reports.TestReport.from_item_and_call was replaced while the agent's code was",
        "rewrites the tests": "tests/test_shop.py was rewritten while the agent's code was judged",
        "a plugin": "the pytest plugin forger was put in while the agent's code was judged",
    }
    assert told.get(name, "") in "\n".join(answer["evidence"]["tampering"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("import gc\nfound = [x for x in gc.get_objects()]\n", "the agent's code called gc.get_objects"),
        ("import sys\nframe = sys._getframe()\n", "the agent's code called sys._getframe"),
        ("import ctypes\nctypes.CDLL(None)\n", "the agent's code called ctypes.dlopen"),
        ("open('/proc/self/maps').read()\n", "the agent's code used /proc/self/maps by open"),
        ("import sys\nsys.meta_path.insert(0, object())\n", "what imports modules was replaced"),
        ("import builtins\nbuiltins.len = lambda x: 0\n", "builtins.len was replaced"),
        ("import sys\nsys.settrace(lambda *a: None)\nsys.settrace(None)\n", "the agent's code called sys.settrace"),
        (
            "try: 1 / 0\nexcept ZeroDivisionError as e: frame = e.__traceback__.tb_frame\n",
            "the agent's code reached for tb_frame of a traceback",
        ),
        (
            "import pluggy._manager as m\nm.PluginManager.register.__code__ = (lambda *a, **k: None).__code__\n",
            "the agent's code set __code__ of a function",
        ),
    ],
)
def test_reaching_for_the_judge_is_told_in_one_process(judged, code, told):
    """Right code that reaches for frames, memory or pytest scores 0, and the report says what it did."""
    answer = judged(hidden_tests(files=SUITE, apart=False), BROKEN, {"shop.py": code + RIGHT})

    assert answer["score"] == 0.0
    assert told in "\n".join(answer["evidence"]["tampering"])


def test_honest_code_is_not_suspected_in_one_process(judged):
    """Named tuples, dataclasses, logging, tracebacks and collections use frames by way of the library."""
    code = """
import collections, dataclasses, functools, logging, traceback, typing, warnings
Pair = collections.namedtuple('Pair', 'a b')
@dataclasses.dataclass
class Sum:
    a: int
    b: int
@functools.lru_cache
def add(a, b):
    logging.getLogger('shop').warning('adding %s', a)
    try: raise ValueError
    except ValueError: traceback.format_exc()
    return Sum(*Pair(a, b)).a + b
"""
    answer = judged(hidden_tests(files=SUITE, apart=False), BROKEN, {"shop.py": code})

    assert answer["comment"] == "3 of 3 pass"
    assert answer["evidence"]["tampering"] == []


@pytest.mark.slow
def test_tampering_with_what_judges_changes_nothing(judged):
    """conftest, configuration, a local pytest and a forged test file are reported and never reach the tests."""
    written = {
        "conftest.py": "def pytest_pyfunc_call(pyfuncitem): return True\n",
        "pytest.ini": "[pytest]\naddopts = --collect-only\n",
        "pytest/__init__.py": "",
        "tests/test_shop.py": "def test_small(): pass\n",
        "tests/__init__.py": "import os; os._exit(0)\n",
    }
    for answer in both(judged, BROKEN, written, SUITE):
        assert answer["score"] == 0.0
        assert answer["evidence"]["exit_code"] == 1
        assert answer["evidence"]["tampering"] == [
            "conftest.py was added: configuration of the tests",
            "pytest.ini was added: configuration of the tests",
            "pytest/__init__.py was added: a module that stands in for pytest of the installed packages",
            "tests/test_shop.py was added: where a hidden file lies",
        ]


@pytest.mark.slow
def test_code_that_can_not_be_imported_is_the_agents_failure(judged):
    """A score of 0 for every test, and the error as the reason."""
    for answer in both(judged, BROKEN, {"shop.py": "import nowhere\n"}, SUITE):
        assert answer["score"] == 0.0
        assert all("No module named 'nowhere'" in reason for reason in checks(answer).values())


@pytest.mark.slow
def test_code_that_removes_its_module_is_the_agents_failure(judged):
    """It was there at first, so its lack is not the suite's."""

    def verifier(**more):
        return hidden_tests(files=SUITE, **more)

    for apart in (True, False):
        answer = judged(verifier(apart=apart), {**BROKEN, "a.py": ""}, {"shop.py": "raise ImportError('gone')\n"})
        assert answer["score"] == 0.0


@pytest.mark.parametrize("apart", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"tests/test_a.py": "import nowhere\n\ndef test_a(): pass\n"}, r"can't import tests/test_a.py: .*nowhere"),
        ({"tests/test_a.py": "def test_a(:\n"}, "can't read the hidden file tests/test_a.py"),
        ({"tests/test_a.py": "A = 1\n"}, "found no test in its hidden files"),
        ({"tests/check.py": "def test_a(): pass\n"}, r"got no test file among \['tests/check.py'\]"),
    ],
)
def test_a_suite_that_can_not_run_is_the_environments_failure(judged, apart, files, says):
    """It names the file; no score of 0 is given for it."""
    with pytest.raises(RewardError, match=f"(?s){says}"):
        judged(hidden_tests(files=files, apart=apart), BROKEN, {"shop.py": RIGHT})


@pytest.mark.slow
def test_a_module_that_the_agent_is_to_write_may_be_missing(judged):
    """Named in modules=, its lack is the agent's; written, it is judged."""
    files = {"test_new.py": "from made import up\ndef test_up():\n    assert up(1) == 2\n"}
    for apart in (True, False):
        verifier = hidden_tests(files=files, apart=apart, modules=["made"])
        assert judged(verifier, BROKEN)["score"] == 0.0
        assert judged(verifier, BROKEN, {"made.py": "def up(n): return n + 1\n"})["comment"] == "1 of 1 pass"


APART = """
import pytest
import shop
from shop import Cart, OutOfStock, Rank, counted, late, mapped, point, sort

def test_objects_stay_there_and_are_asked():
    cart = Cart()
    cart.put("tea", 3)
    assert cart.items == {"tea": 3}
    assert len(cart) == 1 and "tea" in list(cart)
    assert "tea" in cart and "milk" not in cart
    assert isinstance(cart, Cart) and not isinstance(3, Cart)
    assert repr(cart) == "Cart(1)"
    cart.owner = "Ann"
    assert cart.owner == "Ann"
    assert cart["tea"] == 3
    with pytest.raises(AttributeError):
        cart.nothing
    assert cart == cart and cart != Cart()

def test_exceptions_are_of_their_class():
    with pytest.raises(OutOfStock, match="no milk") as caught:
        Cart().take("milk")
    assert isinstance(caught.value, LookupError)
    with pytest.raises(LookupError):
        Cart().take("milk")
    with pytest.raises(ZeroDivisionError):
        shop.mapped([0], lambda n: 1 // n)

def test_functions_are_called_back():
    seen = []
    def double(n):
        seen.append(n)
        return shop.add(n, n)
    assert mapped([1, 2], double) == [2, 4]
    assert seen == [1, 2]

def test_containers_change_in_place():
    numbers = [3, 1, 2]
    assert sort(numbers) is None
    assert numbers == [1, 2, 3]

def test_plain_values_keep_their_types():
    for value in (None, True, 2**200, -1.5, "é", b"\\0", (1, (2,)), {1: {2}}, frozenset({1}), 1j, range(3)):
        assert shop.same(value) == value and type(shop.same(value)) is type(value)

def test_a_named_tuple_is_the_tuple_that_it_is():
    assert point() == (1, 2)
    assert point().x == 1
    assert Rank.HIGH == 2 and Rank.HIGH > 1 and shop.rank() is Rank.HIGH

def test_generators_are_walked():
    assert [n for n in counted(3)] == [0, 1, 2]
    assert next(counted(2)) == 0
    assert sum(counted(4)) == 6

def test_what_is_printed_is_printed_here(capsys):
    shop.say("hello")
    assert capsys.readouterr().out == "hello\\n"

def test_attributes_of_a_module_can_be_set(monkeypatch):
    monkeypatch.setattr(shop, "RATE", 5)
    assert shop.rated(2) == 10
    monkeypatch.undo()
    assert shop.rated(2) == 4 and shop.RATE == 2

def test_long_messages_cross():
    assert len(shop.same("x" * 300_000)) == 300_000

def test_objects_of_the_tests_do_not_cross():
    with pytest.raises(TypeError, match="give plain data or a function"):
        shop.same(object())
    with pytest.raises(TypeError, match="can't be derived from"):
        class Mine(Cart):
            pass
"""
SHOP = """
import collections, enum
RATE = 2
class OutOfStock(LookupError):
    pass
class Cart:
    def __init__(self): self.items = {}
    def put(self, name, n): self.items[name] = n
    def take(self, name):
        if name not in self.items: raise OutOfStock(f"no {name}")
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __contains__(self, name): raise RuntimeError("never asked")
    def __getitem__(self, name): return self.items[name]
    def __repr__(self): return f"Cart({len(self)})"
class Rank(enum.IntEnum):
    LOW = 1
    HIGH = 2
Point = collections.namedtuple("Point", "x y")
def point(): return Point(1, 2)
def rank(): return Rank.HIGH
def add(a, b): return a + b
def mapped(xs, function): return [function(x) for x in xs]
def sort(xs): xs.sort()
def same(x): return x
def counted(n): yield from range(n)
def late(): pass
def say(text): print(text)
def rated(n): return n * RATE
"""


@pytest.mark.slow
def test_apart_a_test_uses_the_agents_code_as_always(judged):
    """All that the docstring says is forwarded, is; what it says is not, says so."""
    answer = judged(hidden_tests(files={"test_shop.py": APART}), {"shop.py": SHOP})

    assert [(name, reason) for name, reason in checks(answer).items() if reason] == []
    assert answer["comment"] == "11 of 11 pass"


def test_apart_no_value_of_a_test_is_judged_by_the_agents_code(judged):
    """An object that says yes to everything is equal to nothing, orders with nothing, and holds what it yields."""
    files = {
        "test_a.py": """
import pytest
from shop import add
def test_equality():
    for value in (3, "a", None, True, [1], {}, object()):
        assert not (add(1, 2) == value) and not (value == add(1, 2))
        assert add(1, 2) != value
    assert add(1, 2) not in [1, 2, 3] and 3 not in {3: add(1, 2)}.values()
def test_order():
    with pytest.raises(TypeError):
        add(1, 2) < 4
    with pytest.raises(TypeError):
        4 > add(1, 2)
def test_members():
    with pytest.raises(TypeError):
        3 in add(1, 2)
def test_approx():
    assert add(1, 2) != pytest.approx(3) and pytest.approx(3) != add(1, 2)
"""
    }

    answer = judged(hidden_tests(files=files), BROKEN, {"shop.py": ALWAYS_EQUAL})

    assert [(name, reason) for name, reason in checks(answer).items() if reason] == []
    assert len(checks(answer)) == 4


@pytest.mark.slow
def test_apart_only_the_test_that_hangs_or_crashes_fails(judged):
    """Others find a new process."""
    code = "import os\ndef add(a, b):\n    while a == 4: pass\n    if a == 5: os._exit(9)\n    return a + b\n"

    answer = judged(hidden_tests(files=SUITE, strict=False, call_seconds=3.0), BROKEN, {"shop.py": code})

    assert checks(answer)[IDS[0]] == ""
    assert "The agent's code gave no answer: it took more than 3 s" in checks(answer)[IDS[1]]
    assert "The agent's code gave no answer: its process ended with exit code 9" in checks(answer)[IDS[2]]


@pytest.mark.slow
def test_apart_forged_answers_are_no_more_than_answers(judged):
    """Lines written to the pipe of the other side are read as plain data, or not at all."""
    code = """
import sys
way = None
frame = sys._getframe()
while frame:
    way = getattr(frame.f_locals.get('self'), 'way', way)
    frame = frame.f_back
def add(a, b):
    class Odd: pass
    stop = {'kind': 'KeyboardInterrupt', 'args': []}
    way.put([{'value': ['builtin', 'eval']}, {'value': ['handle', {}]}, {'raises': stop}][a % 3])
"""
    answer = judged(hidden_tests(files=SUITE, strict=False), BROKEN, {"shop.py": code})

    assert answer["score"] == 0.0
    assert answer["evidence"]["exit_code"] == 1


@pytest.mark.slow
def test_time_is_the_agents_failure(judged):
    """A suite that is over its time passes nothing, in either way."""
    for answer in both(judged, BROKEN, {"shop.py": "def add(a, b):\n    while True: pass\n"}, SUITE, seconds=2.0):
        assert answer["score"] == 0.0
        assert answer["evidence"]["exit_code"] is None
        assert set(checks(answer).values()) == {
            "the process was ended by its limit of seconds before pytest was through"
        }


@pytest.mark.slow
def test_expected_ids_may_be_given(judged):
    """One that pytest does not report is not passed."""
    expected = [*IDS, "tests/test_shop.py::test_gone"]

    answer = judged(hidden_tests(files=SUITE, expected=expected), BROKEN, {"shop.py": RIGHT})

    assert answer["comment"] == "3 of 4 pass; tests/test_shop.py::test_gone: it was not run"


@pytest.mark.slow
def test_endless_output_is_cut(judged):
    """Its end is kept, and the result stands."""
    code = "import os\ndef add(a, b):\n    os.write(1, b'x' * 300_000)\n    return a + b\n"

    answer = judged(
        hidden_tests(files=SUITE, apart=False), BROKEN, {"shop.py": code}, limits=SandboxLimits(output_kib=8)
    )

    assert answer["comment"] == "3 of 3 pass"
    assert len(answer["evidence"]["output"]) <= 4000


WRITTEN = {
    "nonce": "n",
    "exit_code": 0,
    "crossed": False,
    "ids": ["a"],
    "suspicions": [],
    "errors": [{"where": "t.py", "at": "", "text": "no", "missing": None, "crossed": False}],
    "tests": {"a": {"call": ["passed", ""]}},
}


@pytest.mark.parametrize(
    "forged",
    [
        {"nonce": "m"},
        {"ids": [1]},
        {"suspicions": None},
        {"errors": [{}]},
        {"errors": [{**WRITTEN["errors"][0], "where": 3}]},
        {"tests": []},
        {"tests": {"a": []}},
        {"tests": {"a": {"call": "passed"}}},
        {"tests": {"a": {"call": ["passed"]}}},
        {"crossed": 1},
    ],
)
def test_results_of_another_shape_are_none(forged):
    """Forged ones can't make the verifier raise, which would be the environment's failure."""
    assert is_of_pytest(WRITTEN, "n")
    assert not is_of_pytest({**WRITTEN, **forged}, "n")
    assert not is_of_pytest([], "n")


def test_names_are_read_from_the_text_of_a_test_file():
    """Functions, methods of test classes, async ones; nothing else."""
    text = b"def test_a(): 0\nasync def test_b(): 0\nclass TestC:\n    def test_d(self): 0\n    def e(self): 0\n"

    assert names_of_tests(
        {"t/test_x.py": SandboxFile(data=text), "t/data.py": SandboxFile(data=b"def test_y(): ")}
    ) == {"t/test_x.py": ["t/test_x.py::test_a", "t/test_x.py::test_b", "t/test_x.py::TestC::test_d"]}


def test_without_a_sandbox_it_says_what_to_write():
    """As the others do."""
    with pytest.raises(RewardError, match=r"hidden_tests judges .* sandbox=SandboxSpec"):
        hidden_tests(files=SUITE)(task=Task(id="a", input={}), sandbox=None)


def test_apart_messages_are_carried_whatever_output_is_kept(judged):
    """Of 3 KB where 1 KiB of output is kept: else an agent's long answer, given back by a test, would end the suite."""
    tests = {
        "test_shop.py": "from shop import echo\n\ndef test_echo():\n    assert echo(echo('x' * 3000)) == 'x' * 3000\n"
    }
    limits = SandboxLimits(seconds=60.0, output_kib=1)

    answer = judged(hidden_tests(files=tests), {"shop.py": "def echo(text): return text\n"}, limits=limits)

    assert answer["evidence"]["checks"] == [{"name": "test_shop.py::test_echo", "passed": True, "reason": ""}]


def test_apart_an_answer_that_the_tests_have_no_room_for_is_the_agents_failure(judged):
    """The agent makes room for it on its own side; it is no suite that can't run."""
    tests = {"test_shop.py": "from shop import total\n\ndef test_total():\n    assert total() == 3\n"}
    large = "import os\n\ndef total():\n    os.remove('data.txt')\n    return 'x' * 1_200_000\n"
    initial = {"shop.py": "", "data.txt": "." * 1_000_000}

    answer = judged(
        hidden_tests(files=tests), initial, {"shop.py": large}, limits=SandboxLimits(seconds=60, disk_mib=2)
    )

    (check,) = answer["evidence"]["checks"]
    assert (check["name"], check["passed"]) == ("test_shop.py::test_total", False)
    assert "its answer can't be carried over: The disk of the sandbox is full" in check["reason"]
