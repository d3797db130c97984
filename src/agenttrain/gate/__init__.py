"""The run of the promotion gate: a `candidate` is held against the rules (`verdict`), accepted, or refused, and the way back.

`replay` asks a policy the regression set. What the rules say, and what the ledger is, stands in `promotion/`.
"""
