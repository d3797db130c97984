"""A model folder becomes a tokenizer that fits its model, or an error that says what does not.

Nothing is fetched. What comes out is the tokenizer that the folder holds (transformers may put another in its place),
with a chat template, an end-of-turn id, and ids below the model's vocabulary size.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from agenttrain.errors import ModelError
from agenttrain.records import Ids

SHORT: Final = 64
"""Texts up to this length, role headers above all, are kept encoded."""


class QuickTokenizer:
    """A transformers tokenizer without its preparations: the same ids and text, from its Rust backend at once.

    Thread-safe, because it never changes the backend's settings. All else is the wrapped tokenizer's.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.backend_tokenizer = tokenizer, tokenizer.backend_tokenizer
        self.all_special_tokens: list[str] = list(tokenizer.all_special_tokens)
        self._encoded: dict[str, list[int]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._tokenizer(*args, **options)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        if len(text) > SHORT or add_special_tokens:
            return list(self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        if text not in self._encoded and len(self._encoded) < 4096:
            self._encoded[text] = self.backend_tokenizer.encode(text, add_special_tokens=False).ids
        kept = self._encoded.get(text)
        return list(kept if kept is not None else self.backend_tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return str(self.backend_tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))


def load_tokenizer(folder: Path) -> Any:
    """The fast tokenizer of a folder, checked, without truncation or padding.

    Raises:
        ModelError: the folder, the tokenizer or the chat template is missing or does not fit the model.
    """
    from transformers import AutoTokenizer

    if not folder.is_dir():
        raise ModelError(f"{folder} is no folder. Give the folder of a Hugging Face model; a hub id is fetched before.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # transformers raises many classes
        raise ModelError(
            f"The tokenizer of {folder} can't be loaded: {error}. Save it with save_pretrained."
        ) from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ModelError(f"{folder} has no fast tokenizer. Save it with a tokenizer.json.")
    if not tokenizer.chat_template:
        raise ModelError(f"The tokenizer of {folder} has no chat template. Put chat_template.jinja into the folder.")
    _check_fit(folder, tokenizer)
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def _check_fit(folder: Path, tokenizer: Any) -> None:
    """The tokenizer belongs to the model, and is the one that the folder holds."""
    config = config_of(folder)
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    if size is not None and len(tokenizer) > size:
        raise ModelError(
            f"The tokenizer of {folder} has {len(tokenizer)} ids, and the model takes {size} (vocab_size in "
            "config.json). Use the tokenizer that the model was trained with."
        )
    if tokenizer.eos_token_id is None or not 0 <= tokenizer.eos_token_id < (size or len(tokenizer)):
        raise ModelError(
            f"The tokenizer of {folder} has eos id {tokenizer.eos_token_id}, and ids go from 0 to "
            f"{(size or len(tokenizer)) - 1}. Set eos_token in tokenizer_config.json."
        )
    _check_same(folder, tokenizer)


def _check_same(folder: Path, tokenizer: Any) -> None:
    """transformers 5 puts its own tokenizer class in the place of another one for some model types (qwen2)."""
    from tokenizers import Tokenizer

    if not (folder / "tokenizer.json").is_file():
        return
    saved, text = Tokenizer.from_file(str(folder / "tokenizer.json")), 'Order A41: 3 × 12.50 €\n\tgrüße  {"id": 7}'
    ids, loaded = saved.encode(text, add_special_tokens=False).ids, tokenizer.encode(text, add_special_tokens=False)
    if ids != loaded:
        raise ModelError(
            f"transformers loads another tokenizer than {folder}/tokenizer.json: {type(tokenizer).__name__} makes "
            f"{loaded[:8]} … where the file makes {ids[:8]} …. Set tokenizer_class to PreTrainedTokenizerFast, "
            "and a model_type that has no tokenizer of its own."
        )


def stop_ids_of(folder: Path, tokenizer: Any) -> Ids:
    """The tokenizer's eos id first, then those of generation_config.json."""
    path = folder / "generation_config.json"
    given = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    ids = [tokenizer.eos_token_id, *(given if isinstance(given, list) else [given])]
    return tuple(dict.fromkeys(id for id in ids if isinstance(id, int)))


def hashes_of(folder: Path, tokenizer: Any) -> str:
    """Hashes of the tokenizer file and of the chat template: equal exactly when ids mean the same."""
    path = folder / "tokenizer.json"
    content = path.read_bytes() if path.is_file() else tokenizer.backend_tokenizer.to_str().encode()
    return f"{sha256(content).hexdigest()[:16]}:{sha256(template_of(tokenizer).encode()).hexdigest()[:16]}"


def template_of(tokenizer: Any) -> str:
    """The chat template's source; several named ones as JSON."""
    template = tokenizer.chat_template
    return template if isinstance(template, str) else json.dumps(template, sort_keys=True)


def config_of(folder: Path) -> dict[str, Any]:
    """The folder's config.json; empty when there is none."""
    path = folder / "config.json"
    config: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return config
