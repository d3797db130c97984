"""Calls to bodies of POST /generate, answers to Generations.

Invariant: what becomes a Generation is exactly what the server sampled, each id with its own log probability and the
version of the weights that drew it; an answer of which that can't be said is an EngineError, never a Generation. Knows
nothing of connections.

One turn may take several requests. A server also ends an answer on the model's own end id, which need not be a stop id
of the turn: `goes_on` tells, `going_on` asks for what is left and `joined` makes one Generation of both.

Source: sglang 0.5.23, srt/managers/io_struct.py (GenerateReqInput), srt/managers/tokenizer_manager.py (meta_info) and
srt/managers/schedule_batch.py (how an answer ends). 0.5.12 tells no weight_versions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from agenttrain.errors import EngineError
from agenttrain.records import Generation, Ids, RoutedExperts, Sampling, StopReason

from agenttrain_sglang.experts import RoutedShape, joined_experts, routed_experts_of

PUT_IN = "NaN happened"
"""How a server says that a logit was no number and that it put an id in itself."""
ROUNDING = 1e-3
"""A log probability may be this far above 0: the sum of a softmax is rounded."""

Version = Callable[[str], int]
"""A server's name of its weights to their version; for a call with an adapter, to the adapter's, whatever the name.

Raises:
    EngineError: a name that nobody gave.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A request as a server got it: what its answer is held against."""

    prompt_ids: Ids
    """[P]"""
    sampling: Sampling
    rid: str
    """The request's id, made by `client.new_rid`."""
    address: str
    """The server's."""
    n_vocabulary: int
    """Ids that the model has."""
    routed: RoutedShape | None = None
    """Of a row of routed experts. None: no routed experts were asked for."""


def generate_body(
    prompt_ids: Ids, sampling: Sampling, *, rid: str, adapter: str | None = None, wants_experts: bool = False
) -> dict[str, Any]:
    """The body of one POST /generate, plain JSON.

    Every setting that bends the distribution is sent as "off", since a server may have been started with others
    (--preferred-sampling-params). Without stop ids the model's own end ids end nothing either.
    """
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": list(prompt_ids),
        "sampling_params": _sampling_params(sampling),
        "return_logprob": True,
        "stream": False,
    }
    if adapter is not None:
        body["lora_path"] = adapter
    if wants_experts:
        body["return_routed_experts"] = True
        body["routed_experts_start_len"] = sampling.experts_from
    return body


def _sampling_params(sampling: Sampling) -> dict[str, Any]:
    return {
        "temperature": sampling.temperature,
        "max_new_tokens": sampling.max_tokens,
        "min_new_tokens": 0,
        "sampling_seed": sampling.seed,
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": not sampling.stop_ids,
        "stop": [],
        "n": 1,
        "top_p": 1.0,
        "top_k": 1 if sampling.temperature == 0 else -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
    }


def generation_of(answer: Mapping[str, Any], *, sent: Sent, version_of: Version) -> Generation:
    """What a server sampled.

    Returns:
        A Generation with stop_reason "stop" where the server met an end id (see `goes_on`), "length" where there was
        no room left, and "aborted", with what was sampled until then, where the call was aborted.

    Raises:
        EngineError: ids, log probabilities, versions or experts that don't fit the call or each other, or a call that
            the server gave up.
    """
    ids, meta = answer.get("output_ids"), answer.get("meta_info")
    if not isinstance(meta, Mapping) or not isinstance(ids, list):
        _refuse(sent, f"an answer of {sorted(answer)}, and it should hold output_ids and meta_info")
    if meta.get("id") != sent.rid:
        _refuse(sent, f"the answer of request {meta.get('id')!r}")
    stop_reason = _stop_reason(meta.get("finish_reason"), ids, sent)
    _check_prompt_tokens(meta, stop_reason, sent)
    _check_ids(ids, sent)
    return Generation(
        token_ids=tuple(ids),
        logprobs=_logprobs(meta.get("output_token_logprobs"), ids, sent),
        weight_versions=_weight_versions(meta, len(ids), sent, version_of),
        stop_reason=stop_reason,
        n_cached_ids=_n_cached(meta, sent),
        routed_experts=_routed_experts(meta.get("routed_experts"), len(ids), stop_reason, sent),
    )


def _refuse(sent: Sent, seen: str) -> NoReturn:
    raise EngineError(
        f"The server at {sent.address} answered request {sent.rid} with {seen}. Nothing of it is kept; see the "
        "server's log."
    )


def _stop_reason(finish: Any, ids: Sequence[int], sent: Sent) -> StopReason:
    """How the answer ended, in our words. No ids at all, or an end id that is no stop id in the last place, is
    "length"."""
    if not isinstance(finish, Mapping):
        _refuse(sent, f"finish_reason {finish!r}, and it should be a table with a type")
    match finish.get("type"):
        case "stop":
            if finish.get("matched") == PUT_IN:
                _refuse(sent, "an id that it put in itself, since a logit was no number: the weights hold NaN or Inf")
            stopped = bool(ids) and ids[-1] in sent.sampling.stop_ids
            return "stop" if stopped or 0 < len(ids) < sent.sampling.max_tokens else "length"
        case "length":
            return "length"
        case "abort":
            if finish.get("status_code") is not None or finish.get("err_type") is not None:
                _refuse(sent, f"an error, status {finish.get('status_code')}: {finish.get('message')}")
            return "aborted"
        case other:
            _refuse(sent, f"finish_reason type {other!r}, and only stop, length and abort are known")


def _check_prompt_tokens(meta: Mapping[str, Any], stop_reason: StopReason, sent: Sent) -> None:
    """A call that was aborted before it was read has no count."""
    n = meta.get("prompt_tokens")
    if n != len(sent.prompt_ids) and not (n is None and stop_reason == "aborted"):
        _refuse(sent, f"an answer to {n} prompt ids, and {len(sent.prompt_ids)} were sent")


def _check_ids(ids: Sequence[Any], sent: Sent) -> None:
    if len(ids) > sent.sampling.max_tokens:
        _refuse(sent, f"{len(ids)} ids, and {sent.sampling.max_tokens} were asked for")
    for i in ids:
        if type(i) is not int or not 0 <= i < sent.n_vocabulary:
            _refuse(sent, f"id {i!r}, and the model's vocabulary has {sent.n_vocabulary} ids")
    for place, i in enumerate(ids[:-1]):
        if i in sent.sampling.stop_ids:
            _refuse(sent, f"{len(ids) - place - 1} ids after stop id {i}, and nothing should follow it")


def _logprobs(entries: Any, ids: Sequence[int], sent: Sent) -> tuple[float, ...]:
    """[R] from [[log probability, id, text], …], each held against the answer's own id."""
    if not ids:
        return ()
    if not isinstance(entries, list):
        _refuse(sent, f"{len(ids)} ids without log probabilities")
    if len(entries) != len(ids):
        _refuse(sent, f"{len(entries)} log probabilities for {len(ids)} ids")
    logprobs = []
    for place, (entry, i) in enumerate(zip(entries, ids, strict=True)):
        logprob, told = (entry[0], entry[1]) if isinstance(entry, list) and len(entry) >= 2 else (None, None)
        if told != i:
            _refuse(sent, f"the log probability of id {told} at place {place}, where it sampled id {i}")
        if not isinstance(logprob, int | float) or not math.isfinite(logprob) or logprob > ROUNDING:
            _refuse(sent, f"log probability {logprob} at place {place}, and it should be finite and at most 0")
        logprobs.append(float(logprob))
    return tuple(logprobs)


def _weight_versions(meta: Mapping[str, Any], n: int, sent: Sent, version_of: Version) -> tuple[int, ...]:
    """[R] per id where the server tells spans, else the one of the whole call."""
    spans = meta.get("weight_versions")
    if spans is None:
        name = meta.get("weight_version")
        if name is None:
            _refuse(sent, "an answer without weight_version")
        return (version_of(str(name)),) * n
    versions: list[int] = []
    for span in spans if isinstance(spans, list) else ():
        match span:
            case {"version": name, "start": int(start), "end": int(end)} if (
                start == len(versions) and start <= end <= n
            ):
                versions += [version_of(str(name))] * (end - start)
            case _:
                break
    if len(versions) != n:
        _refuse(sent, f"weight_versions {spans} that don't cover its {n} ids one by one")
    return tuple(versions)


def _n_cached(meta: Mapping[str, Any], sent: Sent) -> int:
    """Of the prompt; a call that was taken back may find its own ids in the cache too."""
    n = meta.get("cached_tokens")
    return min(max(n, 0), len(sent.prompt_ids)) if isinstance(n, int) else 0


def _routed_experts(encoded: Any, n: int, stop_reason: StopReason, sent: Sent) -> RoutedExperts | None:
    """None where none were asked for, nothing was sampled, or an aborted call lost them with its place in the cache."""
    if sent.routed is None or n == 0 or (encoded is None and stop_reason == "aborted"):
        return None
    if not isinstance(encoded, str):
        _refuse(sent, "no routed experts: start it with --enable-return-routed-experts, or set routed_experts = false")
    return routed_experts_of(
        encoded,
        shape=sent.routed,
        start=sent.sampling.experts_from,
        end=len(sent.prompt_ids) + n - 1,
        where=f"The server at {sent.address}, request {sent.rid}",
    )


def goes_on(generation: Generation, sampling: Sampling) -> bool:
    """Whether a server ended an answer that is not at its end: on an end id that is no stop id, with room left.

    Args:
        sampling: the one that the answer was asked with.
    """
    return (
        generation.stop_reason == "stop"
        and 0 < len(generation.token_ids) < sampling.max_tokens
        and generation.token_ids[-1] not in sampling.stop_ids
    )


def going_on(prompt_ids: Ids, generation: Generation, sampling: Sampling) -> tuple[Ids, Sampling]:
    """Prompt and sampling of the request that goes on after `generation`.

    The seed stays: a server draws from (seed, position), and positions go on too.
    """
    n = len(generation.token_ids)
    known = generation.routed_experts
    return (
        prompt_ids + generation.token_ids,
        replace(
            sampling,
            max_tokens=sampling.max_tokens - n,
            experts_from=sampling.experts_from if known is None else known.end,
        ),
    )


def joined(first: Generation, second: Generation) -> Generation:
    """One Generation of two, the second asked for by `going_on` from the first.

    Raises:
        EngineError: routed experts that don't follow each other.
    """
    experts = first.routed_experts
    if second.token_ids:
        experts = joined_experts(first.routed_experts, second.routed_experts)
    return Generation(
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
        weight_versions=first.weight_versions + second.weight_versions,
        stop_reason=second.stop_reason,
        n_cached_ids=first.n_cached_ids,
        routed_experts=experts,
    )
