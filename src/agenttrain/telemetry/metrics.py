"""What is counted becomes OpenTelemetry metrics."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from opentelemetry import metrics

from agenttrain.telemetry import names


def meter() -> metrics.Meter:
    """The meter of agenttrain, of whatever provider is set."""
    return metrics.get_meter(names.SCOPE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruments:
    """The metrics of one meter."""

    token_usage: metrics.Histogram
    duration: metrics.Histogram
    rollouts: metrics.Counter
    reward: metrics.Histogram
    tokens: metrics.Counter
    updates: metrics.Counter
    trained_groups: metrics.Counter
    staleness: metrics.Histogram

    @classmethod
    def of(cls, source: metrics.Meter) -> Instruments:
        """Make them, once per meter."""

        def histogram(name: str) -> metrics.Histogram:
            return source.create_histogram(name, *names.METRICS[name])

        def counter(name: str) -> metrics.Counter:
            return source.create_counter(name, *names.METRICS[name])

        return cls(
            token_usage=histogram(names.TOKEN_USAGE_METRIC),
            duration=histogram(names.DURATION_METRIC),
            rollouts=counter(names.ROLLOUTS_METRIC),
            reward=histogram(names.REWARD_METRIC),
            tokens=counter(names.TOKENS_METRIC),
            updates=counter(names.UPDATES_METRIC),
            trained_groups=counter(names.TRAINED_GROUPS_METRIC),
            staleness=histogram(names.STALENESS_METRIC),
        )

    def chat(self, model: str, role: str, *, input_tokens: int, output_tokens: int, seconds: float) -> None:
        """A model call has ended."""
        named = {
            names.OPERATION: "chat",
            names.PROVIDER: names.SCOPE,
            names.REQUEST_MODEL: model,
            names.ROLE: role,
        }
        self.token_usage.record(input_tokens, {**named, names.TOKEN_TYPE: "input"})
        self.token_usage.record(output_tokens, {**named, names.TOKEN_TYPE: "output"})
        self.duration.record(seconds, named)

    def rollout(self, status: str, score: float | None) -> None:
        """A rollout has ended; no reward leaves no mark on the histogram."""
        self.rollouts.add(1, {names.STATUS: status})
        if score is not None:
            self.reward.record(score, {names.STATUS: status})

    def rollout_tokens(self, tokens: Mapping[str, int], phase: str) -> None:
        """Where the tokens of a rollout stand, by a reason of `names.MASK_REASONS`."""
        for reason, n in tokens.items():
            if n:
                self.tokens.add(n, {names.MASK_REASON: reason, names.PHASE: phase})

    def update(self, n_groups: int, staleness: Iterable[int]) -> None:
        """A training step has ended.

        Args:
            staleness: of each trained rollout.
        """
        self.updates.add(1)
        self.trained_groups.add(n_groups)
        for age in staleness:
            self.staleness.record(age)


@functools.cache
def instruments() -> Instruments:
    """The metrics of the provider that is set, or will be."""
    return Instruments.of(meter())
