"""Where the model lives: wherever a graph holds or makes its model, its calls are recorded and trained."""

from __future__ import annotations

from typing import Any

import pytest
from langgraph.graph import MessagesState, StateGraph
from matrix.harness import Roll, says


def one_node(function: Any) -> Any:
    builder = StateGraph(MessagesState)
    builder.add_node("agent", function)
    builder.set_entry_point("agent")
    return builder.compile()


@pytest.mark.row("Where the model lives", "in a closure")
def test_closure(roll: Roll, chat: Any) -> None:
    model = chat()
    rolled = roll(one_node(lambda state: {"messages": [model.invoke(state["messages"])]}), says("hello"))
    assert rolled.places == [("agent", "trained")]
    assert rolled.account.trained == rolled.account.sampled > 0
