"""Every way of weights into the real server: its answers are then those of the new weights."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from agenttrain.errors import EngineError

from agenttrain_sglang.weights import SPOILED, Link, Pushed, ServerSpoiled, Snapshot, Tags, WeightsRefused, push

pytestmark = pytest.mark.sglang
Linked = Callable[..., Link]
SMALL_MIB = 0.01
WAYS = ["group", "tensor", "disk"]


def pushed(link: Link, weights: Any, tag: str, **how: Any) -> Pushed:
    """What became of a push to one server; its error is raised."""
    outcome = push([link], weights, tag, bucket_mib=how.pop("bucket_mib", SMALL_MIB), **how)[link.address]
    if isinstance(outcome, EngineError):
        raise outcome
    return outcome


def version(ask: Any, address: str) -> str:
    return str(ask(address, "/model_info")["weight_version"])


def no_thread_is_left() -> bool:
    return not any(thread.name.startswith("agenttrain-weights") for thread in threading.enumerate())


@pytest.fixture
def snapshot(tmp_path: Path) -> Snapshot:
    return Snapshot(tmp_path / "snapshot")


@pytest.mark.parametrize("way", WAYS)
def test_the_next_answer_is_from_the_new_weights(
    way: str, server: Any, trained: Any, linked: Linked, snapshot: Snapshot
) -> None:
    """Twice, in several buckets: log probabilities, version, and nothing read from the old cache."""
    link, tags = linked(server.address, way), Tags()
    for number in (1, 2):
        weights = trained.shake()
        assert trained.gap(server.address)[0] > 1e-3
        outcome = pushed(link, weights.items(), tags.of(number), dtype=torch.float32, snapshot=snapshot)
        new, told = trained.gap(server.address)
        assert new < 1e-4
        assert {span["version"] for span in told["weight_versions"]} == {tags.of(number)}
        assert told["cached_tokens"] == 0
        assert outcome.n_buckets > 2
        assert 0 < outcome.pause_s <= outcome.seconds
        assert outcome.n_compared > 2
    assert trained.gap(server.address)[1]["cached_tokens"] > 0
    assert snapshot.tag == tags.of(2)
    assert no_thread_is_left()


def test_a_call_in_flight_goes_on_with_the_new_weights(server: Any, trained: Any, linked: Linked) -> None:
    """It says which of its ids came from which; the push waits for no call."""
    link, tags = linked(server.address), Tags()
    pushed(link, trained.shake().items(), tags.of(1))
    sampling = {"max_new_tokens": 900, "ignore_eos": True}
    body = json.dumps({"input_ids": [1, 2, 3], "sampling_params": sampling, "stream": True}).encode()
    call = urllib.request.Request(server.address + "/generate", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(call, timeout=60) as stream:
        assert b"meta_info" in stream.readline()
        pushed(link, trained.shake().items(), tags.of(2))
        *_, last = [line for line in stream if line.startswith(b"data: {")]
    told = json.loads(last.removeprefix(b"data: "))["meta_info"]
    assert [span["version"] for span in told["weight_versions"]] == [tags.of(1), tags.of(2)]
    assert told["finish_reason"]["type"] == "length"


def test_a_push_of_nothing_moves_the_version_only(server: Any, trained: Any, linked: Linked) -> None:
    """The weights are those that were there, and so is what was read with them."""
    link, tags = linked(server.address), Tags()
    pushed(link, trained.shake().items(), tags.of(1))
    trained.gap(server.address)
    outcome = pushed(link, [], tags.of(2))
    gap, told = trained.gap(server.address)
    assert gap < 1e-4
    assert told["weight_version"] == tags.of(2)
    assert told["cached_tokens"] > 0
    assert outcome.n_buckets == 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("name", "shape"),
    [("model.layers.0.mlp.down_proj.weight", (3, 5)), ("model.layers.9.mlp.down_proj.weight", (3, 5))],
)
def test_weights_that_do_not_fit_are_refused_by_name(
    way: str, name: str, shape: tuple[int, ...], server: Any, trained: Any, linked: Linked, snapshot: Snapshot, ask: Any
) -> None:
    """Before anything is sent: the server keeps weights and version, and takes the next push."""
    link, tags = linked(server.address, way), Tags()
    pushed(link, trained.shake().items(), tags.of(1), snapshot=snapshot)
    with pytest.raises(WeightsRefused, match=name):
        pushed(
            link, {**trained.weights(), name: torch.ones(shape)}.items(), tags.of(2), snapshot=snapshot, bucket_mib=9
        )
    gap, told = trained.gap(server.address)
    assert gap < 1e-4
    assert told["weight_version"] == tags.of(1) == snapshot.tag
    pushed(link, trained.shake().items(), tags.of(3), snapshot=snapshot)
    assert trained.gap(server.address)[0] < 1e-4


def test_what_the_server_refuses_half_way_is_never_taken_for_its_old_weights(
    server: Any, trained: Any, linked: Linked, ask: Any
) -> None:
    """A shape that nobody checked, by process group: an error at once, weights that no run takes, no group left."""
    link, tags = linked(server.address, "group"), Tags()
    pushed(link, trained.shake().items(), tags.of(1))
    link.shapes = None
    name = "model.layers.0.mlp.down_proj.weight"
    with pytest.raises(ServerSpoiled, match="Failed to update parameter online"):
        pushed(link, {**trained.weights(), name: torch.ones(3, 5)}.items(), tags.of(2))
    assert version(ask, server.address) == SPOILED
    with pytest.raises(EngineError, match=SPOILED):
        tags.version(SPOILED)
    pushed(link, trained.shake().items(), tags.of(3))
    assert trained.gap(server.address)[0] < 1e-4
    assert no_thread_is_left()


def test_weights_that_can_not_be_made_leave_a_server_that_answers(
    server: Any, trained: Any, linked: Linked, ask: Any
) -> None:
    """The trainer's own error comes through; what was sent before it is never trained."""
    link, tags = linked(server.address), Tags()
    named = list(trained.shake().items())

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from named[:9]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        pushed(link, broken(), tags.of(1))
    assert version(ask, server.address) == SPOILED
    assert len(
        ask(server.address, "/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 2}})["output_ids"]
    )
    pushed(link, named, tags.of(2))
    assert trained.gap(server.address)[0] < 1e-4


@pytest.mark.parametrize("way", WAYS)
def test_what_a_dead_trainer_left_open_is_taken_over(
    way: str, server: Any, trained: Any, linked: Linked, snapshot: Snapshot, ask: Any
) -> None:
    """A pause and a session; afterwards the server answers."""
    ask(server.address, "/pause_generation", {"mode": "retract"})
    ask(server.address, "/begin_weight_update", {})
    tags = Tags()
    link = linked(server.address, way)
    pushed(link, trained.shake().items(), tags.of(1), snapshot=snapshot)
    assert trained.gap(server.address)[0] < 1e-4
    if way == "disk":
        ask(server.address, "/end_weight_update", {})


def test_the_snapshot_gives_a_server_the_same_weights_again(
    server: Any, trained: Any, linked: Linked, snapshot: Snapshot
) -> None:
    """Also into the snapshot itself, while it is read."""
    link, tags = linked(server.address, "tensor"), Tags()
    wanted = {name: tensor.clone() for name, tensor in trained.shake().items()}
    pushed(link, wanted.items(), tags.of(1), snapshot=snapshot)
    trained.shake()
    pushed(link, snapshot.weights(), tags.of(1), snapshot=snapshot)
    kept = dict(snapshot.weights())
    assert kept.keys() == wanted.keys()
    assert all(torch.equal(kept[name], wanted[name]) for name in wanted)
    trained.model.load_state_dict(wanted, strict=False)
    assert trained.gap(server.address)[0] < 1e-4


def test_a_server_that_dies_in_mid_push_keeps_no_other_from_its_weights(
    server: Any, own_server: Any, trained: Any, linked: Linked, snapshot: Snapshot
) -> None:
    """It is told as gone, the other one and the snapshot have all; nothing is left waiting."""
    doomed = own_server()
    links, tags = [linked(server.address, "group"), linked(doomed.address, "group")], Tags()
    named = list(trained.shake().items())

    def deadly() -> Iterator[tuple[str, torch.Tensor]]:
        yield from named[:9]
        doomed.kill()
        yield from named[9:]

    outcomes = push(links, deadly(), tags.of(1), bucket_mib=SMALL_MIB, snapshot=snapshot)
    assert isinstance(outcomes[server.address], Pushed)
    assert isinstance(outcomes[doomed.address], ServerSpoiled)
    assert "start it again" in str(outcomes[doomed.address])
    assert trained.gap(server.address)[0] < 1e-4
    assert {name for name, _ in snapshot.weights()} == {name for name, _ in named}
    assert no_thread_is_left()
