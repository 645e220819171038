"""MindRLHF: reinforcement learning of language models on MindSpore and Ascend."""

__version__ = "0.5.0"
