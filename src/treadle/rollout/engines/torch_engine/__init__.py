"""The embedded engine: continuous batching on the trainer's own module, CPU or GPU."""

from treadle.rollout.engines.torch_engine.engine import TorchEngine
from treadle.rollout.engines.torch_engine.scheduler import EngineLimits

__all__ = ["EngineLimits", "TorchEngine"]
