"""Faster ways on a CPU; each is worth 8 % of a run that docs/performance.md measures."""
