"""Publishing weights: a buffer in shared memory on each node, who writes what to it, and the sync between nodes."""
