"""A trained policy answers the model calls of a graph, for a block (`use`), for a server (`attach`) or by conversation.

Opened lazily: engine and tokenizer with the first call, the gate with the first run of a graph, and out after the last;
other LangChain calls of the process go to their own models. Whoever serves one policy in one process shares its engine,
so concurrent requests batch there. What the roles of the run give to the user's own models stays theirs. Where
"promoted" is named, what answers a conversation is what the ledger says, followed while the process runs.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from agenttrain.capture.served import ServedCalls
from agenttrain.config import environment
from agenttrain.errors import ConfigError, PromotionError, RoleError
from agenttrain.graph.effects import open_effects
from agenttrain.graph.intercept import open_serving_gate, use_route
from agenttrain.graph.load import load_graph, load_module
from agenttrain.graph.roles import RoleBook
from agenttrain.graph.served import served_graph, thread_here
from agenttrain.plugins import Plugins
from agenttrain.promotion.ledger import Ledger
from agenttrain.promotion.outcomes import Outcomes
from agenttrain.records import CallSite, Role
from agenttrain.serving.arms import Arms, LedgerArms, ledger_named, open_arms
from agenttrain.serving.canary_trial import trial_of
from agenttrain.serving.served_policy import ServedSource
from agenttrain.serving.served_run import GraphRun, Outcome, ServedRoute, checked_outcome, served_by
from agenttrain.serving_mark import Served, current_serving_is
from agenttrain.trainable import Selector, Trainable, trainable_of


def use(run: str | Path, *, auxiliary: Sequence[Selector] = ()) -> Serving:
    """Let a trained policy answer the model calls of a block; for `with` and `async with`.

    The calls of any graph or model within are meant, also in tasks begun there and in threads that copy the context.
    Open it once around what serves many requests: the first call loads the policy, and the end of the block unloads it.
    A conversation is a LangGraph thread, or the block where a call has none.

    Args:
        run: an id under runs/, the path of a run, the folder of a policy, or what the ledger says: "promoted",
            "promoted:NAME" or the path of promotions/NAME.
        auxiliary: selectors of calls that stay with the user's own models, beside those of the run's @trainable.

    Raises:
        RunError: there is no such run, or it has no policy.
        ConfigError: a run that another version of agenttrain wrote with keys unknown here.
        PromotionError: there is no such ledger, it is damaged, or what serves is not as it was promoted.

    Example:
        with agenttrain.use("runs/desk-20260101-120000-abcd"):
            graph.invoke({"messages": [("user", "Where is A41?")]})
    """
    return Serving(open_arms(str(run)), target=None, auxiliary=auxiliary)


def attach(graph: Any, run: str | Path, *, auxiliary: Sequence[Selector] = (), outcome: Outcome | None = None) -> Any:
    """The graph with a trained policy inside, for servers; a langgraph.json may name what is given.

    It runs like the graph itself, in every way to run one, keeps its LangGraph checkpointer and store, and may be used
    from several threads and event loops at once. `close()` unloads the policy; so does the end of the process. A
    conversation is a LangGraph thread, or the run where it has none.

    Args:
        graph: a compiled graph, an @entrypoint, a StateGraph, or a function that gives one. It is not changed.
        run: an id under runs/, the path of a run, the folder of a policy, or what the ledger says: "promoted",
            "promoted:NAME" or the path of promotions/NAME.
        auxiliary: selectors of calls that stay with the user's own models, beside those of @trainable.
        outcome: called with (input, state) after each run that has ended; gives whether it succeeded: a bool, a number
            (1 and more is a success), or None where that isn't known. It counts while a canary is tried, and is kept
            nowhere else. Without it a run that ended counts as a success, until `record_outcome` is told how one went.
            A run that raised is a failure.

    Raises:
        GraphError: `graph` is no graph.
        RunError: there is no such run, or it has no policy.
        PromotionError: there is no such ledger, it is damaged, or what serves is not as it was promoted.
        ConfigError: `outcome` can't be called with an input and a state.

    Example:
        served = agenttrain.attach(builder.compile(checkpointer=saver), "promoted", outcome=refunded)
        served.invoke({"messages": [("user", "Where is A41?")]}, {"configurable": {"thread_id": "7"}})
    """
    noted, outcome = trainable_of(graph), checked_outcome(outcome)
    beside = Path(noted.file).parent.name if noted is not None else None
    arms = open_arms(str(run), holds_back=True, beside=beside)
    serving = Serving(arms, target=graph, auxiliary=auxiliary, outcome=outcome)
    return served_graph(graph, serving.run, serving.close)


def open_serving(run: str | Path, *, auxiliary: Sequence[Selector] = (), engine: str | None = None) -> Serving:
    """A trained policy for a server that is asked directly, with no graph of this process; `close()` ends it.

    Args:
        run: as in `attach`.
        engine: name of another engine than the run's.

    Raises:
        RunError: there is no such run, or it has no policy.
        PromotionError: there is no such ledger, it is damaged, or what serves is not as it was promoted.
    """
    serving = Serving(open_arms(str(run), engine=engine), target=None, auxiliary=auxiliary)
    serving.hold()
    return serving


def record_outcome(
    conversation: str, success: bool | float | None, *, run: str | Path = "promoted", why: str = ""
) -> bool:
    """Tell how a conversation went, from any process, while a canary is tried; the last word about it counts.

    Args:
        conversation: LangGraph's thread_id, or `current_serving().conversation`.
        success: a number is a success from 1 on. None: it isn't known, and nothing is done.
        run: which ledger: "promoted", "promoted:NAME" or the path of promotions/NAME.
        why: in words.

    Returns:
        Whether it counts: not without a canary, nor for a conversation that no process began to answer since then.

    Raises:
        PromotionError: there is no such ledger, it can't be written, or `success` is neither a bool nor a number.
    """
    folder = ledger_named(str(run))
    if folder is None:
        raise PromotionError(f"{str(run)!r} is no ledger. Write 'promoted', 'promoted:NAME' or promotions/NAME.")
    ledger = Ledger(folder.resolve())
    with closing(Outcomes(ledger.folder)) as outcomes:
        trial = trial_of(ledger, outcomes, ledger.entries())
        return trial is not None and trial.record(conversation, success, why=why)


class Serving:
    """One `use`, `attach` or server: whose calls are answered, by which policy, in which roles."""

    def __init__(
        self, arms: Arms, *, target: Any, auxiliary: Sequence[Selector], outcome: Outcome | None = None
    ) -> None:
        """Note who serves; nothing is loaded before the first call."""
        self._arms, self._target, self._auxiliary, self._outcome = arms, target, tuple(auxiliary), outcome
        RoleBook(auxiliary=self._auxiliary)  # tells of a selector that can't be read
        self._roles: dict[Path, Callable[[CallSite], tuple[Role, str]]] = {}
        self._block: ExitStack | None = None

    def __enter__(self) -> Serving:
        if self._block is not None:
            raise ConfigError("This use(RUN) is open already. Call agenttrain.use(RUN) again for another block.")
        block = f"block-{uuid.uuid4().hex}"
        with ExitStack() as stack:
            stack.callback(self.close)
            stack.enter_context(self._gate())
            stack.enter_context(use_route(ServedRoute(self, lambda: thread_here() or block)))
            stack.enter_context(current_serving_is(lambda: self.served(thread_here() or block)))
            self._block = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        block, self._block = self._block, None
        if block is not None:
            block.close()

    async def __aenter__(self) -> Serving:
        return self.__enter__()

    async def __aexit__(self, *error: object) -> None:
        self.__exit__(*error)

    @contextmanager
    def run(self, thread: str | None) -> Iterator[GraphRun]:
        """One run of the graph, with the gate in.

        Args:
            thread: LangGraph's thread_id. None: the run is a conversation of its own.
        """
        conversation = thread or f"run-{uuid.uuid4().hex}"
        with self._gate():
            arm = self._arms.begun(conversation)
            run = GraphRun(
                answers=self,
                arms=self._arms,
                conversation=conversation,
                arm=arm,
                trial=self._arms.trial,
                outcome=self._outcome,
                noted=lambda arm: self._noted(arm.source),
            )
            try:
                with closing(run):
                    yield run
            finally:
                self._arms.ended(conversation, arm, is_single=thread is None)

    def hold(self) -> None:
        """Serve from now on; nothing is loaded before the first call."""
        self._arms.hold()

    def close(self) -> None:
        """Serve no more; what nobody else serves is unloaded."""
        self._arms.close()

    @property
    def loaded(self) -> ServedCalls | None:
        """What answers a new conversation, but for a canary's. None: it is not loaded yet."""
        return self._arms.incumbent.loaded

    def calls(self) -> ServedCalls:
        """The same; blocks until it is loaded."""
        return self._arms.incumbent.calls()

    def loaded_for(self, conversation: str) -> ServedCalls | None:
        """What answers a conversation. None: it is not loaded yet."""
        found = self.answering_loaded(conversation)
        return found and found[0]

    def calls_for(self, conversation: str) -> ServedCalls:
        """What answers a conversation; blocks until it is loaded.

        Args:
            conversation: the same text for all calls of one conversation.

        Raises:
            AgenttrainError: it can't be loaded; a canary that can't be is not tried.
        """
        return self.answering(conversation)[0]

    def answering(self, conversation: str) -> tuple[ServedCalls, Served]:
        """What answers a conversation, and which policy that is; blocks and raises as `calls_for` does."""
        arm = self._arms.arm_for(conversation)
        try:
            return arm.calls(), served_by(arm, conversation)
        except Exception as error:
            self._arms.refuse(arm, error)
            arm = self._arms.incumbent
            return arm.calls(), served_by(arm, conversation)

    def answering_loaded(self, conversation: str) -> tuple[ServedCalls, Served] | None:
        """The same without blocking. None: it is not loaded yet."""
        arm = self._arms.arm_for(conversation)
        calls = arm.loaded
        return None if calls is None else (calls, served_by(arm, conversation))

    def served(self, conversation: str) -> Served:
        """Which policy answers a conversation, and whether it is a canary."""
        return served_by(self._arms.arm_for(conversation), conversation)

    def record_outcome(self, conversation: str, success: bool | float | None, *, why: str = "") -> bool:
        """Note how a conversation went; the last word about it counts.

        Args:
            success: a number is a success from 1 on. None: nothing is known.
            why: in words.

        Returns:
            Whether it counts: only while a canary is tried, and not for a conversation that began before.

        Raises:
            PromotionError: it can't be written, or `success` is neither a bool nor a number.
        """
        self._arms.follow()
        trial = self._arms.trial
        return trial is not None and trial.record(conversation, success, why=why)

    def record_failure(self, conversation: str, *, why: str) -> bool:
        """Note that a conversation got no answer, as of a run that raised: a failure of whichever arm answers it."""
        self._arms.follow()
        trial = self._arms.trial
        return trial is not None and trial.record(conversation, False, source="raised", why=why)

    def describe(self) -> dict[str, Any]:
        """What serves, since when, and how a canary does, as JSON takes it."""
        arms = self._arms
        arms.follow()
        entry, trial = arms.incumbent.entry, arms.trial
        return {
            "promotion": str(arms.ledger.folder) if isinstance(arms, LedgerArms) else None,
            "serves": arms.incumbent.source.run_id,
            "since": entry.at if entry is not None else None,
            "canary": trial.describe() if trial is not None else None,
        }

    def role(self, site: CallSite, *, conversation: str) -> tuple[Role, str]:
        """Who answers a call, by the run's selectors.

        Raises:
            RoleError: a second model of which nothing was declared.
        """
        source = self._arms.arm_for(conversation).source
        role_of = self._roles.get(source.policy)
        if role_of is None:
            role_of = self._roles[source.policy] = _roles(source, self._target, self._auxiliary)
        try:
            return role_of(site)
        except RoleError as error:
            raise RoleError(f"{error} Where a policy serves: use(RUN, auxiliary=[…]).") from None

    def _noted(self, source: ServedSource) -> Trainable | None:
        return _noted(source, self._target)[0]

    @contextmanager
    def _gate(self) -> Iterator[None]:
        self.hold()
        with open_serving_gate(), open_effects({}):
            yield


class _ServedRoles(RoleBook):
    """A role book for a process without end: it keeps no names of nodes and tags, which may be new in each request."""

    def _note(self, site: CallSite) -> None:
        """Nothing: what was seen is only told of selectors that match nothing."""


def _noted(source: ServedSource, target: Any) -> tuple[Trainable | None, ModuleType | None]:
    """(what is noted of the graph itself, else of its run's; the module of its file, where it can be had)."""
    noted = trainable_of(target)
    module = _module(source, Path(noted.file) if noted is not None else None)
    if noted is None and module is not None:
        noted = trainable_of(getattr(module, source.attribute, None))
    return noted, module


def _roles(source: ServedSource, target: Any, auxiliary: Sequence[Selector]) -> Callable[[CallSite], tuple[Role, str]]:
    """By the selectors of the graph's own @trainable, else of the run's; a hook's word comes first, also graph.py's."""
    noted, module = _noted(source, target)
    plugins = source.plugins
    if module is not None:
        plugins = Plugins.load(only=environment("AGENTTRAIN_PLUGINS"), graph_module=module)
    book = (
        _ServedRoles(train=noted.train, frozen=noted.frozen, auxiliary=(*auxiliary, *noted.auxiliary))
        if noted is not None
        else _ServedRoles(auxiliary=auxiliary)
    )
    return lambda site: plugins.decide_role(site) or book.role(site)


def _module(source: ServedSource, file: Path | None) -> ModuleType | None:
    """Of the file that notes the graph, else of the run's graph.py: what a server has imported where there is one."""
    file = file or source.graph_file
    if file is None:
        return None
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str) and path.endswith(file.name) and Path(path).resolve() == file:
            return module
    if file != source.graph_file or not file.is_file():
        return None
    return load_module(load_graph(f"{file}:{source.attribute}").file)
