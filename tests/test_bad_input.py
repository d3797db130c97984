"""What is wrong from the start ends a command with one error, exit code 2 and nothing written."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

Refused = Callable[..., str]


@pytest.fixture
def refused(command: Any) -> Refused:
    """Runs a command line that must be refused, and gives its one line of error."""

    def run(*arguments: object) -> str:
        done = command(*arguments)
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1), done.err
        assert not Path("runs").is_dir()
        return str(done.err).removesuffix("\n")

    return run


# The graph


def test_a_wrong_path(project: Any, refused: Refused) -> None:
    """It names the files that are there, and the nearest."""
    said = refused("fit", "grph.py")
    assert said == f"GraphError: grph.py is not a file: {project.folder} holds graph.py. Did you mean 'graph.py'?"


def test_a_file_without_a_graph(project: Any, refused: Refused) -> None:
    """It names what is there and could make one."""
    project.write("empty.py", "def make():\n    pass\n")
    said = refused("fit", "empty.py")
    assert said.startswith("GraphError: empty.py holds no graph. Functions and classes there: make. Name what returns")


def test_several_graphs(new_project: Any, refused: Refused) -> None:
    """It names them and the argument that chooses one."""
    new_project(decorated="a = builder.compile()\nb = builder.compile()\n")
    assert refused("fit", "graph.py") == "GraphError: graph.py holds 2 graphs: a, b. Name one: graph.py:a"


@pytest.mark.parametrize("written", ["app = {}", "app = trainable({}, model=POLICY, verifier=score)"])
def test_a_dict_as_target(new_project: Any, refused: Refused, written: str) -> None:
    """Decorated or not, it is told what it is, and what is needed."""
    new_project(decorated=written)
    said = refused("fit", "graph.py:app")
    assert said.startswith("GraphError: graph.py:app is a dict, and a LangGraph graph is needed: a compiled graph, ")
    assert "Name another object (graph.py:graph)" in said


def test_a_syntax_error(project: Any, refused: Refused) -> None:
    """File, line and what Python says; no traceback."""
    project.write("broken.py", "x = 1\ndef f(:\n")
    assert refused("fit", "broken.py").startswith("GraphError: broken.py:2 raised SyntaxError: invalid syntax")


def test_a_missing_module(project: Any, refused: Refused) -> None:
    """It says which, and where to get it."""
    project.write("broken.py", "import nowhere_to_be_found\n")
    said = refused("fit", "broken.py")
    assert said.startswith("GraphError: broken.py:1 raised ModuleNotFoundError: No module named 'nowhere_to_be_found'")
    assert said.endswith("Install 'nowhere_to_be_found' in this environment, or put it beside graph.py.")


@pytest.mark.parametrize("body", ["", "def f():\n    return ChatOpenAI(model='gpt-4o')\n"])
def test_a_missing_key(new_project: Any, refused: Refused, head: str, monkeypatch: Any, body: str) -> None:
    """A model built without a key, on import or in the factory: any key will do, since the policy answers."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    if body:
        new_project(body + "graph = trainable(f, model=POLICY, verifier=score)", decorated="")
    else:
        new_project(head=head.replace('api_key="unused", ', ""))
    said = refused("fit", "graph.py")
    assert "raised OpenAIError" in said
    assert said.endswith("The policy answers in training, so any key will do: OPENAI_API_KEY=unused is enough.")


def test_a_second_model_of_which_nothing_is_declared(new_project: Any, refused: Refused) -> None:
    """Both are named, with the line to paste."""
    body = """
other = ChatOpenAI(model="gpt-5", api_key="unused")
def judge(state):
    return {"messages": [other.invoke(state["messages"])]}
builder.add_node("agent", agent)
builder.add_node("judge", judge)
builder.set_entry_point("agent")
builder.add_edge("agent", "judge")
"""
    new_project(body)
    said = refused("fit", "graph.py")
    assert said.startswith("RoleError: The graph calls ChatOpenAI:gpt-5, and ChatOpenAI:gpt-4o: two models, and ")
    assert said.endswith(
        'Add to @trainable: auxiliary=["model:gpt-5"] if your own model answers there, or frozen=["model:gpt-5"] if '
        'the policy answers there and is not trained on it, or train=["model:gpt-4o", "model:gpt-5"] if the policy '
        "learns both."
    )


NODES = """
builder.add_node("agent", agent)
builder.add_node("summarize", agent)
builder.set_entry_point("agent")
builder.add_edge("agent", "summarize")
"""


def test_a_selector_that_misspells_a_node(new_project: Any, refused: Refused) -> None:
    """At start, with the nodes seen, subgraphs' too."""
    body = NODES.replace('node("summarize", agent)', 'node("summarize", inner)')
    body = "inner = StateGraph(MessagesState)" + body + "\n"
    body = body.replace(
        "\nbuilder",
        "\ninner.add_node('write', agent)\ninner.set_entry_point('write')\ninner = inner.compile()\nbuilder",
        1,
    )
    decorated = "graph = trainable(builder, model=POLICY, tasks='tasks.jsonl', verifier=score, frozen=['summarise'])\n"
    new_project(body, decorated=decorated)
    said = refused("fit", "graph.py", "--dry-run")
    assert said.startswith(
        "RoleError: frozen=['summarise'] names no node that can be seen before the graph runs. Seen: agent, summarize, "
        "write. Did you mean 'summarize'? For a node that is made while the graph runs write a predicate: "
    )


def test_a_selector_of_a_node_that_is_not_seen_yet(new_project: Any, command: Any) -> None:
    """It may appear when the graph runs: a note, and other kinds of selectors are left alone."""
    selectors = "frozen=['summarize', 'tag:x', 'model:y', 'source:z', lambda site: False], auxiliary=['node:judge']"
    decorated = f"graph = trainable(builder, model=POLICY, tasks='tasks.jsonl', verifier=score, {selectors})\n"
    new_project(NODES, decorated=decorated)
    done = command("fit", "graph.py", "--dry-run", "--json")
    assert done.code == 0, done.err
    assert [note for note in done.json["notes"] if "names no node" in note] == [
        "auxiliary=['node:judge'] names no node that can be seen before the graph runs. Seen: agent, summarize. "
        "If no call matches it in the first evaluation, the run ends there."
    ]


def test_a_misspelt_hook(new_project: Any, refused: Refused) -> None:
    """In graph.py it is an error, with the nearest name."""
    new_project("from agenttrain import hookimpl\n@hookimpl\ndef agenttrain_rollout_finish(result): pass\n")
    said = refused("fit", "graph.py")
    assert said.startswith(
        "PluginError: Plugin 'graph.py' can't be loaded: there is no hook 'agenttrain_rollout_finish'. "
        "Did you mean 'agenttrain_rollout_finished'?"
    )


def test_no_verifier(new_project: Any, refused: Refused) -> None:
    """Without one there is no reward: it says how one is written."""
    new_project(decorated="graph = builder.compile()\n")
    said = refused("fit", "graph.py")
    assert said.startswith("ConfigError: graph.py names no verifier, and without one no rollout has a reward. Decorate")


def test_a_verifier_with_an_argument_that_nothing_fills(new_project: Any, refused: Refused) -> None:
    """Found before anything runs, not at the first score."""
    new_project(
        decorated="def wrong(task, state, sate): return 1\ngraph = trainable(builder, model=POLICY, verifier=wrong)"
    )
    assert "Verifier 'wrong' asks for 'sate', which nothing fills" in refused("fit", "graph.py")


# Tasks


def test_no_task_file(project: Any, refused: Refused) -> None:
    """A name that leads nowhere."""
    said = refused("fit", "graph.py", "--tasks", "taks.jsonl")
    assert said.startswith(f"TaskError: {project.folder}/taks.jsonl can't be read (No such file or directory).")


@pytest.mark.parametrize("name", ["fit", "eval"])
def test_a_task_file_in_another_encoding(project: Any, refused: Refused, name: str) -> None:
    """What a spreadsheet exports."""
    (project.folder / "latin.jsonl").write_bytes('{"id": "grüße"}'.encode("latin-1"))
    said = refused(name, "graph.py", "--tasks", "latin.jsonl")
    assert said.startswith("TaskError: ")
    assert "latin.jsonl is not UTF-8 text (" in said
    assert said.endswith("Save it as UTF-8.")


def test_an_empty_task_file(project: Any, refused: Refused) -> None:
    """It says what a line looks like."""
    project.write("none.jsonl", "\n\n")
    said = refused("fit", "graph.py", "--tasks", "none.jsonl")
    assert said.startswith(f"TaskError: {project.folder}/none.jsonl holds no tasks. Write one JSON object a line: ")


def test_a_task_that_does_not_fit_the_graph(project: Any, refused: Refused, task_rows: list[dict[str, Any]]) -> None:
    """Row, id, the wrong key and the right one."""
    task_rows[1]["input"] = {"mesages": []}
    project.write_tasks(task_rows)
    said = refused("fit", "graph.py")
    assert said == (
        "TaskError: Task 2 ('task-1'): input has the key 'mesages', which the graph doesn't take. "
        "Accepted: messages. Did you mean 'messages'?"
    )


@pytest.mark.parametrize("name", ["fit", "eval"])
def test_no_held_out_task(project: Any, refused: Refused, task_rows: list[dict[str, Any]], name: str) -> None:
    """Nothing could be proved: it names the file and what to write there."""
    project.write_tasks([row for row in task_rows if row["split"] == "train"])
    said = refused(name, "graph.py")
    assert said.startswith(f"TaskError: {project.folder}/tasks.jsonl has 4 tasks, and none of the split that is evalua")
    assert 'Give some rows "split": "held_out"' in said


def test_no_task_to_train_on(project: Any, refused: Refused, task_rows: list[dict[str, Any]]) -> None:
    """The other way round, which only a fit minds."""
    project.write_tasks([row for row in task_rows if row["split"] != "train"])
    assert refused("fit", "graph.py") == (
        'TaskError: There is no task to train on: all rows are held out. Give some "split": "train".'
    )


# The policy


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("/nowhere/policy", "/nowhere/policy is no folder: /nowhere isn't there either. Name the folder of a Hugging"),
        ("./polcy", "/desk/polcy is no folder. Folders in {here}: policy. Did you mean '{here}/policy'?"),
        ("some/folder/below", "some/folder/below is no folder: some/folder isn't there either. Name the folder of a"),
        ("own-er/no-such-model", "'own-er/no-such-model' is no folder, and can't be fetched as a hub id ("),
    ],
)
def test_no_policy_folder(
    project: Any, refused: Refused, model: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path is told as one, with its neighbours; what may be a hub id is asked for there."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (project.folder / "policy").mkdir()
    said = refused("fit", "graph.py", "--model", model)
    assert said.startswith("ModelError: ")
    assert told.format(here=project.folder) in said


def test_no_policy_named(new_project: Any, refused: Refused) -> None:
    """There is no default."""
    new_project(decorated="graph = trainable(builder, tasks='tasks.jsonl', verifier=score)\n")
    assert refused("fit", "graph.py").startswith("ModelError: No policy is named. Say what is trained: @trainable(mode")


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def with_half_the_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def without_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


def with_a_template_that_counts(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(
        "{{ messages | length }}{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )


def with_too_small_a_vocabulary(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (without_config, "holds no config.json: it is no Hugging Face model folder"),
        (without_weights, "holds no weights. Save the model there with save_pretrained"),
        (with_half_the_weights, "model.safetensors can't be read: "),
        (without_template, "has no chat template. Put chat_template.jinja into the folder"),
        (with_a_template_that_counts, "the prompt changes as the conversation grows: at id 0 it has '3user"),
        (with_too_small_a_vocabulary, "has 629 ids, and the model takes 100 (vocab_size in config.json)"),
    ],
)
def test_a_policy_folder_that_can_not_be_used(
    project: Any, refused: Refused, policy_folder: Path, damage: Callable[[Path], None], told: str
) -> None:
    """What is missing or does not fit, and the folder."""
    folder = project.folder / "mine"
    shutil.copytree(policy_folder, folder)
    damage(folder)
    said = refused("fit", "graph.py", "--model", "mine")
    assert said.startswith(("ModelError: ", "TemplateError: "))
    assert str(folder) in said
    assert told in said


# Options and keys


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("trainer.step=3", "'trainer.step' in the command line is no key of the configuration. Did you mean 'trainer."),
        ("trainer.steps=many", "trainer.steps in the command line is 'many': input should be a valid integer"),
        ("trainer.steps=0", "trainer.steps in the command line is 0: input should be greater than or equal to 1"),
        ("seed=-1", "seed in the command line is -1: input should be greater than or equal to 0"),
        ("trainer", "--set 'trainer' has no key=value. Write for example --set trainer.steps=20."),
    ],
)
def test_a_key_or_value_that_can_not_be_used(project: Any, refused: Refused, key: str, told: str) -> None:
    """On the command line."""
    assert refused("fit", "graph.py", "--set", key).startswith(f"ConfigError: {told}")


def test_an_unknown_key_in_the_file(new_project: Any, refused: Refused) -> None:
    """It names the file and the nearest key."""
    project = new_project(settings="[trainer]\nlearning_rte = 1e-3\n")
    assert refused("fit", "graph.py") == (
        f"ConfigError: 'trainer.learning_rte' in {project.folder}/agenttrain.toml is no key of the configuration. "
        "Did you mean 'trainer.learning_rate'?"
    )


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--trainer", "locl"], "No trainer is named 'locl'. Installed trainers: local. Did you mean 'local'?"),
        (["--engine", "Local"], "No engine is named 'Local'. Installed engines: local. Did you mean 'local'?"),
        (
            ["--set", "trainer.advantage=grop"],
            "No advantage estimator is named 'grop'. Installed advantage estimators: centered, group, leave-one-out, "
            "reward. Did you mean 'group'?",
        ),
    ],
)
def test_an_unknown_name(
    project: Any, refused: Refused, flags: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a trainer, an engine, an estimator: what is installed, and the nearest."""
    monkeypatch.setenv("AGENTTRAIN_PLUGINS", "local")
    assert refused("fit", "graph.py", *flags) == f"PluginError: {told}"


def test_an_unknown_plugin_in_the_environment(project: Any, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told by every command, since each could have come from a plugin."""
    monkeypatch.setenv("AGENTTRAIN_PLUGINS", "locl")
    said = refused("fit", "graph.py")
    assert re.match(r"PluginError: No plugin is named 'locl'\. Installed plugins: local[.,]", said)
    assert "Did you mean 'local'?" in said


def test_an_unknown_exporter(project: Any, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenTelemetry's variables are read before anything is made."""
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkin")
    said = refused("fit", "graph.py")
    assert said == "ConfigError: OTEL_TRACES_EXPORTER is 'zipkin'; agenttrain exports to console, otlp or none."


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["fit"], "ConfigError: fit needs a graph: agenttrain fit graph.py, or agenttrain fit --resume RUN."),
        (["fit", "--resume", "gone"], "RunError: No run is named 'gone' under runs or at that path. There are no runs"),
        (["eval", "graph.py", "--run", "gone"], "RunError: No run is named 'gone' under runs or at that path."),
        (["eval", "graph.py", "--split", "test"], "ConfigError: --split is 'test'; it takes train or held_out."),
        (["inspect", "gone"], "RunError: No run is named 'gone' under runs or at that path."),
    ],
)
def test_arguments_that_lead_nowhere(project: Any, refused: Refused, arguments: list[str], told: str) -> None:
    """Runs and splits that are not there."""
    assert refused(*arguments).startswith(told)


def test_an_unknown_option(project: Any, command: Any) -> None:
    """The command line's own error, with the nearest option."""
    done = command("fit", "graph.py", "--trainr", "local")
    assert (done.code, done.out) == (2, "")
    assert "No such option: --trainr (Possible options: --trainer)" in done.err


def test_an_unknown_command(command: Any) -> None:
    """With the nearest one."""
    done = command("fitt", "graph.py")
    assert (done.code, done.out) == (2, "")
    assert "No such command 'fitt'. Did you mean 'fit'?" in done.err


# The disk


def test_too_little_disk_space(project: Any, refused: Refused) -> None:
    """Room for the checkpoints that are kept is asked for first; nothing is made, not even runs/."""
    said = refused("fit", "graph.py", "--set", "checkpoint.keep=100000000")
    assert said.startswith(f"RunError: {project.folder} has ")
    assert said.endswith("MiB. Make room, lower checkpoint.keep, or start in another folder.")
    assert not Path("runs").exists()


@pytest.mark.parametrize("arguments", [("fit",), ("fit", "--dry-run"), ("eval",)])
def test_a_file_in_the_place_of_runs(project: Any, refused: Refused, arguments: tuple[str, ...]) -> None:
    """Root may write anywhere, but not into a file; a dry run tells of it too."""
    project.write("runs", "mine")
    said = refused(*arguments, "graph.py")
    assert said.startswith(f"RunError: {project.folder}/runs can't be written: Not a directory.")
    assert said.endswith("agenttrain writes to runs/ of the current directory: start in a folder you may write to.")
    assert Path("runs").read_text() == "mine"
