import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenttrain.config import (
    Config,
    anchored,
    environment,
    find_file,
    parse_assignments,
    read_file,
    resolve,
)
from agenttrain.errors import ConfigError

NUMBERS: list[tuple[str, st.SearchStrategy[Any]]] = [
    ("seed", st.integers(0, 2**63 - 1)),
    ("trainer.steps", st.integers(1, 1000)),
    ("trainer.learning_rate", st.floats(0, 1)),
    ("limits.seconds", st.floats(0.5, 1e6)),
    ("eval.tasks", st.integers(1, 1000)),
]
LAYER = st.fixed_dictionaries({}, optional=dict(NUMBERS))
"""Dotted key to value, any of the keys left out."""


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    tables: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, leaf = name.split(".")
        table = tables
        for parent in parents:
            table = table.setdefault(parent, {})
        table[leaf] = value
    return tables


def value_of(config: Config, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def refusal(*layers: tuple[str, Any], plugin_tables: tuple[str, ...] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(*layers, plugin_tables=plugin_tables)
    return str(caught.value)


@given(layers=st.lists(LAYER, max_size=4))
def test_the_last_layer_that_writes_a_key_wins(layers: list[dict[str, Any]]) -> None:
    """Every key has the value of the last layer that wrote it, else its default."""
    config = resolve(*((f"layer {n}", nested(layer)) for n, layer in enumerate(layers)))
    for name, _ in NUMBERS:
        written = [layer[name] for layer in layers if name in layer]
        assert value_of(config, name) == (written[-1] if written else value_of(Config(), name))


@given(layer=LAYER)
def test_a_resolved_configuration_resolves_to_itself(layer: dict[str, Any]) -> None:
    """A run goes on with exactly the configuration it began with."""
    config = resolve(("toml", nested({**layer, "verl.nodes": 2})), plugin_tables=["verl"])
    assert resolve(("saved", config.model_dump()), plugin_tables=["verl"]) == config


def test_no_layer_gives_the_defaults() -> None:
    """Sampling at temperature 1, greedy evaluation, the local trainer and engine."""
    config = resolve()
    assert (config.sampling.temperature, config.eval.temperature) == (1.0, 0.0)
    assert (config.trainer.name, config.engine.name, config.model, config.plugins) == ("local", "local", None, {})


def test_none_in_a_layer_leaves_what_an_earlier_one_wrote() -> None:
    """A flag that was not given, or a decorator's Limits(turns=None), writes nothing."""
    config = resolve(("toml", {"limits": {"turns": 3}}), ("flags", {"limits": {"turns": None, "tokens": 9}}))
    assert (config.limits.turns, config.limits.tokens) == (3, 9)


def test_layers_are_not_changed_by_merging() -> None:
    """The tables that were given stay as they are."""
    first, second = {"trainer": {"steps": 3}}, {"trainer": {"steps": 4}}
    resolve(("a", first), ("b", second))
    assert (first, second) == ({"trainer": {"steps": 3}}, {"trainer": {"steps": 4}})


def test_a_resolved_configuration_cannot_be_changed() -> None:
    """The configuration of a run is fixed once it began."""
    with pytest.raises(ValueError, match="frozen"):
        resolve().trainer.steps = 3


@pytest.mark.parametrize(
    ("tables", "name", "meant"),
    [
        ({"trainer": {"step": 3}}, "trainer.step", "trainer.steps"),
        ({"trianer": {"steps": 3}}, "trianer", "trainer"),
        ({"learning_rate": 1e-4}, "learning_rate", "trainer.learning_rate"),
        ({"trianer": {}}, "trianer", "trainer"),
        ({"verk": {"nodes": 2}}, "verk", "verl"),
        ({"verl": {"trainer": {"stepz": 2}}}, "verl.trainer.stepz", "verl.trainer.steps"),
    ],
)
def test_an_unknown_key_is_an_error_with_a_suggestion(tables: dict[str, Any], name: str, meant: str) -> None:
    """It names the key, the layer that wrote it and the key that may have been meant."""
    expected = f"{name!r} in agenttrain.toml is no key of the configuration. Did you mean {meant!r}?"
    assert refusal(("agenttrain.toml", tables), plugin_tables=("verl",)) == expected


def test_an_unknown_key_like_no_other_lists_the_known_ones() -> None:
    """Without a close name the keys of that table are listed, and no key that would be refused."""
    assert refusal(("--set", {"run": {"zzzz": 1}})) == (
        "'run.zzzz' in --set is no key of the configuration. Known here: run.deterministic, run.memory_mib."
    )
    assert "'plugins'" not in refusal(("--set", {"plugin": {"a": 1}}))


def test_an_unknown_key_is_blamed_on_the_layer_that_wrote_it() -> None:
    """Another layer's right keys in the same table don't take the blame."""
    text = refusal(("the decorator", {"trainer": {"steps": 3}}), ("--set", {"trainer": {"stepz": 3}}))
    assert text.startswith("'trainer.stepz' in --set is")


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ({"trainer": {"steps": "many"}}, "trainer.steps in toml is 'many': input should be a valid integer"),
        ({"trainer": {"steps": 0}}, "trainer.steps in toml is 0: input should be greater than or equal to 1"),
        ({"trainer": {"steps": True}}, "trainer.steps in toml is True: input should be a valid integer"),
        (
            {"trainer": {"loss": "mean"}},
            "trainer.loss in toml is 'mean': input should be 'token-mean', 'rollout-mean' or 'constant'",
        ),
        ({"trainer": {"name": ["a"]}}, "trainer.name in toml is ['a']: input should be a valid string"),
        ({"sampling": {"temperature": 0}}, "sampling.temperature in toml is 0: input should be greater than 0"),
        ({"reward": {"unfinished": float("nan")}}, "reward.unfinished in toml is nan: input should be a finite number"),
        ({"model": 3}, "model in toml is 3: input should be a valid string"),
        ({"seed": 2**63}, "seed in toml is 9223372036854775808: input should be less than 9223372036854775808"),
    ],
)
def test_a_value_of_a_wrong_type_or_range_names_key_layer_and_value(tables: dict[str, Any], expected: str) -> None:
    """The message says where the value stands and what is accepted."""
    assert (
        refusal(("the decorator", {"trainer": {"clip_low": 0.1}}), ("toml", tables)) == f"{expected}. Change it there."
    )


def test_a_learning_rate_of_zero_is_accepted() -> None:
    """It is how the noise of a run is measured."""
    assert resolve(("toml", {"trainer": {"learning_rate": 0}})).trainer.learning_rate == 0.0


def test_a_value_where_a_table_is_expected() -> None:
    """The layer that wrote the value is named, also when another wrote the table."""
    expected = "trainer in --set is 3, and a table is expected: [trainer]."
    assert refusal(("--set", {"trainer": 3})) == expected
    assert refusal(("toml", {"trainer": {"steps": 3}}), ("--set", {"trainer": 3})) == expected


@pytest.mark.parametrize("table", ["trainer", "verl.trainer"])
@pytest.mark.parametrize("of_nodes", [{"planner": "adapter-a"}, {"planner": {"rank": 8}}])
def test_an_adapter_for_each_node_is_refused(table: str, of_nodes: dict[str, Any]) -> None:
    """However it is written, and over an earlier layer's word."""
    defaults = ("defaults", {"trainer": {"adapter": "auto"}})
    assert refusal(defaults, ("agenttrain.toml", nested({f"{table}.adapter": of_nodes}))) == (
        f"{table}.adapter in agenttrain.toml is a table ('planner'), and one policy is trained for all nodes: none has "
        'an adapter of its own. Set it to one of "auto", "none", "lora"; lora_rank, lora_alpha and lora_targets stand '
        'beside it. What each node is worth, a verifier says: {"score": number, "nodes": {name: number}}.'
    )


def test_a_table_over_a_value() -> None:
    """Both layers are named."""
    text = refusal(("toml", {"seed": 3}), ("--set", {"seed": {"train": 3}}))
    assert text == "seed in --set is a table, and in toml a value. Write it one way."


@pytest.mark.parametrize("tables", [{"verl": 3}, {"verl": {"trainer": 3}}])
def test_a_value_where_a_plugins_table_is_expected(tables: dict[str, Any]) -> None:
    """A plugin's table and its trainer table are checked like our own."""
    text = refusal(("toml", {"trainer": {"name": "verl"}, **tables}), plugin_tables=("verl",))
    assert re.fullmatch(r"verl(\.trainer)? in toml is 3, and a table is expected: \[verl(\.trainer)?\]\.", text)


def test_a_plugins_table_is_kept_for_it() -> None:
    """Its keys are its own business; nobody checks them here."""
    config = resolve(("toml", {"verl": {"nodes": 2}}), ("--set", {"verl": {"gpus": 8}}), plugin_tables=["verl"])
    assert config.plugins == {"verl": {"nodes": 2, "gpus": 8}}


@pytest.mark.parametrize(
    ("chosen", "steps"), [({}, 3), ({"trainer": {"name": "verl"}}, 10), ({"engine": {"name": "verl"}}, 10)]
)
def test_a_plugins_trainer_table_applies_only_when_it_is_chosen(chosen: dict[str, Any], steps: int) -> None:
    """`[verl.trainer] steps = 10` over `[trainer] steps = 3` when verl is the trainer or the engine."""
    tables = {"trainer": {"steps": 3, "group_size": 4}, "verl": {"trainer": {"steps": 10}}}
    config = resolve(("toml", tables), ("flags", chosen), plugin_tables=["verl"])
    assert (config.trainer.steps, config.trainer.group_size) == (steps, 4)


def test_the_trainers_own_table_wins_over_the_engines() -> None:
    """Both may carry one; the trainer has the last word on trainer keys."""
    own = {"sglang": {"trainer": {"steps": 5, "group_size": 6}}, "verl": {"trainer": {"steps": 10}}}
    chosen = {"trainer": {"name": "verl"}, "engine": {"name": "sglang"}}
    config = resolve(("toml", own), ("flags", chosen), plugin_tables=["verl", "sglang"])
    assert (config.trainer.steps, config.trainer.group_size) == (10, 6)


def test_a_flag_wins_over_a_plugins_trainer_table_of_the_file() -> None:
    """Layers come first: `--set trainer.steps=3` is the last word, also with verl."""
    toml = {"trainer": {"name": "verl"}, "verl": {"trainer": {"steps": 10}}}
    config = resolve(("toml", toml), ("--set", {"trainer": {"steps": 3}}), plugin_tables=["verl"])
    assert config.trainer.steps == 3
    assert resolve(("saved", config.model_dump()), plugin_tables=["verl"]).trainer.steps == 3


def test_a_wrong_value_in_a_plugins_trainer_table_is_blamed_on_it() -> None:
    """The message names `[verl.trainer]`, not the table it stands over."""
    toml = {"trainer": {"name": "verl", "steps": 3}, "verl": {"trainer": {"steps": "many"}}}
    assert refusal(("toml", toml), plugin_tables=("verl",)) == (
        "trainer.steps in [verl.trainer] of toml is 'many': input should be a valid integer. Change it there."
    )


@pytest.mark.parametrize(
    ("assignments", "tables"),
    [
        (["trainer.steps=3", "model=base"], {"trainer": {"steps": 3}, "model": "base"}),
        (["trainer.learning_rate=1e-4"], {"trainer": {"learning_rate": 1e-4}}),
        (["run.deterministic=true"], {"run": {"deterministic": True}}),
        (["model=org/name=v2"], {"model": "org/name=v2"}),
        (["model="], {"model": ""}),
        (['model="3"'], {"model": "3"}),
        ([" seed = 7 "], {"seed": 7}),
        (["seed=1", "seed=2"], {"seed": 2}),
        (["verl.list=[1, 2]"], {"verl": {"list": [1, 2]}}),
    ],
)
def test_assignments_are_toml_else_plain_strings(assignments: list[str], tables: dict[str, Any]) -> None:
    """`--set key.path=value` becomes nested tables."""
    assert parse_assignments(assignments) == tables


@pytest.mark.parametrize("assignment", ["trainer.steps", "=3", " = 3", ""])
def test_an_assignment_without_key_or_value_is_refused(assignment: str) -> None:
    """The message shows how it is written."""
    with pytest.raises(ConfigError, match=r"has no key=value\. Write for example --set trainer\.steps=20\."):
        parse_assignments([assignment])


def test_an_assignment_under_a_value_is_refused() -> None:
    """`--set trainer=1 --set trainer.steps=3` contradicts itself."""
    with pytest.raises(ConfigError, match=r"'trainer.steps=3' needs a table 'trainer'"):
        parse_assignments(["trainer=1", "trainer.steps=3"])


@given(flat=LAYER)
def test_assignments_say_the_same_as_tables(flat: dict[str, Any]) -> None:
    """Numbers written with `--set` come back as they were."""
    assert parse_assignments(f"{name}={value!r}" for name, value in flat.items()) == nested(flat)


def test_the_nearest_file_is_found(tmp_path: Path) -> None:
    """The folder itself, then its parents; agenttrain.toml before pyproject.toml."""
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "agenttrain.toml").write_text("")
    assert find_file(inner) == tmp_path / "agenttrain.toml"
    (tmp_path / "a" / "pyproject.toml").write_text("[tool.agenttrain]\nseed = 1\n")
    assert find_file(inner) == tmp_path / "a" / "pyproject.toml"
    (tmp_path / "a" / "agenttrain.toml").write_text("")
    assert find_file(inner) == tmp_path / "a" / "agenttrain.toml"


def test_a_pyproject_without_our_table_is_passed_by(tmp_path: Path) -> None:
    """Other projects' pyproject.toml says nothing about a run."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    (tmp_path / "agenttrain.toml").write_text("")
    assert find_file(tmp_path / "sub") == tmp_path / "agenttrain.toml"


def test_a_relative_folder_has_parents_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search goes past the current directory."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "agenttrain.toml").write_text("")
    monkeypatch.chdir(tmp_path / "sub")
    assert find_file(Path(".")) == tmp_path / "agenttrain.toml"


@pytest.mark.parametrize(
    ("name", "head"), [("agenttrain.toml", ""), ("pyproject.toml", "[tool.other]\nx = 1\n[tool.agenttrain]\n")]
)
def test_a_file_gives_its_tables(tmp_path: Path, name: str, head: str) -> None:
    """Of pyproject.toml only [tool.agenttrain]."""
    (tmp_path / name).write_text(f"{head}seed = 3\n")
    assert read_file(tmp_path / name) == {"seed": 3}


def test_a_file_that_is_no_toml_is_refused_with_its_line(tmp_path: Path) -> None:
    """The path and what the parser saw."""
    (tmp_path / "agenttrain.toml").write_text("seed = 1\nsteps 3\n")
    with pytest.raises(ConfigError, match=r"agenttrain\.toml can't be read as TOML: .*line 2"):
        read_file(tmp_path / "agenttrain.toml")


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """Bytes that are no UTF-8."""
    (tmp_path / "agenttrain.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="can't be read as TOML"):
        read_file(tmp_path / "agenttrain.toml")


def test_our_table_of_pyproject_that_is_a_value_is_refused(tmp_path: Path) -> None:
    """`agenttrain = 3` under [tool]."""
    (tmp_path / "pyproject.toml").write_text("[tool]\nagenttrain = 3\n")
    with pytest.raises(ConfigError, match=r"tool\.agenttrain in .* is 3, and a table is expected"):
        read_file(tmp_path / "pyproject.toml")


def test_paths_of_a_file_are_relative_to_it(tmp_path: Path) -> None:
    """`tasks`, and `model` where a folder of that name is there, or it says `./`; a hub id stays."""
    (tmp_path / "policy").mkdir()
    tables = {"model": "policy", "tasks": "tasks.jsonl", "seed": 1}
    expected = {"model": str(tmp_path / "policy"), "tasks": str(tmp_path / "tasks.jsonl"), "seed": 1}
    assert anchored(tables, tmp_path) == expected
    assert anchored({"model": "Qwen/Qwen3-0.6B"}, tmp_path) == {"model": "Qwen/Qwen3-0.6B"}
    assert anchored({"model": "../base"}, tmp_path) == {"model": str(tmp_path.parent / "base")}
    assert anchored({"model": None, "tasks": "/data/t.jsonl"}, tmp_path) == {"model": None, "tasks": "/data/t.jsonl"}


def test_the_environment_is_read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable or None."""
    monkeypatch.setenv("AGENTTRAIN_PLUGINS", "mine")
    assert environment("AGENTTRAIN_PLUGINS") == "mine"
    monkeypatch.delenv("AGENTTRAIN_PLUGINS")
    assert environment("AGENTTRAIN_PLUGINS") is None


def test_a_table_of_an_integration_may_stand_where_it_is_not_installed() -> None:
    """One agenttrain.toml serves both; the table is kept as it is, and its trainer keys count where it is chosen."""
    layer = {"sglang": {"replicas": 2, "trainer": {"steps": 3}}}
    assert resolve(("agenttrain.toml", layer)).plugins == {"sglang": {"replicas": 2}}
    assert resolve(("agenttrain.toml", layer)).trainer.steps == 20
    assert resolve(("agenttrain.toml", {**layer, "engine": {"name": "sglang"}})).trainer.steps == 3


def test_what_a_machine_may_leave_unenforced_is_known_by_name() -> None:
    """A misspelt boundary would allow nothing, and a program would be refused for another reason than it has."""
    assert resolve(("toml", {"sandbox": {"allow_unenforced": ["network", "disk_mib"]}})).sandbox.allow_unenforced == [
        "network",
        "disk_mib",
    ]
    assert refusal(("the command line", {"sandbox": {"allow_unenforced": ["network", "netwrok"]}})) == (
        "sandbox.allow_unenforced in the command line is ['network', 'netwrok']: there is no 'netwrok'; accepted are "
        "filesystem, network, processes_end, privileges, seconds, memory_mib, processes, disk_mib, output_kib. "
        "Change it there."
    )
