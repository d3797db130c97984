"""Which policy answers which conversation: the run that was named, or what a ledger says, followed while it changes.

A ledger has two arms: the incumbent, and a canary for its share. A conversation stays with the policy it began with
while that is loaded; one of a canary that has ended goes to the incumbent, from its next call on. A policy that serves
no new conversation is unloaded when none of its runs is under way and none of its conversations was heard of for
`IDLE_S`. Invariants: a canary that can't be loaded, or whose outcomes can't be counted, answers nobody; what can't be
read of a ledger that changes leaves all as it was, and is read again in a while. Thread-safe.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Final

from agenttrain.errors import AgenttrainError, PromotionError, RunError
from agenttrain.promotion.ledger import PROMOTIONS, Ledger, canary_now, serving_now
from agenttrain.promotion.outcomes import Arm as ArmName
from agenttrain.promotion.outcomes import Outcomes
from agenttrain.promotion_record import LedgerEntry
from agenttrain.serving.arm import Arm, Heard, OneRun
from agenttrain.serving.canary_trial import CanaryTrial, trial_of
from agenttrain.serving.served_policy import (
    ServedSource,
    held,
    let_go,
    policy_of,
    source_of_base,
    source_of_entry,
    source_of_run,
)

_log = logging.getLogger(__name__)
IDLE_S: Final = 600.0
"""A conversation that was not heard of for so long needs its policy no more."""
AGAIN_S: Final = 10.0
"""After so long what couldn't be taken over of a ledger is tried again: the folder of a run may come after its line."""
PROMOTED: Final = "promoted"


class LedgerArms:
    """What a ledger says answers."""

    def __init__(
        self,
        folder: Path,
        *,
        engine: str | None = None,
        holds_back: bool = False,
        idle_s: float = IDLE_S,
        again_s: float = AGAIN_S,
    ) -> None:
        """Read it; nothing is loaded.

        Args:
            folder: promotions/<name>.
            engine: name of another engine than the runs'.
            holds_back: whether a canary's tools can be exchanged for their stand-ins here; if not, one that asks for it
                is not tried.

        Raises:
            PromotionError: it is damaged, empty, or a policy in it is not what was recorded.
            AgenttrainError: the run of what serves can't be found.
        """
        self.ledger, self._engine, self._idle_s = Ledger(folder.resolve()), engine, idle_s
        self._holds_back, self._again_s = holds_back, again_s
        self._following, self._lock = threading.Lock(), threading.RLock()  # taken in this order
        self._arms: dict[str, Arm] = {}
        """Held ones, by the hash of their line; the base by an empty one."""
        self._outcomes: Outcomes | None = None
        self._stamp: object = object()
        """Of the ledger that was taken over."""
        self._again_at = math.inf
        """When it is taken over again though it has not changed, since not all of it could be."""
        self._told: set[str] = set()
        """What was logged of it."""
        self._is_held = False
        self.trial: CanaryTrial | None = None
        self._canary: Arm | None = None
        self.incumbent = self._incumbent(self._entries())
        self.incumbent.check()

    def hold(self) -> None:
        """Serve from now on; nothing is loaded yet."""
        with self._lock:
            if not self._is_held:
                self._is_held = True
                self._stamp = object()
        self.follow()

    def close(self) -> None:
        """Serve no more."""
        with self._following, self._lock:
            self._is_held = False
            policies = [arm.policy for arm in self._arms.values()]
            self._arms.clear()
            outcomes, self._outcomes, self.trial, self._canary = self._outcomes, None, None, None
        for policy in policies:
            let_go(policy)
        if outcomes is not None:
            outcomes.close()

    def arm_for(self, conversation: str) -> Arm:
        """What answers a conversation now.

        Raises:
            RunError: it serves no more.
        """
        self.follow()
        with self._lock:
            if not self._is_held:
                raise RunError(
                    f"{self.ledger.folder} is not served any more: close() was called, or the block of use(…) has "
                    "ended, while a run of the graph went on. Let runs end first."
                )
            arm, note = self._assigned(conversation)
            trial = self.trial
            arm.heard[conversation] = Heard(time.monotonic(), trial.id if trial is not None else "")
            arm.heard.move_to_end(conversation)
        if trial is not None and note is not None:
            self._note(trial, conversation, note)
        self._unload(self._unneeded())
        return self.incumbent if arm.is_broken else arm

    def begun(self, conversation: str) -> Arm:
        """A run of a graph begins."""
        arm = self.arm_for(conversation)
        with self._lock:
            arm.n_runs += 1
        return arm

    def ended(self, conversation: str, arm: Arm, *, is_single: bool) -> None:
        """It has ended.

        Args:
            is_single: the conversation was this run.
        """
        with self._lock:
            arm.n_runs -= 1
            if is_single:
                for each in self._arms.values():
                    each.heard.pop(conversation, None)
        self._unload(self._unneeded())

    def refuse(self, arm: Arm, error: Exception) -> None:
        """A canary can't be loaded, or a run of it not be begun: it answers nobody in this process any more.

        Raises:
            Exception: what was given, where it is no canary's.
        """
        if not arm.is_canary:
            raise error
        with self._lock:
            was_broken, arm.is_broken = arm.is_broken, True
            conversations, trial = list(arm.heard), self.trial
        if was_broken:
            return
        _log.error("The canary %s can't be tried here, the incumbent answers: %s", arm.source.run_id, error)
        if trial is not None:
            trial.disowned(conversations)

    def _assigned(self, conversation: str) -> tuple[Arm, ArmName | None]:
        """(who answers, what is to be noted of it for the canary under way); hold the lock."""
        trial = self.trial.id if self.trial is not None else ""
        for arm in self._arms.values():
            heard = arm.heard.get(conversation)
            if heard is None:
                continue
            if arm.is_canary and arm is not self._canary:
                del arm.heard[conversation]
                return self.incumbent, "before"
            return arm, "before" if heard.trial != trial else None
        if self._canary is not None and self._canary.is_broken:
            return self.incumbent, "before"  # none of this process can be the canary's: nothing to hold it against
        if self._canary is not None and self.trial is not None and self.trial.draws(conversation):
            return self._canary, "canary"
        return self.incumbent, "incumbent"

    def _note(self, trial: CanaryTrial, conversation: str, name: ArmName) -> None:
        try:
            trial.answered(conversation, name)
        except PromotionError as error:
            with self._lock:
                canary = self._canary
            if canary is not None:
                self.refuse(canary, error)

    def follow(self) -> None:
        """Take over what the ledger says by now; costs a look at the file's size and time where nothing changed."""
        if not self._is_new(self._stamp_now()):
            return
        with self._following:
            stamp = self._stamp_now()
            if not self._is_new(stamp) or not self._is_held:
                return
            if stamp != self._stamp:
                self._told.clear()
            self._again_at = math.inf
            try:
                entries = self._entries()
                incumbent = self._incumbent(entries)
            except AgenttrainError as error:
                if not self._arms:
                    raise
                self._could_not(f"{self.ledger.file} can't be followed, and all stays as it was: {error}")
            else:
                trial, canary = self._tried(entries)
                with self._lock:
                    self.incumbent, self._canary = self._held(incumbent), canary and self._held(canary)
                    self.trial = trial
            self._stamp = stamp

    def _is_new(self, stamp: object) -> bool:
        return stamp != self._stamp or time.monotonic() >= self._again_at

    def _could_not(self, what: str) -> None:
        """Try again in a while, and tell once."""
        self._again_at = time.monotonic() + self._again_s
        if what not in self._told:
            self._told.add(what)
            _log.error("%s", what)

    def _stamp_now(self) -> object:
        try:
            found = self.ledger.file.stat()
        except OSError:
            return None
        return found.st_size, found.st_mtime_ns, found.st_ino

    def _entries(self) -> tuple[LedgerEntry, ...]:
        entries = self.ledger.entries()
        if not entries:
            raise PromotionError(f"{self.ledger.folder} holds no ledger. {_known_ledgers(self.ledger.folder.parent)}")
        return entries

    def _incumbent(self, entries: tuple[LedgerEntry, ...]) -> Arm:
        serving = serving_now(entries)
        if serving is None:
            return self._arm(source_of_base(entries), None, is_canary=False)
        return self._arm(source_of_entry(serving, entries), serving, is_canary=False)

    def _tried(self, entries: tuple[LedgerEntry, ...]) -> tuple[CanaryTrial | None, Arm | None]:
        """The canary under way, if it can be tried here."""
        try:
            if canary_now(entries) is None:
                return None, None
            if self._outcomes is None:
                self._outcomes = Outcomes(self.ledger.folder)
            trial = trial_of(self.ledger, self._outcomes, entries)
            if trial is None:
                return None, None
            if trial.table.tools == "stand_in" and not self._holds_back:
                raise PromotionError(
                    'its tools are to run their stand-ins (canary.tools = "stand_in"), and only agenttrain.attach can '
                    "have them do so"
                )
            return trial, self._arm(source_of_entry(trial.entry, entries), trial.entry, is_canary=True)
        except AgenttrainError as error:
            self._could_not(f"The canary of {self.ledger.file} can't be tried here, the incumbent answers: {error}")
            return None, None

    def _arm(self, source: ServedSource, entry: LedgerEntry | None, *, is_canary: bool) -> Arm:
        source = source.with_engine(self._engine)
        return Arm(source=source, policy=policy_of(source), is_canary=is_canary, entry=entry)

    def _held(self, arm: Arm) -> Arm:
        """The arm of the same line that is held already, else this one, held from now on; hold the lock."""
        line = arm.entry.hash if arm.entry is not None else ""
        if line not in self._arms:
            self._arms[line] = replace(arm, policy=held(arm.policy), heard=OrderedDict())
        return self._arms[line]

    def _unneeded(self) -> list[Arm]:
        """Arms that serve no new conversation and that none needs any more, taken out.

        Idle conversations are forgotten, those of the incumbent and the canary too: by its hash one is drawn again.
        """
        late = time.monotonic() - self._idle_s
        with self._lock:
            for arm in self._arms.values():
                while arm.heard and next(iter(arm.heard.values())).at <= late:
                    arm.heard.popitem(last=False)
            old = [arm for arm in self._arms.values() if arm is not self.incumbent and arm is not self._canary]
            unneeded = [arm for arm in old if not arm.heard and not arm.n_runs]
            self._arms = {line: arm for line, arm in self._arms.items() if arm not in unneeded}
        return unneeded

    def _unload(self, arms: list[Arm]) -> None:
        """On a thread: an engine that ends may take its time, and a conversation waits for none of it."""
        for arm in arms:
            threading.Thread(target=let_go, args=(arm.policy,), name="agenttrain-unload").start()


Arms = OneRun | LedgerArms


def ledger_named(run: str, *, beside: str | None = None) -> Path | None:
    """The folder of the ledger that stands in a run's place. None: it is a run that is named.

    Args:
        run: "promoted", "promoted:NAME", or the path of a promotions/<name> folder.
        beside: name of the folder of graph.py, where it is known.

    Raises:
        PromotionError: there is no such ledger, or "promoted" might mean several.
    """
    kind, _, name = run.partition(":")
    if kind != PROMOTED:
        return Path(run) if (Path(run) / "ledger.jsonl").is_file() else None
    folders = sorted(file.parent for file in PROMOTIONS.glob("*/ledger.jsonl"))
    if not name and len(folders) > 1 and beside in [folder.name for folder in folders]:
        name = beside or ""
    meant = [folder for folder in folders if not name or folder.name == name]
    if len(meant) == 1:
        return meant[0]
    raise PromotionError(f"{run!r} names {'several ledgers' if meant else 'no ledger'}. {_known_ledgers(PROMOTIONS)}")


def _known_ledgers(root: Path) -> str:
    names = sorted(file.parent.name for file in root.glob("*/ledger.jsonl"))
    if names:
        return f"Ledgers in {root.absolute()}: {', '.join(names)}. Write 'promoted:NAME'."
    return f"There is none in {root.absolute()}: agenttrain promote RUN begins one."


def open_arms(run: str, *, engine: str | None = None, holds_back: bool = False, beside: str | None = None) -> Arms:
    """What answers by a run, the folder of a policy, or a ledger; arguments as of `LedgerArms` and `ledger_named`.

    Raises:
        AgenttrainError: there is no such thing, or it can't be used.
    """
    folder = ledger_named(run, beside=beside)
    if folder is not None:
        return LedgerArms(folder, engine=engine, holds_back=holds_back)
    return OneRun(source_of_run(run).with_engine(engine))
