"""Environments: what answers the model between its turns."""

from treadle.rollout.envs.base import Environment, Reply, load_environment, read_reply
from treadle.rollout.envs.isolated import IsolatedEnvironment

__all__ = ["Environment", "IsolatedEnvironment", "Reply", "load_environment", "read_reply"]
