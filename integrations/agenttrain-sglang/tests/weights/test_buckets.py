"""A stream of weights in pieces."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from agenttrain_sglang.weights.buckets import in_buckets, one_by_one


def test_buckets_hold_what_fits_and_the_last_one_is_told() -> None:
    """A tensor that is larger than a bucket is one by itself."""
    weights = [("a", torch.ones(2)), ("b", torch.ones(2)), ("c", torch.ones(9)), ("d", torch.ones(1))]
    buckets = list(in_buckets(weights, n_bytes=16))
    assert [[name for name, _ in bucket.tensors] for bucket in buckets] == [["a", "b"], ["c"], ["d"]]
    assert [bucket.n_bytes for bucket in buckets] == [16, 36, 4]
    assert [(bucket.number, bucket.is_last) for bucket in buckets] == [(0, False), (1, False), (2, True)]
    assert list(in_buckets([], n_bytes=16)) == []


def test_weights_are_made_when_their_bucket_is_wanted() -> None:
    """One tensor past it at most."""
    made: list[int] = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(6):
            made.append(i)
            yield str(i), torch.ones(2)

    buckets = in_buckets(weights(), n_bytes=16)
    next(buckets)
    assert made == [0, 1, 2]
    next(buckets)
    assert made == [0, 1, 2, 3, 4]


def test_floating_point_weights_travel_in_the_server_s_dtype() -> None:
    """Whole numbers stay what they are; what fits already is not copied."""
    weight, count = torch.ones(2, requires_grad=True), torch.ones(1, dtype=torch.int64)
    (bucket,) = in_buckets([("w", weight), ("n", count)], n_bytes=99, dtype=torch.bfloat16)
    assert [tensor.dtype for _, tensor in bucket.tensors] == [torch.bfloat16, torch.int64]
    (same,) = in_buckets([("w", weight)], n_bytes=99)
    assert same.tensors[0][1].data_ptr() == weight.data_ptr()
    assert not same.tensors[0][1].requires_grad


def test_experts_of_one_tensor_are_told_one_by_one() -> None:
    """As Hugging Face's files name them: gate over up, expert by expert."""
    both, down = torch.arange(2 * 6 * 4.0).reshape(2, 6, 4), torch.arange(2 * 4 * 3.0).reshape(2, 4, 3)
    named = dict(one_by_one([("l.mlp.experts.gate_up_proj", both), ("l.mlp.experts.down_proj", down)]))
    assert list(named) == [
        "l.mlp.experts.0.gate_proj.weight",
        "l.mlp.experts.0.up_proj.weight",
        "l.mlp.experts.1.gate_proj.weight",
        "l.mlp.experts.1.up_proj.weight",
        "l.mlp.experts.0.down_proj.weight",
        "l.mlp.experts.1.down_proj.weight",
    ]
    assert torch.equal(named["l.mlp.experts.1.up_proj.weight"], both[1, 3:])
    assert torch.equal(named["l.mlp.experts.0.down_proj.weight"], down[0])
