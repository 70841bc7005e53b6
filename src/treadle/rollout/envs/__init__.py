"""Environments: what answers the model between its turns."""

from treadle.rollout.envs.base import Environment, Episode, Opening, Reply, ReplyFunction, Step, load_environment
from treadle.rollout.envs.isolated import IsolatedEnvironment

__all__ = [
    "Environment",
    "Episode",
    "IsolatedEnvironment",
    "Opening",
    "Reply",
    "ReplyFunction",
    "Step",
    "load_environment",
]
