"""Whether what is installed fits together, and this machine and this policy with it.

Facts are read (`versions.installed`, `machine.this_machine`, `local.torch_build`), and pure functions turn them into
findings. `examine` asks all of them; it raises nothing that a check found, and starts no rollout.

    finding      one thing that is wrong: code, severity, seen against accepted, fix
    versions     distributions against their requirements and against the tested versions
    machine      cores, threads, memory, disk, the GPU
    policy       tokenizer, chat template, family, tool calls; and graph.py with all that belongs to it
    leftovers    what killed runs left
"""

from __future__ import annotations

from agenttrain.doctor.examine import Examination, examine
from agenttrain.doctor.finding import Finding

__all__ = ["Examination", "Finding", "examine"]
