"""What a rollout is worth: verifiers to a Reward (`score`, `time_limit`), and how it ended to a Status (`status`)."""
