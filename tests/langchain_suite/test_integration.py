"""langchain-tests' standard integration suite on `chat_model()`, answered by a trained policy."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_tests.integration_tests import ChatModelIntegrationTests

from agenttrain.graph.chat_model import ChatPolicy

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("policy_serves"),
    pytest.mark.filterwarnings("ignore:.*in beta"),
]


class TestServedPolicy(ChatModelIntegrationTests):
    """Structured output by function calling."""

    @property
    def chat_model_class(self) -> type[ChatPolicy]:
        return ChatPolicy

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"temperature": 0}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        """One policy serves; a call can't name another."""
        return False


class TestServedPolicyByJsonSchema(TestServedPolicy):
    """Structured output by JSON schema."""

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return {"method": "json_schema"}
