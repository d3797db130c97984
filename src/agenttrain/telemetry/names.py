"""Every name: attributes, events, spans with the attributes that stand on them, and metrics.

Names under `gen_ai` are those of the OpenTelemetry semantic conventions for generative AI, 1.41; what they have no word
for is under `agenttrain`. `SPANS` and `METRICS` are the whole list: a test compares them with what a run emits, and
docs/telemetry.md with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

SCOPE: Final = "agenttrain"
"""Name of the tracer and the meter, and the value of gen_ai.provider.name for the policy."""

OPERATION: Final = "gen_ai.operation.name"
PROVIDER: Final = "gen_ai.provider.name"
AGENT_NAME: Final = "gen_ai.agent.name"
CONVERSATION_ID: Final = "gen_ai.conversation.id"
REQUEST_MODEL: Final = "gen_ai.request.model"
REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
TOKEN_TYPE: Final = "gen_ai.token.type"
TOOL_NAME: Final = "gen_ai.tool.name"
TOOL_CALL_ID: Final = "gen_ai.tool.call.id"
ERROR_TYPE: Final = "error.type"

INPUT_MESSAGES: Final = "gen_ai.input.messages"
OUTPUT_MESSAGES: Final = "gen_ai.output.messages"
TOOL_ARGUMENTS: Final = "gen_ai.tool.call.arguments"
TOOL_RESULT: Final = "gen_ai.tool.call.result"
CONTENT: Final = (INPUT_MESSAGES, OUTPUT_MESSAGES, TOOL_ARGUMENTS, TOOL_RESULT)
"""What stands on spans only when the user asks for it."""

EVALUATION_EVENT: Final = "gen_ai.evaluation.result"
EVALUATION_NAME: Final = "gen_ai.evaluation.name"
EVALUATION_SCORE: Final = "gen_ai.evaluation.score.value"
EVALUATION_LABEL: Final = "gen_ai.evaluation.score.label"

RUN_ID: Final = "agenttrain.run.id"
PHASE: Final = "agenttrain.phase"
STEP: Final = "agenttrain.step"
TASK_ID: Final = "agenttrain.task.id"
GROUP_ID: Final = "agenttrain.group.id"
ROLLOUT_ID: Final = "agenttrain.rollout.id"
ATTEMPT: Final = "agenttrain.attempt"
LIFE: Final = "agenttrain.life"
REMAKE: Final = "agenttrain.remake"
TURN_ID: Final = "agenttrain.turn.id"
EXTENDS: Final = "agenttrain.extends"
BREAK_CAUSE: Final = "agenttrain.break_cause"
RESPELLED: Final = "agenttrain.respelled"
NODE: Final = "agenttrain.node"
ROLE: Final = "agenttrain.role"
ROLE_REASON: Final = "agenttrain.role_reason"
MISSED: Final = "agenttrain.missed"
STATUS: Final = "agenttrain.status"
REWARD: Final = "agenttrain.reward"
SUCCESS: Final = "agenttrain.success"
SANDBOX: Final = "agenttrain.sandbox"
UNENFORCED: Final = "agenttrain.sandbox.unenforced"
TAMPERING: Final = "agenttrain.tampering"
CANARY: Final = "agenttrain.canary"
TRAJECTORIES: Final = "agenttrain.trajectories"
AUXILIARY_CALLS: Final = "agenttrain.auxiliary_calls"
MASK_REASON: Final = "agenttrain.mask_reason"
ADVANTAGE: Final = "agenttrain.advantage"
ADVANTAGES: Final = "agenttrain.advantages"
STALENESS: Final = "agenttrain.staleness"
N_TRAINED: Final = "agenttrain.trained_tokens"
FIRST_WEIGHT_VERSION: Final = "agenttrain.first_weight_version"
WEIGHT_VERSION: Final = "agenttrain.weight_version"
TOKENS_PREFIX: Final = "agenttrain.tokens."
"""Before each reason of `MASK_REASONS`."""
UPDATE_PREFIX: Final = "agenttrain.update."
"""Before the name of each of a step's metrics."""

MASK_REASONS: Final[Mapping[str, str]] = {
    "trained": "mask 1: sampled by trained calls of a rollout that may be trained",
    "frozen": "mask 0: sampled by frozen calls",
    "context": "mask 0: in the response, and nobody sampled them (what tools and users said)",
    "retried": "mask 0: sampled by an attempt of a node whose answer LangGraph threw away",
    "aborted": "mask 0: sampled by a call whose answer never reached the graph",
    "other_trajectory": "in the prompt: sampled ids that are in another trajectory of the rollout",
    "dropped": "sampled by trained calls, and the rollout's status or a plugin keeps it out of training",
}
"""Where the tokens of a rollout stand, and why."""

TOKEN_USAGE_METRIC: Final = "gen_ai.client.token.usage"
DURATION_METRIC: Final = "gen_ai.client.operation.duration"
ROLLOUTS_METRIC: Final = "agenttrain.rollouts"
REWARD_METRIC: Final = "agenttrain.rollout.reward"
TOKENS_METRIC: Final = "agenttrain.rollout.tokens"
UPDATES_METRIC: Final = "agenttrain.updates"
TRAINED_GROUPS_METRIC: Final = "agenttrain.update.groups"
STALENESS_METRIC: Final = "agenttrain.update.staleness"

CAPTURE_CONTENT_VARIABLE: Final = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"


@dataclass(frozen=True, slots=True)
class SpanNames:
    """What stands on one kind of span."""

    always: tuple[str, ...]
    sometimes: Mapping[str, str] = field(default_factory=dict)
    """Attribute to when."""
    events: tuple[str, ...] = ()


_FAILED = {ERROR_TYPE: "it failed"}
_RUN = SpanNames((RUN_ID, AGENT_NAME, LIFE), _FAILED)
_PHASE = SpanNames((PHASE,), _FAILED)

SPANS: Final[Mapping[str, SpanNames]] = {
    "agenttrain.fit": _RUN,
    "agenttrain.evaluation": _RUN,
    "agenttrain.baseline": _PHASE,
    "agenttrain.train": _PHASE,
    "agenttrain.held_out": _PHASE,
    "agenttrain.eval": _PHASE,
    "agenttrain.update": SpanNames(
        (STEP, WEIGHT_VERSION), {f"{UPDATE_PREFIX}*": "one for each number of the step in metrics.jsonl"}
    ),
    "agenttrain.update_group": SpanNames(
        (STEP, GROUP_ID, WEIGHT_VERSION, STALENESS, N_TRAINED), {ADVANTAGES: "the trainer tells advantages"}
    ),
    "agenttrain.publish": SpanNames((WEIGHT_VERSION,), _FAILED),
    "invoke_agent": SpanNames(
        (
            OPERATION, PROVIDER, AGENT_NAME, CONVERSATION_ID, ROLLOUT_ID, TASK_ID, PHASE, STEP, GROUP_ID, ATTEMPT,
            REMAKE, LIFE, STATUS, SUCCESS, TRAJECTORIES, AUXILIARY_CALLS,
            *(TOKENS_PREFIX + reason for reason in MASK_REASONS),
        ),
        {
            REWARD: "it has one",
            FIRST_WEIGHT_VERSION: "the policy sampled in it",
            WEIGHT_VERSION: "the policy sampled in it",
            SANDBOX: "it had a sandbox: the backend's name",
            UNENFORCED: "the sandbox left some boundary or limit unenforced, as was allowed",
            TAMPERING: "it changed what judges it: in how many ways",
            ERROR_TYPE: "the environment failed, or it was aborted",
        },
        (EVALUATION_EVENT,),
    ),
    "chat": SpanNames(
        (OPERATION, ROLLOUT_ID, TURN_ID, ROLE, ROLE_REASON),
        {
            PROVIDER: "the policy answers",
            REQUEST_MODEL: "the model has a name or a class",
            NODE: "a node made the call",
            REQUEST_TEMPERATURE: "the policy answers",
            REQUEST_MAX_TOKENS: "the policy answers",
            FINISH_REASONS: "the policy answered",
            INPUT_TOKENS: "the policy answered",
            CACHED_TOKENS: "the policy answered",
            OUTPUT_TOKENS: "the policy answered",
            FIRST_WEIGHT_VERSION: "the policy answered",
            WEIGHT_VERSION: "the policy answered",
            EXTENDS: "it goes on in a trajectory",
            BREAK_CAUSE: "it begins a trajectory",
            RESPELLED: "the template would write the reply that it extends otherwise than it was sampled",
            MISSED: "the reply lacks what tool_choice or response_format asked for",
            RUN_ID: "a policy serves: its run",
            CANARY: "a policy serves: whether it is a canary",
            CONVERSATION_ID: "a policy serves",
            INPUT_MESSAGES: "content is asked for",
            OUTPUT_MESSAGES: "content is asked for",
            ERROR_TYPE: "it failed",
        },
    ),
    "agenttrain.generate": SpanNames(
        (INPUT_TOKENS,),
        {
            OUTPUT_TOKENS: "the engine answered",
            CACHED_TOKENS: "the engine answered",
            FINISH_REASONS: "the engine answered",
            WEIGHT_VERSION: "the engine answered",
            ERROR_TYPE: "it failed",
        },
    ),
    "execute_tool": SpanNames(
        (OPERATION, TOOL_NAME),
        {
            TOOL_CALL_ID: "the call has an id",
            TOOL_ARGUMENTS: "content is asked for",
            TOOL_RESULT: "content is asked for",
            ERROR_TYPE: "it failed",
        },
    ),
    "agenttrain.reward": SpanNames((ROLLOUT_ID,), _FAILED),
}  # fmt: skip
"""Span name, up to its first space, to what stands on it."""

LINKS: Final[Mapping[str, tuple[str, ...]]] = {
    "agenttrain.update_group": (ROLLOUT_ID, STALENESS, N_TRAINED, ADVANTAGE),
    "invoke_agent": (),
}
"""Spans with links to the attributes of those: to the rollouts that an update trained (the advantage only where the
trainer tells it), and to the run."""

METRICS: Final[Mapping[str, tuple[str, str]]] = {
    TOKEN_USAGE_METRIC: ("{token}", "Tokens of a model call"),
    DURATION_METRIC: ("s", "Duration of a model call"),
    ROLLOUTS_METRIC: ("{rollout}", "Rollouts that ended, by status"),
    REWARD_METRIC: ("1", "Reward of a rollout"),
    TOKENS_METRIC: ("{token}", "Tokens of rollouts, by where they stand and why"),
    UPDATES_METRIC: ("{update}", "Training steps that ended"),
    TRAINED_GROUPS_METRIC: ("{group}", "Groups that were trained"),
    STALENESS_METRIC: ("{update}", "Updates between a trained sample's oldest token and the weights that it trained"),
}
"""Metric to its unit and what it is."""
