"""What every trainer keeps to, as tests: subclass `TrainerContract` in pytest and give the factory as a fixture.

The world is `OddOnes`: real rollouts of a tiny model on a real engine, one place of each group broken. A trainer is
seen from outside, by its steps, its checkpoints and what it exports.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from agenttrain.config import environment
from agenttrain.plugins import Plugins
from agenttrain.protocols import EngineFactory, Trainer, TrainerFactory
from agenttrain.records import RolloutRequest, RolloutResult, StepResult
from agenttrain.testing.odd_ones import N_IDS, OddOnes
from agenttrain.testing.small_model import tiny_model

STEPS, TASKS, GROUP = 3, 3, 4
ROUNDING = 1e-3
"""Largest difference between engine and trainer in a log probability."""

Tables = Mapping[str, Mapping[str, Any]]
Opened = Callable[..., Any]


class TrainerContract:
    """Subclass it, and give `factory`; pytest does the rest.

    Attributes to set where yours differs:
        tables: of the configuration, over the contract's own: {"trainer": {"learning_rate": 0.1}}.
        equal_within: how far weights may be apart that were trained in one go and over a restart.
        learns: that more steps give more reward is checked too, over `steps_to_learn` of them.
    """

    tables: Tables = MappingProxyType({})
    equal_within: float = 1e-6
    learns: bool = True
    steps_to_learn: int = 12

    @pytest.fixture
    def factory(self) -> TrainerFactory:
        """The factory under test, as it is registered."""
        pytest.fail(f"{type(self).__name__} has no fixture `factory`. Write one that gives your TrainerFactory.")

    @pytest.fixture
    def engine_factory(self) -> EngineFactory:
        """What serves training: the embedded engine in this process, unless you say otherwise."""
        return Plugins.load(only=environment("AGENTTRAIN_PLUGINS")).engine("local")

    @pytest.fixture
    def world(self, tmp_path: Path) -> OddOnes:
        """Four tasks, and in each group one rollout whose environment fails."""
        return OddOnes(model=tiny_model(tmp_path / "model"), failing_sibling=1)

    @pytest.fixture
    def opened(self, world: OddOnes, factory: TrainerFactory, engine_factory: EngineFactory) -> Opened:
        """Opens a trainer for a with block; `steps` and other keys of the trainer table can be given."""

        @contextmanager
        def open_trainer(**settings: Any) -> Iterator[Trainer]:
            trainer = factory(world.context(engine_factory, **self._tables(settings)))
            try:
                yield trainer
            finally:
                trainer.close()

        return open_trainer

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────

    def test_it_says_what_it_is(self, opened: Opened, world: OddOnes) -> None:
        """Its name, its engine's, how much it trains, and the version of its weights."""
        with opened() as trainer:
            assert isinstance(trainer.name, str)
            assert trainer.name
            assert trainer.engine_name in [engine.name for engine in world.engines]
            assert trainer.n_parameters > 0
            assert trainer.n_trained_parameters > 0
            assert trainer.adapter is not None or trainer.n_trained_parameters == trainer.n_parameters
            assert trainer.weight_version == 0

    def test_steps_are_numbered_and_published(self, opened: Opened, world: OddOnes) -> None:
        """One result a step, in order; the engines serve the version that the step says."""
        with opened() as trainer:
            steps = []
            for step in trainer.steps():
                steps.append(step)
                assert step.weight_version == trainer.weight_version == world.engines[0].weight_version
                assert all(math.isfinite(value) for value in step.metrics.values())
            assert [step.step for step in steps] == list(range(1, STEPS + 1))
            versions = [step.weight_version for step in steps]
            assert versions == sorted(versions)
            assert versions[-1] > 0
            assert list(trainer.steps()) == []

    def test_every_rollout_is_trained_or_has_a_reason_why_not(self, opened: Opened, world: OddOnes) -> None:
        """Once each; the failed ones are never trained."""
        with opened() as trainer:
            for step in trainer.steps():
                made, world.made[:] = list(world.made), []
                self._check_account(step, made)

    def test_what_is_reported_is_what_was_sampled(self, opened: Opened, world: OddOnes) -> None:
        """The samples of a step are those of its trained rollouts, unchanged; advantages have their shape."""
        with opened() as trainer:
            for step in trainer.steps():
                made = {result.rollout.id: result.samples for result in world.made}
                reported = [sample.extra_fields["rollout_id"] for sample in step.samples]
                assert set(reported) <= set(step.trained_rollout_ids)
                assert all(sample in made[sample.extra_fields["rollout_id"]] for sample in step.samples)
                if step.advantages:
                    assert [len(row) for row in step.advantages] == [len(s.response_ids) for s in step.samples]

    def test_engine_and_trainer_agree(self, opened: Opened) -> None:
        """On the log probabilities of the first step, where the trainer measures that."""
        with opened(steps=1) as trainer:
            (step,) = trainer.steps()
            assert step.metrics.get("logprob_gap_max", 0.0) < ROUNDING

    def test_it_learns(self, opened: Opened, world: OddOnes) -> None:
        """The share of odd ids rises."""
        if not self.learns:
            return
        with opened(steps=self.steps_to_learn) as trainer:
            before = self._reward(trainer)
            for _ in trainer.steps():
                pass
            assert self._reward(trainer) > before

    # ── evaluation ───────────────────────────────────────────────────────────────────────────────────────────────

    def test_evaluation_answers_in_order_and_changes_nothing(self, opened: Opened, world: OddOnes) -> None:
        """Each request has its result; the steps after it are those that would have come anyway."""
        requests = self._requests(world, temperature=0.0)
        seen: list[RolloutResult] = []
        with opened(steps=2) as trainer:
            results = trainer.evaluate(requests, seen.append)
            assert [result.rollout.id for result in results] == [request.rollout_id for request in requests]
            assert sorted(r.rollout.id for r in seen) == sorted(r.rollout.id for r in results)
            assert trainer.weight_version == 0
            trained = [step.trained_rollout_ids for step in trainer.steps()]
        with opened(steps=2) as trainer:
            assert [step.trained_rollout_ids for step in trainer.steps()] == trained

    # ── what is kept ─────────────────────────────────────────────────────────────────────────────────────────────

    def test_a_restored_one_goes_on_where_it_was(self, opened: Opened, world: OddOnes, tmp_path: Path) -> None:
        """The same rollouts, steps and weights as without the restart."""
        saved = tmp_path / "checkpoint"
        saved.mkdir()
        with opened() as trainer:
            steps = trainer.steps()
            next(steps)
            trainer.save(saved)
            world.made.clear()
            rest, made = list(steps), _sampled(world)
            trainer.export(tmp_path / "whole")
        world.made.clear()
        with opened() as trainer:
            trainer.restore(saved)
            assert trainer.weight_version == world.engines[-1].weight_version
            again = list(trainer.steps())
            trainer.export(tmp_path / "restarted")
        assert [step.step for step in again] == [step.step for step in rest]
        assert [step.trained_rollout_ids for step in again] == [step.trained_rollout_ids for step in rest]
        assert [step.weight_version for step in again] == [step.weight_version for step in rest]
        assert _sampled(world) == made
        assert _distance(tmp_path / "whole", tmp_path / "restarted") <= self.equal_within

    def test_the_export_is_the_policy(self, opened: Opened, world: OddOnes, tmp_path: Path) -> None:
        """transformers loads it, with its tokenizer and template, and it answers as the engine did at the end."""
        with opened() as trainer:
            for _ in trainer.steps():
                pass
            results = trainer.evaluate(self._requests(world, temperature=0.0), None)
            trainer.export(tmp_path / "policy")
        answers = [result.samples[0].response_ids for result in results]
        prompts = [result.samples[0].prompt_ids for result in results]
        assert [_greedy(tmp_path / "policy", prompt) for prompt in prompts] == answers

    def test_close_ends_the_engine_and_may_be_called_twice(self, opened: Opened, world: OddOnes) -> None:
        """No call can be made on the engines that it opened."""
        with opened() as trainer:
            trainer.close()
        with pytest.raises(Exception):  # noqa: B017 - of the engine's own kind
            world.run(world.engines[0], self._requests(world, temperature=0.0))

    # ── how it is asked ──────────────────────────────────────────────────────────────────────────────────────────

    def _tables(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        own = {"steps": STEPS, "tasks_per_step": TASKS, "group_size": GROUP, "learning_rate": 3e-2, "warmup_steps": 0}
        given = {name: dict(table) for name, table in self.tables.items()}
        trainer = {**own, **given.pop("trainer", {}), **settings}
        return {"run": {"deterministic": True}, "engine": {"process": "shared"}, **given, "trainer": trainer}

    def _requests(self, world: OddOnes, *, temperature: float, repeats: int = 1) -> list[RolloutRequest]:
        return [
            RolloutRequest(task=task, phase="held_out", sibling=sibling, temperature=temperature, seed=3)
            for task in world.tasks
            for sibling in range(repeats)
        ]

    def _reward(self, trainer: Trainer) -> float:
        """Mean over many sampled rollouts of each task."""
        world_requests = self._requests(OddOnes(model=Path()), temperature=1.0, repeats=24)
        scores = [r.rollout.reward.score for r in trainer.evaluate(world_requests, None) if r.rollout.reward]
        return math.fsum(scores) / len(scores)

    def _check_account(self, step: StepResult, made: Sequence[RolloutResult]) -> None:
        ids = sorted(result.rollout.id for result in made)
        assert sorted((*step.trained_rollout_ids, *step.dropped)) == ids, "trained and dropped are not what was made"
        assert all(reason for reason in step.dropped.values())
        failed = {result.rollout.id for result in made if result.rollout.reward is None}
        assert failed
        assert failed <= step.dropped.keys()


def _sampled(world: OddOnes) -> list[tuple[str, tuple[int, ...]]]:
    return [(r.rollout.id, sample.response_ids) for r in world.made for sample in r.samples]


def _greedy(policy: Path, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """What transformers' own loop answers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoTokenizer.from_pretrained(policy).chat_template
    model = AutoModelForCausalLM.from_pretrained(policy)
    ids = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(N_IDS):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return tuple(ids[0, len(prompt) :].tolist())


def _distance(first: Path, second: Path) -> float:
    """The largest difference between two exports' weights."""
    from agenttrain.local.policy import read_weights

    a, b = read_weights(first), read_weights(second)
    assert a.keys() == b.keys()
    return max(float((a[name].float() - b[name].float()).abs().max()) for name in a)
