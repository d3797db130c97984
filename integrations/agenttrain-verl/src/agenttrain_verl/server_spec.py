"""What an engine's actor is made of, as one text that stands in veRL's configuration.

The configuration is the one thing that reaches both the replica in the driver and the adapter in a trainer's rank:
`actor_rollout_ref.rollout.custom` holds the text under the name "agenttrain". Imports neither veRL nor Ray.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from agenttrain.config import Config
from agenttrain.errors import TrainerError
from agenttrain.exporters import NOTHING, Exported
from agenttrain.records import RolloutSpec

KEY = "agenttrain"
"""Of the text, in rollout.custom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """All that makes the engines of one run."""

    rollout: RolloutSpec
    """The run as the engines' nodes see it: configuration, model, folder; graph.py, which may register the engine."""
    run: str
    """What names this run's actors apart from those of others on the same cluster."""
    device: Literal["cpu", "cuda"]
    """"cpu": the engine sees no GPU."""
    exported: Exported = NOTHING
    """Where the driver's traces go, and as which run."""

    @property
    def config(self) -> Config:
        """The resolved configuration, as an engine in an actor needs it: the actor is a process of its own already."""
        tables = {**self.rollout.config, "engine": {**self.rollout.config.get("engine", {}), "process": "shared"}}
        return Config.model_validate(tables)

    def actor_name(self, replica_rank: int) -> str:
        """Of one replica's actor."""
        return f"agenttrain-engine-{self.run}-{replica_rank}"

    def folder(self, replica_rank: int) -> Path:
        """Of one replica's logs, in the run's own."""
        return Path(self.rollout.run_dir) / "verl" / f"replica-{replica_rank}"

    def as_custom(self) -> dict[str, str]:
        """What rollout.custom is to hold.

        "$" is escaped: OmegaConf would read "${…}" in a user's settings as its own.
        """
        return {KEY: json.dumps(asdict(self)).replace("$", "\\u0024")}

    @staticmethod
    def of_custom(custom: Mapping[str, Any] | None) -> ServerSpec:
        """The same again, from rollout.custom.

        Raises:
            TrainerError: veRL's configuration does not hold it.
        """
        text = (custom or {}).get(KEY)
        if text is None:
            raise TrainerError(
                f"actor_rollout_ref.rollout.custom holds no {KEY!r}, and the rollout named {KEY!r} is made from it. "
                "Leave `custom` and `name` of [verl.overrides.actor_rollout_ref.rollout] as agenttrain sets them."
            )
        fields = json.loads(text)
        rollout = {**fields["rollout"], "plugins": tuple(fields["rollout"]["plugins"])}
        exported = Exported(**fields["exported"])
        return ServerSpec(rollout=RolloutSpec(**rollout), run=fields["run"], device=fields["device"], exported=exported)
