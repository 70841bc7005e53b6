"""SGLang as a rollout engine: a server of its own, spoken to over HTTP; SGLang itself is never imported here."""

from treadle.rollout.engines.sglang_engine.dialect import SglangDialect
from treadle.rollout.engines.sglang_engine.launch import connect_sglang, start_sglang

__all__ = ["SglangDialect", "connect_sglang", "start_sglang"]
