"""One engine of agenttrain, any of them, as an actor of Ray that veRL's client and trainer may call.

What becomes what: a call of veRL's client becomes Engine.generate and its Generation a TokenOutput; buckets of weights
become one Engine.update_weights. Invariants: what is wrong with one call is that call's EngineError and never the
actor's end; between `abort_all_requests` and `resume_generation` no call is in the engine. Nothing waits on the
actor's event loop: the engine is opened, fed and closed on threads.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from agenttrain import telemetry
from agenttrain.config import environment
from agenttrain.errors import AgenttrainError, EngineError
from agenttrain.exporters import exporting
from agenttrain.plugins import Plugins
from agenttrain.protocols import AdapterWeights, Engine, EngineContext, TakesAdapters, TellsNews
from agenttrain.records import Generation, Sampling
from verl.workers.rollout.replica import TokenOutput

from agenttrain_verl.server_spec import ServerSpec
from agenttrain_verl.weight_stream import Bucket, WeightStream

NOTHING = Generation(token_ids=(), logprobs=(), weight_versions=(), stop_reason="aborted")
OFF = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Settings of veRL that an engine of agenttrain doesn't follow, and the value that changes nothing."""
KNOWN = {
    "temperature",
    "max_tokens",
    "stop_token_ids",
    "seed",
    "experts_from",
    "n_drawn",
    "session",
    "trace",
    "logprobs",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What is known of an engine once it is open."""

    name: str
    max_length: int
    takes_seeds: bool | None
    """None: the engine does not say."""
    takes_adapters: bool


@dataclass(slots=True, eq=False)
class _Call:
    session: str
    admitted: asyncio.Future[bool]
    """Whether it may begin; done at once unless generation is paused."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    is_in_engine: bool = False
    is_aborted: bool = False
    """It was asked to end: that an engine could not work on it is no failure then."""


@dataclass(slots=True)
class _Push:
    stream: WeightStream
    done: asyncio.Future[None]


class EngineServer:
    """veRL's server interface over protocols.Engine. Every method runs on one asyncio loop."""

    def __init__(self, spec: ServerSpec, replica_rank: int) -> None:
        self._spec, self._rank = spec, replica_rank
        self._engine: Engine | None = None
        self._calls: set[_Call] = set()
        self._is_paused = False
        self._rejects = False
        self._push: _Push | None = None
        self._stack = ExitStack()

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def open(self) -> ServerFacts:
        """Open the engine; waits until it is ready.

        Raises:
            AgenttrainError: what the engine found wrong.
        """
        self._stack.enter_context(exporting(self._spec.exported.exporter, self._spec.exported.run_id))
        self._engine = await asyncio.to_thread(self._opened)
        return await self.facts()

    async def facts(self) -> ServerFacts:
        """What the engine says of itself."""
        return await asyncio.to_thread(_facts, self._ready())

    async def stats(self) -> dict[str, float]:
        """The engine's own counters."""
        return dict(await asyncio.to_thread(self._ready().stats))

    async def news(self) -> list[str]:
        """What happened to the engine since this was last asked."""
        engine = self._engine
        return list(await asyncio.to_thread(engine.news)) if isinstance(engine, TellsNews) else []

    async def close(self) -> None:
        """Close the engine; calls in flight end as aborted. Safe to call twice."""
        await self.abandon_weights("the engine is closed")
        await self._pause(rejects=True)
        engine, self._engine = self._engine, None
        if engine is not None:
            await asyncio.to_thread(engine.close)
        await asyncio.to_thread(self._stack.close)

    def _opened(self) -> Engine:
        spec, config = self._spec, self._spec.config
        context = EngineContext(config=config, model=spec.rollout.model, run_dir=spec.folder(self._rank))
        engine = _plugins(spec).engine(config.engine.name)(context)
        _ = engine.max_length  # waits until it is ready, or says what is wrong
        return engine

    def _ready(self) -> Engine:
        if self._engine is None:
            raise EngineError(f"The engine of replica {self._rank} is not open. It answers between `open` and `close`.")
        return self._engine

    # ── calls ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Any = None,
    ) -> TokenOutput:
        """Sample a response.

        Args:
            prompt_ids: [P]
            sampling_params: temperature, max_tokens, stop_token_ids, and what `sampling_of` reads beside them.
            request_id: veRL's, a new one for each call; the session where sampling_params names none.

        Raises:
            EngineError: this call can't be answered.
        """
        engine = self._ready()
        if any(each is not None for each in (image_data, video_data, audio_data)):
            raise EngineError("A call holds images, video or audio, and an engine of agenttrain takes token ids alone.")
        session = str(sampling_params.get("session") or request_id)
        sampling = sampling_of(sampling_params, room=engine.max_length - len(prompt_ids))
        with telemetry.continued_from(sampling_params.get("trace") or {}):
            generation = await self._answered(engine, tuple(prompt_ids), sampling, session)
        return token_output(generation, weight_version=engine.weight_version)

    async def release(self, session: str) -> None:
        """The rollout has ended: its calls end as aborted, also those that wait for generation to go on."""
        for call in [call for call in self._calls if call.session == session]:
            call.is_aborted = True
            if not call.admitted.done():
                call.admitted.set_result(False)
        self._ready().release(session)

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """End every call with what was sampled; new ones wait for `resume_generation`.

        Args:
            reject_request: new ones end at once, as aborted with nothing sampled: this replica is to be left alone.
        """
        await self._pause(rejects=reject_request)

    async def resume_generation(self) -> None:
        """Let the calls that wait begin."""
        self._is_paused = self._rejects = False
        for call in self._calls:
            if not call.admitted.done():
                call.admitted.set_result(True)

    async def _pause(self, *, rejects: bool) -> None:
        self._is_paused, self._rejects = True, rejects
        if rejects:
            for call in self._calls:
                if not call.admitted.done():
                    call.admitted.set_result(False)
        running = [call for call in self._calls if call.is_in_engine]
        for call in running:
            call.is_aborted = True
        if self._engine is not None:
            for session in {call.session for call in running}:
                self._engine.release(session)
        await asyncio.gather(*(call.ended.wait() for call in running))

    async def _answered(
        self, engine: Engine, prompt_ids: tuple[int, ...], sampling: Sampling, session: str
    ) -> Generation:
        call = _Call(session, self._admission())
        self._calls.add(call)
        try:
            while await call.admitted and self._is_paused and not call.is_aborted:  # again, before it could begin
                call.admitted = self._admission()
            if call.is_aborted or not call.admitted.result():
                return NOTHING
            call.is_in_engine = True
            future: Future[Generation] = engine.generate(prompt_ids, sampling, session=session)
            return await asyncio.wrap_future(future)
        except EngineError:
            if call.is_aborted:
                return NOTHING
            raise
        except Exception as error:  # a plugin's engine: what it raises is told as its own
            raise EngineError(f"The engine {engine.name!r} raised {type(error).__name__}: {error}") from error
        finally:
            self._calls.discard(call)
            call.ended.set()

    def _admission(self) -> asyncio.Future[bool]:
        admitted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if self._rejects or not self._is_paused:
            admitted.set_result(not self._rejects)
        return admitted

    # ── weights ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def begin_weights(self, version: int | None, adapter: Mapping[str, Any] | None = None) -> None:
        """New weights are to come in buckets.

        Args:
            version: None: the weights are those of the version that the engine has.
            adapter: peft's configuration, where only an adapter comes.
        """
        await self.abandon_weights("others came")
        engine, stream = self._ready(), WeightStream()
        number = engine.weight_version if version is None else version
        taken = asyncio.to_thread(_take, engine, stream, number, adapter)
        self._push = _Push(stream, asyncio.ensure_future(taken))

    async def put_weights(self, bucket: Bucket) -> None:
        """The next bucket; returns when the one before is being worked on.

        Raises:
            AgenttrainError: the engine has refused what came before.
        """
        push = self._under_way()
        await asyncio.to_thread(push.stream.put, bucket)
        if push.done.done():
            push.done.result()

    async def end_weights(self) -> int:
        """All buckets were put; returns when the next token is sampled from them.

        Returns:
            The version that the engine has now.

        Raises:
            AgenttrainError: the engine refused them.
        """
        push, self._push = self._under_way(), None
        push.stream.end()
        await push.done
        return self._ready().weight_version

    async def abandon_weights(self, why: str) -> None:
        """The weights under way will not be whole: the engine is told, and keeps or refuses what it has."""
        push, self._push = self._push, None
        if push is not None:
            push.stream.fail(why)
            await asyncio.gather(push.done, return_exceptions=True)

    def _under_way(self) -> _Push:
        if self._push is None:
            raise EngineError(f"No weights are under way to replica {self._rank}. Call begin_weights first.")
        return self._push

    # ── what veRL asks beside ────────────────────────────────────────────────────────────────────────────────────
    # An engine of agenttrain keeps its weights and holds no key of older ones: there is nothing to do.

    async def wake_up(self) -> None: ...

    async def sleep(self) -> None: ...

    async def clear_kv_cache(self) -> None: ...

    async def release_kv_cache(self) -> None: ...

    async def resume_kv_cache(self) -> None: ...

    async def start_profile(self, **kwargs: Any) -> None: ...

    async def stop_profile(self) -> None: ...


def sampling_of(params: Mapping[str, Any], *, room: int) -> Sampling:
    """veRL's dict of sampling parameters as ours.

    Args:
        room: what max_tokens is where it is not given.

    Raises:
        EngineError: a setting that an engine of agenttrain doesn't follow.

    Example: {"temperature": 1.0, "max_tokens": 4, "seed": 7} -> Sampling(temperature=1.0, max_tokens=4, seed=7, …)
    """
    unknown = sorted(name for name in params if name not in KNOWN and params[name] != OFF.get(name))
    if unknown:
        raise EngineError(
            f"A call asks for {', '.join(f'{name}={params[name]}' for name in unknown)}, and an engine of agenttrain "
            f"follows {', '.join(sorted(KNOWN - {'logprobs', 'session', 'trace'}))}. Leave the others out."
        )
    return Sampling(
        temperature=float(params.get("temperature", 1.0)),
        max_tokens=int(params.get("max_tokens", room)),
        seed=int(params.get("seed", secrets.randbits(63))),
        stop_ids=tuple(params.get("stop_token_ids") or ()),
        experts_from=int(params.get("experts_from", 0)),
        n_drawn=int(params.get("n_drawn", 0)),
    )


def token_output(generation: Generation, *, weight_version: int) -> TokenOutput:
    """A Generation as veRL's record, with what veRL has no field for in extra_fields.

    Args:
        weight_version: of the engine, told where nothing was sampled.
    """
    versions = generation.weight_versions or (weight_version,)
    return TokenOutput(
        token_ids=list(generation.token_ids),
        log_probs=list(generation.logprobs),
        routed_experts=generation.routed_experts,
        stop_reason=generation.stop_reason,
        extra_fields={
            "global_steps": versions[-1],
            "min_global_steps": min(versions),
            "max_global_steps": max(versions),
            "weight_versions": list(generation.weight_versions),
            "num_cached_tokens": generation.n_cached_ids,
            "stop_reason": generation.stop_reason,
        },
    )


def _plugins(spec: ServerSpec) -> Plugins:
    """Those installed here; graph.py too where it may be the one that registers the engine."""
    only, named = environment("AGENTTRAIN_PLUGINS"), spec.rollout.plugins
    plugins = Plugins.load(only=only, named=named)
    if spec.config.engine.name in plugins.engines:
        return plugins
    from agenttrain.graph.load import load_graph, load_module

    rollout = spec.rollout
    loaded = load_graph(
        rollout.graph_file if rollout.attribute is None else f"{rollout.graph_file}:{rollout.attribute}"
    )
    return Plugins.load(only=only, named=named, graph_module=load_module(loaded.file))


def _facts(engine: Engine) -> ServerFacts:
    return ServerFacts(
        name=engine.name,
        max_length=engine.max_length,
        takes_seeds=getattr(engine, "takes_seeds", None),
        takes_adapters=isinstance(engine, TakesAdapters) and engine.takes_adapters,
    )


def _take(engine: Engine, stream: WeightStream, version: int, adapter: Mapping[str, Any] | None) -> None:
    """Feed a stream to the engine; blocks."""
    try:
        if adapter is None:
            engine.update_weights(stream, version)
        elif isinstance(engine, TakesAdapters) and engine.takes_adapters:
            engine.update_adapter(AdapterWeights(config=adapter, tensors=dict(stream)), version)
        else:
            raise EngineError(
                f"An adapter came alone, and the engine {engine.name!r} takes whole weights. Merge it before it is "
                "sent: [verl.overrides.actor_rollout_ref.model.lora] merge = true."
            )
    except AgenttrainError:
        raise
    except Exception as error:  # a plugin's engine: what it raises is told as its own
        raise EngineError(
            f"The engine {engine.name!r} raised on new weights: {type(error).__name__}: {error}"
        ) from error
    finally:
        stream.leave()
