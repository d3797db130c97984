"""What can go wrong with new weights, by what the caller must do next.

Both are EngineErrors. What differs is the server afterwards: the same as before, or not to be trusted.
"""

from __future__ import annotations

from agenttrain.errors import EngineError


class WeightsRefused(EngineError):
    """Nothing was taken: the server samples from the weights that it had, under their version."""


class ServerSpoiled(EngineError):
    """The server is gone, silent, or holds neither the old weights nor the new ones: replace it, or push all again.

    Where it still answers it was told to call its weights `tags.SPOILED`, so that nothing it samples is trained.
    """
