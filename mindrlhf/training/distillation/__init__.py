"""Several teachers: whose samples each judges, the rows of their samples, and their models on a rank."""
