"""Verifiers that ask another model."""
