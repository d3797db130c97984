"""The files of a policy's folder become those of an exported one: whole, or an adapter's with what makes its prompts.

Knows nothing of runs, and reads no weights.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agenttrain.errors import ConfigError, ModelError, PromotionError, RunError
from agenttrain.folder_hash import NOT_POLICY
from agenttrain.promotion.fixed_set import Form, read_fixed_set

ADAPTER = "adapter"
"""Inside a policy's folder: the adapter alone."""
OF_THE_MODEL = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json", "/config.json")
"""How the names of files end that an adapter's folder does without."""
GENERATION = "generation_config.json"


def refuse_target(target: Path) -> None:
    """Refuse to write over a folder that is not an earlier export.

    Raises:
        ConfigError: it holds something else.
    """
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    try:
        read_fixed_set(target)
    except PromotionError:
        raise ConfigError(
            f"{target} holds something that agenttrain did not export, and would be replaced. Name a folder with --to "
            "that isn't there yet, or is an earlier export."
        ) from None


def files_of(policy: Path, form: Form) -> dict[str, Path]:
    """Name in the exported folder to the file of the policy's folder.

    Raises:
        ModelError: there is no adapter beside the policy.
    """
    own = {f"/{p.relative_to(policy).as_posix()}": p for p in sorted(policy.rglob("*")) if p.is_file()}
    beside = {name: path for name, path in own.items() if not name.startswith(f"/{ADAPTER}/")}
    if form == "merged":
        return _named(beside)
    adapter = {name.removeprefix(f"/{ADAPTER}"): path for name, path in own.items() if name not in beside}
    if "/adapter_config.json" not in adapter:
        raise ModelError(
            f"{policy} holds no {ADAPTER}/: all of its weights were trained. Export it without --form adapter, or "
            'train with trainer.adapter = "lora".'
        )
    return _named({name: path for name, path in beside.items() if not name.endswith(OF_THE_MODEL)} | adapter)


def _named(files: dict[str, Path]) -> dict[str, Path]:
    return {name[1:]: path for name, path in files.items() if path.name not in NOT_POLICY}


def copy_policy(files: dict[str, Path], folder: Path) -> None:
    """Copy each file under its name.

    Raises:
        RunError: the disk has too little room.
        OSError: it refuses otherwise.
    """
    needed, free = sum(path.stat().st_size for path in files.values()), shutil.disk_usage(folder).free
    if free < needed:
        raise RunError(
            f"{folder.parent} has {free / 2**20:.0f} MiB free, and the exported folder takes {needed / 2**20:.0f} MiB. "
            "Make room, or name another place with --to."
        )
    for name, path in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / name)


def write_generation_config(folder: Path, stop_ids: Sequence[int]) -> None:
    """Let replies end where they ended in training, and be sampled by nothing that the policy was not measured with.

    A base's own file may ask for top_k or a repetition penalty, which `generate` and servers apply unasked.
    """
    path = folder / GENERATION
    given: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    kept = {key: value for key, value in given.items() if key.endswith("_token_id") or key == "transformers_version"}
    kept["eos_token_id"] = stop_ids[0] if len(stop_ids) == 1 else list(stop_ids)
    if kept != given:
        path.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


def name_base(folder: Path, base: str) -> None:
    """Write into an adapter's configuration what it stands beside."""
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "base_model_name_or_path": base}, indent=2) + "\n", encoding="utf-8")


def base_license(policy: Path) -> str | None:
    """The license that the card of the base names, which was copied beside its tokenizer."""
    from huggingface_hub import ModelCard

    try:
        license = ModelCard.load(policy / "README.md").data.to_dict().get("license")
    except (OSError, ValueError, TypeError):
        return None
    return license if isinstance(license, str) else None
