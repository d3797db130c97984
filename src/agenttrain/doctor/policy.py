"""A policy's folder, and a graph with all that belongs to it, tried as a run would try them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agenttrain.capture.probe import CONVERSATIONS, Conversation
from agenttrain.capture.render import open_renderer
from agenttrain.config import Config
from agenttrain.doctor.finding import Finding
from agenttrain.errors import AgenttrainError, ModelError
from agenttrain.prepare import Job, model_folder, n_parameters, prepare
from agenttrain.protocols import Renderer


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What a check of policy or graph gave."""

    findings: tuple[Finding, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What was found, for people: folder, parameters, family, tool_calls, tasks."""


def try_graph(target: str, cwd: Path, flags: Mapping[str, Any]) -> Tried:
    """Load graph.py with its configuration, tasks, verifiers, policy and template."""
    try:
        job = prepare(target, cwd=cwd, flags=flags)
    except AgenttrainError as error:
        return Tried(findings=(_refused(target, error),))
    facts = {"graph": job.loaded.name, "tasks": {"train": len(job.train), "held_out": len(job.held_out)}}
    notes = tuple(_note(target, note) for note in job.notes if "renderer.family" not in note)
    tried = _tried_renderer(job)
    return Tried(findings=(*notes, *tried.findings), facts=facts | dict(tried.facts))


def try_model(model: str, cwd: Path, family: str | None = None) -> Tried:
    """Load a policy's tokenizer and template, and look at its weights."""
    local = cwd / model
    try:
        folder = model_folder(Config(model=str(local) if local.exists() else model))
        renderer = open_renderer(str(folder), family=family)
    except AgenttrainError as error:
        return Tried(findings=(_refused(model, error),))
    return Tried(findings=tuple(renderer_findings(folder, renderer)), facts=_facts(folder, renderer))


def renderer_findings(folder: Path, renderer: Renderer) -> list[Finding]:
    """What a template that the probe admitted still leaves to say."""
    findings = []
    if getattr(renderer, "family_guessed", False):
        family = getattr(renderer, "family", "")
        findings.append(
            Finding(
                code="family_guessed",
                severity="warning",
                where=str(folder),
                seen=f"the family {family!r}, guessed from the model's type and template",
                accepted="one that is written down: a later version may guess another",
                fix=f'write into agenttrain.toml: renderer.family = "{family}"',
            )
        )
    if reads_tool_calls(renderer) is False:
        findings.append(
            Finding(
                code="tool_calls_unreadable",
                severity="warning",
                where=str(folder),
                seen="tool calls that the template writes and the renderer reads as text",
                accepted="a template whose tool calls can be read back",
                fix="name the model's family: renderer.family in agenttrain.toml; without tools nothing need be done",
            )
        )
    return findings


def reads_tool_calls(renderer: Renderer) -> bool | None:
    """Whether a tool call that the template writes is read back as one. None: the template doesn't let it be seen."""
    conversation = next(c for c in CONVERSATIONS if any(m.get("tool_calls") for m in c.messages))
    at = next(i for i, message in enumerate(conversation.messages) if message.get("tool_calls"))
    written = _written_reply(renderer, conversation, at)
    if written is None:
        return None
    prompt, response = written
    expected = [call["function"]["name"] for call in conversation.messages[at]["tool_calls"]]
    return [call.name for call in renderer.parse(response, conversation.tools, prompt).tool_calls] == expected


def _written_reply(
    renderer: Renderer, conversation: Conversation, at: int
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """(prompt ids, ids of message `at` as the template writes it)."""
    prompt = renderer.render(conversation.messages[:at], conversation.tools)
    whole = renderer.render(conversation.messages[: at + 2], conversation.tools)
    if whole[: len(prompt)] != prompt:
        return None
    rest = whole[len(prompt) :]
    end = next((i for i, id in enumerate(rest) if id in renderer.stop_ids), len(rest) - 1)
    return prompt, rest[: end + 1]


def _tried_renderer(job: Job) -> Tried:
    if job.model is None or job.renderer is None:
        return Tried()
    return Tried(findings=tuple(renderer_findings(job.model, job.renderer)), facts=_facts(job.model, job.renderer))


def _facts(folder: Path, renderer: Renderer) -> dict[str, Any]:
    return {
        "model": str(folder),
        "parameters": n_parameters(folder),
        "family": getattr(renderer, "family", ""),
        "append_only": True,
        "tool_calls": reads_tool_calls(renderer),
    }


def _refused(where: str, error: AgenttrainError) -> Finding:
    """An error that would end a command before it starts; its class names the code, that of any policy alike."""
    kind = ModelError if isinstance(error, ModelError) else type(error)
    name = kind.__name__.removesuffix("Error").lower()
    return Finding(
        code=f"{name}_refused",
        severity="error",
        where=where,
        seen=str(error),
        accepted="what a fit can start with",
        fix=f"as {type(error).__name__} says above, then agenttrain doctor {where}",
    )


def _note(where: str, note: str) -> Finding:
    return Finding(
        code="tasks_note",
        severity="warning",
        where=where,
        seen=note,
        accepted="tasks of which nothing need be said",
        fix="add or mend rows of the task file",
    )
