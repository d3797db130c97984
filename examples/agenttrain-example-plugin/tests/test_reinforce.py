"""The trainer keeps the contract of trainers."""

from __future__ import annotations

import pytest
from agenttrain_example_plugin.reinforce import ReinforceTrainer

from agenttrain.protocols import TrainerFactory
from agenttrain.testing import TrainerContract


class TestReinforce(TrainerContract):
    """Plain gradient descent wants a higher learning rate than Adam."""

    tables = {"trainer": {"learning_rate": 1.0}}  # noqa: RUF012 - read only
    equal_within = 0.0

    @pytest.fixture
    def factory(self) -> TrainerFactory:
        return ReinforceTrainer
