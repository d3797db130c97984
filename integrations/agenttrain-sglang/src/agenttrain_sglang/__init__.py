"""Rollouts of agenttrain from SGLang servers.

    plugin       registers the engine "sglang" and `agenttrain sglang …`; imports nothing heavy
    settings     the table [sglang]
    environment  SGLang's own virtual environment: where it is, how it is made      stand_ins/  what the CPU lacks
    launch       the command line and the environment of one server
    server       one server that we started: its process group, its log, its end
    client       one server's HTTP: generate, abort, facts, counters
    wire         calls to request bodies, answers to Generations
    weights/     published weights into a running server: group, tensor, disk, adapter
    fleet        all servers of a run: which answers whom, what is dead, what replaces it
    engine       protocols.Engine over a fleet
    sglang_0_5_12  what differs in the version that veRL 0.9.1 needs
"""
