"""The trainer "sft": supervised fine-tuning on the base's own verified successes, the cheap alternative to RL.

Imports nothing heavy until a run opens it.
"""

from __future__ import annotations
