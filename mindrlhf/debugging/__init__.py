"""Precision debugging: where two runs part, and msprobe's dump of the kernels of chosen steps."""
