"""What a rollout is worth: verifiers to a Reward (`score`), and how it ended to a Status (`status`)."""
