"""Names that tell whose they are."""

from __future__ import annotations

import os
import subprocess
import sys

from agenttrain.sandbox.owners import _numbered, is_left_behind, owned_name

GIVE = "from agenttrain.sandbox.owners import owned_name; print(owned_name('a/b c'))"


def test_no_two_names_are_equal_and_each_can_be_read() -> None:
    first, second = owned_name("rollout 7/f2a"), owned_name("rollout 7/f2a")
    assert first != second
    assert first.startswith(f"agenttrain-{os.getpid()}-")
    assert first.endswith("-rollout_7_f2a")


def test_a_living_process_s_name_is_not_left_behind() -> None:
    assert not is_left_behind(owned_name("mine"))


def test_a_dead_process_s_name_is_left_behind() -> None:
    name = subprocess.run([sys.executable, "-c", GIVE], stdout=subprocess.PIPE, check=True, text=True).stdout.strip()
    assert name.endswith("-a_b_c")
    assert is_left_behind(name)


def test_a_process_that_ended_and_was_not_waited_for_is_dead() -> None:
    with subprocess.Popen([sys.executable, "-c", GIVE], stdout=subprocess.PIPE, text=True) as process:
        name = process.communicate()[0].strip()
        assert is_left_behind(name)


def test_an_id_that_came_again_is_another_process() -> None:
    _, pid, started, namespace, serial, readable = owned_name("mine").split("-")
    assert is_left_behind(f"agenttrain-{pid}-{int(started) - 1}-{namespace}-{serial}-{readable}")


def test_what_can_not_be_known_is_not_left_behind() -> None:
    _, pid, started, namespace, serial, readable = owned_name("mine").split("-")
    assert not is_left_behind(f"agenttrain-{pid}-{int(started) - 1}-{int(namespace) + 1}-{serial}-{readable}")
    assert not is_left_behind("agenttrain-12-something")
    assert not is_left_behind("other")


WITHOUT_FILES = """
import os, resource, sys
from agenttrain.sandbox.owners import is_left_behind, owned_name
name = owned_name("mine")
assert not is_left_behind(name)
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
print(is_left_behind(name), is_left_behind(sys.argv[1]))
"""


def test_a_process_that_can_open_no_file_takes_nobody_for_dead() -> None:
    words = [sys.executable, "-c", WITHOUT_FILES, owned_name("ours")]
    assert subprocess.run(words, stdout=subprocess.PIPE, check=True, text=True).stdout == "False False\n"


def test_another_start_of_a_machine_has_other_names() -> None:
    """Namespaces of process ids have the same number on every machine, and an engine may serve several."""
    assert _numbered(4026531836, "a") != _numbered(4026531836, "b")
