"""Rules about engines that are servers of their own; each is one function and says one thing."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.config.findings import Finding, Rule, fault, warning
from treadle.config.sections import Config

TAKEN = {
    "vllm": (
        *("model", "host", "port", "dtype", "seed", "max_num_seqs", "logprobs_mode"),
        *("weight_transfer_config", "enable_scale_out", "served_model_name", "api_key", "root_path"),
    ),
    "sglang": (
        *("model_path", "model", "host", "port", "dtype", "random_seed", "max_running_requests", "device"),
        *("skip_tokenizer_init", "served_model_name", "api_key", "admin_api_key", "weight_version", "is_embedding"),
    ),
}
"""Arguments of a server that Treadle gives itself, or that it would not reach the server with."""
NAMES = {"vllm": "vLLM", "sglang": "SGLang"}


def server_settings_are_used(config: Config) -> Iterator[Finding]:
    engine, kind = config.engine, config.rollout.rollout_engine
    for name in NAMES:
        if engine.arguments(name) and kind != name:
            yield fault(f"{name} does nothing with rollout_engine = {kind}; set rollout_engine = {name}")
    if kind != "torch":
        return
    for name, given in (
        ("engine_python", engine.engine_python is not None),
        ("rollout_external_engine_addrs", bool(engine.rollout_external_engine_addrs)),
    ):
        if given:
            yield fault(f"{name} does nothing with rollout_engine = torch; set rollout_engine = vllm or sglang")


def own_arguments_are_left_alone(config: Config) -> Iterator[Finding]:
    for kind, taken in TAKEN.items():
        for name in config.engine.arguments(kind):
            if name.replace("-", "_") in taken:
                flag = f"--{kind}-{name.replace('_', '-')}"
                yield fault(f"{flag} is not yours to give: Treadle sets it from its own settings")


def code_of_models_is_not_run(config: Config) -> Iterator[Finding]:
    for kind in NAMES:
        for name, value in config.engine.arguments(kind).items():
            if name.replace("-", "_") == "trust_remote_code" and value is not False:
                yield fault(
                    f"--{kind}-{name.replace('_', '-')} would run code that lies in the model's folder, which Treadle never "
                    "does; leave it out and use a model that the engine knows"
                )


def servers_are_started_or_reached(config: Config) -> Iterator[Finding]:
    engine, cluster, kind = config.engine, config.cluster, config.rollout.rollout_engine
    addresses = engine.rollout_external_engine_addrs
    if not addresses:
        return
    for name, given in (("engine_python", engine.engine_python is not None), (kind, bool(engine.arguments(kind)))):
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
    transport, kind = config.cluster.weight_transport, config.rollout.rollout_engine
    if transport == "disk-delta" and kind in NAMES:
        yield fault(
            f"weight_transport = {transport} does not reach servers of {NAMES[kind]}; take shm (one machine), broadcast (a "
            "network) or disk (a shared folder)"
        )


ENGINE_RULES: tuple[Rule, ...] = (
    server_settings_are_used,
    own_arguments_are_left_alone,
    code_of_models_is_not_run,
    servers_are_started_or_reached,
    servers_receive_by_their_transports,
)
