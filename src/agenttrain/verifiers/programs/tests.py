"""Runs pytest on hidden tests and writes what came of each, as one JSON file.

Apart from the agent's code its word is good. In one process with it (`guard`) it is only as good as it is hard to
forge: the nonce proves that pytest came to its end, and `guard` tells of what touched pytest.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

MAX_REASON = 600


def main() -> None:
    """Read {"results", "nonce", "roots", "paths", "options", "apart", "folder", "guarded"} from stdin; run pytest."""
    given = json.loads(sys.stdin.buffer.read())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = ["pytest"]
    roots = [os.path.abspath(root) for root in given["roots"]]
    for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
        os.environ.pop(name, None)
    os.environ |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    nonce = given.pop("nonce")
    place = os.path.abspath(given["results"])
    write = _writer(place, nonce)
    try:
        import pytest
    except ImportError as error:
        write({"missing": str(error), "python": sys.version.split()[0]})
        return
    sys.path[:1] = roots
    link = _joined(given)
    seen, plugin = _recorder(link)
    finish = _guarded(given, plugin) if given["guarded"] else list
    write({"exit_code": _run(pytest, given, plugin), **seen(), "suspicions": finish()})
    os._exit(0)  # what the agent's threads and exit handlers do is not waited for


def _run(pytest: Any, given: dict[str, Any], plugin: Any) -> int | str:
    try:
        return int(pytest.main([*given["options"], *given["paths"]], plugins=[plugin]))
    except BaseException as error:  # the agent's code may raise what pytest lets through
        return f"{type(error).__name__}: {error}"
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:
                pass


def _writer(place: str, nonce: str) -> Callable[[dict[str, Any]], None]:
    """Writes the results with what it takes of Python now, whatever becomes of those modules."""
    dumps, open_, write, replace, close = json.dumps, os.open, os.write, os.replace, os.close
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC

    def writes(results: dict[str, Any]) -> None:
        data = dumps({**results, "nonce": nonce}).encode()
        fd = open_(place + ".new", flags, 0o600)
        while data:
            data = data[write(fd, data) :]
        close(fd)
        replace(place + ".new", place)

    return writes


def _joined(given: dict[str, Any]) -> Any:
    """The way to the agent's modules where they stay apart; None: they are imported here."""
    if given["apart"] is None:
        return None
    from agenttrain.verifiers.programs import proxies, wire

    link = proxies.Wire(wire.Way(os.path.abspath(given["folder"])))
    sys.meta_path.insert(0, proxies.Finder(link, given["apart"]))
    return link


def _guarded(given: dict[str, Any], plugin: Any) -> Callable[[], list[str]]:
    from agenttrain.verifiers.programs import guard

    return guard.begin(folder=os.getcwd(), hidden=given["hidden"], plugin=plugin)


def _recorder(link: Any) -> tuple[Callable[[], dict[str, Any]], Any]:
    """What has been recorded so far, and the pytest plugin that records it.

    Args:
        link: what the agent's code raised crossed it. None: it is in this process.
    """
    tests: dict[str, dict[str, list[str]]] = {}
    errors: list[dict[str, Any]] = []
    ids: list[str] = []

    class Recorder:
        def pytest_collection_finish(self, session: Any) -> None:
            ids.extend(item.nodeid for item in session.items)

        def pytest_exception_interact(self, node: Any, call: Any, report: Any) -> None:
            if getattr(report, "when", "collect") == "collect":
                errors.append(_error(report.nodeid, call.excinfo.value, link))

        def pytest_runtest_logreport(self, report: Any) -> None:
            outcome = "xfail" if hasattr(report, "wasxfail") else report.outcome
            tests.setdefault(report.nodeid, {})[report.when] = [outcome, _reason(report)]

    def seen() -> dict[str, Any]:
        crossed = bool(link.crossed) if link is not None else False
        return {"tests": dict(tests), "errors": list(errors), "ids": list(ids), "crossed": crossed}

    return seen, Recorder()


def _reason(report: Any) -> str:
    if report.outcome == "passed":
        return ""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    return str(text)[:MAX_REASON]


def _error(where: str, error: BaseException, link: Any) -> dict[str, Any]:
    """Why a test file could not be collected, and what tells whose fault that is."""
    chain: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in chain:
        chain.append(each)
        each = each.__cause__ or each.__context__
    cause = next((each for each in chain if type(each).__name__ != "CollectError"), error)
    return {
        "where": where,
        "at": _place(cause),
        "text": f"{type(cause).__name__}: {cause}"[:MAX_REASON],
        "missing": next((each.name for each in chain if isinstance(each, ModuleNotFoundError)), None),
        "crossed": link is not None and any(each is other for each in chain for other in link.crossed),
    }


def _place(error: BaseException) -> str:
    """The file of the working directory that it was raised in last; empty: none."""
    place, trace = "", error.__traceback__
    while trace is not None:
        path = os.path.relpath(trace.tb_frame.f_code.co_filename)
        place = place if path.startswith(".") else path
        trace = trace.tb_next
    return place
