"""Models and data sets of hubs: found in the caches of this machine, fetched when a user says so and never else."""
