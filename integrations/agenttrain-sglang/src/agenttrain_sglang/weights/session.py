"""One update of one server's weights: pause, begin, … what a transport loads …, end, go on.

Invariants: no token is sampled between the first bucket and the last, so none comes from half-new weights; calls in
flight go back into the server's queue and are read again with the new ones; a session or a pause that a dead trainer
left is taken over; the version is read back before anything is sampled. After a fault the server is either as it was,
or calls its weights `tags.SPOILED`.

Source: SGLang 0.5.23, srt/managers/tokenizer_control_mixin.py and scheduler_components/weight_updater.py.
"""

from __future__ import annotations

import contextlib
import time

from agenttrain_sglang.weights.faults import ServerSpoiled
from agenttrain_sglang.weights.server_http import Gone, Http, Refused
from agenttrain_sglang.weights.tags import SPOILED

SHORT_S = 20.0
"""For calls that move no weights."""
LAST_S = 3.0
"""For calls to a server that has just failed."""


class UpdateSession:
    """What a server is told around an update. One at a time."""

    def __init__(self, http: Http, *, has_sessions: bool, pause_mode: str = "retract") -> None:
        """Ask nothing yet.

        Args:
            has_sessions: whether weights load between begin and end only, as in 0.5.23 for all but files.
            pause_mode: what becomes of calls in flight: "retract" lets them go on afterwards.
        """
        self._http, self._has_sessions, self._pause_mode = http, has_sessions, pause_mode
        self._paused_at = 0.0

    def begin(self) -> None:
        """Stop sampling, and get ready to load.

        Raises:
            Refused, Gone: the server said no, or nothing.
        """
        self._paused_at = time.perf_counter()
        self._http.post("/pause_generation", {"mode": self._pause_mode})
        if self._has_sessions:
            self._open()

    def _open(self) -> None:
        try:
            self._http.post("/begin_weight_update", {})
        except Refused as refusal:
            if "already open" not in refusal.message:
                raise
            self._http.post("/end_weight_update", {})
            self._http.post("/begin_weight_update", {})

    def end(self, tag: str) -> None:
        """Make the new weights count; nothing is sampled yet.

        Raises:
            ServerSpoiled: the server calls its weights something else than `tag`.
            Refused, Gone: the server said no, or nothing.
        """
        if self._has_sessions:
            self._http.post("/end_weight_update", {})
        self.check(tag)

    def go_on(self) -> float:
        """Sample again.

        Returns:
            Seconds since `begin`.

        Raises:
            Refused, Gone: the server said no, or nothing.
        """
        self._http.post("/continue_generation", {}, timeout_s=SHORT_S)
        return time.perf_counter() - self._paused_at

    def check(self, tag: str) -> None:
        """Read the version back.

        Raises:
            ServerSpoiled: it is another one.
        """
        said = self._http.get("/model_info", timeout_s=SHORT_S).get("weight_version")
        if said != tag:
            raise ServerSpoiled(
                f"The server at {self._http.address} took new weights and calls them {said!r}; it was told {tag!r}. "
                "Let nothing else push weights to it, or start it again."
            )

    def rename(self, tag: str) -> None:
        """Say what the weights that the server has are called; nothing is sent and nothing in flight ends.

        Raises:
            Refused, Gone: the server said no, or nothing.
        """
        self._call_them(tag, SHORT_S)

    def give_up(self, *, is_spoiled: bool) -> None:
        """After a fault: let a server that still answers go on, and say what its weights are now worth."""
        with contextlib.suppress(Gone):
            if is_spoiled:
                with contextlib.suppress(Refused):
                    self._call_them(SPOILED, LAST_S)
            if self._has_sessions:
                with contextlib.suppress(Refused):
                    self._http.post("/end_weight_update", {}, timeout_s=LAST_S)
            with contextlib.suppress(Refused):
                self._http.post("/continue_generation", {}, timeout_s=LAST_S)

    def _call_them(self, tag: str, timeout_s: float) -> None:
        body = {"new_version": tag, "abort_all_requests": False}
        self._http.post("/update_weight_version", body, timeout_s=timeout_s)
