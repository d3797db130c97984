"""What is known of an exported policy becomes README.md of its folder: a model card that says how it was measured.

Pure: takes report.json and what stands around it. Figures that were not measured are named as such, never left out.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agenttrain.promotion.fixed_set import FixedSet
from agenttrain.promotion_record import LedgerEntry

HISTORY_IN_WORDS = {
    "keep": "earlier replies stay in the prompt as they were sampled, thinking included",
    "template": "earlier replies stand in the prompt as the chat template writes them, which may drop their thinking",
}
SHOWN = (
    ("success", "success"),
    ("reward", "reward"),
    ("turns", "turns"),
    ("tool_calls", "tool calls"),
    ("invalid_tool_calls", "invalid tool calls"),
    ("tokens", "tokens"),
    ("seconds", "seconds"),
    ("policy_failures", "policy failures"),
    ("unfinished", "cut by a limit"),
    ("environment_failures", "environment failures"),
    ("safety_violations", "safety violations"),
)
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """What a card is written from."""

    name: str
    """Of the folder, as people will see it."""
    base: str
    """Hub id or folder that training began with. Empty: not known."""
    fixed: FixedSet
    report: Mapping[str, Any] = field(default_factory=dict)
    """report.json. Empty: the policy is of no run."""
    verdict: str = ""
    """One sentence on whether it got better."""
    made_by: Mapping[str, Any] = field(default_factory=dict)
    """Provenance of the run: versions and hashes."""
    ledger: Sequence[LedgerEntry] = ()
    """Lines that are about the run."""
    license: str | None = None
    """What the base's own card says."""
    stop_ids: Sequence[int] = ()
    max_tokens: int | None = None
    """Of one rollout, that it was evaluated with."""


def model_card(facts: CardFacts) -> str:
    """README.md: what the hub reads, then what people do."""
    sections = [
        [f"# {facts.name}", "", *_what(facts)],
        ["## Use", "", *_use(facts)],
        ["## Intended use and limits", "", *_limits(facts)],
        ["## Training", "", *_training(facts)],
        ["## Evaluation", "", *_evaluation(facts)],
        ["## Safety and alarms", "", *_safety(facts.report), *_alarms(facts.report)],
        ["## Promotion", "", *_promotion(facts)],
        ["## Provenance", "", *_provenance(facts)],
    ]
    return f"---\n{_head(facts)}\n---\n\n" + "\n\n".join("\n".join(lines) for lines in sections) + "\n"


def _head(facts: CardFacts) -> str:
    """Metadata in YAML."""
    from huggingface_hub import ModelCardData

    is_adapter, on_hub = facts.fixed.form == "adapter", HUB_ID.fullmatch(facts.base) is not None
    card = ModelCardData(
        license=facts.license,
        library_name="peft" if is_adapter else "transformers",
        base_model=facts.base if on_hub else None,
        base_model_relation=("adapter" if is_adapter else "finetune") if on_hub else None,
        pipeline_tag="text-generation",
        tags=["agenttrain", "reinforcement-learning", "langgraph", "agent"],
    )
    return str(card.to_yaml())


def _what(facts: CardFacts) -> list[str]:
    form = "A LoRA adapter of the policy" if facts.fixed.form == "adapter" else "The policy"
    if not facts.report:
        return [f"{form} that `{facts.base}` holds, exported by agenttrain. It is of no run: nothing is known of it."]
    report = facts.report
    return [
        f"{form} that run `{report['run_id']}` of agenttrain trained for the model calls of one LangGraph agent, "
        f"`{report['graph']}`, from the base `{facts.base}` ({report['model']['parameters']:,} parameters). "
        f"It answers in the place of {_text(report['model']['replaces'])}.",
        "",
        facts.verdict,
    ]


def _use(facts: CardFacts) -> list[str]:
    fixed = facts.fixed
    load = (
        [
            "from peft import AutoPeftModelForCausalLM",
            "",
            'model = AutoPeftModelForCausalLM.from_pretrained(FOLDER, dtype="float32")',
        ]
        if fixed.form == "adapter"
        else [
            "from transformers import AutoModelForCausalLM",
            "",
            'model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype="float32")',
        ]
    )
    server = (
        f"python -m sglang.launch_server --model-path {fixed.base} --dtype float32 --enable-lora "
        "--lora-paths policy=FOLDER"
        if fixed.form == "adapter"
        else "python -m sglang.launch_server --model-path FOLDER --dtype float32"
    )
    return [
        "```python",
        *load,
        "```",
        "",
        f"With SGLang: `{server}`. In the agent itself: `agenttrain.use(FOLDER)`"
        f"{' on the merged form' if fixed.form == 'adapter' else ''}.",
        *(
            ["", "Sample by the generation_config.json of this folder: that of the base may ask for other settings."]
            if fixed.form == "adapter"
            else []
        ),
        "",
        f"- `renderer.history` is **{fixed.history}**: {HISTORY_IN_WORDS.get(fixed.history, fixed.history)}. It was "
        "trained so and has to be served so.",
        f"- Its prompts are made by `{fixed.renderer}` (family, hash of the tokenizer, hash of the chat template); a "
        "changed template is another policy.",
        f"- A reply ends at token {' or '.join(map(str, facts.stop_ids))}; it was evaluated {_sampling(facts.report)}.",
        f"- `agenttrain export --check FOLDER` loads it and holds its answers against the {len(fixed.turns)} turns of "
        "fixed_set.json.",
    ]


def _limits(facts: CardFacts) -> list[str]:
    tasks = facts.report.get("tasks", {}).get("held_out")
    measured = f"the {tasks} held-out tasks below" if tasks else "nothing that is told here"
    budget = f" One task was given at most {facts.max_tokens} tokens." if facts.max_tokens else ""
    return [
        f"Meant for the model calls of this agent, with its tools and its prompts. It was measured on {measured}, and "
        f"of other agents, other tools, general chat and other languages nothing is known.{budget} Everything that the "
        "base was trained on, and may not do, is still in it.",
        "",
        f"fixed_set.json holds {len(facts.fixed.turns)} prompts and answers as token ids: {facts.fixed.source}. "
        "Whoever gets this folder can read them.",
    ]


def _training(facts: CardFacts) -> list[str]:
    report = facts.report
    if not report:
        return ["Not known."]
    tokens, gap, model = report["tokens"], report.get("logprob_gap", {}), report["model"]
    adapter = model.get("adapter")
    trained = f"a LoRA adapter of rank {adapter['rank']}" if adapter else "all weights"
    return [
        f"- {report.get('steps', 0)} steps of {report.get('algorithm', 'training')} by the {report['trainer']} trainer "
        f"on the {report['engine']} engine, seed {report['seed']}, {report['tasks']['train']} training tasks",
        f"- trained: {trained}, {model.get('trained_parameters', model['parameters']):,} of {model['parameters']:,} "
        "parameters",
        f"- tokens sampled {tokens['sampled']:,} = trained {tokens['trained']:,} + frozen {tokens['frozen']:,} "
        f"+ dropped {tokens['dropped']:,}; drifted {tokens['drifted']}",
        *(
            [f"- log probability, engine against trainer: mean {gap['mean']:.1e}, max {gap['max']:.1e}"]
            if gap.get("max") is not None
            else []
        ),
    ]


def _evaluation(facts: CardFacts) -> list[str]:
    report = facts.report
    if not report:
        return ["Not measured."]
    before, after, difference = report["baseline"], report["trained"], report["difference"]
    low, high = difference["ci95"]
    return [
        f"| on {report['tasks']['held_out']} held-out tasks ({_sampling(report)}) | base | this policy |",
        "|---|---|---|",
        *(f"| {label} | {_number(before.get(key))} | {_number(after.get(key))} |" for key, label in SHOWN),
        "",
        f"Difference in success: {difference['success']:+.3f}, 95 % interval {low:+.3f} to {high:+.3f} "
        "(paired bootstrap over tasks).",
        *_slices(before.get("by_slice", {}), after.get("by_slice", {})),
    ]


def _slices(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    rows = [
        _slice(f"{key} = {value}", before.get(key, {}).get(value, {}), one)
        for key, values in after.items()
        for value, one in values.items()
    ]
    return ["", "| slice | tasks | success of the base | of this policy |", "|---|---|---|---|", *rows] if rows else []


def _slice(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    return f"| {_text(name)} | {after['tasks']} | {_number(before.get('success'))} | {_number(after['success'])} |"


def _safety(report: Mapping[str, Any]) -> list[str]:
    if not report:
        return ["Not measured."]
    before, after = report["baseline"].get("safety_violations"), report["trained"].get("safety_violations")
    if after is None:
        return ["No part of the reward is declared as safety: nothing was measured."]
    return [f"Rollouts that a safety part closed: {after} of {report['trained']['rollouts']}, {before} with the base."]


def _alarms(report: Mapping[str, Any]) -> list[str]:
    first: dict[tuple[str, str], str] = {}
    for alarm in report.get("alarms", ()):
        first.setdefault((alarm["severity"], alarm["code"]), alarm["message"])
    if not report or not first:
        return ["", "No alarms."] if report else []
    return ["", *(f"- {severity} alarm: {_text(message)}" for (severity, _), message in first.items())]


def _promotion(facts: CardFacts) -> list[str]:
    if not facts.ledger:
        return ["Not promoted when this was written."]
    return [
        f"- {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime(entry.at))}: {entry.deed.replace('_', ' ')} in the place "
        f"of `{entry.incumbent}`, {_text(entry.why)}"
        for entry in facts.ledger
    ]


def _provenance(facts: CardFacts) -> list[str]:
    hashes, versions = facts.made_by.get("hashes", {}), facts.made_by.get("versions", {})
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    return [
        f"- policy: `{facts.fixed.weights}` (SHA-256 over all files that fit exported)",
        *(f"- {'base' if name == 'model' else name}: `{value}`" for name, value in hashes.items() if value),
        *([f"- versions: Python {facts.made_by.get('python', 'unknown')}, {named}"] if named else []),
        *(f"- verified: {_text(_agreed(agreed))}" for agreed in facts.fixed.agreements),
    ]


def _agreed(agreed: Mapping[str, Any]) -> str:
    return (
        f"{agreed['by']} gave {agreed['n_same_turns']} of {agreed['n_turns']} fixed turns token by token, near ties "
        f"{agreed['n_near_ties']}, log probabilities within {agreed['max_gap']:.1e}"
    )


def _sampling(report: Mapping[str, Any]) -> str:
    temperature = report.get("trained", {}).get("temperature")
    if temperature is None:
        return "not at all"
    return "greedy" if temperature == 0 else f"sampled at {temperature:g}"


def _number(value: Any) -> str:
    if value is None:
        return "not measured"
    return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def _text(text: str) -> str:
    """Text of a user's own, in one line that stays within its cell and is no HTML."""
    return " ".join(text.split()).replace("|", r"\|").replace("<", "&lt;")
