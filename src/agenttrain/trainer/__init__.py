"""Groups of rollouts to a loss and its gradient: the mathematics of training, and a checkpoint that is whole or absent.

`advantage` compares the rollouts of one group; `batches` says which teach and lays their tokens out; `loss` weighs
every sampled token once; `checkpoint` keeps the state. The loop that uses them is a trainer's (`agenttrain.local`).
"""
