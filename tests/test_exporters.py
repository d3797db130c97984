"""Which of the standard OTEL_ variables decide where spans and metrics go."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from agenttrain.errors import ConfigError
from agenttrain.exporters import wanted_exporter

VARIABLES = ("OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER", "OTEL_METRICS_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT")


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, None),
        ({"OTEL_TRACES_EXPORTER": ""}, None),
        ({"OTEL_TRACES_EXPORTER": "console"}, "console"),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://here"}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://here"}, "otlp"),
        ({"OTEL_TRACES_EXPORTER": "", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://here"}, "otlp"),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_SDK_DISABLED": "true"}, None),
        ({"OTEL_METRICS_EXPORTER": "none"}, None),
        ({"OTEL_METRICS_EXPORTER": "console"}, "none"),
        ({"OTEL_METRICS_EXPORTER": "otlp", "OTEL_TRACES_EXPORTER": "none"}, "none"),
    ],
)
def test_what_the_variables_ask_for(
    variables: dict[str, str], wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty variable is one that is not set, as OpenTelemetry says."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert wanted_exporter() == wanted


@pytest.mark.parametrize("name", ["OTEL_TRACES_EXPORTER", "OTEL_METRICS_EXPORTER"])
def test_an_unknown_exporter_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything starts, by the variable's name."""
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    monkeypatch.setenv(name, "prometheus")
    with pytest.raises(ConfigError, match=f"{name} is 'prometheus'; agenttrain exports to console, otlp or none"):
        wanted_exporter()


METRICS_ALONE = """
from agenttrain import telemetry
from agenttrain.exporters import exporting, wanted_exporter

with exporting(wanted_exporter(), "run-1"):
    with telemetry.reward_span("rollout-1") as span:
        assert not span.is_recording()
    telemetry.reward_event(None, score=1.0, status="completed", success=True)
"""


def test_metrics_go_out_without_traces() -> None:
    """In a process of its own, since a process has one meter provider."""
    environment = {**os.environ, **dict.fromkeys(VARIABLES, ""), "OTEL_METRICS_EXPORTER": "console"}
    done = subprocess.run(
        [sys.executable, "-c", METRICS_ALONE], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert '"name": "agenttrain.rollout.reward"' in done.stderr
    assert 'agenttrain.reward"' not in done.stderr
