"""The installed veRL is the one that agenttrain was written against: its fields, and the text of what we stand on."""

from __future__ import annotations

import pytest
from agenttrain.sample.agent_loop_output import FIELDS, METRIC_FIELDS

from agenttrain_verl.known import KNOWN, text_hash


def test_the_fields_of_a_row_are_verls() -> None:
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    assert set(AgentLoopOutput.model_fields) == set(FIELDS)
    assert set(AgentLoopMetrics.model_fields) == set(METRIC_FIELDS)


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_what_we_stand_on_is_as_it_was(name: str) -> None:
    seen = text_hash(name)
    assert seen == KNOWN[name].hash, (
        f"{name} of the installed veRL is {'gone' if seen is None else 'another'}. Read what changed, mend "
        f"agenttrain_verl/{KNOWN[name].ours} where it stands on it, then write {seen!r} into agenttrain_verl/known.py."
    )
