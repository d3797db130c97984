"""Stands in for the compiled half of torchvision, then runs the real package in this module's place.

Where only a CUDA build of torchvision is at hand, its library can't be loaded beside a CPU build of torch, and its
import fails for want of two operations. They are declared here; calling one raises NotImplementedError. A build that
can be loaded declares its own, and is left to do so.
"""

import importlib.machinery
import sys
from pathlib import Path

import torch

_STAND_INS = Path(__file__).resolve().parents[1]
_REAL = importlib.machinery.PathFinder.find_spec(
    "torchvision", [entry for entry in sys.path if Path(entry or ".").resolve() != _STAND_INS]
)
if _REAL is None:
    raise ModuleNotFoundError("No module named 'torchvision' besides agenttrain's stand-in", name="torchvision")


def _declare_operations(folder):
    try:
        for library in Path(folder).glob("_C*.so"):
            torch.ops.load_library(str(library))
        torch.ops.torchvision.nms  # noqa: B018
    except (OSError, AttributeError):
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library


_OPERATIONS = _declare_operations(_REAL.submodule_search_locations[0])
__file__, __path__ = _REAL.origin, list(_REAL.submodule_search_locations)
exec(compile(Path(_REAL.origin).read_bytes(), _REAL.origin, "exec"))
