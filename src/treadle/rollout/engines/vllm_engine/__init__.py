"""vLLM as a rollout engine: a server of its own, spoken to over HTTP; vLLM itself is never imported here."""

from treadle.rollout.engines.vllm_engine.dialect import VllmDialect
from treadle.rollout.engines.vllm_engine.launch import connect_vllm, start_vllm

__all__ = ["VllmDialect", "connect_vllm", "start_vllm"]
