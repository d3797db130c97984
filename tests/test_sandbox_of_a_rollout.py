"""A rollout's sandbox: fresh for each, the tools' and the verifiers', gone with it; a real graph, real namespaces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from matrix.harness import Rolled, call, roll_graph, says

from agenttrain import SandboxLimits, SandboxRefusal, SandboxSpec, Task, current_sandbox, current_task, open_sandbox
from agenttrain.capture.store import read_store
from agenttrain.errors import SandboxError
from agenttrain.records import Isolation
from agenttrain.sandbox.plugin import built_in
from agenttrain.sandbox_protocol import SandboxRequest
from agenttrain.testing import tiny_model


def _missing() -> str:
    try:
        unenforced = built_in("namespaces").isolation(SandboxRequest(name="trial")).unenforced
    except SandboxError as error:
        return str(error)
    return f"this machine does not enforce {', '.join(unenforced)}" if unenforced else ""


MISSING = _missing()
SETTINGS = """
[engine]
process = "shared"
[limits]
turns = 4
tokens = 64
[renderer]
family = "default"
"""
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    tiny_model(folder)
    return folder


@tool
def shell(command: str) -> str:
    """Run a command."""
    return current_sandbox().run(command).text


@tool
def read(path: str) -> str:
    """A file's text."""
    return current_sandbox().read(path)


@tool
def read_or_hear(path: str) -> str:
    """A file's text, or why there is none."""
    try:
        return current_sandbox().read(path)
    except SandboxRefusal as refusal:
        return f"refused: {refusal}"


def graph_of(*tools: Any) -> StateGraph[Any]:
    asked = ChatOpenAI(model="gpt-4o-mini", api_key="unused").bind_tools(tools)
    builder = StateGraph(MessagesState)
    builder.add_node("agent", lambda state: {"messages": [asked.invoke(state["messages"])]})
    builder.add_node("tools", ToolNode(list(tools), handle_tool_errors=False))
    builder.add_edge(START, "agent")
    builder.add_conditional_edges("agent", tools_condition)
    builder.add_edge("tools", "agent")
    return builder


def roll(folder: Path, model: Path, *said: str, tools: tuple[Any, ...] = (shell,), **options: Any) -> Rolled:
    options.setdefault("sandbox", SandboxSpec(files={"notes.txt": "seven\n"}))
    return roll_graph(graph_of(*tools), says(*said), model=model, folder=folder, **options)


def test_a_tool_works_in_the_sandbox_and_a_verifier_sees_what_it_left(tmp_path: Path, model: Path) -> None:
    def left(task: Task, sandbox: Any) -> dict[str, Any]:
        return {"score": 1.0, "comment": " ".join(sandbox.list()) + " " + sandbox.read("out.txt").strip()}

    rolled = roll(tmp_path, model, call("shell", command="cat notes.txt; echo 8 > out.txt"), "Done.", verifier=left)
    assert "seven" in rolled.asked[1]
    reward = rolled.result.rollout.reward
    assert reward is not None
    assert (reward.score, reward.parts[0].comment) == (1.0, "notes.txt out.txt 8")


def test_siblings_share_nothing(tmp_path: Path, model: Path) -> None:
    """Each begins with the files of the spec alone."""
    said = [call("shell", command="ls; touch mine"), "Done."] * 2
    rolled = roll(tmp_path, model, *said, runs=2)
    after = [text for text in rolled.asked if "<|im_start|>tool" in text]
    assert [text.count("notes.txt") for text in after] == [1, 1]
    assert all("mine\n" not in text.split("<|im_start|>tool")[1] for text in after)


def test_the_isolation_in_force_stands_in_the_record(tmp_path: Path, model: Path) -> None:
    rolled = roll(tmp_path, model, "Done.")
    isolation = rolled.result.rollout.isolation
    assert isolation is not None
    assert (isolation.backend, isolation.unenforced) == ("namespaces", ())
    assert set(isolation.enforced) == {
        *("filesystem", "network", "processes_end", "privileges"),
        *("seconds", "memory_mib", "processes", "disk_mib", "output_kib"),
    }
    (stored,) = read_store(tmp_path / "rollouts").rollouts()
    assert stored.isolation == isolation


def test_nothing_runs_any_more_when_a_verifier_is_asked(tmp_path: Path, model: Path) -> None:
    """A program in the background that would have gone on writing has been ended."""

    def counted(sandbox: Any) -> dict[str, Any]:
        sizes = [len(sandbox.read("log")) for _ in range(3)]
        running = sandbox.run("ls -d /proc/[0-9]* | wc -l").stdout.strip()
        return {"score": float(len(set(sizes)) == 1), "comment": running}

    endless = "setsid sh -c 'while :; do echo x >> log; sleep 0.01; done' > /dev/null 2>&1 & sleep 0.2"
    rolled = roll(tmp_path, model, call("shell", command=endless), "Done.", verifier=counted)
    reward = rolled.result.rollout.reward
    assert reward is not None
    assert reward.score == 1.0
    assert int(reward.parts[0].comment) <= 4  # the first process, sh, ls and wc


def test_what_the_agent_asked_for_in_vain_is_its_own_failure(tmp_path: Path, model: Path) -> None:
    """Uncaught it ends the rollout as a policy failure, which the verifiers score; caught it is an answer."""
    rolled = roll(tmp_path / "a", model, call("read", path="no.txt"), tools=(read,), status="policy_failure")
    assert rolled.result.rollout.cause.startswith("SandboxRefusal: ")
    assert rolled.result.rollout.reward is not None
    heard = roll(tmp_path / "b", model, call("read_or_hear", path="../../etc/shadow"), "Done.", tools=(read_or_hear,))
    assert "refused: " in heard.asked[1]


def test_a_sandbox_that_fails_by_itself_is_the_environments_failure(tmp_path: Path, model: Path) -> None:
    @tool
    def pull_the_rug() -> str:
        """Close the sandbox under the agent."""
        current_sandbox().close()
        return current_sandbox().run("true").text

    said = call("pull_the_rug")
    rolled = roll(tmp_path, model, said, tools=(pull_the_rug,), status="environment_failure")
    assert rolled.result.rollout.reward is None
    assert rolled.result.rollout.cause.startswith("SandboxError: ")


def test_one_that_is_closed_before_its_verifier_is_asked_gives_no_reward(tmp_path: Path, model: Path) -> None:
    @tool
    def close() -> str:
        """Close the sandbox."""
        current_sandbox().close()
        return "closed"

    rolled = roll(tmp_path, model, call("close"), "Done.", tools=(close,), status="environment_failure")
    rollout = rolled.result.rollout
    assert (rollout.reward, rollout.verifier_failed) == (None, True)
    assert rollout.cause.startswith("The sandbox failed before the verifiers were asked: ")


def test_setup_works_in_it_too(tmp_path: Path, model: Path) -> None:
    @contextmanager
    def world(task: Task) -> Iterator[None]:
        current_sandbox().write("from_setup.txt", "by setup")
        yield

    rolled = roll(tmp_path, model, call("shell", command="cat from_setup.txt"), "Done.", setup=world)
    assert "by setup" in rolled.asked[1]


def test_files_and_environment_may_be_functions_of_the_task(tmp_path: Path, model: Path) -> None:
    spec = SandboxSpec(
        files=lambda task: {f"{task.id}.txt": str(len(task.input["messages"]))},
        env=lambda task: {"TASK": task.id},
    )
    rolled = roll(tmp_path, model, call("shell", command='echo "$TASK"; cat task.txt'), "Done.", sandbox=spec)
    assert "task\n1" in rolled.asked[1]


def test_no_secret_of_this_process_is_passed_on(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-mine")
    rolled = roll(tmp_path, model, call("shell", command="env"), "Done.")
    assert "sk-of-mine" not in rolled.asked[1]
    assert "PATH=" in rolled.asked[1]


def test_a_template_that_is_not_there_is_named(tmp_path: Path, model: Path) -> None:
    """Here at the first rollout; a command says it before anything starts."""
    spec = SandboxSpec(template="no_such_folder")
    rolled = roll(tmp_path, model, sandbox=spec, status="environment_failure")
    assert "no_such_folder, and that is no folder" in rolled.result.rollout.cause


def test_outside_of_rollouts_there_is_none_until_one_is_opened() -> None:
    with pytest.raises(LookupError, match=r"open one: with agenttrain.open_sandbox"):
        current_sandbox()
    with open_sandbox(SandboxSpec(files={"a.txt": "1"}, limits=SandboxLimits(seconds=5))) as sandbox:
        assert current_sandbox() is sandbox
        assert sandbox.run(["python", "-c", "print(open('a.txt').read())"]).stdout == "1\n"
    with pytest.raises(LookupError):
        current_sandbox()


def test_the_task_is_known_beside_it(tmp_path: Path, model: Path) -> None:
    @tool
    def which() -> str:
        """The task."""
        return f"{current_task().id} in {current_sandbox().path}"

    rolled = roll(tmp_path, model, call("which"), "Done.", tools=(which,))
    assert "task in /sandbox" in rolled.asked[1]


BOXED = """
from dataclasses import replace
from agenttrain import SandboxSpec, hookimpl
from agenttrain.sandbox.namespaces import NamespacesBackend

class Leaky(NamespacesBackend):
    name = "leaky"
    def isolation(self, request):
        held = super().isolation(request)
        means = {name: by for name, by in held.enforced.items() if name != "disk_mib"}
        return replace(held, backend="leaky", enforced=means, unenforced=("disk_mib",))

@hookimpl
def agenttrain_register_sandboxes(register):
    register("leaky", Leaky)

@trainable(model=POLICY, tasks="tasks.jsonl", verifier=score, sandbox=SandboxSpec(NETWORK))
def graph():
    return builder.compile()
"""
"""A graph that brings a backend of its own, which does not enforce the limit of disk."""
LEAKY = SETTINGS + '[sandbox]\nbackend = "leaky"\n'


def test_one_that_can_not_be_made_is_refused_before_anything_starts(new_project: Any, command: Any) -> None:
    """By fit with the reason and what to do, by check as a finding; no run is begun, no rollout made."""
    project = new_project(decorated=BOXED.replace("NETWORK", ""), settings=LEAKY)
    done = command("fit", project.graph)
    assert done.code == 2
    assert done.err.strip() == (
        "SandboxError: No sandbox can be made as sandbox= of @trainable asks. leaky: does not enforce disk_mib here. "
        "Name a backend that can (--set sandbox.backend=…; agenttrain doctor tells what this machine has), or allow "
        "it: --set 'sandbox.allow_unenforced=[\"disk_mib\"]'."
    )
    assert project.runs == []
    found = command("check", project.graph, "--json").json
    assert [each["code"] for each in found["findings"] if each["severity"] == "error"] == ["sandbox_refused"]
    assert found["trial"] is None


def test_a_template_that_is_missing_is_refused_with_its_own_fix(new_project: Any, command: Any) -> None:
    """Another backend would not help there."""
    project = new_project(decorated=BOXED.replace("NETWORK", 'template="nowhere"'))
    findings = command("check", project.graph, "--json").json["findings"]
    (found,) = [each for each in findings if each["code"] == "sandbox_refused"]
    folder = project.folder / "nowhere"
    assert found["cause"] == f"sandbox= of @trainable names the template {folder}, and that is no folder."
    assert found["fix"] == "Make it, or name another."


def test_a_backend_that_nobody_has_is_an_error_with_those_there_are(new_project: Any, command: Any) -> None:
    project = new_project(decorated=BOXED.replace("NETWORK", 'backend="namespace"'))
    done = command("fit", project.graph)
    assert done.code == 2
    assert "Did you mean 'namespaces'?" in done.err


def test_check_tells_what_holds_and_what_was_allowed_to_be_missing(new_project: Any, command: Any) -> None:
    project = new_project(decorated=BOXED.replace("NETWORK", "network=True"))
    once = ("--json", "--n-tasks", "1", "--siblings", "2")
    found = command("check", project.graph, *once).json
    assert found["verdict"]["sandbox"]["backend"] == "namespaces"
    assert "network" not in found["verdict"]["sandbox"]["enforced"]
    project.write("agenttrain.toml", LEAKY + 'allow_unenforced = ["disk_mib"]\n')
    found = command("check", project.graph, *once).json
    assert [each["where"] for each in found["findings"] if each["code"] == "sandbox_unenforced"] == ["sandbox="]
    assert found["verdict"]["sandbox"]["unenforced"] == ["disk_mib"]


def test_inspect_tells_what_held_and_what_ran(new_project: Any, command: Any) -> None:
    project = new_project(decorated=BOXED.replace("NETWORK", "network=True"))
    assert command("check", project.graph, "--json", "--n-tasks", "1", "--siblings", "1").json["trial"]["rollouts"] == 1
    (rollout,) = project.store.rollouts()
    shown = command("inspect", project.run.id, rollout.id)
    assert f"sandbox: {rollout.isolation.in_words}" in shown.out.splitlines()
    plain = command("inspect", project.run.id, rollout.id, "--json").json
    assert plain["sandbox"]["backend"] == "namespaces"
    assert (plain["tools_run"], plain["stand_ins_run"]) == ({}, {})


def test_isolation_in_words() -> None:
    held = {"filesystem": "mount namespace", "disk_mib": "tmpfs", "seconds": "clock", "output_kib": "clock"}
    assert Isolation(backend="b", enforced=held, unenforced=("network", "memory_mib")).in_words == (
        "b (filesystem by mount namespace; disk_mib by tmpfs; seconds, output_kib by clock); "
        "not enforced: network, memory_mib"
    )
    asked = Isolation(backend="b", enforced={"seconds": "clock"}, unenforced=("disk_mib",))
    assert asked.in_words == "b (seconds by clock); not enforced: disk_mib; network open, as asked"
    closed = Isolation(backend="b", enforced={"network": "network namespace"})
    assert closed.in_words == "b (network by network namespace)"
