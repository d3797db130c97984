"""langchain-tests' standard integration suite on ChatOpenAI, answered by a trained policy over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from answered_address import answered
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

from agenttrain.address.app import Address, Settings
from agenttrain.serving.attached import open_serving

POLICY = Path(__file__).parent / "policy"
"""It has learned what the suite asks."""

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:.*in beta")]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Where the policy is served."""
    with closing(open_serving(POLICY)) as serving, answered(Address(serving, Settings(name="learned"))) as url:
        yield url


class TestChatOpenAIAtAnAddress(ChatModelIntegrationTests):
    """Structured output by function calling, as the policy has learned it."""

    @pytest.fixture(autouse=True)
    def _address(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OPENAI_BASE_URL", url)
        monkeypatch.setenv("OPENAI_API_KEY", "unused")

    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        """Each test has an event loop of its own, and a connection kept alive belongs to one."""
        closing = {"Connection": "close"}
        return {"model": "gpt-4o-mini", "temperature": 0, "stream_usage": True, "default_headers": closing}

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return {"method": "function_calling"}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True
