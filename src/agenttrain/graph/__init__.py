"""A user's LangGraph graph: load it, run it once, and answer its model calls.

Reading order: `load` (graph.py to a graph), `run` (one input to an ending), `intercept` (the gate in front of every
LangChain chat model), `messages` (LangChain's messages to plain data and back), `roles` (trained, frozen or auxiliary,
and why), `models` (chat models that can be seen before a run), `spans` (tool calls to OpenTelemetry).
"""
