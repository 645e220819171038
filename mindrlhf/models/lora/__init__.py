"""Low-rank adapters: their cells on the CPU and on Ascend, and models that have them."""
