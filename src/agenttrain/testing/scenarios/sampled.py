"""Conversations with what an engine really samples: garbage, half a call, a cut reply; all of it has its place."""

from __future__ import annotations

import pytest

from agenttrain.errors import RolloutStop
from agenttrain.protocols import Engine
from agenttrain.testing.scenarios.base import ScenarioBase, takes_tools
from agenttrain.testing.scenarios.world import LOOK_UP, Speaker, World, asks, handed_back, results, site, user

N_TURNS = 4
N_IDS = 24


class SampledScenarios(ScenarioBase):
    """T1, T11 and T24, with an engine."""

    @pytest.fixture
    def sampling_world(self, world: World, engine: Engine | None) -> World:
        """The world, with an engine in it that samples."""
        if engine is None:
            pytest.skip("no engine was given")
        world.speaker = Speaker(engine)
        return world

    @pytest.mark.parametrize("seed", range(4))
    def test_sampled_turns_are_trained_as_they_were_sampled(self, sampling_world: World, seed: int) -> None:
        """Whatever the replies are: their ids stand in the next prompt, or a counted break says why not."""
        world = sampling_world
        world.seed = seed
        tools = (LOOK_UP,) if takes_tools(world.renderer) else ()
        recorder, messages = world.open(), self.questions(world)
        for step in range(1, N_TURNS + 1):
            try:
                reply = recorder.answer(asks(messages, site(f"t{step}", step=step), tools=tools, max_tokens=N_IDS))
            except RolloutStop:
                break
            back = handed_back(reply)
            messages = (*messages, back, *(results(back) or (user("And then?"),)))
        kept = world.kept(recorder)
        assert kept.account.trained == kept.account.sampled > 0
        assert sum(kept.breaks.values()) == len(kept.trajectories) - 1
        for before, after in zip(kept.turns, kept.turns[1:], strict=False):
            stored = before.prompt_ids + before.response_ids
            assert after.break_cause is not None or after.prompt_ids[: len(stored)] == stored

    def test_sampled_siblings_differ_and_are_all_trained(self, sampling_world: World) -> None:
        """One prompt, asked by four tasks: four seeds."""
        world = sampling_world
        recorder, messages = world.open(), self.questions(world)
        for i in range(4):
            recorder.answer(asks(messages, site(f"t{i}"), max_tokens=N_IDS))
        kept = world.kept(recorder)
        assert kept.breaks == {"parallel_sibling": 3}
        assert (kept.account.trained, len(kept.samples)) == (kept.n(0, 1, 2, 3), 4)
        assert len({turn.response_ids for turn in kept.turns}) > 1
