"""What a rollout is worth: verifiers to a Reward (`score`, in `time_limit`), and how it ended to a Status (`status`)."""
