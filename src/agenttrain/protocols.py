"""The roles others may play: Engine, Renderer, TurnStore, Verifier, Trainer.

Each is a structural type. Built-ins and third parties come through the same door (`agenttrain.hookspecs`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from agenttrain.records import (
    CallSite,
    Generation,
    Ids,
    InvalidCall,
    ModelCall,
    OwnAnswer,
    ParsedCall,
    Reply,
    Respelling,
    Role,
    Rollout,
    RolloutRequest,
    RolloutResult,
    RolloutSpec,
    Sampling,
    StepResult,
    Task,
    Turn,
)

if TYPE_CHECKING:
    from agenttrain.config import Config


@runtime_checkable
class Engine(Protocol):
    """Answers token ids for the policy. Thread-safe: any thread may call `generate`."""

    name: str

    @property
    def max_length(self) -> int:
        """Positions a prompt and its response may take together."""

    @property
    def weight_version(self) -> int:
        """Of the weights that the next token is sampled from."""

    # An engine may also have `takes_seeds: bool`: whether equal (prompt, seed) give equal ids. The report says which.

    def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str) -> Future[Generation]:
        """Sample a response.

        Args:
            prompt_ids: [P], at least one id, P + sampling.max_tokens ≤ max_length.
            session: the rollout's id; calls of one session may find their prefix cached.

        Returns:
            A future of the Generation. It fails with EngineError when the engine answers nothing.
        """

    def release(self, session: str) -> None:
        """The rollout has ended: what is cached for it may go; its calls in flight end as aborted.

        Those that the engine had no way to work on, such as while a server is replaced, fail with EngineError: the time
        that they took is not the rollout's.
        """

    def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Take new weights (Hugging Face name, tensor). Returns when the next token is sampled from them."""

    def stats(self) -> Mapping[str, float]:
        """Counters since the start: sampled_ids, prefilled_ids, cached_ids, decode_steps, decode_rows, busy_s.

        Of the cost: cpu_s where the engine is a process of its own, gpus that it holds. Waits until the engine is
        ready.

        Raises:
            EngineError: the engine has failed and will answer no call.
        """

    def close(self) -> None:
        """End threads and free memory; calls in flight end as aborted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterWeights:
    """A LoRA adapter alone, as peft names it (LoRA, arXiv:2106.09685)."""

    config: Mapping[str, Any]
    """peft's adapter_config.json: r, lora_alpha, target_modules and the rest."""
    tensors: Mapping[str, Any]
    """Name in peft's format (base_model.model.….lora_A.weight) to tensor."""


@runtime_checkable
class TakesAdapters(Protocol):
    """What an engine may offer beside `Engine`: to sample with an adapter over the base, so that only it travels."""

    takes_adapters: bool
    """False: this one, as it was started, can't."""

    def update_adapter(self, adapter: AdapterWeights, version: int) -> None:
        """Take a new adapter. Returns when the next token is sampled with it."""


@runtime_checkable
class TellsNews(Protocol):
    """What an engine may offer beside `Engine`: to say what happened to it."""

    def news(self) -> Sequence[str]:
        """What a user should know and was not told yet, in words, such as a server that died and was replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """Sampled ids read back to a message."""

    text: str
    reasoning: str | None
    tool_calls: tuple[ParsedCall, ...]
    invalid_tool_calls: tuple[InvalidCall, ...]


@runtime_checkable
class Renderer(Protocol):
    """Messages to token ids and back, for one tokenizer and template."""

    identity: str
    """Family and the hashes of tokenizer and template; equal exactly when ids mean the same."""
    stop_ids: Ids

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> Ids:
        """The prompt ids of a whole conversation, generation prompt included."""

    def extend(
        self,
        prompt_ids: Ids,
        response_ids: Ids,
        new_messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
    ) -> Ids | None:
        """prompt_ids + response_ids + the ids of the new messages and the generation prompt.

        The first two stand unchanged at the front. None: this conversation can't be extended.
        """

    def parse(self, response_ids: Ids, tools: Sequence[Mapping[str, Any]], prompt_ids: Ids = ()) -> Parsed:
        """Text, reasoning and tool calls of sampled ids."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens shown."""


@runtime_checkable
class TellsSpelling(Protocol):
    """What a renderer may offer beside `Renderer`: to say where its template writes history otherwise."""

    def respelled(
        self, response_ids: Ids, message: Mapping[str, Any], new_messages: Sequence[Mapping[str, Any]]
    ) -> tuple[Respelling, ...]:
        """How the template would write an answered reply otherwise than it was sampled. Empty: it writes the same.

        Args:
            message: the reply as it was handed back.
            new_messages: those that follow it in the prompt.
        """

    def drops_thinking(self, response_ids: Ids, new_messages: Sequence[Mapping[str, Any]]) -> bool:
        """Whether `extend` gives None because the template drops thinking from this reply before these messages."""


class Route(Protocol):
    """What answers the model calls of one rollout: the gate asks it, `capture.recorder` is it."""

    def role(self, site: CallSite) -> tuple[Role, str]:
        """Who answers a call made there, and why.

        Raises:
            RoleError: a second model of which nothing was declared.
        """

    def answer(self, call: ModelCall) -> Reply:
        """Answer a trained or frozen call; blocks.

        Raises:
            RolloutStop: a budget is spent, or the rollout was stopped; every later call raises it too.
            EngineError: the engine answered nothing though there was room.
        """

    async def aanswer(self, call: ModelCall) -> Reply:
        """The same without blocking the event loop."""

    def auxiliary_began(self, call: ModelCall) -> str:
        """Another model than the policy is about to answer: the user's own, or one in the policy's place.

        Returns:
            The turn's id.

        Raises:
            RolloutStop: as of `answer`, where the model stands in the policy's place.
        """

    def auxiliary_ended(self, turn_id: str, error: BaseException | None, answer: OwnAnswer | None) -> None:
        """It answered, or failed.

        Args:
            answer: of a stream that was left or failed, what had come. None: nothing was answered.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class InPlace:
    """What answers the trained and frozen calls in the policy's place."""

    name: str
    """As people read it, such as "gpt-4o-mini at http://127.0.0.1:8000/v1"; never with a key."""
    model: Any = None
    """A LangChain chat model. None: each call's own, as the user runs the graph ("as-is")."""


@runtime_checkable
class KnowsInPlace(Protocol):
    """What a route may offer beside `Route`: its trained and frozen calls don't go to the policy."""

    in_place: InPlace | None
    """None: they do."""


@runtime_checkable
class StaysOnLoop(Protocol):
    """What a route may offer beside `Route`: its graph runs on an event loop that lasts, as a server's does."""

    stays_on_loop: bool
    """The user's own models answer on it, as without a gate. Else on one of the process: those of rollouts end."""


class TurnStore(Protocol):
    """Keeps every record, append-only."""

    def put_begun(self, request: RolloutRequest, *, started_at: float) -> None:
        """A rollout is about to begin: seen even if the process is killed before it ends."""

    def put_intent(self, *, turn_id: str, rollout_id: str, started_at: float) -> None:
        """A call is about to be made: seen even if its answer is lost."""

    def put_turn(self, turn: Turn) -> None: ...

    def put_result(self, result: RolloutResult) -> None:
        """The rollout, its trajectories and reward; its turns were put before."""

    def flush(self) -> None:
        """Return when all that was put survives kill -9.

        Raises:
            RunError: the disk is full or gone; nothing before it is lost.
        """

    def close(self) -> None: ...


Verifier = Callable[..., Any]
"""Scores one rollout; arguments are passed by name, see `reward.score.ARGUMENTS`."""


OnDone = Callable[[RolloutResult], None]
"""Called with each result as it comes, those that are tried again included."""
RunRollouts = Callable[[Engine, Sequence[RolloutRequest], OnDone | None], list[RolloutResult]]
"""(engine, requests, on_done) -> the last attempt of each, in the order of the requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoneOn:
    """Requests held against what earlier lives of the run made of them."""

    kept: dict[int, RolloutResult]
    """By position in the requests."""
    open: dict[int, RolloutRequest]
    """Those still to be made; after environment failures, with the attempts counted."""
    earlier: tuple[RolloutResult, ...]
    """All that was made of these requests before and was not cut off, the kept ones among them."""

    def completed(self, made: Sequence[RolloutResult]) -> list[RolloutResult]:
        """Every request's result in the order of the requests, given those of the open ones in theirs."""
        by_position = self.kept | dict(zip(self.open, made, strict=True))
        return [by_position[position] for position in sorted(by_position)]


class Elsewhere(Protocol):
    """The run, to a trainer whose rollouts are made in other processes: what it must tell, and may ask.

    `run_rollouts` does all of this by itself. Any thread may call.
    """

    def go_on(self, requests: Sequence[RolloutRequest]) -> GoneOn:
        """What earlier lives made of a step's requests; asked once for each request, before it is made."""

    def rolled_out(self, result: RolloutResult, *, is_stored: bool) -> None:
        """A rollout has ended, every attempt.

        Args:
            is_stored: the process that made it has written it into the run's own folder.
        """

    def lost(self, requests: Sequence[RolloutRequest]) -> list[RolloutResult | None]:
        """The process that made them has died, and nothing of them was told by `rolled_out`.

        Returns:
            What stands in the run's folder, in the order of the requests: the result of one that had ended; of one that
            was under way that it was aborted, with its turns. None: nothing of it is there, it is to be made as asked.
        """

    def check_stop(self) -> None:
        """Ask often while rollouts are made.

        Raises:
            KeyboardInterrupt: the run is to be saved and to end.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineContext:
    """What an engine factory gets."""

    config: Config
    model: str
    """Folder of the policy."""
    weights_from: Path | None = None
    """Folder of weights that replace the model's, on resume or eval of a run."""
    run_dir: Path | None = None
    """The run's folder, for logs and what lasts as long as the run. None: there is no run, as where a policy serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerContext:
    """What a trainer factory gets."""

    config: Config
    spec: RolloutSpec
    tasks: Sequence[Task]
    """The training split, in file order."""
    open_engine: Callable[[], Engine]
    run_rollouts: RunRollouts
    advantages: Callable[[Sequence[float]], list[float]]
    """The advantage estimator that the configuration names: [G] -> [G]."""
    elsewhere: Elsewhere | None = None
    """For a trainer whose rollouts are made in other processes. None: they can be made in this one alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerCheckContext:
    """What a trainer is asked about, before anything starts."""

    config: Config
    model: str
    """Folder of the policy."""
    graph_file: str
    n_tasks: int
    """Of the training split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastContext:
    """What a trainer is asked to forecast, before anything of it is loaded."""

    config: Config
    model: str
    """Folder of the policy."""
    n_rollouts: int
    """The most that are made together, in a step or in an evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPart:
    """Something that a run will hold in memory at its fullest."""

    name: str
    """Such as "weights" or "optimizer"."""
    process: str
    """What holds it, such as "trainer" or "engine"."""
    memory: str
    """Where: a key of `Forecast.free_bytes`, such as "machine" or "gpu"."""
    n_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a run will need."""

    parts: tuple[MemoryPart, ...]
    free_bytes: Mapping[str, int]
    """Memory to what may be taken of it now; one that is not listed is not held against anything."""
    disk_bytes: int
    """Checkpoints and the exported policy together, at their most."""
    remedies: tuple[str, ...] = ()
    """What would make it smaller, the first thing to try first; shown when it can't fit."""
    notes: tuple[str, ...] = ()
    """What a user should know before it starts."""

    def needed_bytes(self, memory: str) -> int:
        """The sum of the parts in one memory."""
        return sum(part.n_bytes for part in self.parts if part.memory == memory)


class Trainer(Protocol):
    """Turns groups of samples into updates and publishes weights. It owns the loop and the engines that serve it."""

    name: str
    engine_name: str
    n_parameters: int
    """Numbers in the policy."""
    n_trained_parameters: int
    """Numbers that may change: all of the policy's, or those of what is trained beside it."""
    adapter: Mapping[str, Any] | None
    """Settings of what is trained beside a frozen policy, shown by the report. None: the policy's own weights are."""

    @property
    def weight_version(self) -> int:
        """Of the weights that the engines serve."""

    def evaluate(self, requests: Sequence[RolloutRequest], on_done: OnDone | None = None) -> list[RolloutResult]:
        """Roll out on the engines that serve training, at the weights of now."""

    def steps(self) -> Iterator[StepResult]:
        """Train, one result a step, from where it stands to `trainer.steps`."""

    def save(self, folder: Path) -> None:
        """Resumable state into an empty folder: weights, optimizer, schedule, seeds, data cursor."""

    def restore(self, folder: Path) -> None:
        """Go on from what `save` wrote."""

    def export(self, folder: Path) -> None:
        """The weights of now as a Hugging Face folder."""

    def engine_stats(self) -> Mapping[str, float]: ...

    def close(self) -> None: ...


EngineFactory = Callable[[EngineContext], Engine]
EngineCheck = Callable[[EngineContext], Sequence[str]]
"""Raises AgenttrainError for what would keep the engine from working, and gives notes; starts nothing. `run_dir` is
None."""
TrainerFactory = Callable[[TrainerContext], Trainer]
TrainerCheck = Callable[[TrainerCheckContext], Sequence[str]]
"""Raises AgenttrainError for what would keep the trainer from working, and gives notes; starts nothing."""
Forecaster = Callable[[ForecastContext], Forecast]
"""Reads no weights and starts nothing."""
EngineForecaster = Callable[[ForecastContext], Sequence[MemoryPart]]
"""Of an engine that the local machine will hold; reads no weights and starts nothing."""
AdvantageEstimator = Callable[[Sequence[float]], list[float]]
"""[G] rewards of one group -> [G] advantages."""

__all__ = [
    "AdapterWeights",
    "AdvantageEstimator",
    "Elsewhere",
    "Engine",
    "EngineCheck",
    "EngineContext",
    "EngineFactory",
    "EngineForecaster",
    "Forecast",
    "ForecastContext",
    "Forecaster",
    "GoneOn",
    "InPlace",
    "KnowsInPlace",
    "MemoryPart",
    "OnDone",
    "Parsed",
    "Renderer",
    "Route",
    "Rollout",
    "RunRollouts",
    "StaysOnLoop",
    "TakesAdapters",
    "TellsNews",
    "TellsSpelling",
    "Trainer",
    "TrainerCheck",
    "TrainerCheckContext",
    "TrainerContext",
    "TrainerFactory",
    "TurnStore",
    "Verifier",
]
