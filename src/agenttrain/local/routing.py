"""Experts that an engine told instead of a router's own choice, in the passes of one model.

Which experts a token goes through is then what it was when the token was sampled, and what they weigh is made of the
trainer's own router logits, as the model makes it for its own choice, so that gradients flow into the routers.
Invariants: experts that the model would have chosen itself change nothing; a token whose experts are not known routes
by itself; passes of several threads don't see each other's experts.

Taken are routers that give (logits, weights, chosen) for each token, and blocks whose `route_tokens_to_experts` makes
weights and chosen of the logits, as DeepSeek's and GLM's do in transformers 5.10. A weight is a softmax or a sigmoid of
the logits, normalised over the chosen ones or not, times a number. A trial finds out which, whatever the model is
called.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal

import numpy as np
import torch

from agenttrain.errors import ConfigError
from agenttrain.records import RoutedExperts

TOLERANCE: Final = 1e-5
"""Relative, between a router's weights and ours for its own choice."""
TRIAL_LENGTH: Final = 16
SWITCHED_OFF: Final = "or let tokens route anew: trainer.replay_experts = false."

_LAYER = re.compile(r"\.(?:layers|h|blocks)\.([0-9]+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighing:
    """How a model makes the weights of chosen experts."""

    score: Literal["softmax", "sigmoid"]
    normalised: bool
    """The chosen ones sum to `factor`."""
    factor: float = 1.0

    def weights(self, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """[tokens, K] of chosen experts, from the logits [tokens, E] of all."""
        wide = logits.float()
        scores = (wide.softmax(dim=-1) if self.score == "softmax" else wide.sigmoid()).gather(-1, chosen)
        if self.normalised:
            scores = scores / scores.sum(dim=-1, keepdim=True)
        return scores if self.factor == 1.0 else scores * self.factor


KINDS: Final = (
    Weighing(score="softmax", normalised=True),
    Weighing(score="softmax", normalised=False),
    Weighing(score="sigmoid", normalised=True),
    Weighing(score="sigmoid", normalised=False),
)
"""What is tried, in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """A module that chooses experts."""

    name: str
    module: Any
    layer: int
    """Place among all layers of the model."""
    place: int
    """Place among the layers that route."""
    n_experts: int
    n_chosen: int
    weighing: Weighing


class Choice(torch.nn.Module):  # type: ignore[misc]
    """A block's own way from logits to experts, as a router that gives (logits, weights, chosen)."""

    def __init__(self, block: Any) -> None:
        """Stand in the block for its `route_tokens_to_experts`."""
        super().__init__()
        self._route = block.route_tokens_to_experts
        block.add_module("choice", self)
        block.route_tokens_to_experts = self._answer

    def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of the logits, which come last."""
        chosen, weights = self._route(*args)
        return args[-1], weights, chosen

    def _answer(self, *args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, weights, chosen = self(*args)
        return chosen, weights


class Replay:
    """Sends tokens through experts that were told, in every router of a model. Threads may share it."""

    def __init__(self, model: Any) -> None:
        """Find the model's routers.

        Raises:
            ConfigError: it has none, or one that chooses in a way that isn't known here.
        """
        self._name = type(model).__name__
        self._n_layers = int(model.config.get_text_config().num_hidden_layers)
        self._told = threading.local()
        self.routers = _routers(model)
        for router in self.routers:
            router.module.register_forward_hook(partial(self._choose, router))

    def check(self, experts: RoutedExperts) -> None:
        """Refuse what another model routed.

        Raises:
            ConfigError: other layers, another number a token, or an expert that this model has not.
        """
        first = self.routers[0]
        fits = experts.n_layers in (len(self.routers), self._n_layers) and experts.n_chosen == first.n_chosen
        if not fits:
            raise ConfigError(
                f"The engine told {experts.n_chosen} experts a token in {experts.n_layers} layers, and {self._name} "
                f"takes {first.n_chosen} in {len(self.routers)} of its {self._n_layers} layers. Serve the model that "
                f"is trained, {SWITCHED_OFF}"
            )
        numbers = np.frombuffer(experts.data, "<u2").reshape(-1, experts.n_layers, experts.n_chosen)
        if experts.n_layers != len(self.routers):
            numbers = numbers[:, [router.layer for router in self.routers]]
        highest = int(numbers.max(initial=0))
        if highest >= first.n_experts:
            raise ConfigError(
                f"The engine told expert {highest}, and {self._name} has experts 0 to {first.n_experts - 1}. Serve the "
                f"model that is trained, {SWITCHED_OFF}"
            )

    @contextmanager
    def of(self, experts: torch.Tensor | None) -> Iterator[None]:
        """Meanwhile this thread's tokens go through these experts.

        Args:
            experts: [B, T, layers, K] as a batch's ids stand, -1 where a token routes by itself. None: all do.
        """
        self._told.experts = None if experts is None else experts.flatten(0, 1)
        try:
            yield
        finally:
            self._told.experts = None

    def _choose(self, router: Router, _module: Any, _args: Any, output: tuple[torch.Tensor, ...]) -> Any:
        experts = getattr(self._told, "experts", None)
        if experts is None:
            return None
        logits, weights, own = output
        told = experts[:, router.place if experts.shape[1] == len(self.routers) else router.layer].to(own.dtype)
        known = told[:, :1] >= 0
        chosen = torch.where(known, told, own)
        return logits, torch.where(known, router.weighing.weights(logits, chosen).to(weights.dtype), weights), chosen


def _routers(model: Any) -> tuple[Router, ...]:
    """All routers, in the model's order.

    Raises:
        ConfigError: there is none, or one of an unknown kind.
    """
    found: list[Router] = []
    for name, module, (logits, weights, chosen) in _tried(model):
        weighing, layer = _weighing(logits, weights, chosen), _LAYER.search(f".{name}.")
        if weighing is None or layer is None or any(router.module is module for router in found):
            raise ConfigError(
                f"{type(model).__name__} routes in {name} ({type(module).__name__}) in a way that can't be repeated "
                f"with the experts that the engine told. Train another model, {SWITCHED_OFF}"
            )
        found.append(
            Router(
                name=name,
                module=module,
                layer=int(layer[1]),
                place=len(found),
                n_experts=logits.shape[-1],
                n_chosen=chosen.shape[-1],
                weighing=weighing,
            )
        )
    if not found:
        raise ConfigError(
            f"The engine told experts, and {type(model).__name__} has no router that gives (logits, weights, chosen). "
            f"Serve the model that is trained, {SWITCHED_OFF}"
        )
    return tuple(found)


def _tried(model: Any) -> list[tuple[str, Any, tuple[torch.Tensor, ...]]]:
    """The modules that route in a pass over a few ids, with what they gave."""
    for module in list(model.modules()):
        if hasattr(module, "route_tokens_to_experts"):
            Choice(module)
    seen: list[tuple[str, Any, tuple[torch.Tensor, ...]]] = []

    def look(name: str, module: Any, _args: Any, output: Any) -> None:
        if _is_routing(output):
            seen.append((name, module, output))

    hooks = [module.register_forward_hook(partial(look, name)) for name, module in model.named_modules()]
    n_vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.arange(TRIAL_LENGTH, device=next(model.parameters()).device) * 7 % n_vocabulary
    try:
        with torch.no_grad():
            model(input_ids=ids[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _is_routing(output: Any) -> bool:
    """Whether a module gave logits [tokens, E], weights and chosen [tokens, K]."""
    if not (isinstance(output, tuple) and len(output) == 3 and all(isinstance(x, torch.Tensor) for x in output)):
        return False
    logits, _, chosen = output
    return (
        logits.ndim == chosen.ndim == 2
        and len(logits) == len(chosen) == TRIAL_LENGTH
        and not chosen.is_floating_point()
    )


def _weighing(logits: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> Weighing | None:
    """How these weights came of these logits. None: in no way that is known here."""
    if weights.shape != chosen.shape:
        return None
    for kind in KINDS:
        ours = kind.weights(logits, chosen)
        factor = round(float((weights.float() / ours).median()), 4)
        if torch.allclose(weights.float(), ours * factor, rtol=TOLERANCE, atol=0):
            return replace(kind, factor=factor)
    return None
