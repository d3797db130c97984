"""Finding the graph that a path names, and opening it."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import pytest

from agenttrain.errors import GraphError
from agenttrain.graph.load import load_graph, load_module, source_files
from agenttrain.graph.models import nodes_of

HEAD = """
from langgraph.graph import START, MessagesState, StateGraph
from agenttrain.trainable import trainable
builder = StateGraph(MessagesState)
builder.add_node("agent", lambda state: {"messages": []})
builder.add_edge(START, "agent")
"""


def opened_nodes(target: str) -> tuple[str, ...]:
    with load_graph(target).open() as runnable:
        return tuple(nodes_of(runnable))


FORMS = {
    "compiled": "graph = builder.compile()",
    "state_graph": "graph = builder",
    "factory": "def graph():\n    return builder.compile()",
    "factory_of_config": "def graph(config):\n    assert 'configurable' in config\n    return builder",
    "factory_with_defaults": "def graph(config=None, *, deep=False):\n    return builder",
    "async_factory": "async def graph():\n    return builder.compile()",
    "context_manager": (
        "from contextlib import contextmanager\n@contextmanager\ndef graph():\n    yield builder.compile()"
    ),
    "async_context_manager": (
        "from contextlib import asynccontextmanager\n"
        "@asynccontextmanager\nasync def graph(config):\n    yield builder.compile()"
    ),
    "callable_object": ("class Maker:\n    def __call__(self):\n        return builder.compile()\ngraph = Maker()"),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_opens(form: str, write: Any) -> None:
    """Compiled, builder, factory, sync or async, plain or as a context manager."""
    assert opened_nodes(f"{write('graph.py', HEAD + FORMS[form])}:graph") == ("agent",)


def test_an_entrypoint_opens(write: Any) -> None:
    """The functional API's object is a graph with one node."""
    file = write(
        "flow.py", "from langgraph.func import entrypoint\n@entrypoint()\ndef flow(x: str) -> str:\n    return x\n"
    )
    assert opened_nodes(str(file)) == ("flow",)


def test_an_async_context_manager_is_left_in_the_task_that_entered_it(write: Any) -> None:
    """As task groups demand, and only when the block ends."""
    file = write(
        "graph.py",
        HEAD
        + "import asyncio\nfrom contextlib import asynccontextmanager\nevents = []\n"
        + "@asynccontextmanager\nasync def graph():\n    events.append(asyncio.current_task())\n"
        + "    yield builder.compile()\n    events.append(asyncio.current_task())\n",
    )
    loaded = load_graph(f"{file}:graph")
    with loaded.open():
        events = load_module(file).events
        assert len(events) == 1
    assert len(events) == 2
    assert events[0] is events[1]


def test_the_single_trainable_is_found_with_its_settings(write: Any) -> None:
    """Also when other graphs stand beside it."""
    file = write(
        "graph.py",
        HEAD + "other = builder.compile()\n@trainable(model='tiny', frozen=['sum'])\ndef mine():\n    return builder\n",
    )
    loaded = load_graph(str(file))
    assert (loaded.name, loaded.attribute) == ("graph.py:mine", "mine")
    assert loaded.trainable is not None
    assert (loaded.trainable.model, loaded.trainable.frozen) == ("tiny", ("sum",))


def test_several_trainables_are_listed(write: Any) -> None:
    """The error shows how to name one."""
    file = write("graph.py", HEAD + "a = trainable(builder.compile())\nb = trainable(builder.compile())\n")
    with pytest.raises(GraphError, match=r"2 objects decorated with @trainable: a, b\. Name one: graph\.py:a"):
        load_graph(str(file))


def test_langgraph_json_names_the_object(write: Any) -> None:
    """The nearest one upward, where exactly one entry points to the file."""
    write("langgraph.json", '{"graphs": {"desk": "./src/graph.py:made", "other": {"path": "./src/x.py:y"}}}')
    file = write("src/graph.py", HEAD + "one = builder.compile()\ndef made():\n    return builder\n")
    assert load_graph(str(file)).attribute == "made"


def test_a_broken_langgraph_json_is_shown(write: Any) -> None:
    """When it is needed to find the object."""
    write("langgraph.json", "{")
    with pytest.raises(GraphError, match=r"langgraph\.json can't be read \(JSONDecodeError.*graph\.py:graph"):
        load_graph(str(write("graph.py", HEAD)))


def test_the_only_graph_of_a_file_is_found(write: Any) -> None:
    """The compiled one, though its builder stands there too; two names of it are one graph."""
    assert load_graph(str(write("graph.py", HEAD + "app = builder.compile()\ngraph = app\n"))).attribute in (
        "app",
        "graph",
    )


def test_several_graphs_are_listed(write: Any) -> None:
    """The error shows how to name one."""
    file = write("graph.py", HEAD + "a = builder.compile()\nb = builder.compile()\n")
    with pytest.raises(GraphError, match=r"graph\.py holds 2 graphs: a, b\. Name one: graph\.py:a"):
        load_graph(str(file))


def test_a_file_without_graphs_says_what_it_has(write: Any) -> None:
    """Factories are named, since one of them may be meant."""
    with pytest.raises(GraphError, match=r"holds no graph\. Functions and classes there: make"):
        load_graph(str(write("graph.py", "def make():\n    return 1\n")))


def test_a_missing_file_suggests_its_neighbour(write: Any) -> None:
    """With what the folder holds."""
    file = write("graph.py", HEAD)
    with pytest.raises(GraphError, match=r"grap\.py is not a file: .* Did you mean 'graph\.py'\?"):
        load_graph("grap.py", cwd=file.parent)


def test_a_missing_attribute_suggests_the_nearest(write: Any) -> None:
    """With the graphs of the file."""
    file = write("graph.py", HEAD + "graph = builder.compile()\n")
    with pytest.raises(GraphError, match=r"has no 'grpah'\. Graphs there: graph\. Did you mean 'graph\.py:graph'\?"):
        load_graph(f"{file}:grpah")


def test_an_object_that_is_no_graph_is_named(write: Any) -> None:
    """With what is accepted."""
    file = write("graph.py", "app = {}\n")
    with pytest.raises(GraphError, match=r"graph\.py:app is a dict, and a LangGraph graph is needed"):
        opened_nodes(f"{file}:app")


def test_a_factory_that_needs_more_is_refused(write: Any) -> None:
    """It names the arguments."""
    file = write("graph.py", "def make(model, tools):\n    return 1\n")
    with pytest.raises(GraphError, match=r"graph\.py:make takes model, tools.*Give the other arguments defaults"):
        opened_nodes(f"{file}:make")


def test_an_import_error_is_told_with_file_and_line(write: Any) -> None:
    """The line is the user's own, in the file where it happened."""
    write("nodes.py", "x = 1\n\nraise RuntimeError('no db')\n")
    file = write("graph.py", "import nodes\n")
    with pytest.raises(GraphError, match=r"nodes\.py:3 raised RuntimeError: no db while it was imported"):
        load_graph(str(file))
    with pytest.raises(GraphError, match=r"graph\.py:2 raised SyntaxError"):
        load_graph(str(write("sub/graph.py", "x = 1\ny = = 2\n")))
    with pytest.raises(GraphError, match=r"Install 'no_such_package' in this environment"):
        load_graph(str(write("sub2/graph.py", "import no_such_package\n")))


@pytest.mark.parametrize(
    "text", ["m = ChatOpenAI(model='gpt-4o')", "def graph():\n    return ChatOpenAI(model='gpt-4o')"]
)
def test_a_missing_key_says_that_any_will_do(text: str, write: Any, monkeypatch: Any) -> None:
    """At import and inside a factory."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    file = write("graph.py", f"from langchain_openai import ChatOpenAI\n{text}\n")
    with pytest.raises(GraphError, match=r"The policy answers in training.* OPENAI_API_KEY=unused is enough"):
        opened_nodes(f"{file}:graph")


def test_a_module_is_imported_once(write: Any) -> None:
    """By resolved path, under one name that stays known."""
    file = write("graph.py", HEAD + "graph = builder.compile()\n")
    first, again = load_graph(f"{file}:graph"), load_graph(f"{file.parent / '.' / 'graph.py'}:graph")
    assert first.target is again.target
    assert sys.modules[load_module(file).__name__] is load_module(file)


def test_siblings_import_and_are_among_the_sources(write: Any) -> None:
    """Also when another project loaded before has siblings of the same names."""
    for project in ("one", "two"):
        write(f"{project}/parts.py", f"NAME = {project!r}\n")
        file = write(f"{project}/graph.py", HEAD + "from parts import NAME\ngraph = builder.compile()\n")
        loaded = load_graph(f"{file}:graph")
        assert project == load_module(file).NAME
        assert [path.name for path in source_files(loaded)] == ["graph.py", "parts.py"]


def test_a_file_in_a_package_may_import_relatively(write: Any) -> None:
    """Its module is the package's own, so relative and absolute imports meet."""
    write("desk_agent/__init__.py", "")
    write("desk_agent/state.py", "class State: pass\n")
    file = write(
        "desk_agent/graph.py",
        HEAD + "from .state import State\nfrom desk_agent.state import State as Same\nassert State is Same\n",
    )
    loaded = load_graph(f"{file}:builder")
    assert load_module(file).__name__ == "desk_agent.graph"
    assert [path.name for path in source_files(loaded)] == ["__init__.py", "graph.py", "state.py"]


# langgraph.json

PROJECT = """{
  "dependencies": ["./lib", "langchain_openai"],
  "graphs": {
    "desk": "./src/desk/graph.py:made",
    "flow": "flows.refund:graph",
    "chat": {"path": "./chat.py:graph", "description": "Talks."}
  },
  "env": {"DESK_REGION": "eu", "DESK_SECRET": "hunter2"}
}"""


@pytest.fixture
def desk_project(write: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A project with three graphs, as LangGraph's own command line takes it; gives its folder."""
    for name in ("DESK_REGION", "DESK_SECRET"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "path", list(sys.path))
    write("lib/flows/refund.py", HEAD + "from .parts import NAME\ngraph = builder.compile()\n")
    write("lib/flows/parts.py", "NAME = 'refund'\n")
    write(
        "src/desk/graph.py", HEAD + "import os\nREGION = os.environ['DESK_REGION']\ndef made():\n    return builder\n"
    )
    write("chat.py", HEAD + "graph = builder.compile()\nother = builder.compile()\n")
    return write("langgraph.json", PROJECT).parent


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("desk", "graph.py:made"),
        ("flow", "refund.py:graph"),
        ("chat", "chat.py:graph"),
        (".:flow", "refund.py:graph"),
        ("src/desk/graph.py", "graph.py:made"),
        ("chat.py", "chat.py:graph"),
        ("chat.py:other", "chat.py:other"),
    ],
)
@pytest.mark.usefixtures("desk_project")
def test_a_graph_goes_by_its_name_in_langgraph_json(desk_project: Any, target: str, name: str) -> None:
    """By every form of entry, by folder and name, and by the file that an entry names."""
    loaded = load_graph(target, cwd=desk_project)
    assert loaded.name == name
    with loaded.open() as runnable:
        assert nodes_of(runnable) == ["agent"]


def test_a_name_is_sought_upward_and_before_a_folder(desk_project: Any) -> None:
    """From where the command is given; a folder of the same name stands back."""
    (desk_project / "desk").mkdir()
    assert load_graph("desk", cwd=desk_project).attribute == "made"
    assert load_graph("chat", cwd=desk_project / "src").file == desk_project / "chat.py"


def test_dependencies_are_importable_and_among_the_sources(desk_project: Any) -> None:
    """A package without __init__.py too, as with LangGraph's own command line."""
    loaded = load_graph("flow", cwd=desk_project)
    assert str(desk_project / "lib") in sys.path
    assert load_module(loaded.file).NAME == "refund"
    assert [path.name for path in source_files(loaded)] == ["parts.py", "refund.py"]


def test_the_environment_is_filled_up_and_its_values_are_never_told(
    desk_project: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is set already stays; the note has names only."""
    monkeypatch.setenv("DESK_REGION", "us")
    loaded = load_graph("desk", cwd=desk_project)
    assert load_module(loaded.file).REGION == "us"
    assert os.environ["DESK_SECRET"] == "hunter2"
    assert loaded.notes == ("DESK_SECRET set from langgraph.json (variables that were set already stay).",)


def test_the_environment_may_stand_in_a_file(desk_project: Any, write: Any) -> None:
    """NAME=value lines, with comments, quotes and export."""
    write("langgraph.json", PROJECT.replace('{"DESK_REGION": "eu", "DESK_SECRET": "hunter2"}', '".env"'))
    write(".env", "# ours\n\nexport DESK_REGION = 'eu # west'\nDESK_SECRET=a=b # not told\nno line\n")
    loaded = load_graph("desk", cwd=desk_project)
    assert (os.environ["DESK_REGION"], os.environ["DESK_SECRET"]) == ("eu # west", "a=b")
    assert loaded.notes == ("DESK_REGION, DESK_SECRET set from .env (variables that were set already stay).",)


def test_a_langgraph_json_that_names_another_file_is_nobodys(desk_project: Any, write: Any) -> None:
    """Nothing is set or put on the path for it."""
    before = list(sys.path)
    write("own.py", HEAD + "graph = builder.compile()\n")
    loaded = load_graph("own.py", cwd=desk_project)
    assert (loaded.notes, loaded.folders, "DESK_SECRET" in os.environ) == ((), (), False)
    assert str(desk_project / "lib") not in set(sys.path) - set(before)


@pytest.mark.parametrize(
    ("target", "written", "told"),
    [
        ("dsk", None, r"langgraph\.json has no graph 'dsk'\. Graphs there: chat, desk, flow\. Did you mean 'desk'\?"),
        (".", None, r"names 3 graphs: chat, desk, flow\. Name one: agenttrain fit \.:chat"),
        ("src", None, r"src is a folder without langgraph\.json\. Name the file .*: src/graph\.py"),
        ("desk", {"desk": "./gone.py:graph"}, r"gives the graph 'desk'\. .*gone\.py is not a file"),
        ("desk", {"desk": "./graph.py"}, r"gives the graph 'desk' as './graph\.py'\. Accepted: './path\.py:attribute'"),
        ("desk", {"desk": "no.such:graph"}, r"gives the graph 'desk' as 'no\.such:graph'\. Accepted: "),
        ("desk", {"desk": "./desk.ts:graph"}, r"gives the graph 'desk' as './desk\.ts:graph'\. Accepted: "),
        ("desk", {}, r"langgraph\.json names no graphs\. Accepted: "),
        ("desk", [], r"langgraph\.json names no graphs\. Accepted: "),
    ],
)
def test_what_langgraph_json_does_not_give_is_told(
    desk_project: Any, write: Any, target: str, written: Any, told: str
) -> None:
    """With what it has, or what is accepted."""
    if written is not None:
        write("langgraph.json", json.dumps({"graphs": written}))
    with pytest.raises(GraphError, match=told):
        load_graph(target, cwd=desk_project)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("dependencies", 5, r"gives dependencies as 5\. Write a list"),
        ("dependencies", ["./nowhere"], r"names the dependency './nowhere', and .*/nowhere is no folder"),
        ("env", "secrets.env", r"names env 'secrets\.env', and it can't be read \(FileNotFoundError\)"),
    ],
)
def test_what_langgraph_json_needs_must_be_there(
    desk_project: Any, write: Any, key: str, value: Any, told: str
) -> None:
    """Before the graph is imported."""
    write("langgraph.json", json.dumps({**json.loads(PROJECT), key: value}))
    with pytest.raises(GraphError, match=told):
        load_graph("desk", cwd=desk_project)


def test_a_missing_attribute_lists_decorated_factories(write: Any) -> None:
    """They are what most people mean."""
    file = write("graph.py", HEAD + "@trainable(model='m')\ndef desk():\n    return builder\n")
    with pytest.raises(GraphError, match=r"graph\.py has no 'nothing'\. Graphs there: desk, builder\."):
        load_graph(f"{file}:nothing")
