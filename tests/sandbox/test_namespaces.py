"""namespaces.py: sandboxes in Linux namespaces keep to the contract, and to what only they promise."""

from __future__ import annotations

import pytest

from agenttrain.sandbox.namespaces import NamespacesBackend
from agenttrain.testing.sandbox_contract import SandboxBackendContract


class TestNamespaces(SandboxBackendContract):
    @pytest.fixture
    def backend(self) -> NamespacesBackend:
        return NamespacesBackend()
