"""A policy that serves becomes an OpenAI-compatible address: chat completions over HTTP.

parameters     what a request may say, and what comes of each
request        a request's body to a ModelCall (its messages: wire_messages)
conversation   headers and body to the conversation's id
completion     a Reply to a chat completion, whole or in pieces
refusal        what can't be answered, in OpenAI's error shape
app            the paths, and the policy behind them
server         a socket, from the first connection to the last answer
"""
