"""plugins.py: installed distributions and graph.py become loaded plugins. All plugins here are real modules."""

from __future__ import annotations

import logging
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agenttrain.config import Config, resolve
from agenttrain.errors import ConfigError, EngineError, PluginError
from agenttrain.plugins import Loaded, Plugins, Problem
from agenttrain.protocols import EngineContext
from agenttrain.records import CallSite

IMPORT = "from agenttrain import hookimpl\n"

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a distribution with one plugin module, as an installer leaves it: a module and a dist-info folder."""
    monkeypatch.syspath_prepend(str(tmp_path))
    written: list[str] = []

    def install(name: str, source: str, *, distribution: str | None = None, version: str = "1.2") -> None:
        dist, module = distribution or f"dist-{name}", f"plugin_of_test_{distribution or name}".replace("-", "_")
        (tmp_path / f"{module}.py").write_text(IMPORT + textwrap.dedent(source))
        info = tmp_path / f"{dist.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[agenttrain]\n{name} = {module}\n")
        written.append(module)

    yield install
    for module in written:
        sys.modules.pop(module, None)


def module_of(source: str) -> ModuleType:
    """graph.py's module, as the loader would make it."""
    module = ModuleType("graph_of_test")
    exec(IMPORT + textwrap.dedent(source), vars(module))
    return module


def load(*names: str, **options: Any) -> Plugins:
    """Only the named plugins, so that what else is installed here doesn't matter."""
    return Plugins.load(only=",".join(names), **options)


ENGINE = """
@hookimpl
def agenttrain_register_engines(register):
    register("{0}", lambda context: "{0} engine")
"""


def test_built_ins_come_through_the_entry_points() -> None:
    """Without a limit the distribution's own plugin is found like any other."""
    plugins = Plugins.load(only=None)
    assert "local" in [*(plugin.name for plugin in plugins.loaded), *(problem.name for problem in plugins.problems)]


def test_an_installed_plugin_is_loaded_with_its_version(install: Install) -> None:
    install("mine", ENGINE.format("mine"))
    plugins = load("mine")
    assert plugins.loaded == [Loaded("mine", "1.2", "dist-mine")]
    assert plugins.problems == []
    assert plugins.table_names == ("mine",)
    assert plugins.engine("mine")(None) == "mine engine"  # type: ignore[arg-type, comparison-overlap]


def test_trainers_and_advantages_are_registered_too(install: Install) -> None:
    install(
        "mine",
        """
        @hookimpl
        def agenttrain_register_trainers(register):
            register("verl", lambda context: None)
            register("sft", lambda context: None)

        @hookimpl
        def agenttrain_register_advantages(register):
            register("sign", lambda rewards: [1.0 if r > 0 else -1.0 for r in rewards])
        """,
    )
    plugins = load("mine")
    assert sorted(plugins.trainers) == ["sft", "verl"]
    assert plugins.advantage("sign")([2, -3]) == [1.0, -1.0]


def test_an_unknown_name_lists_what_is_there_with_a_suggestion(install: Install) -> None:
    install("mine", "@hookimpl\ndef agenttrain_register_trainers(register):\n    register('verl', print)\n")
    plugins = load("mine")
    with pytest.raises(PluginError) as caught:
        plugins.trainer("veRL")
    assert str(caught.value) == "No trainer is named 'veRL'. Installed trainers: verl. Did you mean 'verl'?"
    with pytest.raises(PluginError, match=r"No engine is named 'x'\. Installed engines: none\."):
        plugins.engine("x")
    with pytest.raises(PluginError, match="No advantage estimator is named 'x'"):
        plugins.advantage("x")


BROKEN = {
    "import": ("import no_such_module_of_test", "can't be imported: ModuleNotFoundError"),
    "syntax": ("def", "can't be imported: SyntaxError"),
    "exit": ("raise SystemExit(3)", "can't be imported: SystemExit"),
    "misspelt": (
        "@hookimpl\ndef agenttrain_register_engine(register): ...",
        "there is no hook 'agenttrain_register_engine'. Did you mean 'agenttrain_register_engines'?",
    ),
    "argument": (
        "@hookimpl\ndef agenttrain_turn_recorded(turns): ...",
        "agenttrain_turn_recorded has no argument 'turns'. Did you mean 'turn'? Accepted: turn",
    ),
    "unmarked": ("def agenttrain_turn_recorded(turn): ...", "agenttrain_turn_recorded has no @hookimpl"),
    "wrapper": (
        "@hookimpl(wrapper=True)\ndef agenttrain_role(site):\n    return (yield)",
        "agenttrain_role is a wrapper",
    ),
    "raises": (
        "@hookimpl\ndef agenttrain_register_engines(register):\n    register('half', print)\n    1 / 0",
        "ZeroDivisionError",
    ),
    "nothing": ("@hookimpl\ndef agenttrain_register_engines(register):\n    register('', 3)", "PluginError: register"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_plugin_is_left_out_and_listed(install: Install, kind: str) -> None:
    """With its reason; the others load, and nothing of it stays registered."""
    source, reason = BROKEN[kind]
    install("broken", source)
    install("fine", ENGINE.format("fine"))
    plugins = load("broken", "fine")
    assert [plugin.name for plugin in plugins.loaded] == ["fine"]
    assert list(plugins.engines) == ["fine"]
    (problem,) = plugins.problems
    assert problem.name == "broken"
    assert reason in problem.reason
    plugins.observe("agenttrain_turn_recorded", turn=None)
    assert plugins.observer_errors == {}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_plugin_that_the_configuration_names_ends_loading(install: Install, kind: str) -> None:
    source, reason = BROKEN[kind]
    install("broken", source)
    with pytest.raises(PluginError, match="Plugin 'broken' can't be loaded") as caught:
        load("broken", named=["broken"])
    assert reason in str(caught.value)
    assert "take it out of the configuration" in str(caught.value)


@pytest.mark.parametrize("kind", ["misspelt", "argument", "unmarked", "wrapper", "raises"])
def test_a_broken_hook_in_graph_py_ends_loading(kind: str) -> None:
    source, reason = BROKEN[kind]
    with pytest.raises(PluginError, match=r"Plugin 'graph.py' can't be loaded") as caught:
        load(graph_module=module_of(source))
    assert reason in str(caught.value)


def test_what_was_left_out_is_told_where_a_name_is_missing(install: Install) -> None:
    install("broken", "import no_such_module_of_test")
    with pytest.raises(PluginError, match="1 plugins were left out: see agenttrain plugins"):
        load("broken").engine("broken")


def test_graph_py_is_a_plugin_when_it_has_hookimpls() -> None:
    plugins = load(graph_module=module_of(ENGINE.format("own")))
    assert plugins.loaded == [Loaded("graph.py", "", "")]
    assert list(plugins.engines) == ["own"]
    assert plugins.table_names == ()
    assert load(graph_module=module_of("x = 1")).loaded == []


def test_the_variable_limits_what_is_loaded(install: Install) -> None:
    """None loads all, empty none, else the names with or without spaces; nothing else is even imported."""
    install("bad", "raise RuntimeError('imported')")
    install("good", ENGINE.format("good"))
    assert {plugin.name for plugin in Plugins.load(only=None).loaded} >= {"good"}
    assert Plugins.load(only="").loaded == []
    assert [plugin.name for plugin in Plugins.load(only=" good ,").loaded] == ["good"]
    assert Plugins.load(only="good").problems == []


def test_a_name_that_is_not_installed_is_refused(install: Install) -> None:
    install("verl", ENGINE.format("verl"))
    with pytest.raises(PluginError, match=r"No plugin is named 'verll'.*Did you mean 'verl'\?.*AGENTTRAIN_PLUGINS"):
        Plugins.load(only="verll")
    with pytest.raises(PluginError, match=r"No plugin is named 'none'.*take it out of the configuration"):
        Plugins.load(only="verl", named=["none"])
    with pytest.raises(PluginError, match="AGENTTRAIN_PLUGINS= leaves it out"):
        Plugins.load(only="", named=["verl"])


def test_two_plugins_that_register_one_name_are_refused_by_both_names(install: Install) -> None:
    install("one", ENGINE.format("same"))
    install("two", ENGINE.format("same"))
    with pytest.raises(PluginError, match=r"'same' is registered twice under engines, by plugin 'one' and by 'two'"):
        load("one", "two")


def test_a_second_distribution_with_the_same_plugin_name_is_listed(install: Install) -> None:
    install("mine", ENGINE.format("first"), distribution="dist-a")
    install("mine", ENGINE.format("second"), distribution="dist-b")
    plugins = load("mine")
    assert len(plugins.loaded) == 1
    assert plugins.problems == [
        Problem(name="mine", reason="another installed distribution has a plugin of this name; uninstall one of them")
    ]


def test_an_observer_that_raises_stops_nobody_and_is_logged_once(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    """The error is kept under plugin and hook; it goes on being called."""
    install("angry", "calls = []\n@hookimpl\ndef agenttrain_turn_recorded(turn):\n    calls.append(turn)\n    1 / 0\n")
    install("calm", "calls = []\n@hookimpl\ndef agenttrain_turn_recorded():\n    calls.append('called')\n")
    plugins = load("angry", "calm")
    with caplog.at_level(logging.WARNING, logger="agenttrain.plugins"):
        plugins.observe("agenttrain_turn_recorded", turn="t1")
        plugins.observe("agenttrain_turn_recorded", turn="t2")
    assert sys.modules["plugin_of_test_angry"].calls == ["t1", "t2"]
    assert sys.modules["plugin_of_test_calm"].calls == ["called", "called"]
    assert plugins.observer_errors == {
        ("angry", "agenttrain_turn_recorded"): "ZeroDivisionError: division by zero",
    }
    assert len(caplog.records) == 1


def role_plugin(answer: str, mark: str = "@hookimpl") -> str:
    return f"{mark}\ndef agenttrain_role(site):\n    return {answer}\n"


def test_the_first_answer_decides_a_role(install: Install) -> None:
    """Last loaded is asked first, None passes on, tryfirst goes before."""
    install("a", role_plugin("('frozen', 'a')"))
    install("b", role_plugin("None"))
    install("c", role_plugin("('auxiliary', 'c') if site.node == 'draft' else None", "@hookimpl(tryfirst=True)"))
    plugins = load("a", "b", "c")
    assert plugins.decide_role(CallSite(node="draft")) == ("auxiliary", "c")
    assert plugins.decide_role(CallSite(node="answer")) == ("frozen", "a")
    assert load("b").decide_role(CallSite()) is None


@pytest.mark.parametrize("answer", ["'frozen'", "('thawed', 'x')", "('frozen',)", "('frozen', None)"])
def test_a_role_of_another_form_is_refused_by_plugin(install: Install, answer: str) -> None:
    install("a", role_plugin(answer))
    with pytest.raises(PluginError, match=r"Plugin 'a' answered agenttrain_role.*trained, frozen, auxiliary"):
        load("a").decide_role(CallSite())


def test_a_decision_that_raises_is_attributed(install: Install) -> None:
    install("a", role_plugin("1 / 0"))
    with pytest.raises(PluginError, match="Plugin 'a' raised in agenttrain_role: ZeroDivisionError"):
        load("a").decide_role(CallSite())


def test_admit_gives_the_first_reason(install: Install) -> None:
    install("a", "@hookimpl\ndef agenttrain_admit(result):\n    return {'long': 'too long', 'bad': True}.get(result)\n")
    plugins = load("a")
    assert plugins.admit("long") == "too long"  # type: ignore[arg-type]
    assert plugins.admit("short") is None  # type: ignore[arg-type]
    with pytest.raises(PluginError, match="Plugin 'a' answered agenttrain_admit with True"):
        plugins.admit("bad")  # type: ignore[arg-type]


def test_every_veto_is_kept_and_what_nobody_can_read_is_one(install: Install) -> None:
    """All are asked, whatever the others say; an exception and an answer that is no text keep the policy out too."""
    veto = "@hookimpl\ndef agenttrain_veto_promotion(promotion):\n    "
    for name, body in {
        "a": "return 'too dear'",
        "b": "1 / 0",
        "c": "return True",
        "d": "pass",
        "e": "return ' '",
    }.items():
        install(name, veto + body)
    assert load("a", "b", "c", "d", "e").vetoes("a promotion") == (  # type: ignore[arg-type]
        "e: answered with ' ', which is no reason",
        "c: answered with True, which is no reason",
        "b: raised ZeroDivisionError: division by zero",
        "a: too dear",
    )


def test_commands_are_added_and_a_broken_plugin_is_listed(install: Install) -> None:
    """One that raises takes no command from the others."""
    import typer
    from typer.testing import CliRunner

    install("a", "@hookimpl\ndef agenttrain_register_commands(app):\n    app.command('hello')(lambda: print('hi'))\n")
    install("b", "@hookimpl\ndef agenttrain_register_commands(app):\n    1 / 0\n")
    plugins, app = load("a", "b"), typer.Typer()
    app.command("other")(lambda: None)
    plugins.register_commands(app)
    assert CliRunner().invoke(app, ["hello"]).stdout == "hi\n"
    assert [problem.name for problem in plugins.problems] == ["b"]


def test_loading_imports_nothing_heavy() -> None:
    """In a process of its own: neither torch nor LangGraph nor transformers comes with the plugins."""
    import subprocess

    program = (
        "import sys; from agenttrain.plugins import Plugins; Plugins.load(only=None, named=());"
        "heavy = {'torch', 'langgraph', 'langchain_core', 'transformers', 'scipy', 'pydantic'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_an_integration_that_is_not_in_use_says_how_to_get_it() -> None:
    """`--engine sglang` without agenttrain-sglang names the distribution."""
    says = r": agenttrain-sglang, the plugin of that name, is not in use here\. pip install agenttrain-sglang, or see"
    with pytest.raises(PluginError, match="No engine is named 'sglang'" + says):
        Plugins.load(only="local").engine("sglang")


CHECKED = """
from agenttrain.config import Table
from agenttrain.errors import EngineError

class Mine(Table):
    replicas: int = 1

def settings():
    {settings}

def check(context):
    {check}

@hookimpl
def agenttrain_register_engines(register):
    register("mine", lambda context: "mine", settings=settings, check=check)
    register("bare", lambda context: "bare")
"""


def checked(settings: str = "return Mine", check: str = "return [f'{context.model} is served']") -> Plugins:
    plugins = load("local")
    plugins.add(module_of(CHECKED.format(settings=settings, check=check)), "mine")
    return plugins


def of_mine(table: dict[str, Any], engine: str = "mine") -> Config:
    return resolve(("agenttrain.toml", {"engine": {"name": engine}, "mine": table}), plugin_tables=["mine"])


def test_the_table_of_a_chosen_plugin_is_checked_as_ours_are() -> None:
    plugins = checked()
    plugins.check_tables(of_mine({"replicas": 2}))
    plugins.check_tables(of_mine({}, engine="bare"))
    with pytest.raises(ConfigError, match=r"mine\.replcas.*Did you mean 'mine\.replicas'"):
        plugins.check_tables(of_mine({"replcas": 2}))
    with pytest.raises(ConfigError, match=r"mine\.replicas in the configuration is 'two'"):
        plugins.check_tables(of_mine({"replicas": "two"}))
    with pytest.raises(PluginError, match="Plugin 'mine' raised in its settings: ZeroDivisionError"):
        checked(settings="1 / 0").check_tables(of_mine({}))


def test_an_engine_is_checked_before_anything_starts() -> None:
    """Its notes are told, an error of ours passes, any other is the plugin's; without a check nothing is said."""
    mine, bare = (EngineContext(config=of_mine({}, engine=name), model="m") for name in ("mine", "bare"))
    assert checked().check_engine(mine) == ("m is served",)
    assert checked().check_engine(bare) == ()
    with pytest.raises(EngineError, match="no server"):
        checked(check="raise EngineError('no server')").check_engine(mine)
    with pytest.raises(PluginError, match="Plugin 'mine' raised in the check of 'mine': ZeroDivisionError"):
        checked(check="1 / 0").check_engine(mine)


@pytest.mark.parametrize(
    ("beside", "says"),
    [("chek=print", "register for engines takes no chek=.*'check'"), ("settings=3", "settings=3.: give something")],
)
def test_what_is_registered_beside_an_engine_is_checked(beside: str, says: str) -> None:
    source = f"@hookimpl\ndef agenttrain_register_engines(register):\n    register('mine', print, {beside})\n"
    with pytest.raises(PluginError, match=says):
        load("local").add(module_of(source), "mine")
