"""The schedules by which samples are made: within the step, ahead of it, in segments, or asynchronously."""
