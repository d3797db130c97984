"""LangGraph's objects in memory are each rollout's own while a run is open, and themselves again afterwards."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from langgraph.cache.memory import InMemoryCache
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.store.base import GetOp, Item, PutOp
from langgraph.store.memory import InMemoryStore

from agenttrain.graph.isolation import Own, isolated, open_isolation


def held_by_classes() -> list[Any]:
    return [dict(vars(kind)) for kind in (InMemoryStore, InMemorySaver, InMemoryCache)]


def test_classes_are_back_after_the_last_opening() -> None:
    before = held_by_classes()
    with open_isolation():
        with open_isolation():
            assert held_by_classes() != before
        assert held_by_classes() != before
    assert held_by_classes() == before


def test_outside_of_a_rollout_nothing_changes() -> None:
    store, cache = InMemoryStore(), InMemoryCache[Any]()
    with open_isolation():
        store.put(("a",), "k", {"x": 1})
        cache.set({(("n",), "k"): ("v", None)})
        assert cache.get([(("n",), "k")]) == {(("n",), "k"): "v"}
    assert store.get(("a",), "k").value == {"x": 1}  # type: ignore[union-attr]


def test_a_rollout_clears_no_cache_of_the_user() -> None:
    cache = InMemoryCache[Any]()
    cache.set({(("n",), "k"): ("v", None)})
    with open_isolation(), isolated():
        assert cache.get([(("n",), "k")]) == {}
        cache.clear()
        asyncio.run(cache.aclear([("n",)]))
    assert cache.get([(("n",), "k")]) == {(("n",), "k"): "v"}


def test_an_opening_that_fails_halfway_changes_no_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later LangGraph may have no such method; what was changed before it is missed is put back."""
    clear = InMemoryCache.clear
    monkeypatch.delattr(InMemoryCache, "clear")
    before = held_by_classes()
    with pytest.raises(KeyError, match="clear"), open_isolation():
        pass
    assert held_by_classes() == before
    monkeypatch.setattr(InMemoryCache, "clear", clear, raising=False)
    with open_isolation():
        assert held_by_classes() != before


def test_a_copy_begins_as_the_store_stands_at_its_first_use() -> None:
    store = InMemoryStore()
    store.put(("a",), "k", {"x": 1})
    with open_isolation():
        with isolated():
            store.put(("a",), "k", {"x": 2})
            store.delete(("a",), "k")
            assert store.list_namespaces() == [("a",)]
            assert store.get(("a",), "k") is None
        with isolated():
            assert store.get(("a",), "k").value == {"x": 1}  # type: ignore[union-attr]


def test_a_copy_searches_by_its_own_texts() -> None:
    """What a rollout puts over an item is found in the rollout, and what it was is found outside."""

    def embed(texts: Sequence[str]) -> list[list[float]]:
        return [[0.0, 1.0] if "dog" in text else [1.0, 0.0] for text in texts]

    store = InMemoryStore(index={"dims": 2, "embed": embed})
    store.put(("a",), "k", {"text": "cat"})
    with open_isolation(), isolated():
        assert store.search(("a",), query="cat")[0].score == 1
        store.put(("a",), "k", {"text": "dog"})
        assert store.search(("a",), query="cat")[0].score == 0
    assert store.search(("a",), query="cat")[0].score == 1


def test_a_copy_stands_for_itself() -> None:
    """Where LangGraph calls one of its methods from another."""
    own, store, saver = Own(), InMemoryStore(), InMemorySaver()
    copies = own.of(store, InMemoryStore), own.of(saver.storage, InMemorySaver)
    assert own.of(copies[0], InMemoryStore) is copies[0]
    assert own.of(copies[1].storage, InMemorySaver) is copies[1]


def test_what_is_read_may_be_changed_in_place() -> None:
    """As in the store itself, a change stays without a put; no other rollout and no user sees it."""
    store = InMemoryStore()
    store.put(("a",), "k", {"x": [1]})
    store.put(("a",), "l", {"x": []})
    for _ in range(2):
        with open_isolation(), isolated():
            store.get(("a",), "k").value["x"].append(2)  # type: ignore[union-attr]
            asyncio.run(store.aget(("a",), "k")).value["x"].append(3)  # type: ignore[union-attr]
            store.search(("a",), filter={"x": [1, 2, 3]})[0].value["x"].append(4)
            assert store.get(("a",), "k").value == {"x": [1, 2, 3, 4]}  # type: ignore[union-attr]
            assert [item.value for item in store.search(("a",))] == [{"x": [1, 2, 3, 4]}, {"x": []}]
    assert store.get(("a",), "k").value == {"x": [1]}  # type: ignore[union-attr]


def test_what_the_same_batch_replaces_is_read_as_it_was() -> None:
    store = InMemoryStore()
    store.put(("a",), "k", {"x": [1]})
    with open_isolation(), isolated():
        before, _ = store.batch([GetOp(("a",), "k"), PutOp(("a",), "k", {"x": [2]})])
        assert isinstance(before, Item)
        before.value["x"].append(3)
        assert store.get(("a",), "k").value == {"x": [2]}  # type: ignore[union-attr]
    assert store.get(("a",), "k").value == {"x": [1]}  # type: ignore[union-attr]


def test_the_user_may_write_to_a_store_while_it_is_copied() -> None:
    store = InMemoryStore()

    class WrittenMeanwhile(dict[str, Item]):
        __iter__ = None  # type: ignore[assignment]  # or copying asks for no keys

        def keys(self) -> Any:
            store._data[("b",)] = {}
            return super().keys()

    store.put(("a",), "k", {"x": 1})
    store._data[("a",)] = WrittenMeanwhile(store._data[("a",)])
    with open_isolation(), isolated():
        assert store.get(("a",), "k").value == {"x": 1}  # type: ignore[union-attr]
    assert ("b",) in store._data


def test_a_value_that_cannot_be_copied_is_given_as_it_is() -> None:
    store, lock = InMemoryStore(), threading.Lock()
    with open_isolation(), isolated():
        store.put(("a",), "k", {"lock": lock})
        assert store.get(("a",), "k").value["lock"] is lock  # type: ignore[union-attr]


def test_threads_that_copy_the_context_share_the_rollouts_copy() -> None:
    store = InMemoryStore()
    with open_isolation(), isolated():
        context = contextvars.copy_context()
        thread = threading.Thread(target=lambda: context.run(store.put, ("a",), "k", {"x": 1}))
        thread.start()
        thread.join()
        assert store.get(("a",), "k").value == {"x": 1}  # type: ignore[union-attr]
    assert store.get(("a",), "k") is None


def test_a_subclass_of_a_store_is_apart_too() -> None:
    class Counting(InMemoryStore):
        n = 0

        def batch(self, ops: Any) -> Any:
            type(self).n += 1
            return super().batch(ops)

    store = Counting()
    with open_isolation(), isolated():
        store.put(("a",), "k", {"x": 1})
        assert store.get(("a",), "k").value == {"x": 1}  # type: ignore[union-attr]
    assert store.get(("a",), "k") is None
    assert Counting.n == 3
