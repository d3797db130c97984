"""Where the user's own code raised, as it stands in the cause of a rollout."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any, TypedDict

import pytest
from langchain_core.tools import tool
from langgraph.graph import START, StateGraph

from agenttrain.error_place import place_of_error

HERE = Path(__file__).name


def raised_by(call: Callable[[], Any]) -> BaseException:
    with pytest.raises(BaseException) as caught:
        call()
    return caught.value


def module_at(file: Path, text: str) -> ModuleType:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    spec = spec_from_loader(file.stem, SourceFileLoader(file.stem, str(file)))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_users_innermost_frame(tmp_path: Path) -> None:
    """Not the standard library or the installed package that it called, nor what called it."""
    package = module_at(tmp_path / "site-packages" / "shop.py", "def sell(order):\n    return order['id']\n")
    own = module_at(tmp_path / "desk.py", "import json\ndef read(text):\n    return json.loads(text)\n")
    assert place_of_error(raised_by(lambda: own.read("{"))) == " at desk.py:3 (read)"
    own = module_at(tmp_path / "desk.py", "\ndef ask(shop):\n    return shop.sell(None)\n")
    assert place_of_error(raised_by(lambda: own.ask(package))) == " at desk.py:3 (ask)"


def test_where_no_frame_is_the_users() -> None:
    """The innermost one, or nothing where nothing was raised yet."""
    error = raised_by(lambda: json.loads("{"))
    assert error.__traceback__ is not None
    while Path(error.__traceback__.tb_frame.f_code.co_filename).name == HERE:  # type: ignore[union-attr]
        error.__traceback__ = error.__traceback__.tb_next  # type: ignore[union-attr]
    assert place_of_error(error).startswith(" at decoder.py:")
    assert place_of_error(KeyError("a")) == ""


def test_the_first_error_of_a_group(tmp_path: Path) -> None:
    """A task group's own frames say nothing of the fault."""
    text = """import asyncio
async def buy():
    raise KeyError("price")
async def both():
    async with asyncio.TaskGroup() as group:
        group.create_task(buy())
"""
    own = module_at(tmp_path / "desk.py", text)
    assert place_of_error(raised_by(lambda: asyncio.run(own.both()))) == " at desk.py:3 (buy)"


class Order(TypedDict):
    id: int


@tool
def look_up(id: int) -> str:
    """The price of an order."""
    return str({}[id])


def asks(state: Order) -> Order:
    look_up.invoke({"id": state["id"]})
    return state


def worker_of(asked: Callable[[Order], Any]) -> Any:
    """A graph whose node `worker` is a graph with the node `desk`."""
    inner = StateGraph(Order)
    inner.add_node("desk", asked)  # type: ignore[call-overload]
    inner.add_edge(START, "desk")
    outer = StateGraph(Order)
    outer.add_node("worker", inner.compile())
    outer.add_edge(START, "worker")
    return outer.compile()


def test_the_nodes_of_langgraph() -> None:
    """Outermost first; the tool that raised goes by its function."""
    error = raised_by(lambda: worker_of(asks).invoke({"id": 7}))
    line = look_up.func.__code__.co_firstlineno + 3  # type: ignore[attr-defined]
    assert place_of_error(error) == f" at {HERE}:{line} (look_up) in node worker:desk"


def test_the_nodes_of_an_async_graph() -> None:
    async def waits(state: Order) -> Order:
        await asyncio.sleep(0)
        raise KeyError("price")

    error = raised_by(lambda: asyncio.run(worker_of(waits).ainvoke({"id": 7})))
    line = waits.__code__.co_firstlineno + 2
    assert place_of_error(error) == f" at {HERE}:{line} (waits) in node worker:desk"
