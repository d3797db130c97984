"""The trainer "verl" of agenttrain: veRL's own trainer, fed by rollouts of a LangGraph graph.

In the process of `agenttrain fit`
    plugin           registers the trainer; imports nothing heavy      settings       the table [verl]
    versions         which veRL is spoken to                           known          what of its code is relied on
    plan             a configuration to what the cluster will be       algorithms     our algorithms in veRL's keys
    compose          a Plan to veRL's configuration                    overrides      what users say of that, checked
    cluster          Ray: started here, or joined                      needs          what veRL will ask it for
    ray_folder       an own cluster's files                            worker_logs    a Ray error in one line
    shipping         graph, tasks and policy to the nodes              node_check     what each joined node answers
    trainer          protocols.Trainer over all of it                  reporting      a step in our words
    controller       veRL's trainer, one step at a time                exporting      its checkpoint as a model folder
    rollout_workers  the processes in which graphs run: asked, watched, replaced
    process_watch    the processes that a run can't do without         rates          learning rates by step

A rollout counts once
    rows             which rollout each of veRL's rows is of           dealing        rows to ranks and mini-batches
    counted          veRL's trainer that does so                       credit         estimators that veRL calls
    calls            what each update is told                          step_figures   what comes out of it

In a rollout worker
    rollout_worker   veRL's agent loop worker, with a graph            host           graph, store and threads
    agent_loop       one rollout to AgentLoopOutputs                   emission       what may be handed to veRL
    outbox           what the driver is told, until it is taken        verl_engine    protocols.Engine over veRL
    turn_client      veRL's client, with a version for each token

Beside the trainer's ranks
    engine_server    any engine of agenttrain in an actor of Ray       server_spec    what it is made of
    replica          that actor as veRL's rollout replica              ray_errors     what became of an actor
    weight_push      new weights from a rank to it                     weight_stream  in buckets, as one iterable
    mailbox          the same where ranks and replicas are apart       mailbox_actor  where they lie meanwhile

In every process of veRL's
    in_every_process what veRL loads                                   cpu/           veRL without a GPU
"""
