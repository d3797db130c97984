"""What all scenarios share: the fixtures that a user may replace, and what a template can't express, by name."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

import pytest

from agenttrain.capture.render import open_renderer
from agenttrain.protocols import Engine, Renderer
from agenttrain.testing.scenarios.world import LOOK_UP, Messages, Speaker, World, call, results, says, system, user


@lru_cache(maxsize=2)
def _opened(folder: str, family: str | None, history: Literal["keep", "template"]) -> Renderer:
    """Kept for the scenarios of one class: a large tokenizer takes seconds to load."""
    return open_renderer(folder, family=family, history=history)


class ScenarioBase:
    """Fixtures, and what must be there for a scenario."""

    history: Literal["keep", "template"] = "keep"
    family: str | None = None

    @pytest.fixture
    def model_folder(self) -> Path:
        """The Hugging Face folder of the model: tokenizer, chat template and config.json; weights aren't read."""
        pytest.fail(f"{type(self).__name__} has no fixture `model_folder`. Write one that gives your model's folder.")

    @pytest.fixture
    def renderer(self, model_folder: Path) -> Renderer:
        """What makes and reads the ids; replace it to hold a renderer of your own against the scenarios."""
        return _opened(str(model_folder), self.family, self.history)

    @pytest.fixture
    def engine(self) -> Engine | None:
        """An engine that samples. None: the scenarios that sample are skipped."""
        return None

    @pytest.fixture
    def world(self, renderer: Renderer, tmp_path: Path) -> Iterator[World]:
        """A recorder's surroundings, where a scenario says what is sampled."""
        made = World(renderer=renderer, folder=tmp_path, speaker=Speaker())
        yield made
        made.close()

    def questions(self, world: World, text: str = "Where is A41?") -> Messages:
        """How a conversation begins: with a system message where the template knows one."""
        return (system("Be brief."), user(text)) if takes_system(world.renderer) else (user(text),)

    def tools(self, world: World) -> Messages:
        """The tools of the scenario, or a skip."""
        if not takes_tools(world.renderer):
            pytest.skip(f"{world.renderer.identity} knows no tool calls")
        return (LOOK_UP,)

    def need_two_calls(self, world: World) -> None:
        """Skip where the template writes one call a reply."""
        if not takes_two_calls(world.renderer):
            pytest.skip(f"{world.renderer.identity} writes no two tool calls in one reply")

    def need_thinking(self, world: World) -> None:
        """Skip where nothing reads thinking apart from text."""
        if not reads_thinking(world.renderer):
            pytest.skip(f"{world.renderer.identity} reads no thinking")


def _writes(renderer: Any, messages: Messages, tools: Messages = ()) -> bool:
    try:
        return bool(renderer.render(messages, tools))
    except Exception:  # a template's own error, of any class
        return False


@cache
def takes_system(renderer: Any) -> bool:
    """Whether a system message is written."""
    question = user("a")
    with_one = (system("Be brief."), question)
    return _writes(renderer, with_one) and renderer.render(with_one, ()) != renderer.render((question,), ())


@cache
def takes_tools(renderer: Any) -> bool:
    """Whether tools, calls and results are written."""
    said = says("", call("c", {"id": "A41"}))
    return _writes(renderer, (user("a"), said, *results(said)), (LOOK_UP,))


@cache
def takes_two_calls(renderer: Any) -> bool:
    """Whether one reply may call twice."""
    said = says("", call("c", {"id": "A41"}), call("d", {"id": "B7"}))
    return takes_tools(renderer) and _writes(renderer, (user("a"), said, *results(said)), (LOOK_UP,))


@cache
def reads_thinking(renderer: Any) -> bool:
    """Whether thinking is read apart from what is said."""
    ids = renderer.encode("<think>\nHm.\n</think>\n\nYes.")
    return bool(renderer.parse((*ids, renderer.stop_ids[0]), ()).reasoning)
