"""Agents: programs that talk to an endpoint, and what is trained of it."""
