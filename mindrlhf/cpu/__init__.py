"""What only makes a CPU fast: everything works without this package, slower.

Nothing imports it: where there is a faster way, it is looked up (:mod:`mindrlhf.system.speed_ups`).
"""
