"""The trainer "verl" of agenttrain: veRL's own trainer, fed by rollouts of a LangGraph graph.

In the process of `agenttrain fit`
plugin        registers the trainer "verl"; imports nothing heavy       settings   the table [verl]
versions      which veRL is spoken to                                   plan       a run's configuration to what the cluster will be
algorithms    our algorithms in veRL's keys                             compose    a Plan to veRL's configuration
cluster       Ray: started here, or joined                              shipping   graph, tasks and policy to the nodes
needs         what a plan asks of Ray, against what nodes have          node_check whether they have the same installed
ray_folder    an own cluster's files; what dead ones left               worker_logs  a Ray error in one line
trainer       protocols.Trainer over all of it                          controller veRL's trainer, one step at a time
rows          which rollout each of veRL's rows is of                   counted    a rollout counts once: dealing, advantages, loss
rollout_workers  the processes in which graphs run: asked, watched, replaced

In a rollout worker
rollout_worker   veRL's agent loop worker that holds a graph            host       graph, store and threads of one process
agent_loop       veRL's agent loop: one rollout to AgentLoopOutputs     emission   what may be handed to veRL
outbox           what a worker tells the driver, until it is taken
verl_engine      protocols.Engine over veRL's servers                   turn_client  veRL's client, with a version for each token

Beside the trainer's ranks
engine_server    an engine of agenttrain in an actor of Ray             replica    that actor as veRL's rollout replica
weight_push      new weights from a rank to it                          mailbox    the same where ranks and replicas are apart

in_every_process what veRL loads in each of its processes               cpu/       veRL without a GPU
"""
