"""Rules about engines that are servers of their own; one rule a function."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from treadle.catalog import SERVERS
from treadle.config.findings import Finding, fault, rule
from treadle.config.secrets import secret_names
from treadle.config.sections import Config
from treadle.config.values import written


@rule("all")
def arguments_of_servers_are_safe(config: Config) -> Iterator[Finding]:
    for kind, record in SERVERS.items():
        taken = record.owned
        given = {name.replace("-", "_"): value for name, value in config.engine.arguments(kind).items()}
        for name in taken & given.keys():
            yield fault(
                f"{_flag(kind, name)} is not yours to give: Treadle sets it from its own settings; leave it out"
            )
        if given.get("trust_remote_code", False) is not False:
            yield fault(
                f"{_flag(kind, 'trust_remote_code')} would run code that lies in the model's folder, which Treadle never does; "
                "leave it out and use a model that the engine knows"
            )
        for name in dict.fromkeys(secret_names({name: given[name] for name in given if name not in taken})):
            yield fault(
                f"{_flag(kind, name)} holds a secret, which every user could read on the server's command line and later in "
                "config.json; leave it out and set the server's variable in the environment (HF_TOKEN, say)"
            )


def _flag(kind: str, name: str) -> str:
    return f"--{kind}-{name.replace('_', '-')}"


@rule("all")
def addresses_are_addresses(config: Config) -> Iterator[Finding]:
    for address in config.engine.rollout_external_engine_addrs:
        why = _why_no_address(address)
        if why:
            shown = written(address if "@" not in address else f"…@{address.rpartition('@')[2]}")
            yield fault(f"rollout_external_engine_addrs has {shown}, {why}; give host:port or http://host:port")


def _why_no_address(address: str) -> str:
    """Say what is wrong with the address of a server; empty if nothing is."""
    try:
        parts = urlsplit(address if "://" in address else f"http://{address}")
        host, port = parts.hostname or "", parts.port
    except ValueError as error:  # a port that is no number, or brackets without an IPv6 address
        return f"which is no address ({error})"
    if "@" in parts.netloc:
        return "with a user or a password, which servers are not asked with and which config.json would keep"
    if parts.scheme not in ("http", "https"):
        return f"and servers speak http or https, not {parts.scheme}"
    if not re.fullmatch(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+(%\w+)?", host) or parts.query or parts.fragment or port == 0:
        return "which is no address"
    return "which has no port" if port is None and "://" not in address else ""


@rule("all")
def servers_are_started_or_reached(config: Config) -> Iterator[Finding]:
    cluster, addresses = config.cluster, config.engine.rollout_external_engine_addrs
    if len(set(addresses)) < len(addresses):
        yield fault("rollout_external_engine_addrs names a server twice")
    if addresses and cluster.runtime == "ray" and cluster.num_engines != len(addresses):
        yield fault(
            f"rollout_external_engine_addrs names {len(addresses)} servers and the run has {cluster.num_engines} engines; "
            f"set rollout_num_gpus = {len(addresses) * cluster.rollout_num_gpus_per_engine}"
        )


@rule("all")
def servers_receive_by_their_transports(config: Config) -> Iterator[Finding]:
    transport, kind = config.cluster.weight_transport, config.rollout.rollout_engine
    if transport == "disk-delta" and kind in SERVERS:
        yield fault(
            f"weight_transport = {transport} does not reach servers of {SERVERS[kind].title}; take shm (one machine), broadcast (a "
            "network) or disk (a shared folder)"
        )
