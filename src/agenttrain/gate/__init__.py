"""The run of the promotion gate: a `candidate` is held against the rules (`verdict`), then accepted, or refused.

`way_back` lets what was accepted before serve again, `replay` asks a policy the regression set. What the rules say, and
what the ledger is, stands in `promotion/`.
"""
