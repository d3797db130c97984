"""Verifiers that come with agenttrain: functions of task, state and sandbox, to be named in `@trainable`."""
