"""The harness of benchmarks/, which these tests run too; it sets what veRL reads before veRL is imported."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what veRL and Ray warn of when they are imported
    import verl_in_process  # noqa: F401
