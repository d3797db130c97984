"""The engine in a process of its own: the same answers, and no process left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path

import pytest

from agenttrain.config import Config
from agenttrain.errors import EngineError, ModelError
from agenttrain.local.engine import LocalEngine
from agenttrain.local.process import ProcessEngine
from agenttrain.protocols import Engine, EngineContext
from agenttrain.records import Sampling

PROMPTS = [(5, 6, 7), (8, 9, 10, 11), (12, 13)]
Folder = Callable[[str], Path]


def context(folder: Path) -> EngineContext:
    return EngineContext(config=Config(), model=str(folder))


def sampling(max_tokens: int = 8) -> Sampling:
    return Sampling(temperature=1.0, max_tokens=max_tokens, seed=3, stop_ids=())


@pytest.fixture
def engine(model_folder: Folder) -> Iterator[ProcessEngine]:
    opened = ProcessEngine(context(model_folder("qwen3")))
    yield opened
    opened.close()


def is_gone(pid: int) -> bool:
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.slow
def test_answers_as_the_engine_in_this_process(engine: ProcessEngine, model_folder: Folder) -> None:
    """Ids are equal and log probabilities within rounding; facts and counters come across."""
    here = LocalEngine(model_folder("qwen3"))
    mine = [here.generate(p, sampling(), session=str(p)) for p in PROMPTS]
    theirs = [engine.generate(p, sampling(), session=str(p)) for p in PROMPTS]
    for a, b in zip(mine, theirs, strict=True):
        assert a.result().token_ids == b.result().token_ids
        assert a.result().logprobs == pytest.approx(b.result().logprobs, abs=1e-5)
    assert isinstance(engine, Engine)
    assert (engine.max_length, engine.weight_version, engine.kv_cache) == (here.max_length, 0, True)
    assert engine.stats()["sampled_ids"] == 24
    here.close()


@pytest.mark.slow
def test_new_weights_are_taken_and_a_wrong_shape_is_refused(engine: ProcessEngine, model_folder: Folder) -> None:
    """The version of an answer is the one that was published last; a refused update changes nothing."""
    other = LocalEngine(model_folder("qwen3"))
    weights = [(name, value * 1.5) for name, value in other.model.state_dict().items()]
    engine.update_weights(weights, 1)
    assert engine.weight_version == 1
    assert set(engine.generate(PROMPTS[0], sampling(), session="a").result().weight_versions) == {1}
    with pytest.raises(EngineError):
        engine.update_weights([("model.norm.weight", weights[0][1][:1])], 2)
    assert engine.weight_version == 1
    other.close()


@pytest.mark.slow
def test_a_prompt_that_cannot_be_answered_fails_its_own_future_only(engine: ProcessEngine) -> None:
    """An id outside of the vocabulary is an EngineError of that call; the next call is answered."""
    bad = engine.generate((10**6,), sampling(), session="a")
    with pytest.raises(EngineError, match="vocabulary"):
        bad.result()
    assert len(engine.generate(PROMPTS[0], sampling(), session="b").result().token_ids) == 8


@pytest.mark.slow
def test_closing_aborts_calls_in_flight_and_ends_the_process(model_folder: Folder) -> None:
    """A call under way ends as aborted with what it had; the process is gone; closing twice is fine."""
    engine = ProcessEngine(context(model_folder("qwen3")))
    assert engine.max_length == 256  # it has loaded: one that still does so may take longer than it is given to end
    future = engine.generate((5, 6), sampling(max_tokens=250), session="a")
    engine.close()
    engine.close()
    assert future.result().stop_reason in ("aborted", "length")
    assert is_gone(engine.pid)
    with pytest.raises(EngineError, match="closed"):
        engine.generate((5, 6), sampling(), session="b")


@pytest.mark.slow
def test_a_killed_process_fails_what_was_asked(model_folder: Folder) -> None:
    """SIGKILL in mid-generation: the call fails with the signal's name, and so does every later one."""
    engine = ProcessEngine(context(model_folder("qwen3")))
    assert engine.max_length == 256
    os.kill(engine.pid, signal.SIGSTOP)
    future = engine.generate((5, 6), sampling(max_tokens=250), session="a")
    os.kill(engine.pid, signal.SIGKILL)
    assert wait([future], timeout=20).done
    with pytest.raises(EngineError, match="SIGKILL"):
        future.result()
    with pytest.raises(EngineError):
        engine.generate((5, 6), sampling(), session="b")
    with pytest.raises(EngineError):
        engine.stats()
    engine.close()


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_is_told_at_first_use(tmp_path: Path) -> None:
    """The process's own ModelError is raised here."""
    engine = ProcessEngine(context(tmp_path))
    with pytest.raises(ModelError):
        _ = engine.max_length
    engine.close()


@pytest.mark.slow
def test_no_engine_outlives_its_owner(model_folder: Folder) -> None:
    """The owner is killed with SIGKILL: the engine's process sees its socket close, and ends."""
    owner = (
        "import sys, time; from agenttrain.config import Config; from agenttrain.protocols import EngineContext;"
        "from agenttrain.local.process import ProcessEngine;"
        f"e = ProcessEngine(EngineContext(config=Config(), model={str(model_folder('qwen3'))!r}));"
        "e.max_length; print(e.pid, flush=True); time.sleep(60)"
    )
    started = subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    pid = int(started.stdout.readline())
    started.kill()
    started.wait()
    started.stdout.close()
    assert is_gone(pid)
