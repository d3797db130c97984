"""The commands, one file each: arguments in, a run folder and printed words out. Heavy imports stay inside them."""
