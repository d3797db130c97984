"""Whether a graph is ready to be trained, told before it is.

Facts are gathered at two places, `prepared` (before anything runs) and `trial` (a few rollouts); pure functions turn
them into findings, each with a code, a cause and a fix.

    finding            one thing that was found; every code
    prepared           graph.py to a job and findings       shape_findings, task_findings, policy_findings
    trial, roles       a few rollouts, ended by nothing     trial_findings, reward_findings
    calls, drawing     who answered which call; the graph drawn
    verdict            ready or not, what is missing, what a fit would cost
    checked            all of it, and the RUN
"""

from __future__ import annotations

from agenttrain.check.checked import Checked, checked
from agenttrain.check.finding import CODES, Finding
from agenttrain.check.prepared import Prepared, prepared

__all__ = ["CODES", "Checked", "Finding", "Prepared", "checked", "prepared"]
