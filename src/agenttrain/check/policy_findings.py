"""The policy's folder and its template become a renderer, or findings that say why not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agenttrain.capture.render import open_renderer
from agenttrain.check.finding import Finding, error, warning
from agenttrain.config import Config
from agenttrain.doctor.policy import renderer_findings
from agenttrain.errors import ModelError, TemplateError
from agenttrain.prepare import model_folder
from agenttrain.protocols import Renderer

FAMILY_LINES = 'Paste into agenttrain.toml (without the first line where it has that table):\n[renderer]\nfamily = "{}"'


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFound:
    """What stands in the policy's folder."""

    model: Path | None = None
    renderer: Renderer | None = None
    """None: it has none that can be used."""
    findings: tuple[Finding, ...] = ()


def policy_of(config: Config) -> PolicyFound:
    """Open the folder as a fit would."""
    try:
        model = model_folder(config)
    except ModelError as refused:
        return PolicyFound(findings=(error("no_policy", config.model or "model", str(refused)),))
    try:
        renderer = open_renderer(str(model), family=config.renderer.family, history=config.renderer.history)
    except TemplateError as refused:
        return PolicyFound(model=model, findings=(error("template_not_append_only", str(model), str(refused)),))
    except ModelError as refused:
        return PolicyFound(model=model, findings=(error("no_policy", str(model), str(refused)),))
    findings = tuple(
        warning(
            found.code, found.where, f"Seen: {found.seen}. Accepted: {found.accepted}.", fix=_fix(found.code, renderer)
        )
        for found in renderer_findings(model, renderer)
    )
    return PolicyFound(model=model, renderer=renderer, findings=findings)


def _fix(code: str, renderer: Renderer) -> str:
    """Lines to paste where the family was guessed; else the code's own."""
    return FAMILY_LINES.format(getattr(renderer, "family", "")) if code == "family_guessed" else ""
