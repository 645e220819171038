"""The schedules of sampling: within the step, off-policy by some steps, in segments, or asynchronously."""
