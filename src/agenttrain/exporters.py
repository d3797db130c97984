"""Sets up the OpenTelemetry SDK from the standard OTEL_ variables, for the time of one command.

Without any of them nothing is set up, and the library's spans cost nothing. A process that a run starts, such as the
engine's, is told by `exported` what its parent set up, and exports to the same place as the same run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agenttrain.config import environment
from agenttrain.errors import ConfigError
from agenttrain.telemetry.names import RUN_ID

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

EXPORTERS = ("console", "otlp", "none")
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


@dataclass(frozen=True, slots=True)
class Exported:
    """What a process exports to, and as which run; picklable."""

    exporter: str | None
    """Of traces, as `wanted_exporter` gives it. None: nothing is exported."""
    run_id: str


NOTHING = Exported(None, "")
_exported = NOTHING


def exported() -> Exported:
    """What this process has set up."""
    return _exported


@contextmanager
def exporting(exporter: str | None, run_id: str) -> Iterator[None]:
    """Export traces and metrics while the block runs, to what `wanted_exporter` gave."""
    global _exported
    if exporter is None:
        yield
        return
    from opentelemetry import metrics, trace
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({"service.name": _service_name(), RUN_ID: run_id})
    tracing = TracerProvider(resource=resource)
    if exporter != "none":
        tracing.add_span_processor(BatchSpanProcessor(_span_exporter(exporter)))
        trace.set_tracer_provider(tracing)
    wanted = _metrics_wanted() or exporter
    readers = [] if wanted == "none" else [PeriodicExportingMetricReader(_metric_exporter(wanted))]
    metering = MeterProvider(resource=resource, metric_readers=readers)
    metrics.set_meter_provider(metering)
    _exported = Exported(exporter, run_id)
    try:
        yield
    finally:
        _exported = NOTHING
        tracing.shutdown()
        metering.shutdown()


def wanted_exporter() -> str | None:
    """console, otlp or none for traces, as OTEL_TRACES_EXPORTER or an OTLP endpoint says.

    None: nothing is exported; "none": metrics alone are.

    Raises:
        ConfigError: an exporter that is not known here.
    """
    if (environment("OTEL_SDK_DISABLED") or "").lower() == "true":
        return None
    named, metrics = environment("OTEL_TRACES_EXPORTER") or None, _metrics_wanted()
    if named not in (None, *EXPORTERS):
        raise ConfigError(f"OTEL_TRACES_EXPORTER is {named!r}; agenttrain exports to console, otlp or none.")
    traces = named or ("otlp" if any(environment(name) for name in ENDPOINTS) else "none")
    return None if traces == "none" and metrics in (None, "none") else traces


def _metrics_wanted() -> str | None:
    """console, otlp or none, as OTEL_METRICS_EXPORTER says. None: it says nothing, and metrics go where traces go.

    Raises:
        ConfigError: an exporter that is not known here.
    """
    named = environment("OTEL_METRICS_EXPORTER") or None
    if named not in (None, *EXPORTERS):
        raise ConfigError(f"OTEL_METRICS_EXPORTER is {named!r}; agenttrain exports to console, otlp or none.")
    return named


def _service_name() -> str:
    """As OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES says, else ours."""
    from opentelemetry.sdk.resources import OTELResourceDetector

    return str(OTELResourceDetector().detect().attributes.get("service.name", "agenttrain"))


def _span_exporter(exporter: str) -> SpanExporter:
    if exporter == "console":
        import sys

        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter(out=sys.stderr)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


def _metric_exporter(exporter: str):  # type: ignore[no-untyped-def]
    if exporter == "console":
        import sys

        from opentelemetry.sdk.metrics.export import ConsoleMetricExporter

        return ConsoleMetricExporter(out=sys.stderr)
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

    return OTLPMetricExporter()
