"""What differs in SGLang 0.5.12: pure; its servers were run by hand."""

from __future__ import annotations

from agenttrain_sglang.sglang_0_5_12 import adapter_body


def test_an_adapter_travels_as_one_string_without_checksums() -> None:
    new = {"lora_name": "a", "serialized_named_tensors": ["x", "x"], "expected_checksums": {"q": "1"}}
    assert adapter_body(new) == {"lora_name": "a", "serialized_tensors": "x"}
