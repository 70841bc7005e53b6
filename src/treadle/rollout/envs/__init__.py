"""Environments: what answers the model between its turns."""

from treadle.rollout.envs.base import Environment, Reply, load_environment, read_reply

__all__ = ["Environment", "Reply", "load_environment", "read_reply"]
