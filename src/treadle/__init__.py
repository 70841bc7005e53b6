"""Treadle: reinforcement learning for language models, from one laptop to a cluster, in one loop."""

__version__ = "0.1.0"
