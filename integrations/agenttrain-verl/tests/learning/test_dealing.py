"""Rows dealt into optimizer steps: every row once, a rollout in one step, equal cells, as veRL cuts them up."""

from __future__ import annotations

from agenttrain.records import Rollout as Ended
from agenttrain.records import RolloutRequest, RolloutResult, Task
from agenttrain.trainer.batches import Lesson, minibatches
from hypothesis import given
from hypothesis import strategies as st

from agenttrain_verl.dealing import Deal, deal, dealt, in_order, seed_of, spread
from agenttrain_verl.rows import Row

COUNTS = st.lists(st.integers(1, 4), min_size=1, max_size=12)
"""Rows of each rollout."""


def row(rollout: str, trajectory: int = 0, *, n_ids: int = 10) -> Row:
    return Row(
        key=f"{rollout}_{trajectory}",
        rollout_id=rollout,
        group_id="g",
        trajectory=trajectory,
        n_ids=n_ids,
        n_trained=3,
        reward=0.0,
        oldest_version=0,
    )


def rows_of_counts(counts: list[int]) -> list[Row]:
    return [row(f"r{n}", t, n_ids=5 + 7 * n + t) for n, count in enumerate(counts) for t in range(count)]


def as_verl_cuts(made: Deal, n_ranks: int) -> list[list[list[int]]]:
    """[updates][ranks] what reaches each by veRL's cuts: chunks for ranks, and slices of those for mini-batches."""
    share = len(made.order) // n_ranks
    width = made.updates[0].n_rows // n_ranks
    chunks = [made.order[rank * share : (rank + 1) * share] for rank in range(n_ranks)]
    return [[chunk[at : at + width] for chunk in chunks] for at in range(0, share, width)]


@given(counts=COUNTS, n_minibatches=st.integers(1, 5), n_ranks=st.integers(1, 4))
def test_what_reaches_each_rank_and_step(counts: list[int], n_minibatches: int, n_ranks: int) -> None:
    """Each row once, each rollout in one step, cells of one size, and padding that is used once."""
    rows = rows_of_counts(counts)
    made = deal(rows, n_minibatches=n_minibatches, n_ranks=n_ranks, seed="0-1")
    cut = as_verl_cuts(made, n_ranks)
    assert len(cut) == len(made.updates) == min(n_minibatches, len(counts))
    assert sorted(made.order) == list(range(len(rows) + made.n_padding))
    step_of_rollout: dict[str, set[int]] = {}
    for step, cells in enumerate(cut):
        assert len({len(cell) for cell in cells}) == 1
        for place in (place for cell in cells for place in cell if place < len(rows)):
            step_of_rollout.setdefault(rows[place].rollout_id, set()).add(step)
    assert all(len(steps) == 1 for steps in step_of_rollout.values())
    for step, update in enumerate(made.updates):
        assert {name for name, steps in step_of_rollout.items() if steps == {step}} == set(update.rollout_ids)


@given(counts=COUNTS, n=st.integers(1, 5), step=st.integers(1, 9), epoch=st.integers(0, 2))
def test_rollouts_are_dealt_as_by_the_local_trainer(counts: list[int], n: int, step: int, epoch: int) -> None:
    """The same rollouts in the same update, in the same order."""
    ids = [f"r{i}" for i in range(len(counts))]
    lessons = [_lesson(name) for name in ids]
    ours = minibatches(lessons, n, seed=f"7-{step}-{epoch}" if epoch else f"7-{step}")
    here = dealt([f"train-1-{name}-0-0" for name in ids], n, seed=seed_of(7, step, epoch))
    assert here == [[lesson.rollout_id for lesson in part] for part in ours]


def _lesson(task: str) -> Lesson:
    request = RolloutRequest(task=Task(id=task, input={}), phase="train", step=1, sibling=0)
    rollout = Ended(
        id=request.rollout_id, task_id=task, phase="train", step=1, sibling=0, attempt=0, status="completed"
    )
    return Lesson(
        result=RolloutResult(request=request, rollout=rollout, turns=(), trajectories=(), samples=()), advantage=0.0
    )


def test_the_number_of_rows_changes_no_number_of_steps() -> None:
    """Two rollouts of one row each, or of nine: two steps."""
    for n_rows in (1, 9):
        rows = [row(name, t) for name in "ab" for t in range(n_rows)]
        made = deal(rows, n_minibatches=2, n_ranks=1, seed="s")
        assert [update.n_rows for update in made.updates] == [n_rows, n_rows]
        assert made.n_padding == 0


def test_uneven_rows_are_padded_to_the_widest_cell() -> None:
    """Rollout a has two rows and b one: two cells of two, the third place of which is padding."""
    rows = [row("a", 0), row("a", 1), row("b", 0)]
    made = deal(rows, n_minibatches=2, n_ranks=1, seed="0-1")
    assert sorted(update.cells for update in made.updates) == [((0, 1),), ((2, 3),)]
    assert made.n_padding == 1


def test_ranks_get_about_the_same_number_of_tokens() -> None:
    """The longest alone, the two others together; never more rows than a cell holds."""
    assert spread({0: 5, 1: 3, 2: 3}, n_ranks=2, width=2) == [[0], [1, 2]]
    assert spread({0: 9, 1: 1, 2: 1, 3: 1}, n_ranks=2, width=2) == [[0, 3], [1, 2]]


def test_rows_go_by_the_order_of_the_requests() -> None:
    """Whatever the order in which they finished; rollouts that were not named come last."""
    rows = [row("b", 1), row("c"), row("a"), row("b", 0)]
    assert [r.key for r in in_order(rows, ["a", "b"])] == ["a_0", "b_0", "b_1", "c_0"]
