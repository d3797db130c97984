"""`agenttrain serve` as users run it: a process of its own, found by what it prints, ended by a signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import AuthenticationError, OpenAI

from agenttrain.commands.serve import model_name
from agenttrain.serving.attached import open_serving
from agenttrain.testing import tiny_model


@pytest.fixture
def run_of_a_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The id of a run with a small policy, whose engine is a process of its own."""
    folder = tmp_path / "runs" / "desk-1"
    tiny_model(folder / "policy")
    (folder / "config.toml").write_text('[renderer]\nfamily = "default"\n')
    monkeypatch.chdir(tmp_path)
    return folder.name


@contextmanager
def served(*arguments: str, **variables: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """The process of `agenttrain serve --json`, and the object that it printed once it was ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", "agenttrain", "serve", *arguments, "--port", "0", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        yield process, json.loads(line)
    finally:
        process.kill()
        process.communicate()


def children_of(pid: int) -> list[int]:
    """Processes whose parent it is."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


@pytest.mark.slow
def test_a_served_run_answers_until_it_is_ended(run_of_a_policy: str) -> None:
    """And its engine ends with it."""
    with served(run_of_a_policy, "--name", "desk") as (process, told):
        url = told["address"]
        client = OpenAI(base_url=url, api_key="unused", max_retries=0)
        asked: Any = [{"role": "user", "content": "How many lamps?"}]
        answers = [client.chat.completions.create(model="gpt-4o", messages=asked, max_tokens=9) for _ in range(2)]
        assert [answer.usage.completion_tokens for answer in answers if answer.usage] == [9, 9]
        assert answers[0].model == run_of_a_policy
        assert [model.id for model in client.models.list()] == ["desk"]
        (engine,) = children_of(process.pid)
        process.send_signal(signal.SIGTERM)
        rest, told_on_error = process.communicate(timeout=60)
    assert (process.returncode, rest, told["name"], told["serves"]) == (0, "", "desk", run_of_a_policy)
    assert f"serving {run_of_a_policy} at {url}\n  OPENAI_BASE_URL={url} OPENAI_API_KEY=unused" in told_on_error
    with pytest.raises(ProcessLookupError):
        os.kill(engine, 0)


@pytest.mark.slow
def test_ctrl_c_ends_with_its_own_code_and_a_key_is_asked_for(run_of_a_policy: str) -> None:
    arguments = (run_of_a_policy, "--api-key-env", "DESK_KEY")
    with served(*arguments, DESK_KEY="s3cret") as (process, told):
        client = OpenAI(base_url=told["address"], api_key="wrong", max_retries=0)
        with pytest.raises(AuthenticationError):
            client.models.list()
        assert client.with_options(api_key="s3cret").models.list().data
        process.send_signal(signal.SIGINT)
        rest, told_on_error = process.communicate(timeout=60)
    assert (process.returncode, rest) == (130, "")
    assert "s3cret" not in told_on_error
    assert "OPENAI_API_KEY=$DESK_KEY" in told_on_error


def test_a_folder_has_one_name(run_of_a_policy: str) -> None:
    """In /v1/models, /v1/serving and the answers: of what holds policy/."""
    folder = f"runs/{run_of_a_policy}/policy"
    with closing(open_serving(folder)) as serving:
        assert (model_name(folder, serving), serving.describe()["serves"]) == ("desk-1", "desk-1")


def test_no_such_run_is_told_before_anything_listens(command: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    done = command("serve", "nothing", "--port", "0", "--json")
    assert done.code == 2
    assert done.json["error"]["type"] == "RunError"
    assert "No run is named 'nothing'" in done.err
    assert "health" not in done.err


def test_a_key_that_is_not_set_is_refused(command: Any, monkeypatch: Any) -> None:
    monkeypatch.delenv("DESK_KEY", raising=False)
    done = command("serve", "nothing", "--api-key-env", "DESK_KEY")
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        "ConfigError: --api-key-env DESK_KEY: that variable is not set. export DESK_KEY=… holds the key.\n"
    )
