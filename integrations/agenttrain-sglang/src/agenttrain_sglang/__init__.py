"""Rollouts of agenttrain from SGLang servers.

plugin       registers the engine "sglang" and `agenttrain sglang …`; imports nothing heavy
settings     the table [sglang]
plan         a run's configuration to what its servers will be; all that can be wrong is found there
forecast     what they will hold in memory
versions     which SGLang is spoken to, and which is tested
environment  SGLang's own virtual environment: where it is, how it is made      stand_ins/  what the CPU lacks
launch       the command line and the environment of one server
server       one server process that we started: its group, its log, its end
client       one server's HTTP: generate, abort, facts, counters
wire         calls to request bodies, answers to Generations      experts  what is told of a mixture
weights/     published weights into a running server: group, tensor, disk, adapter
one_server   one server that may be asked: its calls in flight, its end, its count
replica      the place of one server in a run: how it is filled, watched, and filled again
fleet        all places of a run: which answers whom
published    the weights of now, and what each server holds      adapters  LoRA adapters in one server
calls        one call on its way: sent, and sent again when its server dies
engine       protocols.Engine over all of it      loop  its event loop
sglang_0_5_12  what differs in the version that veRL 0.9.1 needs
"""
