"""What every renderer keeps to, as tests: subclass `RendererContract` in pytest and give the renderer as a fixture."""

from __future__ import annotations

import random

import pytest

from agenttrain.capture.probe import CONVERSATIONS
from agenttrain.protocols import Renderer


class RendererContract:
    """Subclass it, and give `renderer`; pytest does the rest.

    Attributes to set where yours differs:
        n_vocabulary: ids go from 0 up to it.
    """

    n_vocabulary: int = 300

    @pytest.fixture
    def renderer(self) -> Renderer:
        """The renderer under test."""
        pytest.fail(f"{type(self).__name__} has no fixture `renderer`. Write one that gives your renderer.")

    def test_it_says_what_it_is(self, renderer: Renderer) -> None:
        """An identity that is equal when ids mean the same, and at least one id that ends a turn."""
        assert isinstance(renderer, Renderer)
        assert renderer.identity
        assert renderer.stop_ids

    def test_the_same_messages_are_the_same_ids(self, renderer: Renderer) -> None:
        """Ids of plain int, at least one."""
        for conversation in CONVERSATIONS:
            ids = renderer.render(conversation.messages[:1], conversation.tools)
            assert ids
            assert all(type(id) is int for id in ids)
            assert renderer.render(conversation.messages[:1], conversation.tools) == ids

    def test_what_was_sampled_stays_in_the_next_prompt(self, renderer: Renderer) -> None:
        """`extend` puts new ids behind prompt and response and changes neither, whatever was sampled."""
        rng, n_extended = random.Random(1), 0
        for conversation in CONVERSATIONS:
            prompt = renderer.render(conversation.messages[:-1], conversation.tools)
            for n in (0, 1, 9):
                response = (*(rng.randrange(self.n_vocabulary) for _ in range(n)), renderer.stop_ids[0])
                longer = renderer.extend(prompt, response, conversation.messages[-1:], conversation.tools)
                if longer is not None:
                    n_extended += 1
                    assert longer[: len(prompt) + len(response)] == (*prompt, *response)
                    assert len(longer) > len(prompt) + len(response)
        assert n_extended, "no conversation could be extended"

    def test_any_ids_can_be_read(self, renderer: Renderer) -> None:
        """A policy samples anything: what is no message is text or an invalid call, never an exception."""
        rng = random.Random(2)
        for n in (0, 1, 5, 40):
            for _ in range(20):
                ids = tuple(rng.randrange(self.n_vocabulary) for _ in range(n))
                parsed = renderer.parse((*ids, renderer.stop_ids[0]), CONVERSATIONS[-1].tools)
                assert isinstance(parsed.text, str)
                assert isinstance(renderer.decode(ids), str)
