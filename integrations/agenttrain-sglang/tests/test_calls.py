"""Calls that servers refuse, answer wrongly or put off."""

from __future__ import annotations

from typing import Any

import pytest
from agenttrain.errors import EngineError


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ([400, {"error": {"message": "Duplicate request ID"}}], "HTTP 400: Duplicate request ID See its log"),
        ([500, {"detail": "broken"}], "HTTP 500: broken"),
        ([503, {"error": {"message": "the queue is full"}}], "HTTP 503: the queue is full"),
        ([200, "<html>hello</html>"], "answered '<html>hello</html>'"),
        ({"meta_info": {"output_token_logprobs": None}}, "6 ids without log probabilities"),
        ({"meta_info": {"output_token_logprobs": [[-1.0, 5, None]]}}, "1 log probabilities for 6 ids"),
        ({"output_ids": [999] * 6}, "id 999, and the model's vocabulary has 320 ids"),
    ],
)
def test_what_can_not_be_trained_fails_its_call_alone(odd: Any, answer: Any, words: str) -> None:
    """With the reason; the server stays, and the next call is answered."""
    engine = odd.engine()
    odd.does(answer=answer)
    with pytest.raises(EngineError, match=words):
        odd.ask(engine).result(60)
    odd.does()
    assert len(odd.ask(engine).result(60).token_ids) == 6
    stats = engine.stats()
    assert (stats["restarts"], stats["sampled_ids"], stats["server_sampled_ids"] >= 12) == (0, 6, True)


def test_a_busy_server_is_asked_again(odd: Any) -> None:
    """As long as a silent one is waited for."""
    engine = odd.engine(silence_s=30.0)
    odd.does(answer=[503, {"error": {"message": "the queue is full"}}])
    asked = odd.ask(engine)
    odd.until(lambda: engine.stats()["busy"] >= 1)
    odd.does()
    assert len(asked.result(60).token_ids) == 6
