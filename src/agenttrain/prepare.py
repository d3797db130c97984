"""A user's arguments to a Job: everything that can be wrong is found here, before anything starts.

The graph is loaded, the configuration resolved, tasks are held against the graph's schema, the policy's tokenizer
and template are tried. Nothing is written and no rollout is made.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from operator import attrgetter
from pathlib import Path
from typing import Any

from agenttrain.as_is import AS_IS
from agenttrain.capture.render import open_renderer
from agenttrain.config import Config, anchored, environment, find_file, read_file, resolve
from agenttrain.errors import ConfigError, ModelError, TaskError
from agenttrain.function_source import functions_in, source_of
from agenttrain.graph.human import check_on_interrupt
from agenttrain.graph.load import LoadedGraph, load_graph, load_module, source_files
from agenttrain.graph.models import models_of, nodes_of
from agenttrain.graph.roles import RoleBook, check_nodes
from agenttrain.graph.runnable import RunnableGraph
from agenttrain.graph.tools import check_declared, runs_itself, tools_of, undeclared_tools
from agenttrain.graph.world import check_setup
from agenttrain.plugins import Plugins
from agenttrain.protocols import EngineContext, InPlace, Renderer, TrainerCheckContext
from agenttrain.records import CallSite, Task
from agenttrain.reward.score import check_seconds, check_verifiers
from agenttrain.rollout import sandbox_maker
from agenttrain.sandbox.making import SandboxMaker
from agenttrain.tasks import check_against_schema, few_tasks_warning, read_tasks, split_tasks
from agenttrain.tool_spec import Declared
from agenttrain.trainable import Trainable
from agenttrain.trainer.algorithms import chosen, with_algorithm
from agenttrain.verifiers.judging import HiddenContent

FIXED = ("model", "tasks", "seed", "eval", "limits", "reward", "renderer")
"""Keys that a run keeps when it goes on, for its baseline was measured by them."""
BEGUN_WITH = (
    "sampling.temperature",
    *(
        f"trainer.{key}"
        for key in ("name", "algorithm", "adapter", "adapter_above", "lora_rank", "lora_alpha", "lora_targets")
    ),
)
"""Keys that it keeps, for its checkpoints and the rollouts it goes on with were made by them."""
VERSIONED = ("agenttrain", "langgraph", "langchain-core", "torch", "transformers", "renderers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a command works on, whole and checked."""

    config: Config
    loaded: LoadedGraph
    plugins: Plugins
    train: tuple[Task, ...]
    held_out: tuple[Task, ...]
    """Those that are evaluated: the first eval.tasks of the held-out split."""
    model: Path | None
    """Folder of the policy. None: other models answer."""
    renderer: Renderer | None
    in_place: InPlace | None = None
    """What answers in the policy's place. None: the policy does."""
    notes: tuple[str, ...] = ()
    """What a user should know before it starts, such as too few held-out tasks."""

    @property
    def name(self) -> str:
        """A short name for runs/: the folder of graph.py."""
        return self.loaded.file.parent.name or self.loaded.name

    @property
    def tools(self) -> Mapping[str, Declared]:
        """What is declared of the graph's tools."""
        return self.loaded.trainable.tools if self.loaded.trainable is not None else {}


def prepare(
    target: str,
    *,
    cwd: Path,
    flags: Mapping[str, Any],
    saved: Mapping[str, Any] | None = None,
    evaluated_run: Mapping[str, Any] | None = None,
    in_place: Callable[[Config], InPlace] | None = None,
    task_file: Path | None = None,
    split: str | None = None,
    extra_plugins: Mapping[str, Any] | None = None,
) -> Job:
    """Check everything a command needs.

    Args:
        target: graph.py, graph.py:attribute, a name in langgraph.json, or a folder with one.
        flags: tables that the command line set; the last word.
        saved: the tables of a run that goes on; they stand in for decorator and file, and what its baseline was
            measured by can't change.
        evaluated_run: the tables of a run whose policy is evaluated; they stand in for decorator and file.
        in_place: makes what answers in the policy's place, of the resolved configuration. None: the policy answers.
        task_file: tasks instead of the configured ones; all of them are evaluated unless `split` is given.
        extra_plugins: plugins that are no installed distribution, by name.

    Raises:
        AgenttrainError: the first thing that is wrong, with the next step.
    """
    loaded, plugins, config = configured(
        target, cwd=cwd, flags=flags, saved=saved, evaluated_run=evaluated_run, extra_plugins=extra_plugins
    )
    noted = loaded.trainable
    with loaded.open() as graph:
        input_schema, context_schema = graph.input_schema() or {}, graph.context_schema()
        nodes = _check_roles(graph, noted) if in_place is not as_is else ()
        declared = _check_tools(graph, noted) if noted is not None and noted.tools else ()
    _check_functions(noted, target, verifier_seconds=config.limits.verifier_seconds)
    file = task_file or _task_file(config, noted, target)
    tasks = read_tasks(file)
    train, held_out = split_tasks(tasks)
    if task_file is not None:
        held_out = tasks if split is None else tuple(task for task in tasks if task.split == split)
    elif split == "train":
        held_out = train
    evaluated = held_out[: config.eval.tasks] if config.eval.tasks else held_out
    if not evaluated:
        raise TaskError(
            f"{file} has {len(tasks)} tasks, and none of the split that is evaluated ({split or 'held_out'}). "
            'Give some rows "split": "held_out", or leave `split` out: 20 % of the rows are held out then.'
        )
    of_sandbox = _check_sandbox(sandbox_maker(config, loaded, plugins), evaluated[0])
    warnings = check_against_schema((*train, *evaluated), input_schema, context_schema)
    other = in_place(config) if in_place is not None else None
    model = model_folder(config) if other is None else None
    renderer = _renderer(config, model) if model is not None else None
    of_engine = plugins.check_engine(EngineContext(config=config, model=str(model))) if model is not None else ()
    return Job(
        config=config,
        loaded=loaded,
        plugins=plugins,
        train=train,
        held_out=evaluated,
        model=model,
        renderer=renderer,
        in_place=other,
        notes=(*loaded.notes, *nodes, *declared, *warnings, *of_sandbox, *_notes(evaluated, renderer), *of_engine),
    )


def configured(
    target: str,
    *,
    cwd: Path,
    flags: Mapping[str, Any],
    saved: Mapping[str, Any] | None = None,
    evaluated_run: Mapping[str, Any] | None = None,
    extra_plugins: Mapping[str, Any] | None = None,
) -> tuple[LoadedGraph, Plugins, Config]:
    """The graph's file loaded, the plugins, and the configuration, each name in it known; arguments as in `prepare`.

    Raises:
        AgenttrainError: the first thing that is wrong, with the next step.
    """
    loaded = load_graph(target, cwd=cwd)
    plugins = Plugins.load(only=environment("AGENTTRAIN_PLUGINS"), graph_module=load_module(loaded.file))
    for name, plugin in (extra_plugins or {}).items():
        plugins.add(plugin, name)
    layers = _layers(loaded, loaded.trainable, flags, saved or evaluated_run, cwd)
    config = with_algorithm(resolve(*layers, plugin_tables=plugins.table_names))
    if saved is not None:
        _refuse_changed(resolve(*layers[:1], plugin_tables=plugins.table_names), config)
    plugins.trainer(config.trainer.name)
    plugins.engine(config.engine.name)
    plugins.check_tables(config)
    if (advantage := chosen(config.trainer).advantage) is not None:
        plugins.advantage(advantage)
    return loaded, plugins, config


def trainable_job(job: Job) -> Job:
    """The same job, asked of its trainer, with what the trainer has to say before anything starts.

    Raises:
        TaskError: there is nothing to train on.
        AgenttrainError: what would keep the trainer from working.
    """
    if not job.train:
        raise TaskError('There is no task to train on: all rows are held out. Give some "split": "train".')
    context = TrainerCheckContext(
        config=job.config, model=str(job.model), graph_file=str(job.loaded.file), n_tasks=len(job.train)
    )
    return replace(job, notes=(*job.notes, *job.plugins.check_trainer(context)))


def _refuse_changed(saved: Config, config: Config) -> None:
    """A run that goes on keeps what its baseline was measured by, and what its checkpoints and rollouts were made by.

    Raises:
        ConfigError: naming the key, and what may be changed.
    """
    whys = dict.fromkeys(FIXED, "its baseline would not be comparable")
    whys |= dict.fromkeys(BEGUN_WITH, "its checkpoints and rollouts were made by that")
    for key, why in whys.items():
        of_key = attrgetter(key)
        before, now = of_key(saved), of_key(config)
        if before != now:
            raise ConfigError(
                f"{key} is {_shown(now)}, and the run that goes on was begun with {_shown(before)}: {why}. "
                "Leave it as it was (trainer.steps may grow), or start a new run."
            )


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, str | int | None) else str(value)


def model_folder(config: Config) -> Path:
    """The policy's folder: as it stands, or fetched by its hub id.

    Raises:
        ModelError: neither is there.
    """
    if config.model is None:
        raise ModelError(
            "No policy is named. Say what is trained: @trainable(model=…), model in agenttrain.toml, or --model FOLDER."
        )
    path = Path(config.model)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{path} holds no config.json: it is no Hugging Face model folder. Name one with --model.")
        _check_weights(path)
        return path.resolve()
    if path.is_absolute() or config.model.startswith((".", "~")) or config.model.count("/") > 1:
        raise ModelError(_no_folder_text(path))
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(config.model))
    except Exception as error:
        raise ModelError(
            f"{config.model!r} is no folder, and can't be fetched as a hub id ({type(error).__name__}). "
            "Name the folder of a Hugging Face model with --model."
        ) from None


def _no_folder_text(path: Path) -> str:
    """What is said of a name that can only be meant as a path."""
    if not path.parent.is_dir():
        return f"{path} is no folder: {path.parent} isn't there either. Name the folder of a Hugging Face model."
    near = sorted(f.name for f in path.parent.iterdir() if f.is_dir() and not f.name.startswith((".", "_")))
    close = difflib.get_close_matches(path.name, near, n=1)
    hint = f"Did you mean {str(path.parent / close[0])!r}?" if close else "Name the folder of a Hugging Face model."
    return f"{path} is no folder. Folders in {path.parent}: {', '.join(near[:8]) or 'none'}. {hint}"


def _check_weights(folder: Path) -> None:
    """Refuse a folder without weights, and weights that were copied only in part.

    Raises:
        ModelError: naming the file.
    """
    from safetensors import SafetensorError, safe_open

    files = [file for pattern in ("*.safetensors", "*.bin") for file in sorted(folder.glob(pattern))]
    if not files:
        raise ModelError(f"{folder} holds no weights. Save the model there with save_pretrained: model.safetensors.")
    for file in files:
        if file.suffix == ".safetensors":
            try:
                with safe_open(str(file), framework="np"):
                    pass
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file} can't be read: {error}. Copy or save it once more, whole.") from None


def n_parameters(folder: Path) -> int:
    """Numbers in the safetensors files of a model folder, tied ones once."""
    from safetensors import safe_open

    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(str(file), framework="np") as weights:
            names = weights.keys()
            total += sum(math.prod(weights.get_slice(name).get_shape()) for name in names)
    return total


def provenance(job: Job) -> dict[str, Any]:
    """What made a run: versions, and hashes of graph, tasks, verifier, template and model."""
    noted = job.loaded.trainable
    return {
        "graph": str(job.loaded.file),
        "attribute": job.loaded.attribute,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in VERSIONED},
        "hashes": {
            "graph": _files_hash(source_files(job.loaded)),
            "tasks": _text_hash(json.dumps([asdict(t) for t in (*job.train, *job.held_out)], default=repr)),
            "verifier": _text_hash(json.dumps(_verifier_sources(noted, job.held_out))),
            **_hidden_in_training(noted, job.train),
            "renderer": job.renderer.identity if job.renderer else None,
            "model": model_hash(job.model) if job.model else None,
        },
    }


def _layers(
    loaded: LoadedGraph, noted: Trainable | None, flags: Mapping[str, Any], saved: Mapping[str, Any] | None, cwd: Path
) -> list[tuple[str, Mapping[str, Any]]]:
    flag_layer = ("the command line", anchored(flags, cwd))
    if saved is not None:
        return [("the run's config.toml", saved), flag_layer]
    layers: list[tuple[str, Mapping[str, Any]]] = []
    if noted is not None:
        layers.append(("@trainable", anchored(decorator_tables(noted), Path(noted.file).parent)))
    file = find_file(loaded.file.parent)
    if file is not None:
        layers.append((str(file), read_file(file)))
    return [*layers, flag_layer]


def decorator_tables(noted: Trainable) -> dict[str, Any]:
    """The decorator's settings as configuration tables."""
    limits = noted.limits
    return {
        "model": noted.model,
        "tasks": noted.tasks,
        "limits": {"turns": limits.turns, "tokens": limits.tokens, "seconds": limits.seconds},
    }


def as_is(_config: Config) -> InPlace:
    """For `prepare`: the graph is run as its user runs it, each call is answered by its own model."""
    return AS_IS


def _task_file(config: Config, noted: Trainable | None, target: str) -> Path:
    if config.tasks is None:
        raise TaskError(
            f'{target} names no tasks. Say where they are: @trainable(tasks="tasks.jsonl") or --tasks FILE.'
        )
    return Path(config.tasks)


def _check_functions(noted: Trainable | None, target: str, *, verifier_seconds: float) -> None:
    """Refuse what would only fail when the first rollout asks for it."""
    if noted is None or not noted.verifiers:
        raise ConfigError(
            f"{target} names no verifier, and without one no rollout has a reward. "
            "Decorate the graph: @trainable(verifier=…), a function (task, state) that gives a bool or a number."
        )
    check_verifiers(noted.verifiers)
    if noted.sandbox is not None:
        check_seconds(noted.verifiers, timeout_s=verifier_seconds, limits=noted.sandbox.limits)
    if noted.setup is not None:
        check_setup(noted.setup)
    if noted.on_interrupt is not None:
        check_on_interrupt(noted.on_interrupt)


def _check_sandbox(maker: SandboxMaker | None, task: Task) -> tuple[str, ...]:
    """Refuse a sandbox that can't be made here; a note on what it leaves unenforced.

    Raises:
        AgenttrainError: none can be made as it was asked for.
    """
    if maker is None:
        return ()
    isolation = maker.isolation(task)
    missing = ", ".join(isolation.unenforced)
    return (f"sandbox: {isolation.backend} does not enforce {missing} here, as was allowed.",) if missing else ()


def _check_roles(graph: RunnableGraph, noted: Trainable | None) -> tuple[str, ...]:
    """Tell at start what the first calls would tell; gives notes on selectors whose nodes are not seen yet.

    Raises:
        RoleError: a selector that misspells a node, or a second model of which nothing is declared.
    """
    if noted is not None and (noted.train or noted.frozen or noted.auxiliary):
        selectors = {"train": noted.train, "frozen": noted.frozen, "auxiliary": noted.auxiliary}
        return check_nodes(selectors, nodes_of(graph))
    roles = RoleBook()
    for model_class, name, base_url in models_of(graph):
        roles.role(CallSite(model_class=model_class, model_name=name, base_url=base_url))
    return ()


def _check_tools(graph: RunnableGraph, noted: Trainable) -> tuple[str, ...]:
    """Notes on names that no tool has so far, and on tools of which nothing is declared.

    Raises:
        ConfigError: a declaration that can't be true of the tools that are seen.
    """
    tools = tools_of(graph)
    notes = check_declared(noted.tools, tools)
    left = undeclared_tools(noted.tools, list(tools))
    return (*notes, f"{runs_itself(left)} agenttrain check tells what to add to tools=.") if left else notes


def _renderer(config: Config, model: Path) -> Renderer:
    return open_renderer(str(model), family=config.renderer.family, history=config.renderer.history)


def _notes(held_out: Sequence[Task], renderer: Renderer | None) -> tuple[str, ...]:
    notes = [few_tasks_warning(len(held_out))]
    if renderer is not None and getattr(renderer, "family_guessed", False):
        family = getattr(renderer, "family", "")
        notes.append(f"renderer.family was guessed: {family}. Write it into agenttrain.toml to keep it.")
    return tuple(note for note in notes if note)


def _verifier_sources(noted: Trainable | None, evaluated: Sequence[Task]) -> list[tuple[Any, ...]]:
    """(name, weight, source) of each verifier, and what else its Part declares, the functions it was made with, and
    the hidden files by which it judges the evaluated tasks."""
    sources: list[tuple[Any, ...]] = []
    for name, part in sorted(noted.verifiers.items() if noted else (), key=lambda item: item[0]):
        layer = (part.kind, part.low, part.high, part.on_error, part.closed)
        told = () if layer == ("outcome", None, None, "fail", 0.0) else (layer,)
        hidden = hidden_digests(part.function, evaluated)
        sources.append((name, part.weight, *source_of(part.function), *told, *hidden))
    return sources


def _hidden_in_training(noted: Trainable | None, train: Sequence[Task]) -> dict[str, str]:
    """The hash of the hidden files by which training tasks are judged, under its name; nothing where there are none.

    Apart from the verifier's, which is the same for two runs that evaluate the same tasks, whatever they train on.
    """
    parts = sorted(noted.verifiers.items()) if noted and train else []
    digests = [(name, *found) for name, part in parts if (found := hidden_digests(part.function, train))]
    return {"verifier_in_training": _text_hash(json.dumps(digests))} if digests else {}


def hidden_digests(verifier: Any, tasks: Sequence[Task]) -> list[str]:
    """Of a verifier, and those it is made with: a digest of the contents by which it judges these tasks."""
    contents = [hidden for each in functions_in(verifier) if (hidden := getattr(each, "hidden", None)) is not None]
    return [hidden.digest(tasks) for hidden in contents if isinstance(hidden, HiddenContent)]


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _text_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _files_hash(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def model_hash(folder: Path) -> str:
    """Of a base's weights and shape, as provenance has it."""
    weights = (*folder.glob("*.safetensors"), *folder.glob("*.bin"))
    return _files_hash(sorted((*weights, folder / "config.json")))
