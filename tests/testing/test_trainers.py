"""Our own trainer keeps the contract of trainers."""

from __future__ import annotations

import pytest

from agenttrain.local.plugin import make_trainer
from agenttrain.protocols import TrainerFactory
from agenttrain.testing import TrainerContract


class TestLocalTrainer(TrainerContract):
    """With the embedded engine in this process, in lockstep: a restart changes no bit."""

    equal_within = 0.0

    @pytest.fixture
    def factory(self) -> TrainerFactory:
        return make_trainer
