"""An isolated place of its own for each rollout: `making` chooses a backend, `plugin` names those that there are."""
