"""The rate that an update was made at, where veRL tells the one that comes after it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from agenttrain_verl.plan import Plan


@pytest.mark.parametrize(("warmup", "first"), [(4, 0.5), (2, 1.0), (1, 2.0)])
def test_the_first_update_is_made_at_the_first_rate(plan_with: Callable[..., Plan], warmup: int, first: float) -> None:
    """As veRL's own schedule begins: 1 / warm-up of the peak."""
    from agenttrain_verl.compose import compose
    from agenttrain_verl.rates import first_rate

    plan = plan_with(trainer={"steps": 6, "learning_rate": 2.0, "warmup_steps": warmup})
    optim = compose(plan, run_dir=Path("/runs/one")).actor_rollout_ref.actor.optim
    assert first_rate(optim) == pytest.approx(first)


def test_a_step_is_made_at_the_mean_of_its_calls() -> None:
    """Each call ends by telling the rate of the next."""
    from agenttrain_verl.rates import rates

    assert rates([{"lr": 2.0}, {"lr": [4.0]}, {"lr": 1.0}], first=3.0) == (3.0, 1.0)


def test_a_checkpoint_knows_the_rate_of_the_next_update(tmp_path: Path) -> None:
    """As the schedule that veRL saves stands."""
    from agenttrain_verl.rates import saved_rate

    schedule = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD([torch.zeros(1)], lr=2.0), lambda n: 1 / (1 + n))
    torch.save({"lr_scheduler": schedule.state_dict()}, tmp_path / "extra_state_world_size_2_rank_0.pt")
    assert saved_rate(tmp_path) == 2.0
