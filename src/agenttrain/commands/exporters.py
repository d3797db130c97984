"""Sets up the OpenTelemetry SDK from the standard OTEL_ variables, for the time of one command.

Without any of them nothing is set up, and the library's spans cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from agenttrain.config import environment
from agenttrain.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


@contextmanager
def exporting(exporter: str | None, run_id: str) -> Iterator[None]:
    """Export traces and metrics while the block runs, to what `wanted_exporter` gave."""
    if exporter is None:
        yield
        return
    from opentelemetry import metrics, trace
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create(
        {"service.name": environment("OTEL_SERVICE_NAME") or "agenttrain", "agenttrain.run.id": run_id}
    )
    tracing = TracerProvider(resource=resource)
    tracing.add_span_processor(BatchSpanProcessor(_span_exporter(exporter)))
    trace.set_tracer_provider(tracing)
    readers = [PeriodicExportingMetricReader(_metric_exporter(exporter))] if _wants_metrics() else []
    metering = MeterProvider(resource=resource, metric_readers=readers)
    metrics.set_meter_provider(metering)
    try:
        yield
    finally:
        tracing.shutdown()
        metering.shutdown()


def wanted_exporter() -> str | None:
    """console or otlp, as OTEL_TRACES_EXPORTER or an OTLP endpoint says. None: nothing is exported.

    Raises:
        ConfigError: an exporter that is not known here.
    """
    if (environment("OTEL_SDK_DISABLED") or "").lower() == "true":
        return None
    named = environment("OTEL_TRACES_EXPORTER")
    if named is None:
        return "otlp" if any(environment(name) for name in ENDPOINTS) else None
    if named not in ("console", "otlp", "none"):
        raise ConfigError(f"OTEL_TRACES_EXPORTER is {named!r}; agenttrain exports to console, otlp or none.")
    return None if named == "none" else named


def _wants_metrics() -> bool:
    return (environment("OTEL_METRICS_EXPORTER") or "otlp") != "none"


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
