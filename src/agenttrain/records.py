"""The nouns, in the order of the flow: Task, ModelCall, Turn, Rollout, Trajectory, Reward, Sample.

All are frozen. Token ids are tuples of int in the policy's vocabulary; log probabilities are natural logarithms.
Lengths are checked where a record is made. None never means zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from agenttrain.call_record import CallSite as CallSite
from agenttrain.call_record import InvalidCall as InvalidCall
from agenttrain.call_record import ModelCall as ModelCall
from agenttrain.call_record import OwnAnswer as OwnAnswer
from agenttrain.call_record import ParsedCall as ParsedCall
from agenttrain.call_record import Reply as Reply
from agenttrain.call_record import Role as Role
from agenttrain.call_record import StopReason as StopReason
from agenttrain.errors import CaptureError, SampleError, TaskError
from agenttrain.part import GATES
from agenttrain.part import PartKind as PartKind
from agenttrain.routed_experts import RoutedExperts as RoutedExperts

RECORD_VERSION = 6
"""Stored with every record; a reader refuses a higher one."""
NOT_ADMITTED = "not admitted: "
"""Before a plugin's reason, in the cause of a rollout that it kept out of training."""
NOT_LEFT = "leaving setup="
"""Before the name of a setup, in the cause of a rollout whose world could not be left as it should."""

Ids = tuple[int, ...]
Split = Literal["train", "held_out"]
Phase = Literal["baseline", "train", "held_out", "eval", "check"]
Status = Literal[
    "completed",
    "truncated",
    "budget_exhausted",
    "policy_failure",
    "environment_failure",
    "aborted",
    "incomplete",
]
BreakCause = Literal[
    "first_turn",
    "other_conversation",
    "history_rewritten",
    "tools_changed",
    "instruction_changed",
    "parallel_sibling",
    "retry",
    "truncated_turn",
    "thinking_dropped",
    "template",
]
"""Why a turn began a new trajectory; `first_turn` is no break and is not counted as one. thinking_dropped: the template
drops it from answered replies, and renderer.history asks for what the template does."""
Respelling = Literal["thinking_dropped", "arguments_respelled", "text_respelled", "tokens_respelled"]
"""How the template would write an answered reply otherwise than it was sampled. No break: it is kept as sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A row of work, and what scores it."""

    id: str
    """Unique in its file."""
    input: Mapping[str, Any]
    """The graph's input."""
    reference: Any = None
    """What a verifier compares with; the graph never sees it."""
    split: Split = "train"
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Keys to slice reports by."""
    context: Mapping[str, Any] | None = None
    """LangGraph's runtime context for this task. None: the graph is run without one."""

    def __post_init__(self) -> None:
        if not self.id:
            raise TaskError("A task has an empty id. Give each row its own id.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one turn is sampled."""

    temperature: float
    """0 is greedy."""
    max_tokens: int
    seed: int
    """63 bits; with (seed, position) each token's randomness is fixed."""
    stop_ids: Ids
    experts_from: int = 0
    """First position whose routed experts are not known yet; an engine that tells them tells them from here on."""
    n_drawn: int = 0
    """Ids at the prompt's end that this turn has sampled already, where it was broken off and goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What an engine answers."""

    token_ids: Ids
    """[R] the sampled ids, the stop id included."""
    logprobs: tuple[float, ...]
    """[R] at the sampling temperature (at 1 for greedy)."""
    weight_versions: tuple[int, ...]
    """[R] of the weights that sampled each id."""
    stop_reason: StopReason
    n_cached_ids: int = 0
    """Prompt ids that were already in the KV cache."""
    routed_experts: RoutedExperts | None = None
    """From `Sampling.experts_from` to the last id but one. None: the engine doesn't tell."""

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.logprobs) == len(self.weight_versions):
            raise CaptureError(
                f"An engine answered {len(self.token_ids)} ids with {len(self.logprobs)} log probabilities and "
                f"{len(self.weight_versions)} weight versions. All three must have one length."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One model call: prompt ids, sampled ids, log probabilities. Auxiliary turns hold no ids."""

    id: str
    rollout_id: str
    index: int
    """From 0, in the order the calls began."""
    role: Role
    role_reason: str
    site: CallSite
    prompt_ids: Ids = ()
    """[P] exactly what the engine saw."""
    response_ids: Ids = ()
    """[R] exactly what it sampled."""
    response_logprobs: tuple[float, ...] = ()
    """[R]"""
    weight_versions: tuple[int, ...] = ()
    """[R]"""
    routed_experts: RoutedExperts | None = None
    """Of the positions that the turn it extends does not cover, to the last id but one. None: not told."""
    sampling: Sampling | None = None
    """None for auxiliary turns."""
    stands_for: Role | None = None
    """Of an auxiliary turn in the policy's place: the role that the policy would have had. None: not in its place."""
    said: str = ""
    """What was answered in the policy's place: text, then each tool call as JSON on a line; at most 4,000 characters.
    Empty where there are ids, and of other auxiliary turns."""
    n_prompt_tokens: int | None = None
    """Of an auxiliary turn, as its model told. None: it did not tell; or there are ids."""
    n_response_tokens: int | None = None
    """The same of its answer."""
    stop_reason: StopReason = "stop"
    extends: str | None = None
    """Id of the turn whose prompt and response this prompt extends. None: it began a trajectory."""
    break_cause: BreakCause | None = None
    """Why it extends nothing. None when it extends."""
    respelled: tuple[Respelling, ...] = ()
    """How the template would write the turn that this one extends otherwise than it was sampled, and stays. Empty where
    it writes the same, and where this turn extends nothing."""
    n_tool_calls: int = 0
    n_invalid_tool_calls: int = 0
    parse_failed: bool = False
    """The reply held a tool call that could not be read."""
    missed: str = ""
    """What the call asked for and the reply lacks: "tool_choice" or "response_format". Empty: nothing."""
    renderer: str = ""
    """Identity of tokenizer, template and family that made and read the ids."""
    trace_id: str = ""
    """Of the call's span, hexadecimal; empty without a tracer."""
    span_id: str = ""
    started_at: float = 0.0
    """Unix seconds."""
    ended_at: float = 0.0

    def __post_init__(self) -> None:
        if not len(self.response_ids) == len(self.response_logprobs) == len(self.weight_versions):
            raise CaptureError(
                f"Turn {self.id} has {len(self.response_ids)} response_ids, {len(self.response_logprobs)} "
                f"response_logprobs and {len(self.weight_versions)} weight_versions. All three must have one length."
            )
        if self.role != "auxiliary" and (self.stands_for, self.n_prompt_tokens, self.n_response_tokens) != (None,) * 3:
            raise CaptureError(f"Turn {self.id} is {self.role}, and only an auxiliary one is told of by its model.")
        experts, end = self.routed_experts, len(self.prompt_ids) + len(self.response_ids) - 1
        if experts is not None and experts.end != end:
            raise CaptureError(
                f"Turn {self.id} has routed experts of positions {experts.start} to {experts.end - 1}, and its last id "
                f"but one stands at {end - 1}. The rows must end there."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnView:
    """A turn as a verifier sees it."""

    index: int
    """Turn.index, which credit by turn goes by."""
    node: str | None
    """None: outside of any node."""
    role: Role
    """Of the policy; where another model answers in its place, the one that the policy would have had."""
    text: str
    """What was sampled, tool calls as they were written, without the stop token; of another model in the policy's
    place what it said. Empty of auxiliary calls."""
    n_tool_calls: int
    stop_reason: StopReason
    n_tokens: int = 0
    """Sampled; of another model what it told, 0 where it didn't."""
    n_invalid_tool_calls: int = 0
    """Attempts at a call that can't be read, or that the tool's schema refuses."""
    started_at: float = 0.0
    """Unix seconds."""
    ended_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPart:
    """One verifier's word on a rollout."""

    name: str
    score: float
    """Within the part's bounds."""
    weight: float = 1.0
    """0 of a gate: it adds nothing."""
    comment: str = ""
    kind: PartKind = "outcome"
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """What the verifier saw, in JSON's types: "exit_code", "output", "checks" ([{name, passed, reason}]), and under
    "tampering" ([text]) what the agent changed of what judges it, which changed nothing of the score."""
    error: str = ""
    """What the verifier raised, where that leaves only this part out; its score and weight are 0 then. Empty: it
    answered."""

    @property
    def is_closed(self) -> bool:
        """True of a gate that lets nothing through: its score is below 1."""
        return self.kind in GATES and self.score < 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """What verifiers say of parts of a rollout, added to its score for the tokens sampled there."""

    by_node: Mapping[str, float] = field(default_factory=dict)
    """Node, or one around it, to what its turns get."""
    by_turn: Mapping[int, float] = field(default_factory=dict)
    """Turn.index to what that turn gets."""

    def of(self, turn: Turn) -> float:
        """What a turn gets beside the score: that of each named node it was made in, and its own.

        Example: by_node {"team": 0.5, "model": 0.25}, by_turn {3: -1.0}: turn 3, in model within team, gets -0.25.
        """
        nodes = dict.fromkeys(turn.site.nodes)  # a node may stand within one of the same name
        return sum(self.by_node.get(node, 0.0) for node in nodes) + self.by_turn.get(turn.index, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """Score of a rollout, with its parts."""

    score: float
    """Sum of weight × score over the parts, or what a closed gate gives if that is less; plus `unfinished`."""
    parts: tuple[RewardPart, ...]
    unfinished: float = 0.0
    """reward.unfinished where the rollout was cut, else 0."""
    credit: Credit | None = None
    """None: every token of the rollout has its score alone."""
    closed: str = ""
    """Name of the gate that decided the score, whatever the other parts say. Empty: all gates are open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """One rollout to make: who asks, on which task, with which seed."""

    task: Task
    phase: Phase
    step: int = 0
    """Training step from 1; 0 in evaluation."""
    sibling: int = 0
    """Place in the group, or the repeat in evaluation."""
    attempt: int = 0
    """From 0; more than 0 after an environment failure."""
    remake: int = 0
    """How often this life made it again since it was stopped or lost an answer: names the record apart, and changes
    no seed."""
    life: int = 0
    """How often the run had been resumed: names the record apart, and changes no seed."""
    temperature: float = 1.0
    seed: int = 0
    """The run's seed."""

    @property
    def group_id(self) -> str:
        """Of the siblings, as the rollout's own."""
        return group_id(self.phase, self.step, self.task.id)

    @property
    def rollout_id(self) -> str:
        """Readable, unique in a run: phase, step, task, sibling and attempt (and remake and life)."""
        name = f"{self.phase}-{self.step}-{self.task.id}-{self.sibling}-{self.attempt}"
        if self.remake:
            name += f"-m{self.remake}"
        return f"{name}-r{self.life}" if self.life else name


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """What kept a sandbox apart from the machine."""

    backend: str
    enforced: Mapping[str, str]
    """Each of `sandbox_spec.BOUNDARIES` and `LIMITS` that holds, to what enforces it, such as "network namespace"."""
    unenforced: tuple[str, ...] = ()
    """Those that don't, which the user allowed. A network that the user asked for is in neither."""

    @property
    def in_words(self) -> str:
        """For people, in one line.

        Example: "namespaces (filesystem by mount namespace; disk_mib by tmpfs); not enforced: network"
        """
        by_means: dict[str, list[str]] = {}
        for name, means in self.enforced.items():
            by_means.setdefault(means, []).append(name)
        held = "; ".join(f"{', '.join(names)} by {means}" for means, names in by_means.items())
        missing = f"; not enforced: {', '.join(self.unenforced)}" if self.unenforced else ""
        is_open = "network" not in {*self.enforced, *self.unenforced}
        return f"{self.backend} ({held}){missing}{'; network open, as asked' if is_open else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One execution of the graph on one task, and how it ended."""

    id: str
    task_id: str
    phase: Phase
    step: int
    sibling: int
    attempt: int
    remake: int = 0
    life: int = 0
    status: Status
    cause: str = ""
    """What ended it, in words, and what went wrong while its world was left; empty when completed and nothing did."""
    verifier_failed: bool = False
    """A verifier raised, took too long or gave no number; the status is environment_failure then."""
    reward: Reward | None = None
    """None: the status gives none. Never 0 instead."""
    isolation: Isolation | None = None
    """Of its sandbox. None: it had none."""
    tools_run: Mapping[str, int] = field(default_factory=dict)
    """Tool to how often it was called and ran itself."""
    stand_ins_run: Mapping[str, int] = field(default_factory=dict)
    """External tool to how often its stand-in ran in its place."""
    success: bool = False
    n_turns: int = 0
    """Policy calls, trained and frozen; as-is and with a chat model in its place, those that it would have got."""
    n_tool_calls: int = 0
    """Of these calls, as all that follow."""
    n_invalid_tool_calls: int = 0
    n_sampled_ids: int = 0
    """Ids the policy sampled; tokens that another model in its place told of."""
    n_prompt_ids: int = 0
    """The same of the prompts: each call's whole prompt."""
    tokens_told: bool = True
    """False: another model answered in the policy's place and did not tell how many tokens that took."""
    started_at: float = 0.0
    ended_at: float = 0.0
    trace_id: str = ""
    """Hexadecimal; empty without a tracer."""
    span_id: str = ""

    @property
    def seconds(self) -> float:
        return self.ended_at - self.started_at

    @property
    def group_id(self) -> str:
        """Of the siblings: phase, step and task."""
        return group_id(self.phase, self.step, self.task_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSpan:
    """Where the sampled ids of one turn lie in a trajectory's response."""

    turn_id: str
    start: int
    end: int
    """Half open, in positions of response_ids."""
    trained: bool
    """False: mask 0, for `reason`."""
    reason: str = ""
    """Empty when trained; else "frozen: …" or another cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One root-to-leaf token path of a rollout."""

    rollout_id: str
    index: int
    prompt_ids: Ids
    """[P] context before the first sampled id that this trajectory owns."""
    response_ids: Ids
    """[T] sampled ids and the context between them."""
    response_mask: tuple[int, ...]
    """[T] 1 where a trained call sampled, 0 elsewhere."""
    response_logprobs: tuple[float, ...]
    """[T] 0.0 where the mask is 0."""
    weight_versions: tuple[int, ...]
    """[T] -1 where the mask is 0."""
    spans: tuple[TurnSpan, ...]
    break_cause: BreakCause
    """Why this trajectory began."""
    routed_experts: RoutedExperts | None = None
    """Of every position but the last, from 0. None: not known of all."""

    def __post_init__(self) -> None:
        check_lengths(self, f"rollout {self.rollout_id}, trajectory {self.index}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A trajectory with its reward: the fields of veRL's AgentLoopOutput, and where it came from."""

    prompt_ids: Ids
    response_ids: Ids
    response_mask: tuple[int, ...]
    response_logprobs: tuple[float, ...]
    reward_score: float
    num_turns: int
    metrics: Mapping[str, float]
    extra_fields: Mapping[str, Any]
    """rollout_id, task_id, trajectory, group_id, min_global_steps and max_global_steps (ints), reward_extra_info,
    status."""
    routed_experts: RoutedExperts | None = None
    """Of every position but the last, from 0. None: not known of all."""

    def __post_init__(self) -> None:
        check_lengths(self, f"rollout {self.extra_fields.get('rollout_id')}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedSample:
    """A sample as a step handed it to its loss, and what it was worth there."""

    sample: Sample
    """Without its routed experts: the turns of the rollout hold them."""
    step: int
    """From 1."""
    life: int
    """Of the run, when the step was made."""
    staleness: int | None
    """The trained weights' version less the oldest that sampled a trained token. None: an older agenttrain wrote it."""
    advantages: tuple[float, ...]
    """[T] 0.0 where the mask is 0; empty: the trainer did not tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResult:
    """All that one rollout left: its record, turns, trajectories and samples."""

    request: RolloutRequest
    rollout: Rollout
    turns: tuple[Turn, ...]
    trajectories: tuple[Trajectory, ...]
    samples: tuple[Sample, ...]
    """Empty when the status may not be trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a trainer says after one training step."""

    step: int
    """From 1."""
    weight_version: int
    """Of the weights that the step made; published with it, or by a trainer that publishes once at its end."""
    metrics: Mapping[str, float]
    """Numbers of the step: reward, reward_std, groups, groups_trained, loss, grad_norm, learning_rate,
    logprob_gap_max …"""
    trained_rollout_ids: tuple[str, ...]
    dropped: Mapping[str, str]
    """Rollout id to the reason it was not trained."""
    samples: tuple[Sample, ...] = ()
    """Exactly the samples that were handed to the loss."""
    advantages: tuple[tuple[float, ...], ...] = ()
    """[samples][T] each response id's advantage as the loss saw it, 0.0 where the mask is 0; empty: not told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpec:
    """All that rebuilds "one task to samples" in another process; picklable."""

    graph_file: str
    attribute: str | None
    config: Mapping[str, Any]
    """The resolved configuration as plain tables."""
    run_dir: str
    model: str
    """Folder of the policy's tokenizer and template."""
    plugins: tuple[str, ...] = ()
    trace_context: Mapping[str, str] = field(default_factory=dict)


def group_id(phase: Phase, step: int, task_id: str) -> str:
    """What names a group, in samples and in traces."""
    return f"{phase}-{step}-{task_id}"


def check_lengths(record: Trajectory | Sample, where: str) -> None:
    """Refuse a record whose per-token fields differ in length, or that has no response.

    Routed experts have a row for every id of prompt and response but the last.

    Raises:
        SampleError: naming the field, both lengths and the place.
    """
    n = len(record.response_ids)
    if not n:
        raise SampleError(f"response_ids is empty, and a row needs at least one sampled id ({where}).")
    for name in ("response_mask", "response_logprobs", "weight_versions"):
        values = getattr(record, name, None)
        if values is not None and len(values) != n:
            raise SampleError(f"{name} has {len(values)} entries for {n} response_ids ({where}).")
    experts, n_read = record.routed_experts, len(record.prompt_ids) + n - 1
    if experts is not None and (experts.start, experts.end) != (0, n_read):
        raise SampleError(
            f"routed_experts has rows of positions {experts.start} to {experts.end - 1}, and the ids that were read "
            f"stand at 0 to {n_read - 1} ({where})."
        )
