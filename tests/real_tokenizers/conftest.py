"""Model folders with the tokenizers of real models, from the cache that scripts/tokenizers.sh fills."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest

from agenttrain.capture.render import open_renderer
from agenttrain.protocols import Renderer

TEMPLATES = Path(__file__).parent / "templates"
TYPES = {"qwen3": "qwen3", "llama3_1": "llama", "gemma3": "gemma3_text", "deepseek_v3": "deepseek_v3"}
"""Name of a tokenizer to the model_type of the models that have it."""
RealFolder = Callable[..., Path]


def cached(name: str) -> Path:
    """The folder of a tokenizer in the cache; skips, or fails where the tests have to run, when it is not there."""
    caches = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(os.environ.get("AGENTTRAIN_TOKENIZERS") or f"{caches}/agenttrain/tokenizers") / name
    if (folder / "tokenizer.json").is_file():
        return folder
    missing = f"{folder} is not there. Run scripts/tokenizers.sh, which brings it."
    if os.environ.get("AGENTTRAIN_REQUIRE_TOKENIZERS") == "1":
        pytest.fail(missing)
    pytest.skip(missing)


@pytest.fixture(scope="session")
def real_folder(tmp_path_factory: pytest.TempPathFactory) -> RealFolder:
    """Gives a model folder: name of a tokenizer, and optionally a template of `templates` in place of its own."""

    @lru_cache
    def make(name: str, *, template: str | None = None) -> Path:
        source, folder = cached(name), tmp_path_factory.mktemp(name)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folder / file).symlink_to(source / file)
        # Without the version transformers 5.10 warns of a regex that tokenizers of Mistral were saved with.
        config = {"model_type": TYPES[name], "transformers_version": "5.10.0"}
        (folder / "config.json").write_text(json.dumps(config))
        if template is not None:
            (folder / "chat_template.jinja").write_text((TEMPLATES / f"{template}.jinja").read_text())
        return folder

    return make


@pytest.fixture(scope="session")
def opened() -> Callable[..., Renderer]:
    """Opens a folder as a user would; each is loaded once."""
    return lru_cache(open_renderer)
