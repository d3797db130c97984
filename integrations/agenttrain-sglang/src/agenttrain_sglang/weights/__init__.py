"""Published weights into running SGLang servers, from a process that has no SGLang.

- choice: which way they take, from what both sides say of themselves
- push: one stream into several servers, bucket by bucket, with a result for each
- group, tensor, disk, adapter: the ways
- session: pause, begin, end, go on; the version read back
- buckets: the stream in pieces; shapes: what would not fit is not sent; proof: checksums compared
- snapshot: the same weights as files; tags: what a server calls its weights
- faults: what the caller must do next; server_http: plain HTTP with time limits
"""

from agenttrain_sglang.weights.adapter import drop_adapter, push_adapter
from agenttrain_sglang.weights.choice import Choice, Trainer, choose, open_link
from agenttrain_sglang.weights.faults import ServerSpoiled, WeightsRefused
from agenttrain_sglang.weights.push import Link, Pushed, push
from agenttrain_sglang.weights.shapes import Shapes, shapes_of
from agenttrain_sglang.weights.snapshot import Snapshot
from agenttrain_sglang.weights.tags import SPOILED, Tags

__all__ = [
    "SPOILED",
    "Choice",
    "Link",
    "Pushed",
    "ServerSpoiled",
    "Shapes",
    "Snapshot",
    "Tags",
    "Trainer",
    "WeightsRefused",
    "choose",
    "drop_adapter",
    "open_link",
    "push",
    "push_adapter",
    "shapes_of",
]
