"""One thing that a check found, and every code there is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What is wrong, where, and what to do."""

    code: str
    """A key of `CODES`; stable: a script may look for it."""
    severity: Severity
    """error: a fit would end on it, or learn nothing or wrong things. warning: it runs, and this should be known."""
    where: str
    """A node, a file, a row, a key."""
    cause: str
    fix: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """What a code stands for, as docs/check.md tells it."""

    severity: str
    cause: str
    fix: str


def _code(severity: str, cause: str, fix: str) -> Code:
    return Code(severity=severity, cause=cause, fix=fix)


CODES: Mapping[str, Code] = MappingProxyType(
    {
        "escape": _code(
            "error; warning with allow_escapes",
            "a model call on a thread of your own, which belongs to no rollout",
            "keep the context: ContextThreadPoolExecutor of langchain_core.runnables.config, asyncio.to_thread, or "
            "context = contextvars.copy_context() before the thread starts and context.run(model.invoke, …) in it",
        ),
        "unanswerable_call": _code(
            "error",
            "a call that the policy can't answer, such as one with an image or a provider's own tool",
            "name it auxiliary= in @trainable, so that your own model answers it, or take that part out of the call",
        ),
        "second_model": _code(
            "error",
            "a second model, and nothing says who answers its calls",
            "add auxiliary=, frozen= or train= to @trainable; the finding has the lines to paste",
        ),
        "selector_unmatched": _code(
            "error when misspelt; else warning",
            "a selector of train=, frozen= or auxiliary= that matches no call",
            "write the name as it was seen, or take the selector out",
        ),
        "selector_raises": _code(
            "error", "a predicate of train=, frozen= or auxiliary= that raised", "let it say True or False of any call"
        ),
        "no_trained_call": _code(
            "error when no rollout has one; else warning",
            "rollouts that end well and asked the policy nothing, as with a raw HTTP client",
            "call the model by LangChain, or use agenttrain.chat_model(); see frozen= and auxiliary= too",
        ),
        "node_cache": _code(
            "warning",
            "nodes with a cache policy and a cache: siblings would get one and the same answer",
            "nothing need be done for training: each rollout runs the node itself",
        ),
        "llm_cache": _code(
            "warning",
            "a cache of model answers: siblings would get one and the same answer",
            "nothing need be done for training: the policy's calls pass it by",
        ),
        "shared_checkpointer": _code(
            "warning",
            "a LangGraph checkpointer compiled in, which would carry states from rollout to rollout",
            "nothing need be done for the graph's own, nor for one in memory: each rollout has a fresh one. Any other "
            "of a graph within: compile that graph without it, or give it no thread_id of its own",
        ),
        "shared_store": _code(
            "warning",
            "a store compiled in, by which one rollout could read what another wrote",
            "nothing need be done for one in memory: each rollout has a copy. For another let tasks write under keys "
            "of their own, or compile the graph that is trained with an InMemoryStore",
        ),
        "unscripted_interrupt": _code(
            "error when it happened; else warning",
            "the graph waits for a human, and nothing answers for one",
            "add on_interrupt= to @trainable: a function of task and interrupt that gives the value to resume with, "
            'such as on_interrupt=lambda task, interrupt: "yes"',
        ),
        "schema_mismatch": _code(
            "error", "rows of the task file that the graph doesn't take", "change the rows, or the graph's schema"
        ),
        "tasks_unreadable": _code(
            "error", "a task file that is missing or can't be read", "mend the line that is named"
        ),
        "no_train_tasks": _code("error", "no task to train on", 'give rows "split": "train"'),
        "few_held_out": _code(
            "warning; error when there is none",
            "too few held-out tasks to show more than a large difference",
            "hold out 100 tasks or more",
        ),
        "no_verifier": _code(
            "error",
            "no verifier, so no rollout has a reward",
            "add verifier= to @trainable: a function (task, state) that gives a bool or a number",
        ),
        "function_refused": _code(
            "error", "a verifier, setup= or on_interrupt= that can't be called", "give it the arguments that are named"
        ),
        "tools_refused": _code(
            "error",
            "a declaration in tools= that can't be true of the graph's tools, or a tool that may not run in a rollout",
            "write the tool's name as it was seen, and give a stand-in the parameters of its tool",
        ),
        "undeclared_tools": _code(
            "warning",
            "tools of which nothing is declared, where something is of others",
            "add them to tools= of @trainable; the finding has the line to paste",
        ),
        "external_permitted": _code(
            "warning",
            "external tools that may run in rollouts: what they do is done, by this check too",
            "give them a stand-in unless that is meant: External(stand_in=function); else let them write under "
            "agenttrain.idempotency_key()",
        ),
        "sandbox_refused": _code(
            "error",
            "a sandbox that can't be made here as sandbox= asks",
            "name another backend, sandbox.backend in agenttrain.toml, or allow what is missing by name: "
            "sandbox.allow_unenforced; agenttrain doctor tells what this machine has",
        ),
        "sandbox_unenforced": _code(
            "warning",
            "boundaries or limits of the sandbox that this machine doesn't enforce, as was allowed",
            "train where they are enforced, unless the agent's programs may be trusted with that",
        ),
        "tampering": _code(
            "warning",
            "rollouts that changed what judges them, such as tests or their settings; that changed no score",
            "nothing need be done for the score; tell the agent what it may change, or close a gate on it",
        ),
        "verifier_errors": _code(
            "error",
            "a verifier that raised, took too long or gave no number",
            "handle the case in the verifier; raise PolicyFailure where the policy itself did wrong",
        ),
        "no_policy": _code(
            "error", "no policy is named, or its folder can't be used", "name a Hugging Face folder: model= or --model"
        ),
        "template_not_append_only": _code(
            "error",
            "a chat template that writes earlier messages otherwise when later ones come",
            "name the model's family in renderer.family, or use a template that only appends",
        ),
        "family_guessed": _code(
            "warning", "a renderer family that was guessed", "write family into the table [renderer] of agenttrain.toml"
        ),
        "tool_calls_unreadable": _code(
            "warning",
            "tool calls that the template writes and that are read back as text",
            "name the model's family: renderer.family; without tools nothing need be done",
        ),
        "all_zero_rewards": _code(
            "error",
            "no rollout got anything from the verifiers: there is nothing to learn from",
            "if this answer is right, mend the verifier. Else see more rollouts: agenttrain inspect RUN; then easier "
            "tasks, a finer reward or a better starting model; --n-tasks and --siblings look at more",
        ),
        "no_outcome": _code(
            "warning",
            "no rollout got anything from an outcome: what the rewards differ by are other parts, and a fit would "
            "learn those alone",
            "if this answer is right, mend the verifier. Else easier tasks, an outcome that gives part marks, or a "
            "better starting model; --n-tasks and --siblings look at more",
        ),
        "no_spread": _code(
            "warning",
            "equal rewards within each group: none of them teaches",
            "a finer reward, harder or easier tasks, a higher sampling.temperature; --siblings looks at more",
        ),
        "no_success": _code(
            "warning",
            "no rollout is a success, and the trainer sft learns from successes alone",
            "if this answer is right, mend the verifier. Else easier tasks or a better starting model; --n-tasks and "
            "--siblings look at more",
        ),
        "environment_failures": _code(
            "error from half of the rollouts on; else warning",
            "rollouts that ended on an exception, a time limit or an engine without an answer",
            "mend what the cause names; agenttrain inspect RUN names all of them",
        ),
        "lost_calls": _code(
            "warning", "rollouts that lost the answer of a call, or were stopped", "see the engine's log"
        ),
        "no_room": _code(
            "error when such a rollout has no trained turn; else warning",
            "prompts with more ids than the engine takes, so that rollouts end there",
            "a policy with a longer context (max_position_embeddings in its config.json), shorter prompts or fewer "
            "tools",
        ),
        "most_cut": _code(
            "warning",
            "most rollouts run out of turns, tokens or seconds",
            "raise it in [limits] if the agent needs more",
        ),
        "invalid_tool_calls": _code(
            "warning",
            "most tool calls can't be read, or their tool refuses them",
            "start from a model that knows its tools, and let the graph answer such a call with an error",
        ),
        "asked_and_missed": _code(
            "warning",
            "replies without the tool call or the form that their calls asked for",
            "a policy is told in the prompt and can't be forced: answer such a reply with an error, or reward it less",
        ),
        "prefix_breaks": _code(
            "warning",
            "prompts that no longer begin with what was sampled, so that their history is read again",
            "append to the history instead of rewriting it, and keep tools and instructions as they are",
        ),
        "memory": _code(
            "error when it can't fit; else warning", "a fit would use nearly all memory or more", "as the finding says"
        ),
        "disk": _code("error", "runs/ can't be written, or the disk is too full", "make room, or start elsewhere"),
        "engine_refused": _code("error", "the engine can't work here", "as it says; agenttrain doctor looks further"),
        "trainer_refused": _code("error", "the trainer can't work here", "as it says; agenttrain doctor looks further"),
    }
)
"""In the order of docs/check.md."""


def error(code: str, where: str, cause: str, *, fix: str = "") -> Finding:
    """A finding of that severity; without a fix of its own, the code's."""
    return Finding(code=code, severity="error", where=where, cause=cause, fix=fix or _sentence(CODES[code].fix))


def warning(code: str, where: str, cause: str, *, fix: str = "") -> Finding:
    """A finding of that severity; without a fix of its own, the code's."""
    return Finding(code=code, severity="warning", where=where, cause=cause, fix=fix or _sentence(CODES[code].fix))


def counted(n: int, what: str) -> str:
    """Example: 1, "rollout" -> "1 rollout"; 2, "rollout" -> "2 rollouts"."""
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
