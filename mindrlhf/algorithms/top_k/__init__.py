"""Distillation from the K likeliest words of a teacher at each position, in place of the one that was sampled."""
