"""A trained policy answers outside of training: for a graph, a block or an address (`attached`).

Which policy answers which conversation the `arms` decide, by the ledger where "promoted" is named; `served_policy`
loads them, `served_run` is one run of a graph, `canary_trial` counts outcomes and takes a canary back.
"""
