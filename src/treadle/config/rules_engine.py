"""Rules about engines that are servers of their own; each is one function and says one thing."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.config.findings import Finding, Rule, fault, warning
from treadle.config.sections import Config

TAKEN = (
    *("model", "host", "port", "dtype", "seed", "max_num_seqs", "logprobs_mode"),
    *("weight_transfer_config", "enable_scale_out", "served_model_name", "api_key", "root_path"),
)
"""Arguments of vLLM's server that Treadle gives itself, or that it would not reach the server with."""


def server_settings_are_used(config: Config) -> Iterator[Finding]:
    if config.rollout.rollout_engine != "torch":
        return
    engine = config.engine
    for name, given in (
        ("engine_python", engine.engine_python is not None),
        ("rollout_external_engine_addrs", bool(engine.rollout_external_engine_addrs)),
        ("vllm", bool(engine.vllm)),
    ):
        if given:
            yield fault(f"{name} does nothing with rollout_engine = torch; set rollout_engine = vllm")


def own_arguments_are_left_alone(config: Config) -> Iterator[Finding]:
    for name in config.engine.vllm:
        if name.replace("-", "_") in TAKEN:
            yield fault(f"--vllm-{name.replace('_', '-')} is not yours to give: Treadle sets it from its own settings")


def servers_are_started_or_reached(config: Config) -> Iterator[Finding]:
    engine, cluster = config.engine, config.cluster
    addresses = engine.rollout_external_engine_addrs
    if not addresses:
        return
    for name, given in (("engine_python", engine.engine_python is not None), ("vllm", bool(engine.vllm))):
        if given:
            yield warning(f"{name} does nothing with rollout_external_engine_addrs: those servers run already")
    if len(set(addresses)) < len(addresses):
        yield fault("rollout_external_engine_addrs names a server twice")
    if cluster.runtime == "ray" and cluster.num_engines != len(addresses):
        yield fault(
            f"rollout_external_engine_addrs names {len(addresses)} servers and the run has {cluster.num_engines} engines; "
            f"set rollout_num_gpus = {len(addresses) * cluster.rollout_num_gpus_per_engine}"
        )


def servers_receive_by_their_transports(config: Config) -> Iterator[Finding]:
    transport = config.cluster.weight_transport
    if config.rollout.rollout_engine == "vllm" and transport == "disk-delta":
        yield fault(
            f"weight_transport = {transport} does not reach a vLLM server; take shm (one machine), broadcast (a network) "
            "or disk (a shared folder)"
        )


ENGINE_RULES: tuple[Rule, ...] = (
    server_settings_are_used,
    own_arguments_are_left_alone,
    servers_are_started_or_reached,
    servers_receive_by_their_transports,
)
