"""Records become rows, and rows become the same records again: the tables of a store's file, and what lies in them.

Per-token fields are blobs, all else of a record is JSON. What JSON can't hold in a task's own data is kept as its
repr. Routed experts are by far the largest: they are written with the turns, compressed, and trajectories and samples
take theirs from there when they are read.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, Final

import numpy as np

from agenttrain.errors import CaptureError
from agenttrain.records import (
    CallSite,
    Credit,
    Isolation,
    Reward,
    RewardPart,
    Rollout,
    RolloutRequest,
    RolloutResult,
    RoutedExperts,
    Sample,
    Sampling,
    Task,
    TrainedSample,
    Trajectory,
    Turn,
    TurnSpan,
)

SCHEMA: Final = """
CREATE TABLE begun (rollout_id TEXT PRIMARY KEY, started_at REAL NOT NULL, body TEXT NOT NULL);
CREATE TABLE intents (turn_id TEXT PRIMARY KEY, rollout_id TEXT NOT NULL, started_at REAL NOT NULL);
CREATE INDEX intents_of_rollout ON intents (rollout_id);
CREATE TABLE turns (id TEXT PRIMARY KEY, rollout_id TEXT NOT NULL, body TEXT NOT NULL, prompt_ids BLOB NOT NULL,
    response_ids BLOB NOT NULL, response_logprobs BLOB NOT NULL, weight_versions BLOB NOT NULL, routed_experts BLOB);
CREATE INDEX turns_of_rollout ON turns (rollout_id);
CREATE TABLE results (rollout_id TEXT PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE trajectories (rollout_id TEXT NOT NULL, place INTEGER NOT NULL, body TEXT NOT NULL,
    prompt_ids BLOB NOT NULL, response_ids BLOB NOT NULL, response_mask BLOB NOT NULL, response_logprobs BLOB NOT NULL,
    weight_versions BLOB NOT NULL, routed_experts BLOB, PRIMARY KEY (rollout_id, place));
CREATE TABLE samples (rollout_id TEXT NOT NULL, place INTEGER NOT NULL, body TEXT NOT NULL, prompt_ids BLOB NOT NULL,
    response_ids BLOB NOT NULL, response_mask BLOB NOT NULL, response_logprobs BLOB NOT NULL, routed_experts BLOB,
    PRIMARY KEY (rollout_id, place));
CREATE TABLE trained (rollout_id TEXT NOT NULL, place INTEGER NOT NULL, step INTEGER NOT NULL, life INTEGER NOT NULL,
    body TEXT NOT NULL, prompt_ids BLOB NOT NULL, response_ids BLOB NOT NULL, response_mask BLOB NOT NULL,
    response_logprobs BLOB NOT NULL, staleness INTEGER, advantages BLOB NOT NULL, PRIMARY KEY (rollout_id, place));
"""

ARRAYS: Final[Mapping[str, np.dtype[Any]]] = {
    "prompt_ids": np.dtype("<i4"),
    "response_ids": np.dtype("<i4"),
    "response_mask": np.dtype("u1"),
    "response_logprobs": np.dtype("<f8"),
    "weight_versions": np.dtype("<i4"),
}
"""Per-token fields and how they lie in a blob; float64, so that log probabilities come back exactly."""

OF_THE_TURNS: Final = b""
"""In place of routed experts: they are those that the turns of the rollout hold."""

Row = tuple[str, tuple[Any, ...]]
"""Table and values, the primary key first."""


# Records to rows


def begun_row(request: RolloutRequest, started_at: float) -> Row:
    return ("begun", (request.rollout_id, started_at, json.dumps(_plain(request), default=repr)))


def turn_row(turn: Turn) -> Row:
    return ("turns", (turn.id, turn.rollout_id, _body(turn), *_blobs(turn), packed(turn.routed_experts)))


def result_rows(result: RolloutResult) -> list[Row]:
    """(table, values) of a rollout that has ended: its result, trajectories and samples."""
    id = result.rollout.id
    body = json.dumps({"request": _plain(result.request), "rollout": _plain(result.rollout)}, default=repr)
    by_id = {turn.id: turn for turn in result.turns}
    of_paths = [experts_of(path.spans[-1].turn_id, by_id) for path in result.trajectories]
    rows: list[Row] = [("results", (id, body))]
    for i, path in enumerate(result.trajectories):
        rows.append(("trajectories", (id, i, _body(path), *_blobs(path), _told(path.routed_experts, of_paths[i]))))
    by_index = {path.index: path.routed_experts for path in result.trajectories}
    for i, sample in enumerate(result.samples):
        of_path = by_index.get(sample.extra_fields.get("trajectory", -1))
        rows.append(("samples", (id, i, _body(sample), *_blobs(sample), _told(sample.routed_experts, of_path))))
    return rows


def experts_of(turn_id: str, by_id: Mapping[str, Turn]) -> RoutedExperts | None:
    """Those of the path from a first turn to this one. None: not known of every turn."""
    parts: list[RoutedExperts | None] = []
    turn = by_id.get(turn_id)
    while turn is not None:
        parts.append(turn.routed_experts)
        turn = by_id.get(turn.extends or "")
    return RoutedExperts.of_path(parts[::-1])


def _told(experts: RoutedExperts | None, of_turns: RoutedExperts | None) -> bytes | None:
    """What stands for routed experts that the turns hold, else they themselves."""
    return OF_THE_TURNS if experts is not None and experts == of_turns else packed(experts)


def packed(experts: RoutedExperts | None) -> bytes | None:
    """Low bytes before high ones, which are all 0 up to 256 experts, then compressed."""
    if experts is None:
        return None
    return zlib.compress(np.frombuffer(experts.data, "u1").reshape(-1, 2).T.tobytes(), 1)


def trained_row(step: int, life: int, sample: Sample, staleness: int | None, advantages: Sequence[float]) -> Row:
    rollout_id, place = sample.extra_fields["rollout_id"], sample.extra_fields["trajectory"]
    credit = _packed(advantages, sample.response_mask)
    body = _body(replace(sample, routed_experts=None))
    return ("trained", (rollout_id, place, step, life, body, *_blobs(sample), staleness, credit))


def _packed(advantages: Sequence[float], mask: Sequence[int]) -> bytes:
    """Those at mask 1; one number where all are equal, as for every estimator that credits a whole rollout."""
    if not advantages:
        return b""
    kept = [advantage for advantage, trained in zip(advantages, mask, strict=True) if trained]
    return np.asarray(kept[:1] if len(set(kept)) == 1 else kept, "<f8").tobytes()


def _body(record: Turn | Trajectory | Sample) -> str:
    """All of a record but its per-token fields, as JSON."""
    return json.dumps(_plain(record), default=repr)


def _blobs(record: Turn | Trajectory | Sample) -> list[bytes]:
    return [np.asarray(getattr(record, name), dtype).tobytes() for name, dtype in _arrays(type(record))]


def _arrays(kind: type[Turn | Trajectory | Sample]) -> list[tuple[str, np.dtype[Any]]]:
    names = {each.name for each in fields(kind)}
    return [(name, dtype) for name, dtype in ARRAYS.items() if name in names]


def _plain(value: Any) -> Any:
    """A record as nested dicts and lists, per-token fields left out."""
    if is_dataclass(value) and not isinstance(value, type):
        left_out = {*ARRAYS, "data"} if isinstance(value, RoutedExperts) else ARRAYS
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value) if each.name not in left_out}
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


# Rows to records


def turn_of(row: Sequence[Any]) -> Turn:
    body = json.loads(row[2])
    tuples = {name: tuple(body["site"].get(name, ())) for name in ("tags", "attempts")}  # before version 4 no attempts
    body["site"] = CallSite(**{**body["site"], **tuples})
    if body["sampling"] is not None:
        body["sampling"] = Sampling(**{**body["sampling"], "stop_ids": tuple(body["sampling"]["stop_ids"])})
    body["respelled"] = tuple(body.get("respelled", ()))  # before version 4 there is none
    return Turn(**_with_experts(Turn, body, row, None))


def trajectory_of(row: Sequence[Any], turns: Mapping[str, Turn]) -> Trajectory:
    """One row, with the routed experts of the rollout's turns."""
    body = json.loads(row[2])
    body["spans"] = tuple(TurnSpan(**span) for span in body["spans"])
    of_turns = experts_of(body["spans"][-1].turn_id, turns) if takes_from_turns(row) else None
    return Trajectory(**_with_experts(Trajectory, body, row, of_turns))


def takes_from_turns(row: Sequence[Any]) -> bool:
    """Whether the record of a row can't be read without the rollout's turns."""
    return bool(row[-1] == OF_THE_TURNS)


def _with_experts(
    kind: type[Turn | Trajectory | Sample], body: dict[str, Any], row: Sequence[Any], of_turns: RoutedExperts | None
) -> dict[str, Any]:
    """All fields of a record."""
    n_blobs = len(_arrays(kind))
    experts = next(iter(row[3 + n_blobs :]), None)  # before version 3 there is no such column
    if experts is not None:
        if experts == OF_THE_TURNS and of_turns is None:
            raise CaptureError(
                f"A record of rollout {row[0]} takes its routed experts from turns that its file has not. Put every "
                "turn of a rollout before its result."
            )
        body["routed_experts"] = of_turns if experts == OF_THE_TURNS else _unpacked_experts(body, experts)
    return {**body, **_read_blobs(kind, row[3 : 3 + n_blobs])}


def _unpacked_experts(body: Mapping[str, Any], experts: bytes) -> RoutedExperts:
    data = np.frombuffer(zlib.decompress(experts), "u1").reshape(2, -1).T.tobytes()
    return RoutedExperts(**body["routed_experts"], data=data)


def trained_of(row: Sequence[Any]) -> TrainedSample:
    sample, (staleness, credit) = sample_of([*row[:2], *row[4:9]], ()), row[9:] or (None, b"")  # version 1 has neither
    advantages = _unpacked(credit, sample.response_mask)
    return TrainedSample(sample=sample, step=row[2], life=row[3], staleness=staleness, advantages=advantages)


def _unpacked(credit: bytes, mask: Sequence[int]) -> tuple[float, ...]:
    kept = np.frombuffer(credit, "<f8").tolist()
    if not kept:
        return ()
    left = iter(kept * sum(mask) if len(kept) == 1 else kept)
    return tuple(next(left) if trained else 0.0 for trained in mask)


def sample_of(row: Sequence[Any], paths: Sequence[Trajectory]) -> Sample:
    """One row, with the routed experts of its trajectory."""
    body = json.loads(row[2])
    index = body["extra_fields"].get("trajectory", -1)
    of_path = next((path.routed_experts for path in paths if path.index == index), None)
    return Sample(**_with_experts(Sample, body, row, of_path))


def request_of(body: dict[str, Any]) -> RolloutRequest:
    return RolloutRequest(**{**body, "task": Task(**body["task"])})


def rollout_of(body: dict[str, Any]) -> Rollout:
    reward = body["reward"]
    if reward is not None:
        parts = tuple(RewardPart(**part) for part in reward["parts"])
        reward = Reward(**{**reward, "parts": parts, "credit": _credit_of(reward.get("credit"))})
    isolation = body.get("isolation")  # none before version 5
    if isolation is not None:
        isolation = Isolation(**{**isolation, "unenforced": tuple(isolation["unenforced"])})
    return Rollout(**{**body, "reward": reward, "isolation": isolation})


def _credit_of(body: Mapping[str, Any] | None) -> Credit | None:
    """None too before version 4."""
    if body is None:
        return None
    return Credit(by_node=body["by_node"], by_turn={int(index): number for index, number in body["by_turn"].items()})


def _read_blobs(kind: type[Turn | Trajectory | Sample], blobs: Sequence[bytes]) -> dict[str, Any]:
    pairs = zip(_arrays(kind), blobs, strict=True)
    return {name: tuple(np.frombuffer(blob, dtype).tolist()) for (name, dtype), blob in pairs}
