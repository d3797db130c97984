"""A policy that serves becomes an OpenAI-compatible address: chat completions over HTTP."""
