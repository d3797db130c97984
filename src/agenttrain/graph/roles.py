"""A call's site becomes its role (trained, frozen or auxiliary) and the reason.

Order: the `auxiliary`, `frozen` and `train` selectors; then what LangChain's own middleware asks for on the graph's one
model is frozen; then the graph's one model is trained, or frozen when `train=` names other calls. A second model that
nothing names is refused. Invariant: no role depends on the order in which threads call, only on what was called; an
order can change which call is told of a refusal, never whether there is one. Knows nothing of LangChain's objects.
"""

from __future__ import annotations

import difflib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from agenttrain.errors import RoleError
from agenttrain.records import CallSite, Role

Selector = str | Callable[[CallSite], bool]
Identity = tuple[str, str, str]

PREFIXES = ("node", "tag", "model", "source")
MISSPELT = 0.75
"""How alike a name and a node's must be for the one to be a slip for the other."""
SEQUENCE_TAG = "seq:step:"
"""Before a number, LangChain's own tag on each step of a sequence."""
STOCK_MIDDLEWARE = frozenset({"SummarizationMiddleware", "ModelRouterMiddleware", "RubricMiddleware"})
"""Middleware of LangChain and deepagents that asks a model for its own ends in a node of its own. What else does so
within the agent's nodes is told by its source only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    role: Role
    selector: Selector
    matches: Callable[[CallSite], bool]

    @property
    def text(self) -> str:
        if isinstance(self.selector, str):
            return self.selector
        return str(getattr(self.selector, "__name__", type(self.selector).__name__))


class RoleBook:
    """Who answers the model calls of one run. Thread-safe; one for all rollouts."""

    def __init__(
        self,
        *,
        train: Sequence[Selector] = (),
        frozen: Sequence[Selector] = (),
        auxiliary: Sequence[Selector] = (),
    ) -> None:
        """Read the selectors.

        Args:
            train: when given, these calls are trained and the rest of the graph's one model is frozen.
            frozen: answered by the policy, not trained.
            auxiliary: answered by the user's own model.

        Raises:
            RoleError: a selector that can't be read.
        """
        declared: tuple[tuple[Role, Sequence[Selector]], ...] = (
            ("auxiliary", auxiliary),
            ("frozen", frozen),
            ("trained", train),
        )
        self._rules = [_rule(role, selector) for role, selectors in declared for selector in selectors]
        self._trains_some = bool(train)
        self._matched: set[int] = set()
        self._standing: tuple[CallSite, ...] = ()
        self._nodes: set[str] = set()
        self._tags: set[str] = set()
        self._models: set[str] = set()
        self._sources: set[str] = set()
        self._undeclared_models: dict[Identity, str | None] = {}
        self._trained_models: dict[Identity, str | None] = {}
        self._uses: dict[Identity, str | None] = {}
        """Of each undeclared model, why it serves middleware; None once it has served the agent."""
        self._refusal: RoleError | None = None
        self._lock = threading.Lock()

    @property
    def refused(self) -> RoleError | None:
        """The first refusal, kept since the graph's own code may catch what was raised. None: there was none."""
        with self._lock:
            return self._refusal

    def role(self, site: CallSite) -> tuple[Role, str]:
        """Who answers a call made there, and why.

        Raises:
            RoleError: a second model of which nothing was declared, or a predicate that raised.
        """
        with self._lock:
            self._note(site)
            rule = self._first_match(site)
            if rule is not None and rule.role != "trained":
                return rule.role, f"{rule.role}: {rule.text}"
            if rule is not None:
                self._trained_models.setdefault(site.model_identity, site.node)
                self._refuse_second_model(site)
                return "trained", f"train: {rule.text}"
            return self._undeclared(site)

    def see(self, *, nodes: Sequence[str], models: Sequence[Identity]) -> None:
        """Take what can be seen in the graph before it runs: naming it is no slip, even where no call is made there.

        A fallback may never be asked, a summary never be due.
        """
        by_node = (CallSite(node=name, model_class="", model_name="") for name in nodes)
        by_model = (CallSite(model_class=kind, model_name=name, base_url=url) for kind, name, url in models)
        with self._lock:
            self._standing = (*by_node, *by_model)

    def unmatched(self) -> list[str]:
        """One sentence per selector that matched no call so far, with the names seen; empty when all matched.

        `frozen` and `auxiliary` selectors by the name of a node or model that stands in the graph count as matched.
        """
        with self._lock:
            return [
                self._unmatched_text(rule)
                for i, rule in enumerate(self._rules)
                if i not in self._matched and not self._stands(rule)
            ]

    def _stands(self, rule: _Rule) -> bool:
        named = isinstance(rule.selector, str) and rule.role != "trained"
        return named and any(rule.matches(site) for site in self._standing)

    def _note(self, site: CallSite) -> None:
        self._nodes.update(site.nodes)
        self._tags.update(tag for tag in site.tags if not tag.startswith(SEQUENCE_TAG))
        self._models.add(model_label(site.model_identity))
        if site.source:
            self._sources.add(site.source)

    def _first_match(self, site: CallSite) -> _Rule | None:
        first: _Rule | None = None
        for i, rule in enumerate(self._rules):
            if rule.matches(site):
                self._matched.add(i)
                first = first or rule
        return first

    def _undeclared(self, site: CallSite) -> tuple[Role, str]:
        self._undeclared_models.setdefault(site.model_identity, site.node)
        detected = detected_use(site)
        self._uses[site.model_identity] = self._uses.get(site.model_identity, detected) and detected
        self._refuse_second_model(site)
        if detected is not None:
            return "frozen", detected
        if self._trains_some:
            return "frozen", "the graph's one model, and train= names other calls"
        return "trained", "the graph's one model"

    def _refuse_second_model(self, site: CallSite) -> None:
        """Raise when some model is undeclared and is not the only one that the policy would answer for."""
        seen = {**self._undeclared_models, **self._trained_models}
        if not self._undeclared_models or len(seen) == 1:
            return
        if self._refusal is None:
            second = self._second(site.model_identity)
            one = min(identity for identity in seen if identity != second)
            self._refusal = RoleError(_second_model_text(second, seen[second], one, seen[one], self._uses.get(second)))
        raise self._refusal

    def _second(self, here: Identity) -> Identity:
        """The model to ask about: one that only serves middleware, else the one that is called, if undeclared."""
        serving = [identity for identity in self._undeclared_models if self._uses.get(identity)]
        if serving:
            return min(serving)
        return here if here in self._undeclared_models else min(self._undeclared_models)

    def _unmatched_text(self, rule: _Rule) -> str:
        keyword = _keyword(rule.role)
        if not isinstance(rule.selector, str):
            return f"{keyword}=[{rule.text}] matched no call. Nodes seen: {_listed(self._nodes)}."
        prefix, name = split_selector(rule.selector)
        seen = {"node": self._nodes, "tag": self._tags, "model": self._models, "source": self._sources}[prefix]
        close = difflib.get_close_matches(name, sorted(seen), n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        return f"{keyword}=[{rule.selector!r}] matched no call. {prefix.title()}s seen: {_listed(seen)}.{hint}"


def split_selector(selector: str) -> tuple[str, str]:
    """("node" | "tag" | "model" | "source", name) of a selector written as text.

    Raises:
        RoleError: an unknown prefix, or no name.
    """
    prefix, colon, name = selector.partition(":")
    if not colon:
        prefix, name = "node", selector
    if not name.strip():
        raise RoleError(f"The selector {selector!r} names nothing. Write a node's name, or tag:x, model:x, source:x.")
    if prefix not in PREFIXES:
        close = difflib.get_close_matches(prefix, PREFIXES, n=1)
        hint = f" Did you mean '{close[0]}:{name}'?" if close else f" For a node of that name write 'node:{selector}'."
        raise RoleError(
            f"The selector {selector!r} begins with {prefix!r}. Accepted: a node's name, node:, tag:, model:, source: "
            f"and a name, or a predicate.{hint}"
        )
    return prefix, name


def check_nodes(selectors: Mapping[str, Sequence[Selector]], nodes: Sequence[str]) -> tuple[str, ...]:
    """Refuse, before anything runs, a selector that misspells a node.

    Args:
        selectors: by keyword: train, frozen, auxiliary.
        nodes: those that can be seen before the graph runs.

    Returns:
        A note for each selector that names no such node; one may appear when the graph runs.

    Raises:
        RoleError: a name close to a node's, with the nodes seen.
    """
    notes = []
    for keyword, written in selectors.items():
        for selector in written:
            prefix, name = split_selector(selector) if isinstance(selector, str) else ("", "")
            if prefix != "node" or name in nodes:
                continue
            seen = f"{keyword}=[{selector!r}] names no node that can be seen before the graph runs. Seen: "
            seen += f"{_listed(set(nodes))}."
            close = difflib.get_close_matches(name, nodes, n=1, cutoff=MISSPELT)
            if close:
                raise RoleError(
                    f"{seen} Did you mean {close[0]!r}? For a node that is made while the graph runs write a "
                    f"predicate: lambda site: site.node == {name!r}."
                )
            notes.append(f"{seen} If no call matches it in the first evaluation, the run ends there.")
    return tuple(notes)


def detected_use(site: CallSite) -> str | None:
    """Why a call serves LangChain's own middleware and not the agent, or None."""
    if site.source:
        return f"LangChain says this call is for {site.source}"
    stock = next(filter(_is_stock, site.nodes), None)
    return f"made by {stock}" if stock else None


def _is_stock(node: str) -> bool:
    """Whether a node is a hook of such middleware, `Class.hook`; a node of the user may have the name alone."""
    middleware, dot, _ = node.partition(".")
    return bool(dot) and middleware in STOCK_MIDDLEWARE


def model_label(identity: Identity) -> str:
    """`Class:name` of a model, with its address when it has one."""
    model_class, name, base_url = identity
    label = f"{model_class}:{name}" if name else model_class
    return f"{label} at {base_url}" if base_url else label


def _rule(role: Role, selector: Selector) -> _Rule:
    if callable(selector):
        return _Rule(role=role, selector=selector, matches=_guarded(selector, _keyword(role)))
    if not isinstance(selector, str):
        raise RoleError(
            f"{_keyword(role)}= got {selector!r}. Accepted: a node's name, node:, tag:, model: or source: and a name, "
            "or a predicate that takes the call's site."
        )
    prefix, name = split_selector(selector)
    matches = {"node": _by_node, "tag": _by_tag, "model": _by_model, "source": _by_source}[prefix]
    return _Rule(role=role, selector=selector, matches=lambda site: matches(site, name))


def _guarded(predicate: Callable[[CallSite], bool], keyword: str) -> Callable[[CallSite], bool]:
    def matches(site: CallSite) -> bool:
        try:
            return bool(predicate(site))
        except Exception as error:
            name = getattr(predicate, "__name__", type(predicate).__name__)
            raise RoleError(
                f"{keyword}=[{name}] raised {type(error).__name__}: {error} for a call in node {site.node!r}. "
                "A predicate takes a CallSite and says True or False."
            ) from error

    return matches


def _by_node(site: CallSite, name: str) -> bool:
    """A subgraph's node selects all calls within."""
    return name in site.nodes


def _by_tag(site: CallSite, name: str) -> bool:
    return name in site.tags


def _by_model(site: CallSite, name: str) -> bool:
    return name in (site.model_name, site.model_class, f"{site.model_class}:{site.model_name}")


def _by_source(site: CallSite, name: str) -> bool:
    return name == site.source


def _keyword(role: Role) -> str:
    return "train" if role == "trained" else role


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _second_model_text(
    second: Identity, second_node: str | None, one: Identity, one_node: str | None, detected: str | None
) -> str:
    why = f" ({detected})" if detected else ""
    by_second = f"Node {second_node!r} calls" if second_node else "The graph calls"
    by_one = f"node {one_node!r} calls " if one_node else ""
    return (
        f"{by_second} {model_label(second)}{why}, and {by_one}{model_label(one)}: two models, and nothing says who "
        f"answers {_short(second, one)!r}. Add to @trainable: "
        f"{' or '.join(lines_to_paste(second, second_node, one))}."
    )


def lines_to_paste(second: Identity, second_node: str | None, one: Identity) -> list[str]:
    """What may be added to @trainable for a second model, each with the case it is for."""
    if second[:2] == one[:2]:
        where = f"node:{second_node or 'NAME'}"
        both = f'train=["{where}", "node:NAME"] if the policy learns both'
    else:
        where = f"model:{_short(second, one)}"
        both = f'train=["model:{_short(one, second)}", "{where}"] if the policy learns both'
    return [
        f'auxiliary=["{where}"] if your own model answers there,',
        f'frozen=["{where}"] if the policy answers there and is not trained on it,',
        both,
    ]


def _short(identity: Identity, other: Identity) -> str:
    """The shortest name that selects this model and not the other one."""
    model_class, name, _ = identity
    if not name:
        return model_class
    return name if name != other[1] else f"{model_class}:{name}"
