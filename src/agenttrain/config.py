"""What users write: the tables of agenttrain.toml and `--set`, checked; and the only reader of the environment.

Four layers, the later wins: defaults, the decorator, the file, the flags. A key nobody knows is an error with a
suggestion, never ignored. A table named after a plugin is kept for that plugin, and its own `trainer` table
stands over the `trainer` table of the same layer when that plugin is the trainer or the engine.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from agenttrain.errors import ConfigError
from agenttrain.sandbox_spec import BOUNDARIES, LIMITS

FILE_NAMES = ("agenttrain.toml", "pyproject.toml")
INTEGRATIONS = {"sglang": "agenttrain-sglang", "verl": "agenttrain-verl"}
"""Plugins of ours that are distributions of their own: one file serves where they are installed and where not."""
BUILT_IN = ("local", "sft")
"""Plugins of this distribution that a configuration may have tables of where `AGENTTRAIN_PLUGINS` leaves them out."""

T = TypeVar("T", bound="Table")


class Table(BaseModel):
    """A table of the configuration: unknown keys are refused, values can't change after the run began.

    Types are taken at their word: `steps = true` is no 1, and `unfinished = nan` is no number.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class TrainerTable(Table):
    name: str = "local"
    """What trains: the embedded trainer, or a plugin's."""
    algorithm: Literal["grpo", "dr_grpo", "rloo", "gspo", "ppo"] = "grpo"
    """Decides the keys below whose default is None: trainer/algorithms.py lists them. sft has its own."""
    advantage: str | None = None
    """Name of the advantage estimator: "group" centres and scales by the group's standard deviation."""
    steps: int = Field(20, ge=1)
    """Training steps."""
    tasks_per_step: int = Field(16, ge=1)
    """Tasks whose groups one step trains on."""
    group_size: int = Field(8, ge=1)
    """Rollouts of each of them."""
    learning_rate: float = Field(1e-5, ge=0)
    """After the warm-up. 0: a run that measures noise."""
    clip_low: float | None = Field(None, gt=0, lt=1)
    """How far below 1 the ratio of new to old probability counts."""
    clip_high: float | None = Field(None, gt=0)
    """How far above 1 the ratio of new to old probability counts."""
    loss: Literal["token-mean", "rollout-mean", "constant"] | None = None
    """Over what the loss is averaged."""
    minibatches: int = Field(2, ge=1)
    """Optimizer steps per training step and epoch; the rollouts are dealt to them singly, each to one."""
    epochs: int = Field(1, ge=1)
    """Passes over the rollouts of a step, dealt anew in each."""
    kl_coefficient: float = Field(0.0, ge=0)
    """What the distance from the policy at the run's start costs. 0: nothing, and it is not measured."""
    kl: Literal["k1", "k3"] = "k3"
    """How that distance is estimated: "k3" is a term of the loss, "k1" a part of the reward."""
    importance_cap: float | None = Field(None, gt=0)
    """Weigh each token by trainer's over engine's probability, at most this. None: the two are taken as equal."""
    discount: float | None = Field(None, gt=0, le=1)
    """Per trained token (ppo)."""
    gae_lambda: float | None = Field(None, ge=0, le=1)
    """Of generalized advantage estimation (ppo)."""
    value_learning_rate: float | None = Field(None, ge=0)
    """The critic's (ppo)."""
    value_clip: float | None = Field(None, gt=0)
    """How far the critic's word may move from its last (ppo)."""
    critic_warmup_steps: int | None = Field(None, ge=0)
    """First steps in which only the critic learns (ppo)."""
    micro_batch_tokens: int = Field(8192, ge=1)
    """Padded tokens of one forward and backward pass."""
    replay_experts: bool = True
    """Send each token through the experts that the engine sent it through, where the engine told them."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients longer than that are shortened to it."""
    warmup_steps: int = Field(2, ge=0)
    """Training steps over which the learning rate rises to its full height."""
    final_learning_rate: float = Field(0.1, ge=0, le=1)
    """Share of `learning_rate` left at the last step of the linear decay."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW's."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW's."""
    adapter: Literal["auto", "none", "lora"] = "auto"
    """What is trained: "none": all weights; "lora": an adapter, the base frozen; "auto": lora for a large model."""
    adapter_above: int = Field(400_000_000, ge=0)
    """Parameters of a model above which "auto" means "lora"."""
    lora_rank: int = Field(16, ge=1)
    """Of the adapter's matrices."""
    lora_alpha: int = Field(32, ge=1)
    """What the adapter adds is scaled by lora_alpha / lora_rank."""
    lora_targets: list[str] = []
    """Names of the linear layers adapted, such as "q_proj". Empty: all but the output head."""


class EngineTable(Table):
    name: str = "local"
    """What samples: the embedded engine, or a plugin's."""
    concurrency: int = Field(256, ge=1)
    """Rollouts in flight at once, each with a thread of its own."""
    process: Literal["own", "shared"] = "own"
    """Where the local engine runs. "own": its own process, with a core to itself; "shared": this one, for debugging."""


class SamplingTable(Table):
    temperature: float = Field(1.0, gt=0)
    """Of the training rollouts, whatever the user's model says."""


class LimitsTable(Table):
    turns: int = Field(16, ge=1)
    """Model calls of one rollout."""
    tokens: int = Field(4096, ge=1)
    """Sampled tokens of one rollout."""
    seconds: float = Field(300.0, gt=0)
    """Wall clock of one rollout, its setup too."""
    verifier_seconds: float = Field(60.0, gt=0)
    """Wall clock of one verifier."""


class RewardTable(Table):
    unfinished: float = 0.0
    """Added to the reward of a rollout that was truncated or ran out of budget."""


class SandboxTable(Table):
    """Where sandboxes are made; what is in them, `@trainable(sandbox=…)` says."""

    backend: str | None = None
    """None: the best that works on this machine."""
    image: str | None = None
    """Of a container, where a container engine makes them."""
    allow_unenforced: list[str] = []
    """Names of boundaries and limits that this machine may leave unenforced."""

    @field_validator("allow_unenforced")
    @classmethod
    def _known(cls, names: list[str]) -> list[str]:
        known = (*BOUNDARIES, *LIMITS)
        for name in names:
            if name not in known:
                said = {"name": repr(name), "known": ", ".join(known)}
                raise PydanticCustomError("unknown_name", "there is no {name}; accepted are {known}", said)
        return names


class EvalTable(Table):
    tasks: int | None = Field(None, ge=1)
    """Held-out tasks evaluated, from the front of the file. None: all."""
    repeats: int = Field(1, ge=1)
    """Rollouts of each task."""
    temperature: float = Field(0.0, ge=0)
    """0 is greedy."""


class CostTable(Table):
    """Prices, in a unit of your own; without them a rollout costs its sampled tokens."""

    sampled_token: float = Field(1.0, ge=0)
    """Of the policy."""
    prompt_token: float = Field(0.0, ge=0)
    """Of the policy; each call's whole prompt counts."""
    own_sampled_token: float = Field(1.0, ge=0)
    """Of your own models, as-is, or of a chat model in the policy's place."""
    own_prompt_token: float = Field(0.0, ge=0)
    """Of the same."""
    tool_call: float = Field(0.0, ge=0)
    """Whatever the tool."""
    second: float = Field(0.0, ge=0)
    """Of a rollout's wall clock."""


class PromotionTable(Table):
    """What a policy must show before it may serve, on the held-out tasks, against what serves now."""

    min_difference: float = Field(0.0, ge=-1, lt=1)
    """The lower bound of the difference in success must be above it."""
    slice_loss: float = Field(0.0, ge=0, lt=1)
    """No slice may be shown to lose more success than this."""
    max_logprob_gap: float = Field(1e-3, gt=0)
    """Largest log-probability gap of the run, engine against trainer, must be below it."""
    max_cost: float | None = Field(None, ge=0)
    """A rollout's mean cost is shown to be at most this. None: not asked."""
    max_cost_ratio: float | None = Field(None, gt=0)
    """The same, as a multiple of what serves now. None: not asked."""
    max_seconds: float | None = Field(None, gt=0)
    """A rollout's mean wall clock is shown to be at most this. None: not asked."""
    max_seconds_ratio: float | None = Field(None, gt=0)
    """The same, as a multiple of what serves now. None: not asked."""
    check_turns: int = Field(64, ge=1)
    """Greedy turns that the exported weights are asked again."""


class CanaryTable(Table):
    """How a share of the conversations tries a promoted policy first."""

    share: float = Field(0.1, gt=0, le=0.5)
    """Of the conversations, by a stable hash."""
    tools: Literal["marked", "stand_in"] = "marked"
    """In its conversations: "marked": tools run and know it; "stand_in": external ones run their stand-ins, sandboxed
    ones in a sandbox."""
    min_outcomes: int = Field(10, ge=2)
    """Its outcomes before it can be taken back for doing worse."""
    false_alarm: float = Field(0.05, gt=0, lt=0.5)
    """The most likely it is that one which does as well is ever taken back."""


class CheckpointTable(Table):
    every: int = Field(5, ge=1)
    """Training steps between two checkpoints."""
    keep: int = Field(2, ge=1)
    """Checkpoints that are kept, the newest."""


class RunTable(Table):
    deterministic: bool = False
    """Batches of fixed width, in lockstep, on one thread: equal runs give bit-equal weights."""
    memory_mib: int | None = Field(None, ge=1)
    """Memory of this process at which it saves and stops. None: when the machine or its container has little left."""


class RendererTable(Table):
    family: str | None = None
    """Family of the chat template; None: guessed from the tokenizer, and the guess is printed."""
    history: Literal["keep", "template"] = "keep"
    """"keep": the tokens stay as they were sampled; "template": what the chat template drops is dropped, and a new
    trajectory begins."""


class Config(Table):
    """The resolved configuration of a run."""

    model: str | None = None
    """Hugging Face folder or hub id of the policy. None: the decorator's."""
    tasks: str | None = None
    """Task file. None: the decorator's."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Of all randomness of the run."""
    trainer: TrainerTable = TrainerTable()
    engine: EngineTable = EngineTable()
    sampling: SamplingTable = SamplingTable()
    limits: LimitsTable = LimitsTable()
    reward: RewardTable = RewardTable()
    sandbox: SandboxTable = SandboxTable()
    eval: EvalTable = EvalTable()
    cost: CostTable = CostTable()
    promotion: PromotionTable = PromotionTable()
    canary: CanaryTable = CanaryTable()
    checkpoint: CheckpointTable = CheckpointTable()
    run: RunTable = RunTable()
    renderer: RendererTable = RendererTable()
    plugins: dict[str, dict[str, Any]] = {}
    """Tables of plugins, by name; without their `trainer` tables, which `trainer` has taken in."""


def resolve(*layers: tuple[str, Mapping[str, Any]], plugin_tables: Iterable[str] = ()) -> Config:
    """Merge layers, the later wins, and check the result.

    Args:
        layers: (where it was written, nested tables), for the error messages. A resolved configuration is one too.
        plugin_tables: names of tables that installed plugins own; or those of `INTEGRATIONS` and `BUILT_IN`.

    Raises:
        ConfigError: an unknown key, or a value of a wrong type or range; it names the layer that wrote it.
    """
    owned = {*plugin_tables, *INTEGRATIONS, *BUILT_IN} - set(Config.model_fields)
    flat = [(where, _with_plugins_beside(layer)) for where, layer in layers]
    for where, layer in flat:
        for path, table in (("", layer), *((f"{name}.", layer.get(name)) for name in sorted(owned))):
            _refuse_adapter_of_a_node(table, f"{path}trainer.adapter", where)
    merged, written = _merged(flat, owned)
    engine, trainer = (merged.get(table, {}).get("name", "local") for table in ("engine", "trainer"))
    chosen = [trainer] if engine == "local" else [engine, trainer]  # [local.trainer] is the trainer's of that name
    own_trainers = [name for name in chosen if isinstance(name, str) and name in owned]
    merged, written = _merged(_with_own_trainers(flat, own_trainers), owned)
    plugins = {name: _without_trainer(merged.pop(name)) for name in list(merged) if name in owned}
    try:
        return Config(**merged, plugins=plugins)
    except ValidationError as error:
        raise ConfigError(_first_misfit(error, written)) from None


def plugin_table(model: type[T], plugin: str, config: Config) -> T:
    """A plugin's own table of a configuration, checked.

    Args:
        model: what it may hold.
        plugin: its name, which the table has too.

    Raises:
        ConfigError: an unknown key, or a value of a wrong type or range.

    Example: plugin_table(SglangTable, "sglang", config).replicas -> 1
    """
    table = config.plugins.get(plugin, {})
    written = _written(table, f"{plugin}.", "the configuration")
    _refuse_unknown(model, table, written, set(), f"{plugin}.")
    try:
        return model(**table)
    except ValidationError as error:
        raise ConfigError(_first_misfit(error, written, f"{plugin}.")) from None


def _written(table: Mapping[str, Any], path: str, where: str) -> dict[str, str]:
    """Every key of nested tables to where it was written."""
    names = {f"{path}{key}": where for key in table}
    for key, value in table.items():
        if isinstance(value, Mapping):
            names |= _written(value, f"{path}{key}.", where)
    return names


def find_file(start: Path) -> Path | None:
    """agenttrain.toml, else a pyproject.toml with [tool.agenttrain], in a folder or its parents."""
    start = start.absolute()
    for folder in (start, *start.parents):
        for name in FILE_NAMES:
            path = folder / name
            if path.is_file() and (name == "agenttrain.toml" or "agenttrain" in _parse(path).get("tool", {})):
                return path
    return None


def read_file(path: Path) -> dict[str, Any]:
    """The tables of a configuration file; a relative `model` or `tasks` becomes absolute from its folder.

    Raises:
        ConfigError: the file is no TOML.
    """
    tables = _parse(path)
    if path.name == "pyproject.toml":
        tables = tables.get("tool", {}).get("agenttrain", {})
        if not isinstance(tables, dict):
            raise ConfigError(f"tool.agenttrain in {path} is {tables!r}, and a table is expected: [tool.agenttrain].")
    return anchored(tables, path.parent)


def anchored(tables: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The same tables with `model` and `tasks` read relative to a folder; a hub id stays as it is."""
    anchored_tables = dict(tables)
    for key in ("model", "tasks"):
        value = anchored_tables.get(key)
        if isinstance(value, str) and (key == "tasks" or (folder / value).exists() or value.startswith(".")):
            anchored_tables[key] = str((folder / value).resolve())
    return anchored_tables


def parse_assignments(assignments: Iterable[str]) -> dict[str, Any]:
    """`key.path=value` as nested tables; a value is TOML, else a plain string.

    Raises:
        ConfigError: an assignment without "=".

    Example: ["trainer.steps=3", "model=base"] -> {"trainer": {"steps": 3}, "model": "base"}
    """
    tables: dict[str, Any] = {}
    for assignment in assignments:
        key, separator, text = assignment.partition("=")
        if not separator or not key.strip():
            raise ConfigError(f"--set {assignment!r} has no key=value. Write for example --set trainer.steps=20.")
        *parents, leaf = key.strip().split(".")
        table = tables
        for parent in parents:
            table = table.setdefault(parent, {})
            if not isinstance(table, dict):
                raise ConfigError(
                    f"--set {assignment!r} needs a table {parent!r}, and an earlier --set made it a value."
                )
        table[leaf] = _toml_value(text.strip())
    return tables


def environment(name: str) -> str | None:
    """An environment variable, or None; nobody else reads the environment."""
    return os.environ.get(name)


def set_missing(variables: Mapping[str, str]) -> list[str]:
    """Set the environment variables that aren't set; gives their names, sorted."""
    missing = sorted(name for name in variables if name not in os.environ)
    os.environ.update({name: variables[name] for name in missing})
    return missing


def _parse(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read as TOML: {error}. Mend that line and start again.") from None


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _merge(into: dict[str, Any], layer: Mapping[str, Any], where: str, written: dict[str, str], path: str = "") -> None:
    for key, value in layer.items():
        name = f"{path}{key}"
        if isinstance(value, Mapping):
            table = into.setdefault(key, {})
            if not isinstance(table, dict):
                raise ConfigError(f"{name} in {where} is a table, and in {written[name]} a value. Write it one way.")
            written.setdefault(name, where)
            _merge(table, value, where, written, f"{name}.")
        elif value is not None:
            into[key] = value
            written[name] = where


def _merged(layers: Iterable[tuple[str, Mapping[str, Any]]], owned: set[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """(one set of tables of known keys, key to the layer that wrote it last)."""
    merged: dict[str, Any] = {}
    written: dict[str, str] = {}
    for where, layer in layers:
        _merge(merged, layer, where, written)
    _refuse_unknown(Config, {key: value for key, value in merged.items() if key not in owned}, written, owned)
    for name in sorted(owned & merged.keys()):
        table = _table(merged[name], name, written)
        own = _table(table.get("trainer", {}), f"{name}.trainer", written)
        _refuse_unknown(TrainerTable, own, written, owned, f"{name}.trainer.")
    return merged, written


def _refuse_adapter_of_a_node(table: Any, name: str, where: str) -> None:
    trainer = table.get("trainer") if isinstance(table, Mapping) else None
    adapter = trainer.get("adapter") if isinstance(trainer, Mapping) else None
    if isinstance(adapter, Mapping):
        raise ConfigError(
            f"{name} in {where} is a table ({', '.join(map(repr, adapter)) or 'empty'}), and one policy is trained for "
            'all nodes: none has an adapter of its own. Set it to one of "auto", "none", "lora"; lora_rank, lora_alpha '
            "and lora_targets stand beside it. What each node is worth, a verifier says: "
            '{"score": number, "nodes": {name: number}}.'
        )


def _table(value: Any, name: str, written: Mapping[str, str]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} in {written[name]} is {value!r}, and a table is expected: [{name}].")
    return value


def _with_own_trainers(
    layers: Iterable[tuple[str, Mapping[str, Any]]], plugins: Iterable[str]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each layer, then its `[verl.trainer]` as `[trainer]`: over its own `trainer` table and under later layers."""
    for where, layer in layers:
        yield where, layer
        for name in plugins:
            yield f"[{name}.trainer] of {where}", {"trainer": layer.get(name, {}).get("trainer", {})}


def _with_plugins_beside(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Plugin tables beside the others, as users write them; a resolved configuration holds them under `plugins`."""
    rest = {key: value for key, value in layer.items() if key != "plugins"}
    plugins = layer.get("plugins", {})
    return {**plugins, **rest} if isinstance(plugins, Mapping) else dict(layer)


def _without_trainer(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key != "trainer"}


def _refuse_unknown(
    model: type[BaseModel], table: Mapping[str, Any], written: Mapping[str, str], owned: set[str], path: str = ""
) -> None:
    for key, value in table.items():
        name = f"{path}{key}"
        field = model.model_fields.get(key)
        if field is None or name == "plugins":
            known = [f"{path}{k}" for k in model.model_fields if k != "plugins"] + (sorted(owned) if not path else [])
            raise ConfigError(_unknown(name, written[name], known))
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Table):
            _refuse_unknown(inner, _table(value, name, written), written, owned, f"{name}.")


def _unknown(name: str, where: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known + _all_keys(), n=1)
    hint = f"Did you mean {close[0]!r}?" if close else f"Known here: {', '.join(known)}."
    return f"{name!r} in {where} is no key of the configuration. {hint}"


def _all_keys(model: type[BaseModel] = Config, path: str = "") -> list[str]:
    keys = []
    for key, field in model.model_fields.items():
        if key == "plugins":
            continue
        inner = field.annotation
        nested = isinstance(inner, type) and issubclass(inner, Table)
        keys += _all_keys(inner, f"{path}{key}.") if nested else [f"{path}{key}"]  # type: ignore[arg-type]
    return keys


def _first_misfit(error: ValidationError, written: Mapping[str, str], path: str = "") -> str:
    first = error.errors()[0]
    name = path + ".".join(str(part) for part in first["loc"])
    where = written.get(name, "the configuration")
    return f"{name} in {where} is {first['input']!r}: {first['msg'].lower()}. Change it there."
