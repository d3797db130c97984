"""What LangGraph keeps in memory beside a graph becomes each rollout's own, so that siblings are independent samples.

Inside a rollout LangGraph's InMemoryStore reads and writes a copy, which begins as the store stands at the rollout's
first use of it; an InMemorySaver begins empty; an InMemoryCache holds nothing. It makes no difference who reaches them:
the graph, one nested in it with a config of its own, a tool with the object in a closure, the setup or a verifier.
Classes are changed when the first `open_isolation` opens and put back after the last closes. Invariant: no rollout
changes an object of the user. Stores and LangGraph checkpointers outside of the process are left as they are.

Source: langgraph 1.0 to 1.2, store/memory, checkpoint/memory, cache/memory.
"""

from __future__ import annotations

import contextvars
import copy
import functools
import inspect
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from langgraph.cache.memory import InMemoryCache
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.store.base import Item, SearchItem
from langgraph.store.memory import InMemoryStore


class Own:
    """The copies of one rollout, by the identity of what they were made of, which is kept alive meanwhile."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Any, Any]] = {}
        self._lock = threading.Lock()

    def of(self, held: Any, make: Callable[[], Any]) -> Any:
        """The copy that stands for an object, made once."""
        with self._lock:
            if id(held) not in self._copies:
                made = make()
                self._copies[id(held)] = held, made
                self._copies[id(_contents(made))] = _contents(made), made
            return self._copies[id(held)][1]


_own: contextvars.ContextVar[Own | None] = contextvars.ContextVar("agenttrain_isolation", default=None)
_lock = threading.Lock()
_n_open = 0
_originals: list[tuple[type, str, Any]] = []


@contextmanager
def open_isolation() -> Iterator[None]:
    """Let `isolated` work in a block; nested and concurrent openings share it."""
    global _n_open
    with _lock:
        if _n_open == 0:
            _install()
        _n_open += 1
    try:
        yield
    finally:
        with _lock:
            _n_open -= 1
            if _n_open == 0:
                _uninstall()


@contextmanager
def isolated() -> Iterator[None]:
    """One rollout: everything in the block, and in tasks and context-copying threads begun there, shares its copies."""
    token = _own.set(Own())
    try:
        yield
    finally:
        _own.reset(token)


def _install() -> None:
    """Change the classes, or none of them."""
    try:
        _replace(InMemoryStore, "batch", _batch)
        _replace(InMemoryStore, "abatch", _abatch)
        for name, function in list(vars(InMemorySaver).items()):
            if _reads_or_writes(name, function):
                _replace(InMemorySaver, name, _of_own_saver)
        _replace(InMemoryCache, "get", _nothing)
        _replace(InMemoryCache, "set", _nowhere)
        _replace(InMemoryCache, "clear", _nowhere)
    except BaseException:
        _uninstall()
        raise


def _uninstall() -> None:
    while _originals:
        kind, name, original = _originals.pop()
        setattr(kind, name, original)


def _replace(kind: type, name: str, replacement: Callable[[Any], Any]) -> None:
    original = vars(kind)[name]
    _originals.append((kind, name, original))
    setattr(kind, name, functools.wraps(original)(replacement(original)))


def _reads_or_writes(name: str, function: Any) -> bool:
    """Of a saver's methods those that touch what it holds; its async ones call them."""
    is_async = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
    return inspect.isfunction(function) and not is_async and not name.startswith("_") and name != "get_next_version"


def _contents(held: Any) -> Any:
    """What tells two apart: LangGraph clones a saver for a run, and the clones share what they hold."""
    return held.storage if isinstance(held, InMemorySaver) else held


def _batch(original: Any) -> Any:
    def batch(self: InMemoryStore, ops: Any) -> Any:
        own = _own.get()
        if own is None:
            return original(self, ops)
        store = own.of(self, lambda: _copied(self))
        return _of_rollout(store, original(store, ops))

    return batch


def _abatch(original: Any) -> Any:
    async def abatch(self: InMemoryStore, ops: Any) -> Any:
        own = _own.get()
        if own is None:
            return await original(self, ops)
        store = own.of(self, lambda: _copied(self))
        return _of_rollout(store, await original(store, ops))

    return abatch


def _copied(store: InMemoryStore) -> InMemoryStore:
    """A store that shares its items; each is copied when it is first read, since code may change it in place.

    The user's own code may write to it meanwhile: `list` of a dict's items is one step, a loop over them is not.
    """
    made = copy.copy(store)
    made._data = defaultdict(dict, {space: dict(items) for space, items in list(store._data.items())})
    vectors = {space: _vectors_copied(by_key) for space, by_key in list(store._vectors.items())}
    made._vectors = defaultdict(lambda: defaultdict(dict), vectors)
    return made


def _vectors_copied(by_key: Any) -> Any:
    return defaultdict(dict, {key: dict(by_path) for key, by_path in list(by_key.items())})


class _OwnItem(Item):
    """An item of one rollout alone: what code changes in it stays, as it does in the store itself."""

    __slots__ = ()


def _of_rollout(store: InMemoryStore, found: Any) -> Any:
    """What was read from a rollout's copy, without a value that is anyone else's."""
    if isinstance(found, list):
        return [_of_rollout(store, each) for each in found]
    if not isinstance(found, Item):
        return found
    held = store._data.get(found.namespace, {}).get(found.key)
    is_held = held is not None and held.value is found.value  # the same batch may have put another
    own = held if is_held and isinstance(held, _OwnItem) else _own_item(found)
    if is_held:
        store._data[found.namespace][found.key] = own
    if isinstance(found, SearchItem):
        found.value = own.value
        return found
    return own


def _own_item(item: Item) -> _OwnItem:
    try:
        value = copy.deepcopy(item.value)
    except Exception:  # a value of a store may be anything
        value = item.value
    return _OwnItem(
        value=value,
        key=item.key,
        namespace=item.namespace,
        created_at=item.created_at,
        updated_at=item.updated_at,
    )


def _of_own_saver(original: Any) -> Any:
    def of_own_saver(self: InMemorySaver, *args: Any, **kwargs: Any) -> Any:
        own = _own.get()
        if own is not None:
            self = own.of(self.storage, lambda: InMemorySaver(serde=self.serde))
        return original(self, *args, **kwargs)

    return of_own_saver


def _nothing(original: Any) -> Any:
    def get(self: Any, keys: Any) -> Any:
        return original(self, keys) if _own.get() is None else {}

    return get


def _nowhere(original: Any) -> Any:
    def change(self: Any, *args: Any, **kwargs: Any) -> None:
        if _own.get() is None:
            original(self, *args, **kwargs)

    return change
