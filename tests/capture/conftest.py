"""Model folders with real tokenizers, made in a second, and an engine that answers from a script."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agenttrain.capture.render import open_renderer
from agenttrain.errors import EngineError
from agenttrain.protocols import Renderer
from agenttrain.records import Generation, Ids, RoutedExperts, Sampling

HERMES = (Path(__file__).parent / "hermes.jinja").read_text()
"""What Qwen3's own template writes for conversations without thinking."""

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]


def make_folder(
    folder: Path, *, template: str = HERMES, marks: Iterable[str] = MARKS, config: Mapping[str, Any] | None = None
) -> Path:
    """A model folder: a byte-level BPE of a few hundred ids, the template, and a config without weights."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([template, "assistant user system tool name arguments order lamp"] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )
    tokenizer.add_tokens(list(marks))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    settings = {"model_type": "tiny", "vocab_size": len(tokenizer) + 4, **(config or {})}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokenizer.eos_token_id, 0]}))
    return folder


MakeFolder = Callable[..., Path]


@pytest.fixture(scope="session", name="make_folder")
def make_folder_fixture() -> MakeFolder:
    """Makes a model folder: folder, template, marks, config."""
    return make_folder


@pytest.fixture
def scripted() -> type[ScriptedEngine]:
    """The engine that answers from a script."""
    return ScriptedEngine


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plain folder."""
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def qwen_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, that calls itself a Qwen3 model."""
    return make_folder(tmp_path_factory.mktemp("qwen"), config={"model_type": "qwen3"})


@pytest.fixture(scope="session")
def renderer(folder: Path) -> Renderer:
    return open_renderer(str(folder))


@pytest.fixture(scope="session")
def encode(folder: Path) -> Callable[[str], Ids]:
    """Ids of a text, special tokens included."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda text: tuple(tokenizer.encode(text, add_special_tokens=False).ids)


class ScriptedEngine:
    """An engine in process: `say` gives the ids of an answer. It plays the engine's role for the recorder.

    Attributes:
        asked: prompt ids and sampling of each call, in order of arrival.
        held: calls wait for it when it is set.
        is_broken: calls that are released fail, since nothing worked on them.
        tells: experts for prompt ids, sampled ids and sampling. None: it tells none.
    """

    name = "scripted"

    def __init__(self, say: Callable[[Ids, Sampling], Ids | Exception], *, max_length: int = 4096) -> None:
        self.max_length, self.weight_version = max_length, 3
        self.asked: list[tuple[Ids, Sampling]] = []
        self.held: threading.Event | None = None
        self.tells: Callable[[Ids, Ids, Sampling], RoutedExperts | None] | None = None
        self.released: list[str] = []
        self.is_broken = False
        self._say, self._open = say, dict[str, list[Future[Generation]]]()

    def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str) -> Future[Generation]:
        future: Future[Generation] = Future()
        self.asked.append((prompt_ids, sampling))
        self._open.setdefault(session, []).append(future)
        threading.Thread(target=self._answer, args=(future, prompt_ids, sampling), daemon=True).start()
        return future

    def _answer(self, future: Future[Generation], prompt_ids: Ids, sampling: Sampling) -> None:
        if self.held is not None:
            self.held.wait(5)
        said = self._say(prompt_ids, sampling)
        if future.done():
            return
        if isinstance(said, Exception):
            future.set_exception(said)
        else:
            ids = said[: sampling.max_tokens]
            told = self.tells(prompt_ids, ids, sampling) if self.tells else None
            future.set_result(replace(generation(ids, sampling.stop_ids), routed_experts=told))

    def release(self, session: str) -> None:
        self.released.append(session)
        for future in self._open.pop(session, []):
            if not future.done() and self.is_broken:
                future.set_exception(EngineError("its server was gone"))
            elif not future.done():
                future.set_result(
                    Generation(token_ids=(7,), logprobs=(-0.5,), weight_versions=(3,), stop_reason="aborted")
                )

    def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        self.weight_version = version

    def stats(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None:
        pass


def generation(ids: Ids, stop_ids: Ids) -> Generation:
    """An answer with a log probability that tells its position."""
    return Generation(
        token_ids=ids,
        logprobs=tuple(-0.125 * (i + 1) for i in range(len(ids))),
        weight_versions=(3,) * len(ids),
        stop_reason="stop" if ids and ids[-1] in stop_ids else "length",
    )
