"""Groups of rollouts to a loss and its gradient: the mathematics of training, and the files of a checkpoint.

`algorithms` says what each is made of; `advantage` compares the rollouts of one group, and `by_turn` their turns where
verifiers credit nodes or turns; `batches` says which teach and lays their tokens out; `credit` walks along a rollout
with a critic; `loss` weighs every sampled token once;
`checkpoint` keeps the state. The loop that uses them is a trainer's (`agenttrain.local`).
"""
