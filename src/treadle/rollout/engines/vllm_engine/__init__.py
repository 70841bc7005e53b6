"""vLLM as a rollout engine: a server of its own, spoken to over HTTP; vLLM itself is never imported here."""

from treadle.rollout.engines.vllm_engine.engine import VllmEngine, VllmLimits
from treadle.rollout.engines.vllm_engine.launch import VllmLaunch, connect_vllm, start_vllm

__all__ = ["VllmEngine", "VllmLaunch", "VllmLimits", "connect_vllm", "start_vllm"]
