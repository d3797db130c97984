import dataclasses
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenttrain import records
from agenttrain.errors import CaptureError, SampleError, TaskError
from agenttrain.records import (
    CallSite,
    Generation,
    Rollout,
    RolloutRequest,
    RolloutSpec,
    RoutedExperts,
    Sample,
    Task,
    Trajectory,
    Turn,
    TurnSpan,
)

RECORDS = [
    record
    for record in vars(records).values()
    if dataclasses.is_dataclass(record) and isinstance(record, type) and record.__module__ == records.__name__
]
REQUESTS = st.builds(
    RolloutRequest,
    task=st.builds(Task, id=st.text("ab-0r1", min_size=1, max_size=5), input=st.just({})),
    phase=st.sampled_from(["baseline", "train", "held_out", "eval"]),
    step=st.integers(0, 11),
    sibling=st.integers(0, 11),
    attempt=st.integers(0, 2),
    remake=st.integers(0, 2),
    life=st.integers(0, 2),
)


def turn(**changes: Any) -> Turn:
    given_fields: dict[str, Any] = {
        "id": "t0",
        "rollout_id": "r0",
        "index": 0,
        "role": "trained",
        "role_reason": "the graph's one model",
        "site": CallSite(),
        "prompt_ids": (1, 2),
        "response_ids": (3, 4),
        "response_logprobs": (-0.5, -0.25),
        "weight_versions": (0, 0),
    }
    return Turn(**{**given_fields, **changes})


def trajectory(**changes: Any) -> Trajectory:
    given_fields: dict[str, Any] = {
        "rollout_id": "r0",
        "index": 1,
        "prompt_ids": (1, 2),
        "response_ids": (3, 4),
        "response_mask": (1, 0),
        "response_logprobs": (-0.5, 0.0),
        "weight_versions": (0, -1),
        "spans": (TurnSpan(turn_id="t0", start=0, end=1, trained=True),),
        "break_cause": "first_turn",
    }
    return Trajectory(**{**given_fields, **changes})


def sample(**changes: Any) -> Sample:
    given_fields: dict[str, Any] = {
        "prompt_ids": (1, 2),
        "response_ids": (3, 4),
        "response_mask": (1, 0),
        "response_logprobs": (-0.5, 0.0),
        "reward_score": 1.0,
        "num_turns": 1,
        "metrics": {},
        "extra_fields": {"rollout_id": "r0"},
    }
    return Sample(**{**given_fields, **changes})


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_records_are_frozen_slotted_and_keyword_only(record: type) -> None:
    """Nothing changes a record once it is made, and no field is given by place."""
    assert record.__dataclass_params__.frozen
    assert "__dict__" not in dir(record)
    assert all(field.kw_only for field in dataclasses.fields(record))


def test_a_task_without_an_id_is_refused() -> None:
    """Ids name rollouts, and so must be there."""
    with pytest.raises(TaskError, match=r"A task has an empty id\. Give each row its own id\."):
        Task(id="", input={})


def test_a_generation_has_one_length() -> None:
    """An engine that answers fewer log probabilities than ids is refused, with all three lengths."""
    expected = r"answered 3 ids with 2 log probabilities and 1 weight versions\. All three must have one length"
    with pytest.raises(CaptureError, match=expected):
        Generation(token_ids=(1, 2, 3), logprobs=(0.0, 0.0), weight_versions=(0,), stop_reason="stop")
    assert Generation(token_ids=(), logprobs=(), weight_versions=(), stop_reason="aborted").token_ids == ()


@pytest.mark.parametrize("field", ["response_ids", "response_logprobs", "weight_versions"])
def test_a_turn_has_one_length(field: str) -> None:
    """The turn and the three lengths are named."""
    lengths = {"response_ids": 2, "response_logprobs": 2, "weight_versions": 2} | {field: 1}
    expected = (
        f"Turn t0 has {lengths['response_ids']} response_ids, {lengths['response_logprobs']} "
        f"response_logprobs and {lengths['weight_versions']} weight_versions. All three must have one length."
    )
    with pytest.raises(CaptureError) as caught:
        turn(**{field: (0,)})
    assert str(caught.value) == expected


def test_an_auxiliary_turn_holds_no_ids() -> None:
    """Its fields are empty, all of one length."""
    empty = turn(role="auxiliary", prompt_ids=(), response_ids=(), response_logprobs=(), weight_versions=())
    assert (empty.response_ids, empty.sampling) == ((), None)


@pytest.mark.parametrize("field", ["response_mask", "response_logprobs", "weight_versions"])
def test_a_trajectory_has_one_length(field: str) -> None:
    """The field, both lengths and the place are named."""
    with pytest.raises(SampleError) as caught:
        trajectory(**{field: (0, 0, 0)})
    assert str(caught.value) == f"{field} has 3 entries for 2 response_ids (rollout r0, trajectory 1)."


@pytest.mark.parametrize("field", ["response_mask", "response_logprobs"])
def test_a_sample_has_one_length(field: str) -> None:
    """The same for what is handed to the loss."""
    with pytest.raises(SampleError) as caught:
        sample(**{field: (0,)})
    assert str(caught.value) == f"{field} has 1 entries for 2 response_ids (rollout r0)."


def test_a_row_without_a_response_is_refused() -> None:
    """There is nothing in it that could be trained."""
    empty: dict[str, Any] = {"response_ids": (), "response_mask": (), "response_logprobs": ()}
    with pytest.raises(SampleError, match=r"response_ids is empty, .* \(rollout r0\)\."):
        sample(**empty)
    with pytest.raises(SampleError, match=r"response_ids is empty, .* \(rollout r0, trajectory 1\)\."):
        trajectory(**empty, weight_versions=())


def test_a_rollout_id_can_be_read() -> None:
    """Phase, step, task, sibling and attempt; the remake only of one made again, the life only after a resume."""
    request = RolloutRequest(task=Task(id="order-7", input={}), phase="train", step=3, sibling=2, attempt=1)
    assert request.rollout_id == "train-3-order-7-2-1"
    assert dataclasses.replace(request, life=4).rollout_id == "train-3-order-7-2-1-r4"
    assert dataclasses.replace(request, remake=1, life=4).rollout_id == "train-3-order-7-2-1-m1-r4"


@given(first=REQUESTS, second=REQUESTS)
def test_rollout_ids_are_equal_exactly_when_all_that_names_them_is(
    first: RolloutRequest, second: RolloutRequest
) -> None:
    """Also for task ids with dashes and digits in them."""
    fields = ("phase", "step", "task", "sibling", "attempt", "remake", "life")
    same = all(getattr(first, name) == getattr(second, name) for name in fields)
    assert (first.rollout_id == second.rollout_id) == same


def test_the_seed_and_temperature_name_no_rollout() -> None:
    """They are the run's, and the same for all of it."""
    request = RolloutRequest(task=Task(id="a", input={}), phase="eval")
    assert dataclasses.replace(request, seed=9, temperature=0.0).rollout_id == request.rollout_id


def test_one_model_is_known_by_class_name_and_address() -> None:
    """Whatever node calls it."""
    site = CallSite(node="agent", model_class="ChatOpenAI", model_name="m", base_url="http://a")
    assert site.model_identity == dataclasses.replace(site, node="judge", tags=("x",)).model_identity
    assert site.model_identity != dataclasses.replace(site, base_url="http://b").model_identity


def test_a_rollout_lasts_from_start_to_end() -> None:
    """In seconds, and it has no reward unless its status gives one."""
    rollout = Rollout(
        id="r",
        task_id="t",
        phase="train",
        step=1,
        sibling=0,
        attempt=0,
        status="aborted",
        started_at=10.0,
        ended_at=12.5,
    )
    assert (rollout.seconds, rollout.reward) == (2.5, None)


@pytest.mark.parametrize(
    "record",
    [
        turn(),
        trajectory(),
        sample(),
        RolloutRequest(task=Task(id="a", input={"q": 1}, metadata={"k": "v"}), phase="train"),
        RolloutSpec(graph_file="g.py", attribute=None, config={"seed": 1}, run_dir="runs/x", model="m"),
    ],
    ids=lambda record: type(record).__name__,
)
def test_records_cross_processes(record: object) -> None:
    """Another process gets an equal record."""
    assert pickle.loads(pickle.dumps(record)) == record


def experts(start: int, end: int, *, n_layers: int = 2) -> RoutedExperts:
    rows = [bytes([position, 0] * n_layers) for position in range(start, end)]
    return RoutedExperts(start=start, n_layers=n_layers, n_chosen=1, data=b"".join(rows))


def test_routed_experts_are_whole_rows() -> None:
    assert (experts(3, 7).start, experts(3, 7).end, experts(3, 7).row_bytes) == (3, 7, 4)
    with pytest.raises(CaptureError, match="from position 0 hold 5 bytes for 2 layers of 1 experts"):
        RoutedExperts(start=0, n_layers=2, n_chosen=1, data=bytes(5))


def test_rows_of_turns_that_extend_one_another_become_those_of_their_path() -> None:
    assert RoutedExperts.of_path([experts(0, 3)]) == experts(0, 3)
    assert RoutedExperts.of_path([experts(0, 3), experts(3, 4), experts(4, 9)]) == experts(0, 9)


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [None],
        [experts(1, 3)],
        [experts(0, 3), experts(4, 6)],
        [experts(0, 3), experts(2, 6)],
        [experts(0, 3), None, experts(3, 6)],
        [experts(0, 3), None],
        [experts(0, 3), experts(3, 6, n_layers=3)],
    ],
    ids=["no turn", "not told", "no beginning", "a gap", "an overlap", "one lacks", "the last lacks", "other layers"],
)
def test_rows_that_are_not_known_of_every_position_are_none(parts: list[RoutedExperts | None]) -> None:
    assert RoutedExperts.of_path(parts) is None


def test_routed_experts_end_at_the_last_id_but_one() -> None:
    """The last id of a turn was never read; a trajectory and a sample begin at 0 besides."""
    assert turn(routed_experts=experts(2, 3)).routed_experts == experts(2, 3)
    with pytest.raises(CaptureError, match="Turn t0 has routed experts of positions 0 to 3, and its last id but one"):
        turn(routed_experts=experts(0, 4))
    assert sample(routed_experts=experts(0, 3)).routed_experts == experts(0, 3)
    with pytest.raises(SampleError, match=r"rows of positions 1 to 2, and the ids that were read stand at 0 to 2"):
        sample(routed_experts=experts(1, 3))
    with pytest.raises(SampleError, match=r"rows of positions 0 to 1, .* \(rollout r0, trajectory 1\)"):
        trajectory(routed_experts=experts(0, 2))
