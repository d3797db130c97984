"""Who answers a call, and why."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest

from agenttrain.errors import RoleError
from agenttrain.graph.roles import RoleBook
from agenttrain.records import CallSite


def site(node: str = "agent", model: str = "gpt-4o", **fields: Any) -> CallSite:
    return CallSite(node=node, model_class="ChatOpenAI", model_name=model, **fields)


def test_the_graphs_one_model_is_trained() -> None:
    """Wherever it is called, whatever its settings."""
    book = RoleBook()
    assert book.role(site()) == ("trained", "the graph's one model")
    assert book.role(site("writer")) == ("trained", "the graph's one model")
    assert book.refused is None


def test_auxiliary_wins_over_frozen_wins_over_train() -> None:
    """A call that several selectors name."""
    book = RoleBook(train=["agent"], frozen=["agent", "b"], auxiliary=["tag:judge"])
    assert book.role(site(tags=("judge",))) == ("auxiliary", "auxiliary: tag:judge")
    assert book.role(site()) == ("frozen", "frozen: agent")
    assert [text.partition(" matched")[0] for text in book.unmatched()] == ["frozen=['b']"]


@pytest.mark.parametrize(
    ("selector", "matching"),
    [
        ("agent", site()),
        ("node:agent", site()),
        ("team", site(checkpoint_ns="team:1|agent:2")),
        ("tag:judge", site(tags=("a", "judge"))),
        ("model:gpt-4o", site()),
        ("model:ChatOpenAI:gpt-4o", site()),
        ("model:ChatOpenAI", site()),
        ("source:title", site(source="title")),
        (lambda s: s.step == 3, site(step=3)),
    ],
)
def test_every_kind_of_selector(selector: Any, matching: CallSite) -> None:
    """A node (also one around a subgraph), a tag, a model, a source, a predicate; and it matches nothing else."""
    book = RoleBook(frozen=[selector])
    assert book.role(matching)[0] == "frozen"
    assert book.role(CallSite(node="other", model_class="Other", model_name="other"))[0] == "trained"


def test_with_train_the_rest_of_the_model_is_frozen() -> None:
    """What must not be trained is said with the reason."""
    book = RoleBook(train=["planner"])
    assert book.role(site("writer")) == ("frozen", "the graph's one model, and train= names other calls")
    assert book.role(site("planner")) == ("trained", "train: planner")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"source": "summarization"}, "LangChain says this call is for summarization"),
        (
            {"checkpoint_ns": "SummarizationMiddleware.before_model:1"},
            "made by SummarizationMiddleware.before_model",
        ),
        ({"checkpoint_ns": "RubricMiddleware.after_agent:1|model:2"}, "made by RubricMiddleware.after_agent"),
        ({"checkpoint_ns": "ModelRouterMiddleware.before_agent:1"}, "made by ModelRouterMiddleware.before_agent"),
        ({"source": "middleware"}, "LangChain says this call is for middleware"),
    ],
)
def test_middlewares_own_calls_are_frozen(fields: dict[str, Any], reason: str) -> None:
    """On the graph's one model, with why; a train selector still wins."""
    assert RoleBook().role(site(**fields)) == ("frozen", reason)
    assert RoleBook(train=["model:gpt-4o"]).role(site(**fields))[0] == "trained"


def test_a_users_node_of_such_a_name_is_trained() -> None:
    """LangChain's nodes are hooks, `SummarizationMiddleware.before_model`."""
    within = site(checkpoint_ns="SummarizationMiddleware:1|agent:2")
    assert RoleBook().role(within) == ("trained", "the graph's one model")


def test_a_second_model_is_refused_with_the_line_to_paste() -> None:
    """Both models and nodes are named, and every later call of the run hears the same."""
    book = RoleBook()
    book.role(site())
    with pytest.raises(RoleError) as raised:
        book.role(site("judge", "gpt-4o-mini"))
    text = str(raised.value)
    assert "Node 'judge' calls ChatOpenAI:gpt-4o-mini, and node 'agent' calls ChatOpenAI:gpt-4o" in text
    assert 'auxiliary=["model:gpt-4o-mini"]' in text
    assert 'train=["model:gpt-4o", "model:gpt-4o-mini"]' in text
    assert book.refused is raised.value
    with pytest.raises(RoleError):
        book.role(site())


def test_the_line_to_paste_works() -> None:
    """Either one, pasted, lets both models call."""
    calls = [site(), site("judge", "gpt-4o-mini")]
    judged = RoleBook(auxiliary=["model:gpt-4o-mini"])
    assert [judged.role(call)[0] for call in calls] == ["trained", "auxiliary"]
    both = RoleBook(train=["model:gpt-4o", "model:gpt-4o-mini"])
    assert [both.role(call)[0] for call in calls] == ["trained", "trained"]


def test_a_summary_by_another_model_is_not_decided_silently() -> None:
    """The line to paste names the model of the summaries, and says why, whichever comes first."""
    summary = site("m", "gpt-4o-mini", source="summarization")
    for calls in ([site(), summary], [summary, site()]):
        book = RoleBook()
        book.role(calls[0])
        with pytest.raises(RoleError, match="two models") as raised:
            book.role(calls[1])
        assert "calls ChatOpenAI:gpt-4o-mini (LangChain says this call is for summarization)" in str(raised.value)
        assert 'auxiliary=["model:gpt-4o-mini"]' in str(raised.value)


def test_a_model_that_serves_the_agent_too_is_not_the_one_to_ask_about() -> None:
    """Though middleware calls it as well, before or after."""
    for source in ((None, "summarization"), ("summarization", None)):
        book = RoleBook()
        for each in source:
            book.role(site(source=each))
        with pytest.raises(RoleError, match=r"^Node 'judge' calls ChatOpenAI:gpt-4o-mini, and node 'agent' calls "):
            book.role(site("judge", "gpt-4o-mini"))


def test_one_name_at_two_addresses_is_two_models() -> None:
    """They can only be told apart by node."""
    book = RoleBook()
    book.role(site(base_url="http://a"))
    with pytest.raises(RoleError, match=r'auxiliary=\["node:judge"\]'):
        book.role(site("judge", base_url="http://b"))


def test_no_order_of_calls_hides_a_second_model() -> None:
    """Any order of a trained node, another model and the rest is refused; without the other model none is."""
    for order in itertools.permutations([site("planner"), site("writer"), site("judge", "other")]):
        book = RoleBook(train=["planner"])
        refusals = 0
        for call in order:
            try:
                book.role(call)
            except RoleError:
                refusals += 1
        assert refusals >= 1
    for order in itertools.permutations([site("planner"), site("writer")]):
        book = RoleBook(train=["planner"])
        assert {call.node: book.role(call)[0] for call in order} == {"planner": "trained", "writer": "frozen"}


def test_threads_get_the_roles_that_one_thread_gets() -> None:
    """Eight threads ask at once."""
    book = RoleBook(frozen=["summarize"])
    said: list[tuple[str | None, str]] = []

    def ask() -> None:
        said.extend((node, book.role(site(node))[0]) for node in ("agent", "summarize") * 50)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(said) == {("agent", "trained"), ("summarize", "frozen")}


def test_selectors_that_matched_nothing_are_told_with_the_names_seen() -> None:
    """With the nearest name; one that matched but lost to another is no such selector."""

    def late(site: CallSite) -> bool:
        return False

    book = RoleBook(train=["agent"], frozen=["sumarize", late], auxiliary=["tag:judge"])
    book.role(site())
    book.role(site("summarize", tags=("fast",)))
    assert book.unmatched() == [
        "auxiliary=['tag:judge'] matched no call. Tags seen: fast.",
        "frozen=['sumarize'] matched no call. Nodes seen: agent, summarize. Did you mean 'summarize'?",
        "frozen=[late] matched no call. Nodes seen: agent, summarize.",
    ]


def test_what_stands_in_the_graph_is_no_slip() -> None:
    """A summary that was never due, a fallback that was never asked; but train= must name what is called."""
    selectors = {"frozen": ["summarize", "tag:late"], "auxiliary": ["model:gpt-4o-mini"], "train": ["writer"]}
    book = RoleBook(**selectors)  # type: ignore[arg-type]
    book.see(nodes=["agent", "summarize", "writer"], models=[("ChatOpenAI", "gpt-4o-mini", "")])
    book.role(site())
    assert book.unmatched() == [
        "frozen=['tag:late'] matched no call. Tags seen: none.",
        "train=['writer'] matched no call. Nodes seen: agent.",
    ]


@pytest.mark.parametrize(
    ("selector", "message"),
    [
        ("nod:agent", r"Did you mean 'node:agent'\?"),
        ("a:b", r"write 'node:a:b'"),
        ("tag:", r"names nothing"),
        (3, r"frozen= got 3\. Accepted"),
    ],
)
def test_a_selector_that_cant_be_read_is_refused(selector: Any, message: str) -> None:
    """Before anything runs, with what is accepted."""
    with pytest.raises(RoleError, match=message):
        RoleBook(frozen=[selector])


def test_a_predicate_that_raises_is_named() -> None:
    """With the node whose call it was asked about."""

    def picky(site: CallSite) -> bool:
        raise KeyError("x")

    with pytest.raises(RoleError, match=r"frozen=\[picky\] raised KeyError.* node 'agent'"):
        RoleBook(frozen=[picky]).role(site())
