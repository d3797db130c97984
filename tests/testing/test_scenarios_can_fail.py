"""Renderers with one fault each, over ours that has none: the scenarios must see every one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agenttrain.capture.render import open_renderer
from agenttrain.protocols import Parsed, Renderer
from agenttrain.records import Ids
from agenttrain.testing import ScenarioContract, tiny_model
from agenttrain.testing.scenarios.world import Speaker, World


class Faulty:
    """Our renderer; a subclass breaks one thing of it."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.renderer, name)


class NeverExtends(Faulty):
    def extend(self, *args: Any) -> Ids | None:
        return None


class ForgetsTheBoundary(Faulty):
    """Leaves out the first id between a reply and what answers it."""

    def extend(self, prompt_ids: Ids, response_ids: Ids, new: Any, tools: Any) -> Ids | None:
        longer, n = self.renderer.extend(prompt_ids, response_ids, new, tools), len(prompt_ids) + len(response_ids)
        return longer and longer[:n] + longer[n + 1 :]


class ClosesTwice(Faulty):
    """Adds an end of turn where one was sampled."""

    def extend(self, prompt_ids: Ids, response_ids: Ids, new: Any, tools: Any) -> Ids | None:
        longer, n = self.renderer.extend(prompt_ids, response_ids, new, tools), len(prompt_ids) + len(response_ids)
        return longer and (*longer[:n], self.renderer.stop_ids[0], *longer[n:])


class RendersAnew(Faulty):
    """Makes the reply's ids again from its text, as most systems do."""

    def extend(self, prompt_ids: Ids, response_ids: Ids, new: Any, tools: Any) -> Ids | None:
        ids = self.renderer.encode(self.renderer.decode(response_ids))
        return self.renderer.extend(prompt_ids, ids, new, tools)


class ReadsOneCall(Faulty):
    def parse(self, response_ids: Ids, tools: Any, prompt_ids: Ids = ()) -> Parsed:
        parsed = self.renderer.parse(response_ids, tools, prompt_ids)
        return replace(parsed, tool_calls=parsed.tool_calls[:1])


class LosesTheText(Faulty):
    """Beside a call."""

    def parse(self, response_ids: Ids, tools: Any, prompt_ids: Ids = ()) -> Parsed:
        parsed = self.renderer.parse(response_ids, tools, prompt_ids)
        return replace(parsed, text="") if parsed.tool_calls else parsed


class KeepsThinkingInTheText(Faulty):
    def parse(self, response_ids: Ids, tools: Any, prompt_ids: Ids = ()) -> Parsed:
        parsed = self.renderer.parse(response_ids, tools, prompt_ids)
        thought = parsed.reasoning or ""
        return replace(parsed, text=thought + parsed.text)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    """Our renderer."""
    return open_renderer(str(tiny_model(tmp_path_factory.mktemp("sound") / "model", max_length=4096)))


@pytest.fixture
def play(sound: Renderer, tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Plays one scenario with a renderer."""
    worlds: list[World] = []

    def run(scenario: str, renderer: Any, *more: Any) -> None:
        worlds.append(World(renderer=renderer, folder=tmp_path / str(len(worlds)), speaker=Speaker()))
        getattr(ScenarioContract(), scenario)(worlds[-1], *more)

    yield run
    for world in worlds:
        world.close()


@pytest.mark.parametrize(
    ("fault", "scenario"),
    [
        (NeverExtends, "test_t01_three_turns_are_one_trajectory"),
        (NeverExtends, "test_t04_other_ids_of_tool_calls_are_the_same_conversation"),
        (ForgetsTheBoundary, "test_t05_what_the_template_writes_between_turns_comes_once"),
        (ForgetsTheBoundary, "test_t05_so_it_does_after_a_tool_call"),
        (ForgetsTheBoundary, "test_t06_several_results_of_one_reply_are_appended_as_they_are_rendered"),
        (ClosesTwice, "test_t26_nothing_is_trimmed_between_turns"),
        (ReadsOneCall, "test_t23_parallel_calls_of_one_reply_come_back_all"),
        (LosesTheText, "test_t23_text_around_a_call_is_kept_with_it"),
        (KeepsThinkingInTheText, "test_t02_thinking_is_kept_or_begins_a_trajectory_when_the_user_speaks"),
    ],
)
def test_a_fault_fails_its_scenario(
    sound: Renderer, play: Callable[..., None], fault: type[Faulty], scenario: str
) -> None:
    play(scenario, sound)
    with pytest.raises(AssertionError):
        play(scenario, fault(sound))


def test_ids_that_are_made_again_fail_theirs(sound: Renderer, play: Callable[..., None]) -> None:
    play("test_t15_ids_that_the_tokenizer_would_not_make_stay", sound, 1)
    with pytest.raises(AssertionError):
        play("test_t15_ids_that_the_tokenizer_would_not_make_stay", RendersAnew(sound), 1)
