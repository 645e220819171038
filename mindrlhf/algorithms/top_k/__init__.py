"""Distillation from the top-k tokens of a teacher at each position, in place of the one that was sampled."""
