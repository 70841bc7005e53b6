"""The settings of engines that are servers of their own."""

from __future__ import annotations

from pydantic import Field

from treadle.config.section import MAX_SECONDS, Section

EngineValue = str | bool | int | float | tuple[str, ...]


class EngineSection(Section):
    """The server that generates, where rollout_engine is not torch."""

    engine_python: str | None = Field(
        None,
        description="Python interpreter that has the engine, `venv/bin/python`; Treadle's own where not given.",
    )
    rollout_external_engine_addrs: tuple[str, ...] = Field(
        (), description="Servers that run already, `host:port` each, instead of starting any."
    )
    engine_start_timeout_seconds: float = Field(
        600.0,
        gt=0,
        le=MAX_SECONDS,
        description="Deadline of starting an engine's server, or of reaching one that runs.",
    )
    max_logprob_diff: float = Field(
        0.1,
        gt=0,
        description="Warn where the mean gap between the trainer's and the engine's logprobs is above this (nats); bfloat16 alone makes up to 0.05.",
    )
    vllm: dict[str, EngineValue] = Field(
        default_factory=dict,
        description="Arguments of vLLM's server by their own names; as flags `--vllm-NAME VALUE`, `--vllm-enforce-eager`.",
    )
    sglang: dict[str, EngineValue] = Field(
        default_factory=dict,
        description="Arguments of SGLang's server by their own names; as flags `--sglang-NAME VALUE`, `--sglang-disable-cuda-graph`.",
    )

    def arguments(self, kind: str) -> dict[str, EngineValue]:
        """Those for a server of this kind; none for the torch engine."""
        return {"vllm": self.vllm, "sglang": self.sglang}.get(kind, {})
