"""Optional CPU performance patches: everything works without this package, more slowly.

Nothing imports it: where there is a faster way, it is looked up (:mod:`mindrlhf.system.speed_ups`).
"""
