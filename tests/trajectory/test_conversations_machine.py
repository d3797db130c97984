"""Random conversations through the real recorder, tree, samples, account and store: where every token stands.

A machine of rules plays the graph: it goes on, edits, retries, forks, compresses, calls in parallel, starts sub-agents.
An engine that remembers what it saw and sampled answers it. After each step every sampled id must be found in exactly
one place, with the ids that the engine saw before it.
"""

from __future__ import annotations

import json
import random
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tokenizers import Tokenizer

from agenttrain.capture.recorder import Recorder, RecorderLimits
from agenttrain.capture.render import open_renderer
from agenttrain.capture.store import SqliteStore, read_store
from agenttrain.errors import EngineError, RolloutStop
from agenttrain.protocols import Renderer
from agenttrain.records import (
    CallSite,
    Generation,
    Ids,
    ModelCall,
    Reply,
    Reward,
    Role,
    Rollout,
    RolloutRequest,
    RolloutResult,
    Sampling,
    Task,
    Trajectory,
    Turn,
)
from agenttrain.sample.account import drifted, token_account
from agenttrain.sample.build import build_samples
from agenttrain.trajectory.prefix_breaks import prefix_breaks
from agenttrain.trajectory.tree import ABORTED, SUPERSEDED, trajectories

POLICY = Path(__file__).parents[2] / "examples" / "order-desk" / "policy"
END = "<|im_end|>"
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"id": "A41"}}\n</tool_call>'
SAYINGS = (
    f"A lamp.{END}",
    f"  A lamp.\n{END}",
    f"In row 4.{END}",
    f"{CALL}{END}",
    f"{CALL.replace(': ', ':')}{END}",
    f"I look.\n{CALL}\n{CALL.replace('A41', 'B7')}{END}",
    f"<think>\nHm.\n</think>\n\nA lamp.{END}",
    f"<tool_call>\n{{oops\n</tool_call>{END}",
    END,
    "A lamp in the",
    "<tool_call>\n{",
)
"""Some that are read alike and sampled otherwise, some that can't be read, and the last two cut at their length."""


def tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"id": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


TOOLS = ((tool("look_up"),), (tool("look_up"), tool("add")), ())
TEXTS = st.sampled_from(("Where is A41?", "And B7?", "Good."))
SAYING = st.sampled_from(SAYINGS)
CHAIN = st.integers(0, 5)
Message = Mapping[str, Any]


@cache
def renderer_of(history: str) -> Renderer:
    return open_renderer(str(POLICY), family="default", history="keep" if history == "keep" else "template")


@cache
def encoded(text: str) -> Ids:
    return tuple(tokenizer().encode(text, add_special_tokens=False).ids)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(POLICY / "tokenizer.json"))


class RememberingEngine:
    """Answers with what it is told to say, and remembers by its seed what each call saw and was answered."""

    name, max_length = "remembering", 100_000

    def __init__(self) -> None:
        self.weight_version = 0
        self.says: str | Exception = SAYINGS[0]
        self.is_aborting = False
        self.asked: dict[int, tuple[Ids, Sampling]] = {}
        self.answered: dict[int, Generation] = {}
        self.held: list[tuple[Future[Generation], int, str]] | None = None
        self._arrived = threading.Condition()

    def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str) -> Future[Generation]:
        future: Future[Generation] = Future()
        self.weight_version += sampling.seed % 4 == 0
        with self._arrived:
            assert sampling.seed not in self.asked, "two calls of one rollout had one seed"
            self.asked[sampling.seed] = prompt_ids, sampling
            if isinstance(self.says, Exception):
                future.set_exception(self.says)
            elif self.held is None:
                self.answer(future, sampling.seed, self.says)
            else:
                self.held.append((future, sampling.seed, self.says))
                self._arrived.notify_all()
        return future

    def wait_for(self, n: int) -> None:
        """Return when so many calls are held."""
        with self._arrived:
            assert self._arrived.wait_for(lambda: self.held is not None and len(self.held) >= n, timeout=60)

    def answer(self, future: Future[Generation], seed: int, says: str) -> None:
        """Tokens change their weights in the middle of an answer, and each has a log probability of its own."""
        _, sampling = self.asked[seed]
        ids = encoded(says)[: sampling.max_tokens]
        n, stops = len(ids), ids[-1] in sampling.stop_ids
        generation = Generation(
            token_ids=ids,
            logprobs=tuple(-0.001 * (1 + seed % 1009) - 0.25 * i for i in range(n)),
            weight_versions=tuple(self.weight_version + (i > n // 2) for i in range(n)),
            stop_reason="aborted" if self.is_aborting else "stop" if stops else "length",
        )
        self.answered[seed] = generation
        future.set_result(generation)

    def release(self, session: str) -> None: ...

    def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None: ...

    def stats(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None: ...


@dataclass(slots=True, kw_only=True)
class Chain:
    """One conversation as the graph holds it, and where in the graph it is held."""

    messages: tuple[Message, ...]
    around: str = ""
    tools: tuple[Message, ...] = TOOLS[0]
    last: ModelCall | None = None
    """The call that its last message answers. None: its messages were changed since."""

    def copy(self) -> Chain:
        return replace(self)


@dataclass(slots=True, kw_only=True)
class Seen:
    """What the machine knows of one rollout beside the recorder."""

    left: dict[str, list[str]] = field(default_factory=dict)
    """Conversation after an answer, as JSON, to the turns that left it."""
    n_lost: int = 0
    n_auxiliary: int = 0


N_STEPS: Counter[str] = Counter()
"""Steps that were made, by rule."""


def conversation(messages: Sequence[Message], tools: Sequence[Message]) -> str:
    """What is compared of a conversation: neither the ids of calls nor white space around what the policy said."""
    plain = []
    for message in messages:
        calls = [each["function"] for each in message.get("tool_calls", ())]
        said = message["content"].strip() if message["role"] == "assistant" else message["content"]
        plain.append([message["role"], said, calls])
    return json.dumps([plain, tools], sort_keys=True)


class Conversations(RuleBasedStateMachine):
    """The graph: some conversations that go on, and one rollout that records them."""

    @initialize(history=st.sampled_from(("keep", "keep", "template")))
    def begin(self, history: str) -> None:
        self.history, self.renderer = history, renderer_of(history)
        self.engine = RememberingEngine()
        self.folder = tempfile.TemporaryDirectory()
        self.store = SqliteStore(Path(self.folder.name))
        self.n_rollouts = self.n_tasks = self.step = 0
        self._open()

    def _open(self) -> None:
        self.request = RolloutRequest(task=Task(id="t", input={}), phase="train", step=1, sibling=self.n_rollouts)
        self.n_rollouts += 1
        self.engine.asked, self.engine.answered = {}, {}
        self.recorder = Recorder(
            request=self.request,
            engine=self.engine,
            renderer=self.renderer,
            store=self.store,
            role_of=lambda site: ("trained", "default"),
            limits=RecorderLimits(),
            model_name="policy",
        )
        self.seen, self.n_checked = Seen(), 0
        self.chains = [Chain(messages=({"role": "system", "content": "Be brief."},))]

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self._check_intents()
            self.store.close()
            self.folder.cleanup()

    # Calls

    def _site(self, chain: Chain, *, task_id: str = "", attempt: int = 1, source: str | None = None) -> CallSite:
        if not task_id:
            self.n_tasks += 1
            self.step += 1
            task_id = f"task {self.n_tasks}"
        return CallSite(
            node="agent",
            step=self.step,
            task_id=task_id,
            checkpoint_ns=f"{chain.around}agent:{task_id}",
            path="pull agent",
            attempt=attempt,
            source=source,
        )

    def _call(self, chain: Chain, *, role: Role = "trained", site: CallSite | None = None, **more: Any) -> ModelCall:
        return ModelCall(
            messages=more.pop("messages", chain.messages),
            tools=chain.tools,
            site=site or self._site(chain),
            role=role,
            role_reason="default",
            **more,
        )

    def _ready(self, chain: Chain, text: str) -> None:
        """Let the graph speak, where the policy spoke last."""
        last = chain.messages[-1]
        calls = last.get("tool_calls", ())
        results = [{"role": "tool", "content": text, "tool_call_id": call["id"]} for call in calls]
        if results:
            chain.messages = (*chain.messages, *results)
        elif last["role"] != "user":
            chain.messages = (*chain.messages, {"role": "user", "content": text})
        chain.last = None

    def _said(self, chain: Chain, call: ModelCall, reply: Reply) -> None:
        """Hand a reply back to the graph, and hold what the turn extends against the machine's own memory."""
        calls = [
            {"id": each.id, "type": "function", "function": {"name": each.name, "arguments": dict(each.arguments)}}
            for each in reply.tool_calls
        ]
        says = {"role": "assistant", "content": reply.text, **({"tool_calls": calls} if calls else {})}
        chain.messages, chain.last = (*call.messages, says), call
        self._check_extended(call, reply)
        self.seen.left.setdefault(conversation(chain.messages, call.tools), []).append(reply.call_id)

    def _check_extended(self, call: ModelCall, reply: Reply) -> None:
        """A prompt goes on from a turn that left its conversation; it breaks only where none did, or by the history."""
        n = next((i for i in range(len(call.messages), 0, -1) if call.messages[i - 1]["role"] == "assistant"), 0)
        known = self.seen.left.get(conversation(call.messages[:n], call.tools), []) if n < len(call.messages) else []
        turn = next(turn for turn in self.recorder.turns if turn.id == reply.call_id)
        if turn.extends is not None:
            assert turn.extends in known
            assert turn.break_cause is None
        elif known:
            assert (self.history, turn.break_cause) == ("template", "thinking_dropped")
        else:
            assert turn.break_cause not in (None, "template", "truncated_turn", "thinking_dropped")

    def _ask(self, chain: Chain, says: str, **more: Any) -> None:
        self.engine.says = says
        call = self._call(chain, **more)
        self._said(chain, call, self.recorder.answer(call))

    def _chain(self, index: int) -> Chain:
        return self.chains[index % len(self.chains)]

    def _add(self, chain: Chain) -> None:
        self.chains = [*self.chains, chain][-6:]

    # Rules

    @rule(at=CHAIN, text=TEXTS, says=SAYING)
    def go_on(self, at: int, text: str, says: str) -> None:
        N_STEPS["go on"] += 1
        chain = self._chain(at)
        self._ready(chain, text)
        self._ask(chain, says)

    @rule(at=CHAIN, text=TEXTS, says=SAYING, max_tokens=st.integers(1, 9))
    def be_cut(self, at: int, text: str, says: str, max_tokens: int) -> None:
        N_STEPS["cut"] += 1
        chain = self._chain(at)
        self._ready(chain, text)
        self._ask(chain, says, max_tokens=max_tokens)

    @rule(at=CHAIN, where=st.integers(0, 9), text=TEXTS, says=SAYING)
    def edit(self, at: int, where: int, text: str, says: str) -> None:
        """An earlier message is written anew, or left as it was."""
        N_STEPS["edit"] += 1
        chain = self._chain(at)
        i = where % len(chain.messages)
        edited = {**chain.messages[i], "content": f"{chain.messages[i]['content']} {text * (where > 2)}".strip()}
        chain.messages = (*chain.messages[:i], edited, *chain.messages[i + 1 :])
        self._ready(chain, text)
        self._ask(chain, says)

    @rule(at=CHAIN, n=st.integers(1, 3), says=SAYING)
    def roll_back(self, at: int, n: int, says: str) -> None:
        """The last messages go, as when a user edits their last question."""
        N_STEPS["roll back"] += 1
        chain = self._chain(at)
        chain.messages = chain.messages[: max(1, len(chain.messages) - n)]
        self._ready(chain, "Where, then?")
        self._ask(chain, says)

    @precondition(lambda self: any(chain.last for chain in self.chains))
    @rule(at=CHAIN, says=SAYING)
    def retry(self, at: int, says: str) -> None:
        """LangGraph throws the node's answer away and runs it again."""
        N_STEPS["retry"] += 1
        chain, call = self._answered(at)
        self._again(chain, call, says, attempt=call.site.attempt + 1)

    @precondition(lambda self: any(chain.last for chain in self.chains))
    @rule(at=CHAIN, says=SAYING)
    def resume(self, at: int, says: str) -> None:
        """A node that stopped for a human runs again from its start, in the same attempt."""
        N_STEPS["resume"] += 1
        chain, call = self._answered(at)
        self._again(chain, call, says, attempt=call.site.attempt)

    def _answered(self, at: int) -> tuple[Chain, ModelCall]:
        """A conversation in which the policy spoke last, and the call that it answered."""
        answered = [(chain, chain.last) for chain in self.chains if chain.last is not None]
        return answered[at % len(answered)]

    def _again(self, chain: Chain, call: ModelCall, says: str, *, attempt: int) -> None:
        self.engine.says = says
        again = replace(call, site=replace(call.site, attempt=attempt))
        self._said(chain, again, self.recorder.answer(again))

    @rule(at=CHAIN, texts=st.tuples(TEXTS, TEXTS), says=st.tuples(SAYING, SAYING))
    def fork(self, at: int, texts: tuple[str, str], says: tuple[str, str]) -> None:
        """Two conversations go on from one turn, with one text or with two."""
        N_STEPS["fork"] += 1
        chain = self._chain(at)
        other = chain.copy()
        for each, text, said in zip((chain, other), texts, says, strict=True):
            self._ready(each, text)
            self._ask(each, said)
        self._add(other)

    @rule(at=CHAIN, says=SAYING, apart=st.booleans())
    def compress(self, at: int, says: str, apart: bool) -> None:
        """A frozen call of the same model sums the conversation up, in it or beside it, and the sum replaces it."""
        N_STEPS["compress"] += 1
        chain = self._chain(at)
        self._ready(chain, "Go on.")
        asks = {"role": "user", "content": "Sum up."}
        messages = ({"role": "user", "content": json.dumps(chain.messages)}, asks) if apart else (*chain.messages, asks)
        beside = replace(chain, messages=messages)
        call = self._call(beside, role="frozen", site=self._site(chain, source="summarization"))
        self.engine.says = says
        reply = self.recorder.answer(call)
        self._said(beside, call, reply)
        chain.messages = (chain.messages[0], {"role": "user", "content": f"Until now: {reply.text}"})
        chain.last = None

    @rule(at=CHAIN, text=TEXTS, says=SAYING)
    def start_sub_agent(self, at: int, text: str, says: str) -> None:
        N_STEPS["sub-agent"] += 1
        chain = self._chain(at)
        opening = ({"role": "system", "content": "You help."}, {"role": "user", "content": text})
        self.n_tasks += 1
        helper = Chain(messages=opening, around=f"{chain.around}help:{self.n_tasks}|")
        self._add(helper)
        self._ask(helper, says)

    @rule(at=CHAIN, tools=st.sampled_from(TOOLS), says=SAYING)
    def change_tools(self, at: int, tools: tuple[Message, ...], says: str) -> None:
        N_STEPS["tools"] += 1
        chain = self._chain(at)
        chain.tools = tools
        self._ready(chain, "Go on.")
        self._ask(chain, says)

    @rule(at=CHAIN, says=st.lists(SAYING, min_size=2, max_size=4), alike=st.booleans(), seed=st.integers(0, 99))
    def call_in_parallel(self, at: int, says: list[str], alike: bool, seed: int) -> None:
        """Several calls are under way at once, on one prompt or on several, and end in another order."""
        N_STEPS["parallel"] += 1
        chain = self._chain(at)
        chains = [chain.copy() for _ in says]
        for i, each in enumerate(chains):
            self._ready(each, "Where?" if alike else f"Where is A{i}?")
        self.step += 1
        step, calls = self.step, [self._call(each) for each in chains]
        calls = [replace(call, site=replace(call.site, step=step)) for call in calls]
        self.engine.held = held = []
        with ThreadPoolExecutor(len(calls)) as threads:
            waiting = []
            for n, (call, self.engine.says) in enumerate(zip(calls, says, strict=True), start=1):
                waiting.append(threads.submit(self.recorder.answer, call))
                self.engine.wait_for(n)
            order = list(range(len(calls)))
            random.Random(seed).shuffle(order)
            self.engine.held = None
            for i in order:
                self.engine.answer(*held[i])
                self._said(chains[i], calls[i], waiting[i].result(60))
        for each in chains:
            self._add(each)

    @rule(at=CHAIN, text=TEXTS)
    def lose_a_call(self, at: int, text: str) -> None:
        """The engine fails, and the graph goes on without the answer."""
        N_STEPS["lost"] += 1
        chain = self._chain(at)
        self._ready(chain, text)
        self.engine.says = ValueError("no memory")
        with pytest.raises(EngineError):
            self.recorder.answer(self._call(chain))
        self.seen.n_lost += 1

    @rule(at=CHAIN)
    def call_auxiliary(self, at: int) -> None:
        N_STEPS["auxiliary"] += 1
        call = self._call(self._chain(at), role="auxiliary")
        self.recorder.auxiliary_ended(self.recorder.auxiliary_began(call), None, None)
        self.seen.n_auxiliary += 1

    @precondition(lambda self: self.seen.left)
    @rule(at=CHAIN, says=SAYING)
    def abort(self, at: int, says: str) -> None:
        """The engine breaks a call off: the rollout has ended, and another begins."""
        N_STEPS["aborted"] += 1
        chain = self._chain(at)
        self._ready(chain, "Go on.")
        self.engine.says, self.engine.is_aborting = says, True
        with pytest.raises(RolloutStop):
            self.recorder.answer(self._call(chain))
        self.engine.is_aborting = False
        self.where_every_token_stands()
        self._check_intents()
        self.recorder.close()
        self._open()

    # What must hold

    @invariant()
    def where_every_token_stands(self) -> None:
        if not hasattr(self, "recorder"):
            return
        turns = self.recorder.turns
        if len(turns) == self.n_checked:
            return
        self.n_checked = len(turns)
        paths = trajectories(turns)
        self._check_places(turns, paths)
        self._check_account(turns, paths)
        shuffled = random.Random(len(turns)).sample(turns, len(turns))
        assert trajectories(shuffled) == paths
        self._check_store(turns)

    def _check_places(self, turns: Sequence[Turn], paths: Sequence[Trajectory]) -> None:
        """Each answer of the engine stands in one span, behind what the engine saw before it."""
        by_id = {turn.id: turn for turn in turns}
        placed: list[int] = []
        for path in paths:
            mask = [0] * len(path.response_ids)
            for span in path.spans:
                turn = by_id[span.turn_id]
                seed = turn.sampling.seed if turn.sampling else -1
                placed.append(seed)
                self._check_span(path, span.start, span.end, seed)
                assert span.reason == self._reason(turn, turns, paths)
                assert span.trained == (not span.reason)
                mask[span.start : span.end] = [int(span.trained)] * (span.end - span.start)
                assert path.weight_versions[span.start : span.end] == (
                    turn.weight_versions if span.trained else (-1,) * len(turn.response_ids)
                )
            assert path.response_mask == tuple(mask)
        assert sorted(placed) == sorted(self.engine.answered)
        assert sum(prefix_breaks(turns).values()) == max(0, len(paths) - 1)

    def _check_span(self, path: Trajectory, start: int, end: int, seed: int) -> None:
        (prompt_ids, _), answer = self.engine.asked[seed], self.engine.answered[seed]
        assert path.prompt_ids + path.response_ids[:start] == prompt_ids
        assert path.response_ids[start:end] == answer.token_ids
        trained = path.response_mask[start]
        assert path.response_logprobs[start:end] == (answer.logprobs if trained else (0.0,) * (end - start))

    def _reason(self, turn: Turn, turns: Sequence[Turn], paths: Sequence[Trajectory]) -> str:
        """Why a turn is not trained, by what the graph did with it."""
        if turn.role == "frozen":
            return f"frozen: {turn.role_reason}"
        superseded = any(
            other.site.task_id == turn.site.task_id and other.site.attempt > turn.site.attempt for other in turns
        )
        if superseded and not self._lives_on(turn, turns):
            return SUPERSEDED
        return ABORTED if turn.stop_reason == "aborted" else ""

    def _lives_on(self, turn: Turn, turns: Sequence[Turn]) -> bool:
        """Whether a turn of the last attempt of its own node goes on from this one, however many turns later."""
        for other in turns:
            if other.extends == turn.id:
                again = any(
                    each.site.task_id == other.site.task_id and each.site.attempt > other.site.attempt for each in turns
                )
                if not again or self._lives_on(other, turns):
                    return True
        return False

    def _check_account(self, turns: Sequence[Turn], paths: Sequence[Trajectory]) -> None:
        rollout = Rollout(
            id=self.recorder.rollout_id, task_id="t", phase="train", step=1, sibling=0, attempt=0,
            status="completed", reward=Reward(score=1.0, parts=()),
        )  # fmt: skip
        samples = build_samples(rollout, paths)
        result = RolloutResult(
            request=self.request, rollout=rollout, turns=tuple(turns), trajectories=tuple(paths), samples=samples
        )
        account = token_account([result], samples)
        assert account.sampled == sum(len(answer.token_ids) for answer in self.engine.answered.values())
        assert account.trained == sum(sum(path.response_mask) for path in paths)
        assert account.frozen == sum(len(turn.response_ids) for turn in turns if turn.role == "frozen")
        assert drifted(samples, {turn.id: turn for turn in turns}) == 0

    def _check_store(self, turns: Sequence[Turn]) -> None:
        """All is read as it was written."""
        self.store.flush()
        assert read_store(Path(self.folder.name)).turns(self.recorder.rollout_id) == turns

    def _check_intents(self) -> None:
        """The calls that were lost are seen, and no others."""
        self.store.flush()
        began = read_store(Path(self.folder.name)).intents_of(self.recorder.rollout_id)
        turns = self.recorder.turns
        assert len({intent.turn_id for intent in began} - {turn.id for turn in turns}) == self.seen.n_lost
        assert self.recorder.lost == self.seen.n_lost
        assert sum(turn.role == "auxiliary" for turn in turns) == self.seen.n_auxiliary


def played(*, examples: int, steps: int) -> int:
    """Steps that were made without a broken invariant."""
    N_STEPS.clear()
    run_state_machine_as_test(
        Conversations,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return sum(N_STEPS.values())


def test_every_token_has_one_place_in_random_conversations() -> None:
    """A short play with all rules; the long one is below."""
    assert played(examples=16, steps=20) >= 200
    assert len(N_STEPS) == 14


@pytest.mark.long
def test_ten_thousand_steps_without_a_broken_invariant() -> None:
    assert played(examples=250, steps=50) >= 10_000
    assert min(N_STEPS.values()) >= 100
