"""Trajectories and a reward become Samples; `account` proves afterwards where every sampled token went."""
