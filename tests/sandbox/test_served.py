"""Requests of many threads over one channel, and what they are told when the other side fails."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from agenttrain.errors import SandboxError
from agenttrain.records import Isolation
from agenttrain.sandbox.channel import Channel, Frame, Served
from agenttrain.sandbox.served import Begin, ServedSandbox, begun, files_of, index_of
from agenttrain.sandbox_protocol import Execution, SandboxFile, SandboxRefusal, SandboxRequest

REQUEST = SandboxRequest(name="r", files={"a": SandboxFile(data=b"x")})
BEGIN = Begin(path="/w", env={"PATH": "/bin"})


def frame_bytes(header: dict[str, Any], body: bytes = b"") -> bytes:
    head = json.dumps(header).encode()
    return struct.pack(">II", len(head), len(body)) + head + body


class Other:
    """The other side of a channel, played by a function of a request that gives bytes, or None to hang up."""

    def __init__(self, answers: Callable[[Frame], bytes | None]) -> None:
        ours, theirs = socket.socketpair()
        fd = ours.detach()
        self.channel = Channel(fd, fd)
        self.requests: list[Frame] = []
        self._end = theirs
        self._answers = answers
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        theirs = Channel(fd := os.dup(self._end.fileno()), fd)
        try:
            while (frame := theirs.receive(time.monotonic() + 60)) is not None:
                self.requests.append(frame)
                answer = self._answers(frame)
                if answer is None:
                    break
                os.write(fd, answer)
        except (EOFError, OSError):
            pass
        theirs.end()
        self._end.close()


@pytest.fixture
def others() -> Iterator[list[Other]]:
    made: list[Other] = []
    yield made
    for other in made:
        other.thread.join(60)
        assert not other.thread.is_alive()


def sandbox_of(other: Other, released: list[str]) -> ServedSandbox:
    def reopen(request: SandboxRequest) -> ServedSandbox:
        raise SandboxError("none")

    return ServedSandbox(
        request=REQUEST,
        isolation=Isolation(backend="test", enforced={}),
        path="/w",
        served=Served(other.channel),
        reopen=reopen,
        release=lambda: released.append("released"),
    )


def test_answers_find_their_askers_in_whatever_order(others: list[Other]) -> None:
    """Thirty-two threads; each answer says what was asked, and they come in packs, last first."""
    held: list[bytes] = []

    def answer(frame: Frame) -> bytes:
        held.append(frame_bytes({"id": frame[0]["id"], "said": frame[0]["word"]}, frame[1]))
        if len(held) < 8:
            return b""
        pack = b"".join(reversed(held))
        held.clear()
        return pack

    others.append(Other(answer))
    served = Served(others[0].channel)
    with ThreadPoolExecutor(32) as threads:
        asked = [threads.submit(served.ask, {"word": i}, bytes([i]) * 10_000, within_s=60) for i in range(32)]
        assert [(f.result(60)[0]["said"], f.result(60)[1]) for f in asked] == [
            (i, bytes([i]) * 10_000) for i in range(32)
        ]
    served.end("done")


def test_who_waits_is_told_that_the_other_side_is_gone(others: list[Other]) -> None:
    """All of them, and whoever asks later."""
    others.append(Other(lambda frame: b"" if frame[0]["word"] < 3 else None))
    served = Served(others[0].channel)
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(served.ask, {"word": i}, within_s=60) for i in range(4)]
        assert {str(f.exception(60)) for f in asked} == {
            "The sandbox can't be used any more: its first process has ended."
        }
    with pytest.raises(SandboxError, match="its first process has ended"):
        served.ask({"word": 9}, within_s=60)
    served.end("it was closed")


def test_an_answer_that_does_not_come_in_time_ends_the_sandbox(others: list[Other]) -> None:
    others.append(Other(lambda frame: b""))
    served = Served(others[0].channel)
    with pytest.raises(SandboxError, match="it did not answer in time"):
        served.ask({"word": 1}, within_s=0.2)
    served.end("it was closed")


def test_who_takes_nothing_in_is_not_waited_for_for_ever() -> None:
    """More than a socket holds, to a side that never reads."""
    ours, theirs = socket.socketpair()
    with theirs:
        served = Served(Channel(fd := ours.detach(), fd))
        with pytest.raises(SandboxError, match="can't be used any more: it takes nothing in"):
            served.ask({"op": "write"}, b"x" * 10_000_000, within_s=0.2)
        served.end("it was closed")


def test_a_refusal_is_the_policys_and_a_failure_the_environments(others: list[Other]) -> None:
    """By the answer's own words."""
    answers = {"read": {"refused": "There is no file 'x'."}, "list": {"failed": "OSError: disk"}}
    others.append(Other(lambda frame: frame_bytes({"id": frame[0]["id"], **answers[frame[0]["op"]]})))
    sandbox = sandbox_of(others[0], [])
    with pytest.raises(SandboxRefusal, match=r"^There is no file 'x'\.$"):
        sandbox.read("x")
    with pytest.raises(SandboxError, match=r"The sandbox of r failed by itself: OSError: disk"):
        sandbox.list()
    sandbox.close()


def test_it_is_released_once(others: list[Other]) -> None:
    """However often and by however many it is closed."""
    others.append(Other(lambda frame: b""))
    released: list[str] = []
    sandbox = sandbox_of(others[0], released)
    with ThreadPoolExecutor(4) as threads:
        for closing in [threads.submit(sandbox.close) for _ in range(4)]:
            closing.result(60)
    assert released == ["released"]


def test_words_that_no_system_takes_are_refused_before_they_are_sent(others: list[Other]) -> None:
    others.append(Other(lambda frame: b""))
    sandbox = sandbox_of(others[0], [])
    for call in (lambda: sandbox.run([]), lambda: sandbox.run(["a\0b"]), lambda: sandbox.run(["a"], env={"X": "\0"})):
        with pytest.raises(SandboxRefusal):
            call()
    sandbox.close()
    assert others[0].requests == []


def test_seconds_are_never_more_than_the_sandboxs(others: list[Other]) -> None:
    end = {"exit_code": 0, "ended_by": "", "seconds": 0.1, "n_dropped": 0, "n_stdout": 1}
    others.append(Other(lambda frame: frame_bytes({"id": frame[0]["id"], **end}, b"oe")))
    sandbox = sandbox_of(others[0], [])
    ran = [sandbox.run("x", seconds=seconds) for seconds in (None, 3.0, 99.0)]
    assert [request[0]["seconds"] for request in others[0].requests] == [10.0, 3.0, 10.0]
    assert (ran[0].argv, ran[0].stdout, ran[0].stderr) == (("sh", "-c", "x"), "o", "e")
    sandbox.close()


@pytest.mark.parametrize(
    ("code", "n_more", "ended_by"), [(-9, 1, "memory_mib"), (137, 1, "memory_mib"), (-9, 0, ""), (1, 1, "")]
)
def test_a_run_that_was_killed_when_memory_ran_out_says_so(
    others: list[Other], code: int, n_more: int, ended_by: str
) -> None:
    end = {"exit_code": code, "ended_by": "", "seconds": 0.1, "n_dropped": 0, "n_stdout": 0}
    others.append(Other(lambda frame: frame_bytes({"id": frame[0]["id"], **end})))
    sandbox = sandbox_of(others[0], [])
    counts = iter([2, 2 + n_more])
    sandbox.n_out_of_memory = lambda: next(counts)
    ran = sandbox.run("x")
    assert (ran.ended_by, ran.exit_code) == (ended_by, None if ended_by else code)
    sandbox.close()


def test_what_cannot_begin_says_why(others: list[Other]) -> None:
    """The channel is closed then."""
    others.append(Other(lambda frame: frame_bytes({"id": 1, "refused": "The disk of the sandbox is full."})))
    with pytest.raises(SandboxError, match=r"The sandbox of r could not begin: its files can't be laid. The disk"):
        begun(others[0].channel, REQUEST, BEGIN)
    others.append(Other(lambda frame: None))
    with pytest.raises(SandboxError, match=r"could not begin: .*its first process has ended"):
        begun(others[1].channel, REQUEST, BEGIN)


def test_files_are_the_same_on_the_other_side() -> None:
    files = {
        "b": SandboxFile(kind="folder"),
        "b/c": SandboxFile(data=b"12", executable=True),
        "a": SandboxFile(kind="link", data=b"b/c"),
    }
    assert index_of(files) == ([["a", "link", 3, False], ["b", "folder", 0, False], ["b/c", "file", 2, True]], b"b/c12")
    assert files_of(*index_of(files)) == files


def test_a_runs_text_says_what_was_dropped_and_how_it_ended() -> None:
    """Nothing is said of what went well."""
    ran = Execution(argv=("a",), exit_code=3, stdout="out\n", stderr="err\n", seconds=0.1, n_dropped=4000)
    assert ran.text == "out\nerr\n[… 4,000 bytes more]\n[exit code 3]"
    assert Execution(argv=("a",), exit_code=0, stdout="out\n", stderr="", seconds=0.1).text == "out"
