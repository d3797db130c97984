"""A run's policy becomes a folder that other people load, and proof that it is the policy that was measured.

What becomes what: a run's policy/ and report.json become a Hugging Face folder with a model card and a fixed set. The
folder stands in its place only once transformers, loading it as anybody would, has given the answers that were
recorded. Invariant: what is said of a policy's answers comes from the weights as they lie on the disk, never from the
engine or the trainer that made them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from agenttrain.config import Config, resolve
from agenttrain.disk import disk_trouble, empty_folder, replace_folder
from agenttrain.errors import ModelError, PromotionError, RunError
from agenttrain.export.exported_files import (
    base_license,
    copy_policy,
    files_of,
    name_base,
    refuse_target,
    write_generation_config,
)
from agenttrain.export.policy_answers import (
    MOST_TOKENS,
    TRANSFORMERS,
    adapter_tables,
    check_tokenizer,
    fixed_turns,
    generated,
    opened_engine,
    reloaded,
    rescored,
    stop_ids,
    synthetic_prompts,
)
from agenttrain.export.policy_source import PolicySource, changed_since_fit, ledger_lines
from agenttrain.export.recorded_turns import recorded_turns
from agenttrain.folder_hash import file_hashes, policy_hash
from agenttrain.plugins import Plugins
from agenttrain.prepare import model_folder
from agenttrain.promotion.card import CardFacts, model_card
from agenttrain.promotion.fixed_set import NAME, Agreement, FixedSet, FixedTurn, Form, as_json, read_fixed_set
from agenttrain.report import verdict
from agenttrain.run_folder import RunFolder

if TYPE_CHECKING:
    from agenttrain.local.reloaded import Reloaded

CARD = "README.md"
N_TURNS = 32
Prompts = Literal["held_out", "synthetic"]
"""Of the fixed set: those of the run's held-out tasks, or openings of conversations that are of no task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportCheck:
    """What the weights of policy/, loaded anew, make of turns that the held-out evaluation recorded."""

    n_turns: int
    """Turns that were scored again."""
    n_same_tokens: int
    """Turns of which every token is the likeliest again; all that were sampled at a temperature above 0."""
    n_near_ties: int
    """Tokens that are not, where both are as likely up to rounding."""
    max_gap: float | None
    """Largest difference of a log probability. None: no turn was scored."""
    hash_same: bool
    """Whether the folder holds the bytes that fit exported."""
    why: str
    """What differs, with its figure; empty when nothing does."""

    @property
    def passed(self) -> bool:
        """Whether the policy of the run is the one that was measured."""
        return not self.why


def export_check(run: RunFolder, *, n_turns: int = N_TURNS) -> ExportCheck:
    """Hold the policy of a fit against what its held-out evaluation recorded: its bytes, then its answers.

    Both are looked at in any case, so that a change which shows in no answer is told from one that does.

    Args:
        n_turns: how many recorded turns are scored again, spread over the tasks.

    Raises:
        RunError: the run has not ended, or recorded no turn.
    """
    turns = recorded_turns(run, n_turns)
    other_bytes = changed_since_fit(run, run.read_report() or {})
    try:
        check_tokenizer(run.policy, str(run.read_config()[1]["hashes"]["renderer"]))
        seen = rescored(reloaded(run.policy), turns)
    except ModelError as error:
        why = f"{other_bytes} {error}".strip()
        return ExportCheck(n_turns=0, n_same_tokens=0, n_near_ties=0, max_gap=None, hash_same=not other_bytes, why=why)
    return ExportCheck(
        n_turns=seen.n_turns,
        n_same_tokens=seen.n_same_turns,
        n_near_ties=seen.n_near_ties,
        max_gap=seen.max_gap,
        hash_same=not other_bytes,
        why=f"{other_bytes} {seen.first}".strip(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """How a policy is exported, or checked."""

    plugins: Plugins
    form: Form = "merged"
    n_turns: int = N_TURNS
    """Of the fixed set."""
    prompts: Prompts = "held_out"
    engine: str | None = None
    """Of which the answers are asked too. None: of transformers alone."""
    base: Path | None = None
    """Folder of the model that an adapter stands beside, in place of the one that it names."""
    flags: Mapping[str, Any] = field(default_factory=dict)
    """Of the configuration, as the command line sets them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What became of it."""

    folder: Path
    fixed: FixedSet
    """With what was agreed on."""
    faults: tuple[str, ...]
    """What is not as it should be; empty when all is. An export with faults is not put in its place."""


def export_policy(source: PolicySource, target: Path, *, wanted: Wanted) -> Exported:
    """Write a policy as a folder of its own, and hold its answers against what was recorded.

    Args:
        target: replaced where it is an earlier export; untouched when something is not as it should be.

    Raises:
        ConfigError: the target holds something else.
        RunError: it can't be written, or the policy is not what fit exported.
        ModelError: the policy, or an adapter's base, can't be loaded.
        EngineError: the engine can't serve it.
    """
    refuse_target(target)
    files = files_of(source.folder, wanted.form)
    if source.run is not None and (other := changed_since_fit(source.run, source.report)):
        raise RunError(f"{other} What was measured is not what would be exported. Put it back, or train again.")
    fixed = _fixed_set(source, wanted)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with empty_folder(target.with_name(f".{target.name}.part")) as aside:
            copy_policy(files, aside)
            write_generation_config(aside, stop_ids(source.folder))
            if wanted.form == "adapter":
                name_base(aside, source.base)
            fixed = replace(fixed, files=file_hashes(aside))
            done = _checked(aside, fixed, wanted, source.tables)
            if not done.faults:
                (aside / NAME).write_text(as_json(done.fixed), encoding="utf-8")
                (aside / CARD).write_text(_card(source, done.fixed, target.name), encoding="utf-8")
                replace_folder(aside, target)
    except OSError as error:
        if isinstance(error, RunError):
            raise
        raise RunError(
            f"{target} can't be written: {disk_trouble(error) or error}. What stood there stands."
        ) from error
    return replace(done, folder=target, faults=tuple(each.replace(str(aside), str(target)) for each in done.faults))


def check_export(folder: Path, *, wanted: Wanted) -> Exported:
    """Hold an exported folder, wherever it is from, against its own fixed set.

    Raises:
        PromotionError: it is no exported folder.
        ModelError: it, or an adapter's base, can't be loaded.
        EngineError: the engine can't serve it.
    """
    fixed = read_fixed_set(folder)
    if not fixed.turns:
        raise PromotionError(f"{folder / NAME} holds no turn: nothing can be held against it. Export the run again.")
    return _checked(folder, fixed, wanted, {})


def _checked(folder: Path, fixed: FixedSet, wanted: Wanted, tables: Mapping[str, Any]) -> Exported:
    """Bytes, tokenizer and template, then the answers of transformers and of the engine that is asked for."""
    faults = _other_files(folder, fixed)
    try:
        check_tokenizer(folder, fixed.renderer)
    except ModelError as error:
        faults.append(str(error))
    base = _base(fixed, wanted)
    try:
        model = reloaded(folder, base=base)
    except ModelError as error:
        return Exported(folder=folder, fixed=replace(fixed, agreements=()), faults=(*faults, str(error)))
    agreements = _agreements(model, folder, base, fixed, wanted, tables)
    faults += [agreed.in_words for agreed in agreements if not agreed.passed]
    fixed = replace(fixed, agreements=tuple(agreed.as_dict() for agreed in agreements))
    return Exported(folder=folder, fixed=fixed, faults=tuple(faults))


def _other_files(folder: Path, fixed: FixedSet) -> list[str]:
    seen = file_hashes(folder)
    return [
        f"{folder / name} {'is gone' if name not in seen else 'has other bytes than were exported'}: SHA-256 "
        f"{seen.get(name, 'none')[:16]} in place of {written[:16]}."
        for name, written in fixed.files.items()
        if seen.get(name) != written
    ] + [
        f"{folder / name} was not exported."
        for name in seen
        if name not in fixed.files and not any(part.startswith(".") for part in Path(name).parts)
    ]


def _agreements(
    model: Reloaded, folder: Path, base: Path | None, fixed: FixedSet, wanted: Wanted, tables: Mapping[str, Any]
) -> list[Agreement]:
    agreements = [generated(TRANSFORMERS, fixed.turns, model.greedy, model)]
    if wanted.engine is not None:
        trainer = adapter_tables(folder) if base is not None else {"adapter": "none"}
        config = _config(wanted, tables, {"engine": {"name": wanted.engine}, "trainer": trainer})
        adapter = folder if base is not None else None
        with opened_engine(wanted.plugins, config, base or folder, adapter=adapter) as (engine, answer):
            agreements.append(generated(engine.name, fixed.turns, answer, model))
    return agreements


def _base(fixed: FixedSet, wanted: Wanted) -> Path | None:
    """The folder that an adapter stands beside; None for the merged form."""
    if fixed.form == "merged":
        return None
    try:
        return wanted.base or model_folder(Config(model=fixed.base))
    except ModelError as error:
        raise ModelError(
            f"The adapter stands beside {fixed.base}: {error} Say where it is with --base FOLDER."
        ) from None


def _config(wanted: Wanted, tables: Mapping[str, Any], more: Mapping[str, Any]) -> Config:
    """Of the run, with what is set beside it."""
    layers = (("the run's config.toml", tables), ("the export", more), ("the command line", wanted.flags))
    return resolve(*layers, plugin_tables=wanted.plugins.table_names)


def _fixed_set(source: PolicySource, wanted: Wanted) -> FixedSet:
    """Turns of the run's own evaluation where it was greedy, else what the engine answers now."""
    renderer, turns, said = _turns(source, wanted)
    return FixedSet(
        run_id=source.run.id if source.run is not None else "",
        form=wanted.form,
        source=said,
        renderer=renderer,
        history=source.tables.get("renderer", {}).get("history", "keep"),
        weights=policy_hash(source.folder),
        files={},
        base=source.base if wanted.form == "adapter" else "",
        turns=tuple(turns),
    )


def _turns(source: PolicySource, wanted: Wanted) -> tuple[str, list[FixedTurn], str]:
    """The renderer's identity, the turns, and where they are from."""
    with ExitStack() as stack:
        if source.run is None or wanted.prompts == "synthetic":
            config = _config(wanted, source.tables, {})
            renderer, ids = synthetic_prompts(source.folder, config)
            prompts = [(f"prompt {n}", prompt, MOST_TOKENS) for n, prompt in enumerate(ids[: wanted.n_turns])]
            of = "prompts of no task"
        else:
            renderer = str(source.made_by["hashes"]["renderer"])
            recorded = recorded_turns(source.run, wanted.n_turns)
            if all(each.temperature == 0 for each in recorded):
                return (
                    renderer,
                    [each.turn for each in recorded],
                    "turns of the run's held-out evaluation, which was greedy",
                )
            config = _config(wanted, source.tables, {})
            prompts = [(each.turn.name, each.turn.prompt_ids, each.max_tokens) for each in recorded]
            of = "prompts of the run's held-out evaluation, which was sampled"
        engine, answer = stack.enter_context(opened_engine(wanted.plugins, config, source.folder))
        turns = fixed_turns(prompts, engine, answer)
    return renderer, turns, f"{of}, answered greedily by the {engine.name} engine"


def _card(source: PolicySource, fixed: FixedSet, name: str) -> str:
    return model_card(
        CardFacts(
            name=name,
            base=source.base,
            fixed=fixed,
            report=source.report,
            verdict=verdict(source.report) if source.report else "",
            made_by=source.made_by,
            ledger=ledger_lines(source.run) if source.run is not None else (),
            license=base_license(source.folder),
            stop_ids=stop_ids(source.folder),
            max_tokens=source.tables.get("limits", {}).get("tokens"),
        )
    )
