"""ONE TASK: a graph is run on a task, its model calls are captured, scored, and made into samples.

`open_runner` loads what a process needs once; `Runner.run` turns one RolloutRequest into one RolloutResult and never
raises for what the graph, its tools or its verifiers do: a bad rollout is data with a status. The local trainer's
pool calls it in process; a trainer that owns the loop calls it in its workers, rebuilt from a RolloutSpec.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agenttrain import telemetry
from agenttrain.as_is import AS_IS, AsIsRoles, NoEngine, NoRenderer
from agenttrain.capture.recorder import Recorder, RecorderLimits
from agenttrain.config import Config, LimitsTable, environment
from agenttrain.errors import ConfigError, GraphError, RewardError, SandboxError, WorldError
from agenttrain.flight import Flight
from agenttrain.graph.effects import Effects, effects_of, open_effects
from agenttrain.graph.intercept import Gate, open_gate, outside_rollouts
from agenttrain.graph.isolation import isolated, open_isolation
from agenttrain.graph.load import LoadedGraph, load_graph, load_module
from agenttrain.graph.models import models_of, nodes_of
from agenttrain.graph.roles import RoleBook
from agenttrain.graph.run import GraphEnding, is_about_tool, run_graph
from agenttrain.graph.runnable import RunnableGraph
from agenttrain.graph.self_test import self_test
from agenttrain.graph.spans import tool_spans
from agenttrain.graph.tools import tools_of, unseen_stand_ins
from agenttrain.plugins import Plugins
from agenttrain.protocols import Engine, InPlace, Renderer, TurnStore
from agenttrain.records import (
    NOT_ADMITTED,
    CallSite,
    Reward,
    Role,
    Rollout,
    RolloutRequest,
    RolloutResult,
    RolloutSpec,
    Status,
    Turn,
    TurnView,
)
from agenttrain.reward.layers import passes
from agenttrain.reward.score import VerifierPolicyFailure, score
from agenttrain.reward.status import STATUS_RULES, Ending, is_rewarded, may_succeed, status_of
from agenttrain.rollout_span import describe
from agenttrain.sample.build import build_samples
from agenttrain.sandbox.making import SandboxMaker
from agenttrain.sandbox_protocol import Sandbox
from agenttrain.telemetry.content import captures_content
from agenttrain.telemetry.names import CAPTURE_CONTENT_VARIABLE
from agenttrain.tool_spec import Declared
from agenttrain.trainable import Part, Trainable, current_sandbox_is, current_task_is
from agenttrain.trajectory.tree import trajectories

SUPERSTEPS_PER_TURN = 8
"""LangGraph's own default lets a looping graph run for 10,007 supersteps; ours grows with limits.turns."""


@dataclass(slots=True)
class Runner:
    """What every rollout of a process shares."""

    config: Config
    loaded: LoadedGraph
    graph: RunnableGraph
    renderer: Renderer
    store: TurnStore
    plugins: Plugins
    roles: RoleBook
    gate: Gate
    model_name: str
    in_place: InPlace | None = None
    """What answers in the policy's place. None: the policy does."""
    sandboxes: SandboxMaker | None = None
    """None: the graph has no sandbox."""
    run_id: str = ""
    """Of the run that the rollouts belong to, the same in each of its lives; empty in none."""
    unseen_tools: frozenset[str] = frozenset()
    """External tools with a stand-in that were not found in the graph."""
    captures_content: bool = False
    """Whether prompts, completions and what tools got and gave stand on spans."""
    trace_context: Mapping[str, str] = field(default_factory=dict)
    """Of the run's span, which each rollout's trace is linked to."""
    refusals: list[GraphError] | None = None
    """Takes what no rollout may do, where a graph is only looked at. None: the first ends the run."""
    _flights: dict[str, Flight] = field(default_factory=dict)

    def run(self, request: RolloutRequest, engine: Engine | None) -> RolloutResult:
        """Run the graph on one task; blocks.

        Args:
            engine: answers the policy's calls. None: other models answer them.

        Raises:
            GraphError: a call that can't be answered (an image, a provider's own tool), or one that got past the gate.
            RoleError: a second model of which nothing was declared.
            PluginError: a plugin that decides raised.
        """
        with (
            isolated(),
            telemetry.rollout_span(
                graph=self.loaded.name,
                rollout_id=request.rollout_id,
                task_id=request.task.id,
                phase=request.phase,
                step=request.step,
                group=request.group_id,
                attempt=request.attempt,
                remake=request.remake,
                life=request.life,
                run=self.trace_context,
            ) as span,
            effects_of(request, self.tools, run_id=self.run_id, unseen=self.unseen_tools) as effects,
        ):
            flight = self._take_off(request, engine, effects)
            try:
                ending = self._run_graph(flight)
                self._refuse(ending)
                return self._land(flight, ending, span)
            finally:
                flight.let_world_go()
                flight.close_sandbox()

    def abandon(self, rollout_id: str, cause: str) -> RolloutResult | None:
        """Give up on a rollout whose graph does not return; its thread can't be ended, only cut off.

        Returns:
            Its result with status environment_failure, or None when it has just ended by itself.
        """
        flight = self._flights.get(rollout_id)
        if flight is None or not flight.close():
            return None
        flight.recorder.stop(cause)
        flight.let_world_go()
        flight.close_sandbox()
        return self._record(flight, Ending(stuck=True, stopped=cause), state=None, span=None)

    def _refuse(self, ending: GraphEnding) -> None:
        """End the run for what no rollout may do, even where the graph's own code caught it."""
        refusal = self._refusal(ending)
        if refusal is None:
            return
        if self.refusals is None:
            raise refusal
        self.refusals.append(refusal)

    def _refusal(self, ending: GraphEnding) -> GraphError | None:
        if isinstance(ending.error, GraphError):
            return ending.error
        if ending.refusal is not None:
            return ending.refusal
        if self.roles.refused is not None:
            return self.roles.refused
        return None if self.gate.allow_escapes else self.gate.first_escape

    def stop_all(self) -> None:
        """Cut off every rollout under way: their next model call ends them as aborted."""
        for flight in list(self._flights.values()):
            flight.recorder.stop("aborted: the run was stopped")

    def _take_off(self, request: RolloutRequest, engine: Engine | None, effects: Effects) -> Flight:
        recorder = Recorder(
            request=request,
            engine=engine or NoEngine(),
            renderer=self.renderer,
            store=self.store,
            role_of=self._role_of,
            limits=self._recorder_limits,
            tracer=telemetry.tracer(),
            captures_content=self.captures_content,
            model_name=self.model_name,
            in_place=self.in_place,
            on_turn=self._observe_turn,
        )
        flight = Flight(request=request, recorder=recorder, effects=effects)
        self.store.put_begun(request, started_at=recorder.started_at)
        self._flights[request.rollout_id] = flight
        return flight

    def _run_graph(self, flight: Flight) -> GraphEnding:
        task, noted = flight.request.task, self.noted
        try:
            sandbox = flight.open_sandbox(self.sandboxes)
            with current_sandbox_is(sandbox):
                given = flight.enter_world(noted.setup if noted else None, self.graph.input_keys)
        except (ConfigError, SandboxError, WorldError, GraphError) as error:
            return GraphEnding(state=None, error=error)
        flight.context = given.context_over(task.context)
        with (
            current_task_is(task),
            current_sandbox_is(sandbox),
            tool_spans(captures_content=self.captures_content) as callbacks,
        ):
            return run_graph(
                self.graph,
                input={**task.input, **given.state},
                context=flight.context,
                configurable=given.configurable,
                route=flight.recorder,
                callbacks=callbacks,
                recursion_limit=self._max_supersteps,
                thread_id=flight.request.rollout_id,
                answer=flight.answer(noted.on_interrupt if noted else None, self._max_supersteps),
                loop=flight.world.loop if flight.world is not None else None,
            )

    @property
    def _max_supersteps(self) -> int:
        return SUPERSTEPS_PER_TURN * self.limits.turns

    def _land(self, flight: Flight, ended: GraphEnding, span: Any) -> RolloutResult:
        recorder = flight.recorder
        if not flight.close():
            return self._late(flight)
        last = recorder.last_trained_turn
        ending = Ending(
            error=ended.error,
            recursion=ended.recursion,
            interrupted=ended.interrupted,
            stopped=recorder.stopped or (None if ended.error or ended.interrupted else recorder.overrun),
            aborted=bool(recorder.stopped and recorder.stopped.startswith("aborted")),
            last_turn_cut=last is not None and last.stop_reason == "length" and not _raised_by_itself(ended),
            ended_on_unparsable=ended.unreadable_answer or (last is not None and _is_at_fault(last, ended, recorder)),
            lost_calls=recorder.lost,
            n_trained_turns=sum("trained" in (turn.role, turn.stands_for) for turn in recorder.turns),
        )
        return self._record(flight, ending, state=ended.state, span=span)

    def _record(self, flight: Flight, ending: Ending, *, state: Any, span: Any) -> RolloutResult:
        """Score, status, trajectories and samples; written to the store before anyone sees them."""
        status, cause = status_of(ending)
        turns = flight.recorder.turns
        reward, is_asked = None, is_rewarded(status)
        if is_asked:
            reward, status, cause = self._reward(flight, status, cause, state)
        left = flight.leave_world(self.config.limits.verifier_seconds)
        cause = "; ".join(part for part in (cause, left) if part)
        rollout = self._rollout(flight, turns, status, cause, reward, span)
        rollout = replace(rollout, verifier_failed=is_asked and reward is None)
        paths = trajectories(turns)
        result = RolloutResult(
            request=flight.request,
            rollout=rollout,
            turns=turns,
            trajectories=paths,
            samples=build_samples(rollout, paths),
        )
        result = self._admitted(result)
        self.store.put_result(result)
        self._flights.pop(rollout.id, None)
        describe(result, span)
        self.plugins.observe("agenttrain_rollout_finished", result=result)
        return result

    def _reward(self, flight: Flight, status: Status, cause: str, state: Any) -> tuple[Reward | None, Status, str]:
        """The verifiers' word, and the status it may change: a broken verifier is the environment's failure."""
        request, world, turns = flight.request, flight.world, flight.recorder.turns
        unfinished = self.config.reward.unfinished if STATUS_RULES[status].unfinished else 0.0
        try:
            with (
                outside_rollouts(),
                current_task_is(request.task),
                current_sandbox_is(flight.sandbox),
                telemetry.reward_span(request.rollout_id),
            ):
                reward = score(
                    self.verifiers,
                    task=request.task,
                    state=state,
                    timeout_s=self.config.limits.verifier_seconds,
                    unfinished=unfinished,
                    context=flight.context,
                    sandbox=self._settled(flight),
                    loop=world.loop if world is not None else None,
                    turns=None if self.in_place is not None else turns,  # none is trained then, and some are credited
                    views=lambda: [self._view(turn) for turn in turns],
                )
        except VerifierPolicyFailure as failure:
            return failure.reward, "policy_failure", str(failure)
        except RewardError as error:
            return None, "environment_failure", str(error)
        return reward, status, cause

    def _settled(self, flight: Flight) -> Sandbox | None:
        """The rollout's sandbox for its verifiers: nothing that the agent started runs in it any more.

        Raises:
            RewardError: it failed by itself.
        """
        sandbox = flight.sandbox
        try:
            if sandbox is not None:
                sandbox.settle()
        except SandboxError as error:
            raise RewardError(f"The sandbox failed before the verifiers were asked: {error}") from error
        return sandbox

    def _view(self, turn: Turn) -> TurnView:
        ids = turn.response_ids
        said = ids[:-1] if ids and ids[-1] in self.renderer.stop_ids else ids
        return TurnView(
            index=turn.index,
            node=turn.site.node,
            role=turn.stands_for or turn.role,
            text=self.renderer.decode(said) if said else turn.said,
            n_tool_calls=turn.n_tool_calls,
            stop_reason=turn.stop_reason,
            n_tokens=len(ids) or turn.n_response_tokens or 0,
            n_invalid_tool_calls=turn.n_invalid_tool_calls,
            started_at=turn.started_at,
            ended_at=turn.ended_at,
        )

    def _rollout(
        self,
        flight: Flight,
        turns: tuple[Turn, ...],
        status: Status,
        cause: str,
        reward: Reward | None,
        span: Any,
    ) -> Rollout:
        request = flight.request
        trace_id, span_id = telemetry.ids_of(span)
        counted = [turn for turn in turns if turn.role != "auxiliary" or turn.stands_for is not None]
        return Rollout(
            id=request.rollout_id,
            task_id=request.task.id,
            phase=request.phase,
            step=request.step,
            sibling=request.sibling,
            attempt=request.attempt,
            remake=request.remake,
            life=request.life,
            status=status,
            cause=cause,
            reward=reward,
            isolation=flight.isolation,
            tools_run=flight.effects.ran if flight.effects is not None else {},
            stand_ins_run=flight.effects.stood_in if flight.effects is not None else {},
            success=reward is not None and may_succeed(status) and passes(reward),
            n_turns=len(counted),
            n_tool_calls=sum(turn.n_tool_calls for turn in counted),
            n_invalid_tool_calls=sum(turn.n_invalid_tool_calls for turn in counted),
            n_sampled_ids=sum(len(turn.response_ids) + (turn.n_response_tokens or 0) for turn in counted),
            n_prompt_ids=sum(len(turn.prompt_ids) + (turn.n_prompt_tokens or 0) for turn in counted),
            tokens_told=all(map(_tokens_told, counted)),
            started_at=flight.recorder.started_at,
            ended_at=flight.recorder.now(),
            trace_id=trace_id,
            span_id=span_id,
        )

    def _admitted(self, result: RolloutResult) -> RolloutResult:
        """A plugin may keep a rollout out of training; its reason stands in the rollout's cause."""
        may_train = result.samples and result.request.phase == "train"
        reason = self.plugins.admit(result) if may_train else None
        if reason is None:
            return result
        return replace(result, samples=(), rollout=replace(result.rollout, cause=f"{NOT_ADMITTED}{reason}"))

    def _late(self, flight: Flight) -> RolloutResult:
        """The graph came back after it was abandoned: its record stands already."""
        rollout = self._rollout(flight, (), "environment_failure", "abandoned before it returned", None, None)
        return RolloutResult(request=flight.request, rollout=rollout, turns=(), trajectories=(), samples=())

    def _role_of(self, site: CallSite) -> tuple[Role, str]:
        return self.plugins.decide_role(site) or self.roles.role(site)

    def _observe_turn(self, turn: Turn) -> None:
        self.plugins.observe("agenttrain_turn_recorded", turn=turn)

    @property
    def noted(self) -> Trainable | None:
        return self.loaded.trainable

    @property
    def tools(self) -> Mapping[str, Declared]:
        return self.noted.tools if self.noted is not None else {}

    @property
    def verifiers(self) -> Mapping[str, Part]:
        return self.noted.verifiers if self.noted is not None else {}

    @property
    def limits(self) -> LimitsTable:
        return self.config.limits

    @property
    def _recorder_limits(self) -> RecorderLimits:
        """As-is, turns and tokens are the user's own models' affair, as where the graph serves."""
        limits, is_as_is = self.limits, self.in_place is not None and self.in_place.model is None
        if is_as_is:
            return RecorderLimits(seconds=limits.seconds)
        return RecorderLimits(turns=limits.turns, tokens=limits.tokens, seconds=limits.seconds)


@contextmanager
def open_runner(
    config: Config,
    loaded: LoadedGraph,
    *,
    renderer: Renderer | None,
    store: TurnStore,
    plugins: Plugins,
    model_name: str,
    in_place: InPlace | None = None,
    run_id: str = "",
) -> Iterator[Runner]:
    """Open the graph and put the gate in; both go when the context ends.

    Args:
        renderer: None: no policy answers.
        in_place: what answers then. None: each call's own model, as-is.
        run_id: of the run that the rollouts belong to. Empty: of none.

    Raises:
        GraphError: the factory raised, or the gate misses a funnel of this langchain-core.
    """
    noted = loaded.trainable
    in_place = in_place if in_place is not None or renderer is not None else AS_IS
    with ExitStack() as stack:
        allow = noted.allow_escapes if noted is not None else False
        graph = stack.enter_context(loaded.open())
        gate = stack.enter_context(open_gate(allow_escapes=allow))
        self_test()
        stack.enter_context(open_isolation())
        stack.enter_context(open_effects(noted.tools if noted is not None else {}))
        roles = _role_book(noted, graph, AsIsRoles if in_place is AS_IS else RoleBook)
        yield Runner(
            config=config,
            loaded=loaded,
            graph=graph,
            renderer=renderer or NoRenderer(),
            store=store,
            plugins=plugins,
            roles=roles,
            gate=gate,
            model_name=model_name,
            in_place=in_place,
            sandboxes=sandbox_maker(config, loaded, plugins),
            run_id=run_id,
            unseen_tools=unseen_stand_ins(noted.tools, tools_of(graph)) if noted and noted.tools else frozenset(),
            captures_content=captures_content(environment(CAPTURE_CONTENT_VARIABLE)),
            trace_context=telemetry.trace_context(),
        )


@contextmanager
def open_runner_of(spec: RolloutSpec, *, store: TurnStore) -> Iterator[Runner]:
    """The same in another process, from a picklable description."""
    from agenttrain.capture.render import open_renderer

    config = Config.model_validate(dict(spec.config))
    target = spec.graph_file if spec.attribute is None else f"{spec.graph_file}:{spec.attribute}"
    loaded = load_graph(target)
    plugins = Plugins.load(
        only=environment("AGENTTRAIN_PLUGINS"), named=spec.plugins, graph_module=load_module(loaded.file)
    )
    renderer = open_renderer(spec.model, family=config.renderer.family, history=config.renderer.history)
    with (
        telemetry.continued_from(spec.trace_context),
        open_runner(
            config,
            loaded,
            renderer=renderer,
            store=store,
            plugins=plugins,
            model_name=Path(spec.model).name,
            run_id=Path(spec.run_dir).name,
        ) as runner,
    ):
        yield runner


def sandbox_maker(config: Config, loaded: LoadedGraph, plugins: Plugins) -> SandboxMaker | None:
    """What makes the sandboxes of a graph. None: it has none."""
    noted = loaded.trainable
    if noted is None or noted.sandbox is None:
        return None
    return SandboxMaker(
        spec=noted.sandbox, folder=Path(noted.file).parent, backend_of=plugins.sandbox, table=config.sandbox
    )


def _raised_by_itself(ended: GraphEnding) -> bool:
    """Whether the graph's own code raised, and not about the policy's answer: the environment's failure."""
    return ended.error is not None and not ended.recursion and not ended.unreadable_answer


def _is_at_fault(last: Turn, ended: GraphEnding, recorder: Recorder) -> bool:
    """Whether the graph ended on the calls of this turn.

    None could read them, a tool refused their arguments, or the graph looked up a tool that the policy made up.
    """
    if ended.refused_arguments:
        return last.n_invalid_tool_calls > 0
    if is_about_tool(ended.error, recorder.unknown_tools.get(last.id, ())):
        return True
    return last.parse_failed and not _raised_by_itself(ended)


def _tokens_told(turn: Turn) -> bool:
    """Whether what a counted turn took is known; a call that failed took nothing."""
    told = None not in (turn.n_prompt_tokens, turn.n_response_tokens)
    return turn.stands_for is None or told or turn.stop_reason == "aborted"


def _role_book(noted: Trainable | None, graph: RunnableGraph, kind: type[RoleBook]) -> RoleBook:
    if noted is None:
        return kind()
    roles = kind(train=noted.train, frozen=noted.frozen, auxiliary=noted.auxiliary)
    if noted.frozen or noted.auxiliary:
        roles.see(nodes=nodes_of(graph), models=models_of(graph))
    return roles
