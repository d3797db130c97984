"""Engines and trainers with one fault each, over ours that have none: the contract must see every one of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agenttrain.errors import EngineError
from agenttrain.local.engine import LocalEngine
from agenttrain.local.plugin import make_trainer
from agenttrain.local.policy import read_weights
from agenttrain.protocols import TrainerContext
from agenttrain.records import Generation, Ids, Sampling, StepResult
from agenttrain.testing import EngineContract, TrainerContract, tiny_model

pytestmark = pytest.mark.slow
PROMPT = (5, 9, 13, 17)


class Faulty:
    """Our engine; a subclass breaks one thing of it."""

    def __init__(self, model: Path) -> None:
        self.engine = LocalEngine(model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str) -> Future[Generation]:
        """What the engine answers, changed; the caller waits for it."""
        future: Future[Generation] = Future()
        future.set_result(self.changed(self.asked(prompt_ids, sampling, session), sampling))
        return future

    def asked(self, prompt_ids: Ids, sampling: Sampling, session: str) -> Generation:
        return self.engine.generate(prompt_ids, sampling, session=session).result()

    def changed(self, answer: Generation, sampling: Sampling) -> Generation:
        return answer


class TooSure(Faulty):
    def changed(self, answer: Generation, sampling: Sampling) -> Generation:
        return replace(answer, logprobs=tuple(min(0.0, logprob + 0.2) for logprob in answer.logprobs))


class TooModest(Faulty):
    def changed(self, answer: Generation, sampling: Sampling) -> Generation:
        return replace(answer, logprobs=tuple(logprob - 0.3 for logprob in answer.logprobs))


class DeafToTemperature(Faulty):
    """Samples at the temperature and tells log probabilities at 1."""

    def asked(self, prompt_ids: Ids, sampling: Sampling, session: str) -> Generation:
        answer = super().asked(prompt_ids, sampling, session)
        if sampling.temperature in (0.0, 1.0):
            return answer
        return replace(answer, logprobs=tuple(logprob * sampling.temperature for logprob in answer.logprobs))


class DeafToStops(Faulty):
    def asked(self, prompt_ids: Ids, sampling: Sampling, session: str) -> Generation:
        return super().asked(prompt_ids, replace(sampling, stop_ids=()), session)


class DropsTheStop(Faulty):
    def changed(self, answer: Generation, sampling: Sampling) -> Generation:
        if answer.stop_reason != "stop" or len(answer.token_ids) < 2:
            return answer
        cut = {name: getattr(answer, name)[:-1] for name in ("token_ids", "logprobs", "weight_versions")}
        return replace(answer, **cut)


class OneMore(Faulty):
    def asked(self, prompt_ids: Ids, sampling: Sampling, session: str) -> Generation:
        if len(prompt_ids) + sampling.max_tokens + 1 > self.max_length:
            return super().asked(prompt_ids, sampling, session)
        return super().asked(prompt_ids, replace(sampling, max_tokens=sampling.max_tokens + 1), session)


class DeafToSeeds(Faulty):
    def asked(self, prompt_ids: Ids, sampling: Sampling, session: str) -> Generation:
        return super().asked(prompt_ids, replace(sampling, seed=random.getrandbits(40)), session)


class OneSeed(Faulty):
    def asked(self, prompt_ids: Ids, sampling: Sampling, session: str) -> Generation:
        return super().asked(prompt_ids, replace(sampling, seed=7), session)


class WarmGreedy(Faulty):
    def asked(self, prompt_ids: Ids, sampling: Sampling, session: str) -> Generation:
        return super().asked(prompt_ids, replace(sampling, temperature=sampling.temperature or 1.0), session)


class ForgetsTheLastId(Faulty):
    """As a cache does that lost a key."""

    def asked(self, prompt_ids: Ids, sampling: Sampling, session: str) -> Generation:
        return super().asked(prompt_ids[:-1] or prompt_ids, sampling, session)


class CutsLongPrompts(Faulty):
    def asked(self, prompt_ids: Ids, sampling: Sampling, session: str) -> Generation:
        room = max(1, self.max_length - sampling.max_tokens)
        return super().asked(prompt_ids[-room:], replace(sampling, max_tokens=self.max_length - room), session)


class OldVersion(Faulty):
    weight_version = 0


class KeepsItsWeights(Faulty):
    def update_weights(self, weights: Any, version: int) -> None:
        self.engine.update_weights((), version)


class CountsCalls(Faulty):
    n_calls = 0

    def stats(self) -> dict[str, float]:
        return {**self.engine.stats(), "sampled_ids": float(self.n_calls)}

    def changed(self, answer: Generation, sampling: Sampling) -> Generation:
        self.n_calls += 1
        return answer


class AnswersWhenClosed(Faulty):
    closed = False

    def close(self) -> None:
        self.closed = True

    def asked(self, prompt_ids: Ids, sampling: Sampling, session: str) -> Generation:
        return super().asked(prompt_ids, sampling, session)


class DeafToRelease(Faulty):
    """Asynchronous, as ours is, and a released session's calls go on."""

    def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str) -> Future[Generation]:
        return self.engine.generate(prompt_ids, sampling, session=session)

    def release(self, session: str) -> None:
        pass


FAULTS: dict[type[Faulty], str] = {
    TooSure: "test_log_probabilities_are_those_of_what_is_sampled",
    TooModest: "test_log_probabilities_are_those_of_what_is_sampled",
    DeafToTemperature: "test_log_probabilities_are_at_the_sampling_temperature",
    DeafToStops: "test_a_stop_id_ends_the_answer_and_stands_in_it",
    DropsTheStop: "test_a_stop_id_ends_the_answer_and_stands_in_it",
    OneMore: "test_without_a_stop_id_it_goes_on_to_max_tokens",
    DeafToSeeds: "test_a_seed_decides_what_is_drawn",
    OneSeed: "test_a_seed_decides_what_is_drawn",
    WarmGreedy: "test_greedy_is_the_same_twice",
    ForgetsTheLastId: "test_what_was_sampled_stands_in_the_next_prompt",
    CutsLongPrompts: "test_a_call_that_can_not_be_answered_fails_with_an_engine_error",
    OldVersion: "test_new_weights_answer_the_next_call",
    KeepsItsWeights: "test_new_weights_answer_the_next_call",
    CountsCalls: "test_stats_count_what_was_sampled",
    AnswersWhenClosed: "test_close_ends_calls_in_flight_and_may_be_called_twice",
    DeafToRelease: "test_release_ends_the_calls_of_its_session_only",
}
"""Each fault, and the check that must see it."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny model and another one of its shape."""
    folder = tmp_path_factory.mktemp("faults")
    return tiny_model(folder / "model"), tiny_model(folder / "other", seed=1)


def checked(engine: Any, check: str, new_weights: Any) -> None:
    """Run one check of the contract, as pytest would."""
    given = {"new_weights": new_weights} if check == "test_new_weights_answer_the_next_call" else {}
    getattr(EngineContract(), check)(engine, PROMPT, **given)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_contract_sees_the_fault_of_an_engine(fault: type[Faulty], models: tuple[Path, Path]) -> None:
    """The same check passes on the engine without the fault."""
    new_weights = list(read_weights(models[1]).items())
    for kind in (Faulty, fault):
        engine = kind(models[0])
        try:
            if kind is Faulty and fault is not DeafToRelease:
                checked(engine, FAULTS[fault], new_weights)
            elif kind is not Faulty:
                with pytest.raises((AssertionError, EngineError, pytest.fail.Exception)):
                    checked(engine, FAULTS[fault], new_weights)
        finally:
            engine.engine.close()


class FaultyTrainer:
    """Our trainer; a subclass breaks one thing of it."""

    def __init__(self, context: TrainerContext) -> None:
        self.trainer = make_trainer(context)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.trainer, name)

    def steps(self) -> Iterator[StepResult]:
        for step in self.trainer.steps():
            yield self.changed(step)

    def changed(self, step: StepResult) -> StepResult:
        return step


class Silent(FaultyTrainer):
    """Leaves out why rollouts are not trained."""

    def changed(self, step: StepResult) -> StepResult:
        return replace(step, dropped={})


class Twice(FaultyTrainer):
    """Counts a rollout twice."""

    def changed(self, step: StepResult) -> StepResult:
        return replace(step, trained_rollout_ids=(*step.trained_rollout_ids, step.trained_rollout_ids[0]))


class ClosesNothing(FaultyTrainer):
    def close(self) -> None:
        pass


class StartsOver(FaultyTrainer):
    """Restores nothing."""

    def restore(self, folder: Path) -> None:
        pass


class ExportsTheBase(FaultyTrainer):
    def export(self, folder: Path) -> None:
        tiny_model(folder)


TRAINER_FAULTS: dict[type[FaultyTrainer], str] = {
    Silent: "test_every_rollout_is_trained_or_has_a_reason_why_not",
    Twice: "test_every_rollout_is_trained_or_has_a_reason_why_not",
    ClosesNothing: "test_close_ends_the_engine_and_may_be_called_twice",
    StartsOver: "test_a_restored_one_goes_on_where_it_was",
    ExportsTheBase: "test_the_export_is_the_policy",
}


@pytest.mark.parametrize("fault", TRAINER_FAULTS, ids=lambda fault: fault.__name__)
def test_the_contract_sees_the_fault_of_a_trainer(
    fault: type[FaultyTrainer], models: tuple[Path, Path], tmp_path: Path
) -> None:
    """Test classes of a plugin's author, run by pytest itself, turn red exactly there."""
    test_file = tmp_path / f"test_{fault.__name__}.py"
    test_file.write_text(
        f"""
import importlib.util, pytest
from agenttrain.testing import TrainerContract
spec = importlib.util.spec_from_file_location("faults", {str(Path(__file__))!r})
faults = importlib.util.module_from_spec(spec)
spec.loader.exec_module(faults)

class TestIt(TrainerContract):
    @pytest.fixture
    def factory(self):
        return faults.{fault.__name__}
"""
    )
    code = pytest.main(
        ["-q", "-p", "no:cacheprovider", "-p", "no:asyncio", str(test_file), "-k", TRAINER_FAULTS[fault]]
    )
    assert code == pytest.ExitCode.TESTS_FAILED


def test_a_contract_without_its_fixture_says_what_is_missing() -> None:
    """And a contract whose tests ask for nothing would pass unseen."""
    for contract, fixture in ((EngineContract, "engine"), (TrainerContract, "factory")):
        give: Callable[..., Any] = getattr(contract, fixture).__wrapped__
        with pytest.raises(pytest.fail.Exception, match=f"has no fixture `{fixture}`"):
            give(contract())
