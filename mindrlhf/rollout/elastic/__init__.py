"""Nodes for rollout only: they join a run, take a share of its prompts, and leave, while the run goes on."""
