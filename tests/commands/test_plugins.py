"""`agenttrain plugins`: what is installed and what it brings."""

from __future__ import annotations

from typing import Any

from agenttrain import __version__
from agenttrain.plugins import hook_names


def test_the_built_ins_come_through_the_same_door(command: Any, monkeypatch: Any) -> None:
    """One plugin, with an engine, a trainer and the estimators; another with the sandboxes."""
    monkeypatch.setenv("AGENTTRAIN_PLUGINS", "local")
    listed = command("plugins", "--json").json
    assert listed["loaded"] == [{"name": "local", "version": __version__, "distribution": "agenttrain"}]
    assert (listed["engines"], listed["trainers"], listed["problems"]) == (["local"], ["local"], [])
    said = command("plugins").out
    lines = "engines: local\ntrainers: local\nadvantage estimators: centered, group, leave-one-out, reward\n"
    assert lines in said
    monkeypatch.setenv("AGENTTRAIN_PLUGINS", "local,sandbox")
    backends = ["bubblewrap", "docker", "namespaces", "podman", "subprocess"]
    assert command("plugins", "--json").json["sandboxes"] == backends
    assert command("plugins").out.endswith(f"{lines}sandbox backends: {', '.join(backends)}\n")


def test_only_what_is_named_is_loaded(command: Any, monkeypatch: Any) -> None:
    """AGENTTRAIN_PLUGINS empty loads none."""
    monkeypatch.setenv("AGENTTRAIN_PLUGINS", "")
    assert command("plugins", "--json").json["loaded"] == []


def test_hooks_are_told_by_their_docstrings(command: Any) -> None:
    """Each with all its sections; the example is code."""
    told = command("plugins", "--hooks", "--json").json["hooks"]
    assert [hook["name"] for hook in told] == hook_names()
    assert all(value for hook in told for value in hook.values())
    shapes = {hook["name"]: hook["shape"].partition(".")[0] for hook in told}
    assert shapes["agenttrain_register_engines"] == "register"
    assert shapes["agenttrain_admit"] == "decide"
    assert shapes["agenttrain_turn_recorded"] == "observe"
    for hook in told:
        compile(hook["example"], hook["name"], "exec")


def test_one_hook_in_words(command: Any) -> None:
    """Its prefix may be left out."""
    assert command("plugins", "--hooks", "admit").out == (
        """\
agenttrain_admit(result: RolloutResult) -> str | None
  Keep a rollout out of training by giving the reason; None lets it in.
  shape: decide. It can't let in what its status keeps out.
  when: once per training rollout that may be trained, before its group is used.
  exception: the run ends with a PluginError that names the plugin; so does an answer that is no text.
      @hookimpl
      def agenttrain_admit(result):
          return "too long" if result.rollout.n_turns > 20 else None

"""
    )


def test_an_unknown_hook_is_refused_with_a_suggestion(command: Any) -> None:
    """And a name without --hooks says where it belongs."""
    done = command("plugins", "--hooks", "agenttrain_admitt")
    assert done.code == 2
    assert done.err.startswith("PluginError: There is no hook 'agenttrain_admitt'. Did you mean 'agenttrain_admit'? ")
    done = command("plugins", "admit")
    assert done.code == 2
    assert done.err == "ConfigError: 'admit' stands without --hooks. Write agenttrain plugins --hooks admit.\n"
