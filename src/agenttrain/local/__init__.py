"""The embedded engine and trainer: a Hugging Face folder trained in this process, a plugin like any other.

`engine` answers token ids (`policy` loads the model, `kv_cache` keeps what it has read, `draw` samples);
`trainer` turns rollouts into updates (`shared_prefix` reads their common beginning once) and publishes weights to
whatever engine serves it.
"""
