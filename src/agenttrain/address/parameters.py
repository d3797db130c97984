"""What a request may say beside its messages, and what comes of it.

Every name that OpenAI's chat completions know stands in one of three tables; docs/serve.md prints them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

FOLLOWED: Final[Mapping[str, str]] = {
    "model": "any name; with `--strict-model` the served one alone",
    "messages": "system, developer (as system), user, assistant and tool messages, content as text or parts of text",
    "tools": "functions",
    "tool_choice": "auto, none, required or one function; the policy is told in words, as in training",
    "parallel_tool_calls": "false: the first call of an answer alone is given",
    "response_format": "text, json_object or json_schema; the policy is told in words, as in training",
    "max_tokens": "of one answer",
    "max_completion_tokens": "the same; it wins over max_tokens",
    "temperature": "from 0; without it that of the run's evaluation, which is greedy unless set",
    "stop": "one text or several; the answer is cut before the first",
    "stream": "the answer in pieces, sent once the policy has ended it",
    "stream_options": "include_usage",
    "user": "the conversation's id, where neither X-Conversation-Id nor metadata.conversation is given",
    "metadata": "metadata.conversation is the conversation's id where no X-Conversation-Id is given",
}
WITHOUT_EFFECT: Final[Mapping[str, Any]] = {
    "top_p": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
    "seed": None,
    "service_tier": None,
    "store": False,
    "reasoning_effort": None,
    "verbosity": None,
    "prompt_cache_key": None,
    "prompt_cache_retention": None,
    "prompt_cache_options": None,
    "safety_identifier": None,
}
"""Taken and not followed, and the value by which nothing is asked; others are named in the answer's header
X-Without-Effect. A policy that was trained without them draws from all tokens."""
SAMPLING: Final = ("top_p", "presence_penalty", "frequency_penalty", "logit_bias")
"""Of these, what would change which token is drawn; the server warns of each once."""
REFUSED: Final[Mapping[str, str]] = {
    "n": "the policy gives one answer a call: ask several times",
    "logprobs": "a policy that serves tells no log probabilities: `agenttrain eval` records them",
    "top_logprobs": "a policy that serves tells no log probabilities: `agenttrain eval` records them",
    "functions": "send tools",
    "function_call": "send tool_choice",
    "modalities": "the policy reads and writes text only",
    "audio": "the policy reads and writes text only",
    "prediction": "the policy samples every token: leave it out",
    "moderation": "nothing here moderates: leave it out",
    "web_search_options": "nothing runs on this server: give the policy a tool of yours",
}
"""Name to the reason and the next step; the values that ask for nothing are taken."""
ASKS_NOTHING: Final[Mapping[str, Any]] = {"n": 1, "logprobs": False, "top_logprobs": 0, "modalities": ["text"]}
