"""Tokens are trained through the experts that they went through in sampling, with the gradients of that path."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DynamicCache,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from agenttrain.capture.recorder import Recorder, RecorderLimits
from agenttrain.capture.render import open_renderer
from agenttrain.capture.store import SqliteStore, read_store
from agenttrain.config import Config
from agenttrain.errors import ConfigError, RolloutStop
from agenttrain.local import policy
from agenttrain.local.routing import Replay
from agenttrain.local.trainer import LocalTrainer
from agenttrain.markers import hookimpl
from agenttrain.protocols import EngineFactory, Renderer, TrainerContext
from agenttrain.records import (
    CallSite,
    Generation,
    Ids,
    ModelCall,
    Reward,
    Rollout,
    RolloutRequest,
    RolloutResult,
    RolloutSpec,
    RoutedExperts,
    Sampling,
    Task,
)
from agenttrain.sample.account import drifted
from agenttrain.sample.build import build_samples
from agenttrain.testing import EngineContract, tiny_model, toy_project
from agenttrain.trainer.advantage import centered_advantages
from agenttrain.trajectory.tree import trajectories

CPU = torch.device("cpu")
N_EXPERTS = 8
IDS = torch.tensor([[5, 9, 20, 33, 7, 250, 11, 40], [5, 9, 21, 60, 61, 3, 99, 100]])
TASKS = [Task(id=str(i), input={}) for i in range(2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of 8 experts in layers 0 and 2, with a dense layer between them."""
    return tiny_model(tmp_path_factory.mktemp("mixture"), layers=3, experts=N_EXPERTS)


@pytest.fixture(scope="module")
def renderer(folder: Path) -> Renderer:
    return open_renderer(str(folder), family="default")


def routers_of(model: Any) -> list[Any]:
    return [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]


def chosen_by(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """[B, T, layers, K] that the model chooses itself."""
    seen: list[torch.Tensor] = []
    hooks = [gate.register_forward_hook(lambda _m, _a, out: seen.append(out[2])) for gate in routers_of(model)]
    with torch.no_grad():
        model(input_ids=ids)
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, dim=1).unflatten(0, ids.shape)


def others(seed: int = 0) -> torch.Tensor:
    """[B, T, layers, K] two different experts for every id of IDS, at random."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand((*IDS.shape, 2, N_EXPERTS), generator=generator)
    return draws.argsort(dim=-1)[..., :2]


def differentiated(model: Any, replay: Replay | None, experts: torch.Tensor | None) -> list[torch.Tensor]:
    """Log probabilities of IDS and the gradient of their weighted sum for every parameter."""
    parameters = [p.requires_grad_(True) for p in model.parameters()]
    if replay is None:
        logits = model(input_ids=IDS).logits
    else:
        with replay.of(experts):
            logits = model(input_ids=IDS).logits
    logprobs = logits[:, :-1].log_softmax(-1).gather(-1, IDS[:, 1:, None])[..., 0]
    loss = (logprobs * torch.linspace(-1, 1, logprobs.numel()).view_as(logprobs)).sum()
    grads = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    return [logprobs.detach(), *grads]


class ByHand(torch.nn.Module):
    """A layer of experts as its formula says it, token by token, through the experts that are given."""

    def __init__(self, block: Any, experts: torch.Tensor) -> None:
        super().__init__()
        self.gate, self.experts = block.gate, block.experts
        self._chosen = experts.flatten(0, 1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = [self._of(x, chosen.tolist()) for x, chosen in zip(hidden.flatten(0, 1), self._chosen, strict=True)]
        return torch.stack(rows).view_as(hidden)

    def _of(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        odds = torch.stack([(self.gate.weight[e] @ x).exp() for e in chosen])
        total = torch.zeros_like(x)
        for weight, expert in zip(odds / odds.sum(), chosen, strict=True):
            gate, up = (self.experts.gate_up_proj[expert] @ x).chunk(2)
            total = total + weight * (self.experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up))
        return total


def test_experts_that_the_model_chooses_itself_change_nothing(folder: Path) -> None:
    """No log probability and no number of any gradient, to the last bit."""
    model = policy.load_model(folder, device=CPU)
    own = chosen_by(model, IDS)
    plain = differentiated(model, None, None)
    replayed = differentiated(model, Replay(model), own)
    assert all(torch.equal(a, b) for a, b in zip(plain, replayed, strict=True))
    assert sum(bool(grad.any()) for grad in plain) == len(plain)


def test_other_experts_give_the_log_probabilities_and_gradients_of_their_path(folder: Path) -> None:
    """As the formula written out gives them, the routers' own gradients too."""
    model, by_hand = policy.load_model(folder, device=CPU), policy.load_model(folder, device=CPU)
    for place, layer in enumerate((0, 2)):
        block = by_hand.model.layers[layer]
        block.mlp = ByHand(block.mlp, others()[:, :, place])
    expected, replayed = differentiated(by_hand, None, None), differentiated(model, Replay(model), others())
    names = ["log probabilities", *dict(model.named_parameters())]
    by_name = dict(zip(["log probabilities", *dict(by_hand.named_parameters())], expected, strict=True))
    for name, ours in zip(names, replayed, strict=True):
        torch.testing.assert_close(ours, by_name[name], rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
    plain = differentiated(model, None, None)
    assert (plain[0] - replayed[0]).abs().max() > 0.1


def test_rows_and_positions_without_experts_route_by_themselves(folder: Path) -> None:
    model = policy.load_model(folder, device=CPU)
    replay, plain = Replay(model), differentiated(model, None, None)[0]
    part = others()
    part[0] = -1
    part[1, 4:] = -1
    own = chosen_by(model, IDS)
    with replay.of(part):
        seen = chosen_by(model, IDS)
    assert torch.equal(seen[0], own[0])
    assert torch.equal(seen[1, :4], others()[1, :4])
    torch.testing.assert_close(differentiated(model, replay, part)[0][0], plain[0])


def test_experts_of_all_layers_are_taken_too(folder: Path) -> None:
    """Some engines tell a row for every layer, with anything where a layer does not route."""
    model = policy.load_model(folder, device=CPU)
    wide = torch.zeros((*IDS.shape, 3, 2), dtype=torch.int64)
    wide[:, :, [0, 2]] = others()
    replay = Replay(model)
    assert torch.equal(differentiated(model, replay, wide)[0], differentiated(model, replay, others())[0])


def test_threads_do_not_see_each_others_experts(folder: Path) -> None:
    model = policy.load_model(folder, device=CPU)
    replay = Replay(model)
    wanted = [differentiated(model, replay, others(seed))[0] for seed in range(4)]
    together = threading.Barrier(4)

    def once(seed: int) -> bool:
        together.wait(30)
        with replay.of(others(seed)), torch.no_grad():
            logits = model(input_ids=IDS).logits
        ours = logits[:, :-1].log_softmax(-1).gather(-1, IDS[:, 1:, None])[..., 0]
        return torch.allclose(ours, wanted[seed], atol=1e-5)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(once, list(range(4)) * 8))


# Models


_SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "initializer_range": 0.4, "bos_token_id": None, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip


def mixture(kind: str) -> Any:
    torch.manual_seed(3)
    match kind:
        case "mixtral":
            return MixtralForCausalLM(MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2))
        case "qwen2_moe":
            own = {"num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
            return Qwen2MoeForCausalLM(Qwen2MoeConfig(**_SIZES, **own, num_experts_per_tok=2, norm_topk_prob=False))
        case "olmoe":
            return OlmoeForCausalLM(OlmoeConfig(**_SIZES, num_experts=4, num_experts_per_tok=2))
        case "gpt_oss":
            return GptOssForCausalLM(GptOssConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2))
        case "glm4_moe":
            own = {"n_routed_experts": 4, "moe_intermediate_size": 8, "n_group": 1, "topk_group": 1}
            more = {"first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "num_experts_per_tok": 2}
            return Glm4MoeForCausalLM(Glm4MoeConfig(**_SIZES, **own, **more))
        case "deepseek_v3":
            own = {"n_routed_experts": 4, "moe_intermediate_size": 8, "n_group": 2, "topk_group": 1}
            more = {"first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "num_experts_per_tok": 2}
            heads = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
            return DeepseekV3ForCausalLM(DeepseekV3Config(**_SIZES | heads | own | more))
    raise AssertionError(kind)


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "olmoe", "gpt_oss", "glm4_moe", "deepseek_v3"])
def test_models_of_several_makers_replay(kind: str) -> None:
    """Their own choice changes nothing; another one is taken."""
    model = mixture(kind).eval()
    replay = Replay(model)
    seen: list[torch.Tensor] = []
    for router in replay.routers:
        router.module.register_forward_hook(lambda _m, _a, out: seen.append(out[2]))
    with torch.no_grad():
        plain = model(input_ids=IDS).logits
        own = torch.stack(seen, dim=1).unflatten(0, IDS.shape)
        with replay.of(own):
            same = model(input_ids=IDS).logits
        with replay.of((own + 1) % 4):
            other = model(input_ids=IDS).logits
    torch.testing.assert_close(same, plain, rtol=1e-5, atol=1e-5)
    assert torch.equal(torch.stack(seen[-len(replay.routers) :], dim=1).unflatten(0, IDS.shape), (own + 1) % 4)
    assert (other - plain).abs().max() > 1e-3


def told(n_layers: int = 2, n_chosen: int = 2, highest: int = 7) -> RoutedExperts:
    rows = np.full((5, n_layers, n_chosen), highest, "<u2")
    return RoutedExperts(start=0, n_layers=n_layers, n_chosen=n_chosen, data=rows.tobytes())


@pytest.mark.parametrize(
    ("experts", "says"),
    [
        (told(4), r"told 2 experts a token in 4 layers, and Qwen3MoeForCausalLM takes 2 in 2 of its 3 layers"),
        (told(2, 3), r"told 3 experts a token in 2 layers"),
        (told(highest=8), r"told expert 8, and Qwen3MoeForCausalLM has experts 0 to 7"),
    ],
)
def test_experts_of_another_model_are_refused(folder: Path, experts: RoutedExperts, says: str) -> None:
    replay = Replay(policy.load_model(folder, device=CPU))
    replay.check(told())
    replay.check(told(3))
    with pytest.raises(ConfigError, match=says + ".*trainer.replay_experts = false"):
        replay.check(experts)


def test_what_stands_in_a_layer_that_does_not_route_is_passed_over(folder: Path) -> None:
    """Anything may stand there; the layers beside it are looked at."""
    replay = Replay(policy.load_model(folder, device=CPU))
    rows = np.full((5, 3, 2), 7, "<u2")
    rows[:, 1] = 65535
    replay.check(RoutedExperts(start=0, n_layers=3, n_chosen=2, data=rows.tobytes()))
    rows[4, 2, 1] = 8
    with pytest.raises(ConfigError, match=r"told expert 8, and .* has experts 0 to 7"):
        replay.check(RoutedExperts(start=0, n_layers=3, n_chosen=2, data=rows.tobytes()))


def test_a_model_that_does_not_route_is_refused_by_name(tmp_path: Path) -> None:
    model = policy.load_model(tiny_model(tmp_path / "dense"), device=CPU)
    with pytest.raises(ConfigError, match=r"Qwen3ForCausalLM has no router .*trainer.replay_experts = false"):
        Replay(model)


class OddRouter(torch.nn.Module):
    """Weights that come of the logits in no way that is known."""

    def __init__(self, router: Any) -> None:
        super().__init__()
        self.router = router

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits, weights, chosen = self.router(hidden)
        return logits * 3.0, weights, chosen


def test_a_router_of_an_unknown_kind_is_refused_by_name(folder: Path) -> None:
    model = policy.load_model(folder, device=CPU)
    model.model.layers[0].mlp.gate = OddRouter(model.model.layers[0].mlp.gate)
    with pytest.raises(ConfigError, match=r"routes in model\.layers\.0\.mlp\.gate \(OddRouter\) in a way"):
        Replay(model)


# From sampling to the update


@dataclass(slots=True)
class _Line:
    """What one call left in the cache."""

    ids: Ids
    rows: list[torch.Tensor]
    cache: Any


class TellingEngine:
    """Samples from a mixture, reuses what a session has read, and tells the experts of every id.

    Its routers pass over the likeliest expert, so that a trainer that routes anew gets other log probabilities.
    """

    name = "telling"

    def __init__(self, folder: Path) -> None:
        self.max_length, self.weight_version = 1024, 0
        self.n_reused = 0
        self.aborts: set[str] = set()
        """Sessions whose next call ends as aborted after two ids."""
        self._model = policy.load_model(folder, device=CPU)
        self._logits = policy.Logits(self._model)
        self._lines: dict[str, list[_Line]] = {}
        self._seen: list[torch.Tensor] = []
        self._lock = threading.Lock()
        for gate in routers_of(self._model):
            gate.register_forward_hook(self._second_and_third)

    def _second_and_third(self, _module: Any, _args: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        logits = output[0]
        best = logits.topk(3).indices[:, 1:]
        self._seen.append(best)
        return logits, logits.gather(1, best).softmax(-1), best

    def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str) -> Future[Generation]:
        future: Future[Generation] = Future()
        with self._lock, torch.no_grad():
            future.set_result(self._generate(prompt_ids, sampling, session))
        return future

    def _generate(self, prompt_ids: Ids, sampling: Sampling, session: str) -> Generation:
        line, logits = self._read_prompt(prompt_ids, session)
        generator = torch.Generator().manual_seed(sampling.seed)
        ids: list[int] = []
        logprobs: list[float] = []
        n_most = 2 if session in self.aborts else sampling.max_tokens
        while len(ids) < n_most and not (ids and ids[-1] in sampling.stop_ids):
            if ids:
                logits = self._read(line, (ids[-1],))
            row = (logits / (sampling.temperature or 1.0)).log_softmax(-1)
            drawn = torch.multinomial(row.exp(), 1, generator=generator) if sampling.temperature else row.argmax()
            ids.append(int(drawn))
            logprobs.append(float(row[ids[-1]]))
        self._lines.setdefault(session, []).append(line)
        data = torch.stack(line.rows[sampling.experts_from :]).numpy().astype("<u2").tobytes()
        stopped = "stop" if ids[-1] in sampling.stop_ids else "length"
        return Generation(
            token_ids=tuple(ids),
            logprobs=tuple(logprobs),
            weight_versions=(self.weight_version,) * len(ids),
            stop_reason="aborted" if session in self.aborts else stopped,  # type: ignore[arg-type]
            routed_experts=RoutedExperts(start=sampling.experts_from, n_layers=2, n_chosen=2, data=data),
        )

    def _read_prompt(self, prompt_ids: Ids, session: str) -> tuple[_Line, torch.Tensor]:
        def n_shared(line: _Line) -> int:
            return next(
                (i for i, (a, b) in enumerate(zip(line.ids, prompt_ids, strict=False)) if a != b), len(line.ids)
            )

        best = max(self._lines.get(session, ()), key=n_shared, default=None)
        n = min(n_shared(best), len(prompt_ids) - 1) if best is not None else 0
        line = _Line(ids=(), rows=[], cache=DynamicCache())
        if best is not None and n:
            line = _Line(ids=best.ids[:n], rows=best.rows[:n], cache=copy.deepcopy(best.cache))
            if n < len(best.ids):  # crop(0) empties the cache (transformers 5.10.4)
                line.cache.crop(n - len(best.ids))
            self.n_reused += n
        return line, self._read(line, prompt_ids[n:])

    def _read(self, line: _Line, ids: Ids) -> torch.Tensor:
        self._seen.clear()
        (logits,) = self._logits.at(torch.tensor([len(ids) - 1]), torch.tensor([ids]), cache=line.cache, use_cache=True)
        line.ids += ids
        line.rows += list(torch.stack(self._seen, dim=1))
        return logits

    def release(self, session: str) -> None:
        self._lines.pop(session, None)

    def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        policy.load_weights(self._model, dict(weights), where="the trainer")
        self.weight_version = version

    def stats(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None:
        pass


class TellsTheFirstPositions(TellingEngine):
    """As many rows as were asked for, and those of the front."""

    def _generate(self, prompt_ids: Ids, sampling: Sampling, session: str) -> Generation:
        answer = super()._generate(prompt_ids, replace(sampling, experts_from=0), session)
        assert answer.routed_experts is not None
        data = answer.routed_experts.data
        data = data[: len(data) - sampling.experts_from * answer.routed_experts.row_bytes]
        return replace(answer, routed_experts=replace(answer.routed_experts, start=sampling.experts_from, data=data))


class TellsAllAlways(TellingEngine):
    def _generate(self, prompt_ids: Ids, sampling: Sampling, session: str) -> Generation:
        return super()._generate(prompt_ids, replace(sampling, experts_from=0), session)


def test_the_contract_of_engines_sees_experts_at_the_wrong_place(folder: Path) -> None:
    check, prompt = EngineContract().test_experts_are_of_the_positions_that_were_asked_for, (5, 9, 13, 17)
    check(TellingEngine(folder), prompt)
    for fault in (TellsTheFirstPositions, TellsAllAlways):
        with pytest.raises(AssertionError):
            check(fault(folder), prompt)


def asked(*texts: str) -> tuple[Mapping[str, Any], ...]:
    """User and assistant in turn."""
    return tuple({"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts))


def rolled_out(engine: Any, request: RolloutRequest, renderer: Renderer, store: SqliteStore) -> RolloutResult:
    """A conversation of three turns, one that branches off its first turn, and one by itself: real turns, trained."""
    recorder = Recorder(
        request=request,
        engine=engine,
        renderer=renderer,
        store=store,
        role_of=lambda site: ("trained", "default"),
        limits=RecorderLimits(),
        model_name="policy",
    )

    def say(*texts: str, step: int) -> str:
        site = CallSite(node="agent", step=step, task_id=str(step), checkpoint_ns=f"agent:{step}")
        return recorder.answer(ModelCall(messages=asked(*texts), max_tokens=8, site=site, role="trained")).text

    try:
        first = say(f"item {request.task.id}", step=1)
        second = say(f"item {request.task.id}", first, "and the price", step=2)
        say(f"item {request.task.id}", first, "no, the order", step=3)
        say(f"item {request.task.id}", first, "and the price", second, "thanks", step=4)
        say("something else", step=5)
    except RolloutStop:
        pass
    recorder.close()
    score = sum(id % 2 for turn in recorder.turns for id in turn.response_ids) / 40
    rollout = Rollout(
        id=request.rollout_id, task_id=request.task.id, phase=request.phase, step=request.step,
        sibling=request.sibling, attempt=0, status="completed", reward=Reward(score=score, parts=()),
    )  # fmt: skip
    paths = trajectories(recorder.turns)
    result = RolloutResult(
        request=request,
        rollout=rollout,
        turns=recorder.turns,
        trajectories=paths,
        samples=build_samples(rollout, paths),
    )
    store.put_result(result)
    return result


@contextmanager
def opened(
    folder: Path, engine: Any, renderer: Renderer, store: SqliteStore, **settings: Any
) -> Iterator[tuple[LocalTrainer, list[RolloutResult]]]:
    made: list[RolloutResult] = []

    def run(engine: Any, requests: Sequence[RolloutRequest], _on_done: Any) -> list[RolloutResult]:
        made.extend(rolled_out(engine, request, renderer, store) for request in requests)
        return made[-len(requests) :]

    trainer = LocalTrainer(
        TrainerContext(
            config=Config(
                trainer={"steps": 2, "tasks_per_step": 2, "group_size": 3, "learning_rate": 1e-2} | settings  # type: ignore[arg-type]
            ),
            spec=RolloutSpec(graph_file="", attribute=None, config={}, run_dir="", model=str(folder)),
            tasks=TASKS,
            open_engine=lambda: engine,
            run_rollouts=run,
            advantages=centered_advantages,
        )
    )
    try:
        yield trainer, made
    finally:
        trainer.close()


def test_what_was_sampled_is_trained_through_the_experts_of_its_sampling(
    folder: Path, renderer: Renderer, tmp_path: Path
) -> None:
    """Over several turns, branches and updates the engine's log probabilities are the trainer's; routed anew they
    are others. The records hold the same experts."""
    engine, store = TellingEngine(folder), SqliteStore(tmp_path)
    with opened(folder, engine, renderer, store) as (trainer, made):
        steps = list(trainer.steps())
    store.close()
    assert [step.metrics["logprob_gap_max"] < 1e-4 for step in steps] == [True, True]
    assert all(step.metrics["logprob_gap_unreplayed_max"] > 0.05 for step in steps)
    assert all(
        step.metrics["logprob_gap_unreplayed_max"] >= step.metrics["logprob_gap_unreplayed_mean"] > 0.005
        for step in steps
    )
    assert engine.weight_version == 2
    assert engine.n_reused > 0
    assert {len(result.trajectories) for result in made} == {3}
    assert all(path.routed_experts is not None for result in made for path in result.trajectories)
    assert any(turn.routed_experts is not None and turn.routed_experts.start for r in made for turn in r.turns)
    view = read_store(tmp_path)
    assert sorted(view.results(), key=lambda r: r.rollout.id) == sorted(made, key=lambda r: r.rollout.id)
    turns = {turn.id: turn for result in made for turn in result.turns}
    assert drifted([sample for step in steps for sample in step.samples], turns) == 0


def test_a_call_that_was_cut_short_keeps_its_experts(folder: Path, renderer: Renderer, tmp_path: Path) -> None:
    """An aborted turn is a leaf at mask 0; what came before it is trained through its experts."""
    engine, store = TellingEngine(folder), SqliteStore(tmp_path)
    request = RolloutRequest(task=TASKS[0], phase="train", step=1)
    engine.aborts.add(request.rollout_id)
    result = rolled_out(engine, request, renderer, store)
    store.close()
    (turn,) = result.turns
    assert (turn.stop_reason, len(turn.response_ids)) == ("aborted", 2)
    assert turn.routed_experts is not None
    assert turn.routed_experts.end == len(turn.prompt_ids) + 1
    assert result.trajectories[0].routed_experts == turn.routed_experts
    assert next(read_store(tmp_path).results()) == result


def without_experts(result: RolloutResult) -> RolloutResult:
    return replace(result, samples=tuple(replace(sample, routed_experts=None) for sample in result.samples))


@pytest.mark.parametrize(
    ("settings", "changed"),
    [
        ({"replay_experts": False}, lambda result: result),
        ({}, without_experts),
    ],
    ids=["switched off", "not told"],
)
def test_without_replay_tokens_route_anew(
    folder: Path,
    renderer: Renderer,
    tmp_path: Path,
    settings: dict[str, Any],
    changed: Callable[[RolloutResult], RolloutResult],
) -> None:
    """The gap is then what it was as unreplayed, and no second figure is told."""
    engine, store = TellingEngine(folder), SqliteStore(tmp_path)
    with opened(folder, engine, renderer, store, steps=1, **settings) as (trainer, _):
        run = trainer._context.run_rollouts
        trainer._context = replace(
            trainer._context, run_rollouts=lambda *each: [changed(result) for result in run(*each)]
        )
        (step,) = trainer.steps()
    store.close()
    assert step.metrics["logprob_gap_max"] > 0.05
    assert not [name for name in step.metrics if "unreplayed" in name]


def test_an_adapter_and_a_reference_go_with_replay(folder: Path, renderer: Renderer, tmp_path: Path) -> None:
    """The adapter's passes are replayed; the reference routes by itself, so that it is at a distance from the start."""
    engine, store = TellingEngine(folder), SqliteStore(tmp_path)
    more = {
        "steps": 1,
        "adapter": "lora",
        "kl_coefficient": 0.1,
        "importance_cap": 2.0,
        "minibatches": 2,
    }
    with opened(folder, engine, renderer, store, **more) as (trainer, _):
        (step,) = trainer.steps()
    store.close()
    assert step.metrics["logprob_gap_max"] < 1e-4
    assert step.metrics["importance_mean"] == pytest.approx(1.0, abs=1e-4)
    assert step.metrics["kl_mean"] > 1e-4


def test_a_dense_model_trained_on_a_mixtures_answers_is_refused(
    folder: Path, renderer: Renderer, tmp_path: Path
) -> None:
    engine, store = TellingEngine(folder), SqliteStore(tmp_path / "rollouts")
    dense = tiny_model(tmp_path / "dense")
    with (
        opened(dense, engine, renderer, store) as (trainer, _),
        pytest.raises(ConfigError, match=r"trainer\.replay_experts = false"),
    ):
        next(trainer.steps())
    store.close()


class Telling:
    """A plugin with the engine."""

    @hookimpl
    def agenttrain_register_engines(self, register: Callable[[str, EngineFactory], None]) -> None:
        register("telling", lambda context: TellingEngine(Path(context.model)))


def test_a_whole_run_replays(tmp_path: Path) -> None:
    """From the graph to the report: nothing drifts, the gap is rounding, and each step says what it would be."""
    project = toy_project(tmp_path)
    tiny_model(tmp_path / "model", layers=3, experts=N_EXPERTS)
    run = project.fit(plugins={"telling": Telling()}, engine={"name": "telling"}, trainer={"group_size": 4, "steps": 2})
    assert run.report["tokens"]["drifted"] == 0
    assert run.report["tokens"]["trained"] > 0
    assert 0 < run.report["logprob_gap"]["max"] < 1e-4
    unreplayed = [row["logprob_gap_unreplayed_max"] for row in run.folder.metrics() if "loss" in row]
    assert unreplayed
    assert min(unreplayed) > 0.05
    assert all(path.routed_experts for r in run.store.rollouts() for path in run.store.trajectories(r.id))
