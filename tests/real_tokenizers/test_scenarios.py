"""Every scenario with the tokenizers and templates of Qwen3, Llama 3.1, Gemma 3 and DeepSeek V3, with either history.

Where a model's own template can't call tools, a template of ours in the format that the model was taught stands beside
it, so that the scenarios with tools run on its tokenizer too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest

from agenttrain.capture.render import open_renderer
from agenttrain.errors import ModelError
from agenttrain.protocols import Renderer
from agenttrain.testing import ScenarioContract

RealFolder = Callable[..., Path]
TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}


class RealScenarios(ScenarioContract):
    """The contract on a tokenizer of the cache; abstract."""

    tokenizer: ClassVar[str]
    template: ClassVar[str | None] = None

    @pytest.fixture
    def model_folder(self, real_folder: RealFolder) -> Path:
        return real_folder(self.tokenizer, template=self.template)

    @pytest.fixture
    def renderer(self, model_folder: Path, opened: Callable[..., Renderer]) -> Renderer:
        return opened(str(model_folder), family=self.family, history=self.history)


class TestQwen3(RealScenarios):
    """Guessed: the hand-written renderer."""

    tokenizer = "qwen3"

    def test_the_renderer_is_the_hand_written_one(self, renderer: Renderer) -> None:
        assert (renderer.family, renderer.family_guessed) == ("qwen3", True)


@pytest.mark.slow
class TestQwen3TemplateHistory(TestQwen3):
    """Thinking is dropped when the user speaks."""

    history = "template"


@pytest.mark.slow
class TestQwen3ByItsTemplate(RealScenarios):
    """The suffix bridge over the same template."""

    tokenizer, family = "qwen3", "default"


@pytest.mark.long
class TestQwen3ByItsTemplateTemplateHistory(TestQwen3ByItsTemplate):
    history = "template"


@pytest.mark.slow
class TestLlama31(RealScenarios):
    """Its folder's template, which writes no tools."""

    tokenizer = "llama3_1"

    def test_tools_are_refused_by_name(self, renderer: Renderer) -> None:
        with pytest.raises(ModelError, match="can't call tools: its chat template writes none"):
            renderer.render([{"role": "user", "content": "a"}], [TOOL])


@pytest.mark.long
class TestLlama31TemplateHistory(TestLlama31):
    history = "template"


@pytest.mark.slow
class TestLlama31WithTools(RealScenarios):
    """A call is a JSON object, one a reply; the tools stand in the first question."""

    tokenizer, template = "llama3_1", "llama3_1"


@pytest.mark.long
class TestLlama31WithToolsTemplateHistory(TestLlama31WithTools):
    history = "template"


@pytest.mark.slow
class TestGemma3(RealScenarios):
    """No tools; the system message stands in the first question, and questions and replies must take turns."""

    tokenizer = "gemma3"

    def test_tools_are_refused_by_name(self, renderer: Renderer) -> None:
        with pytest.raises(ModelError, match="can't call tools: its chat template writes none"):
            renderer.render([{"role": "user", "content": "a"}], [TOOL])


@pytest.mark.long
class TestGemma3TemplateHistory(TestGemma3):
    history = "template"


@pytest.mark.slow
class TestDeepSeekV3(RealScenarios):
    """Its folder's template, which writes no tools."""

    tokenizer = "deepseek_v3"

    def test_tools_are_refused_by_name(self, renderer: Renderer) -> None:
        with pytest.raises(ModelError, match="can't call tools: its chat template writes none"):
            renderer.render([{"role": "user", "content": "a"}], [TOOL])


@pytest.mark.long
class TestDeepSeekV3TemplateHistory(TestDeepSeekV3):
    history = "template"


@pytest.mark.slow
class TestDeepSeekV3ByItsFamily(RealScenarios):
    """The hand-written renderer, which writes no tools."""

    tokenizer, family = "deepseek_v3", "deepseek-v3"

    def test_tools_are_refused_by_name(self, renderer: Renderer) -> None:
        with pytest.raises(ModelError, match="family deepseek-v3 writes no tools into the prompt"):
            renderer.render([{"role": "user", "content": "a"}], [TOOL])


@pytest.mark.long
class TestDeepSeekV3ByItsFamilyTemplateHistory(TestDeepSeekV3ByItsFamily):
    history = "template"


@pytest.mark.slow
class TestDeepSeekV3WithTools(RealScenarios):
    """Calls between marks of their own; a reply to results follows them directly."""

    tokenizer, template = "deepseek_v3", "deepseek_v3"


@pytest.mark.long
class TestDeepSeekV3WithToolsTemplateHistory(TestDeepSeekV3WithTools):
    history = "template"


@pytest.mark.slow
def test_the_hand_written_renderer_of_llama_is_refused_for_the_id_that_is_missing(real_folder: RealFolder) -> None:
    """The package's tokenizer is that of Llama 3: `<|eom_id|>` came with 3.1."""
    with pytest.raises(ModelError, match=r"is no llama-3 model: Special token '<\|eom_id\|>' not found"):
        open_renderer(str(real_folder("llama3_1")), family="llama-3")
