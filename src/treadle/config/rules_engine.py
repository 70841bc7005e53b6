"""Rules about engines that are servers of their own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from treadle.catalog import SERVERS
from treadle.config.conditions import Finding, fault, refuse, rule
from treadle.config.secrets import secret_names
from treadle.config.sections import Config
from treadle.config.values import written


@rule("all")
def arguments_of_servers_are_safe(config: Config) -> Iterator[Finding]:
    for kind, record in SERVERS.items():
        given = {name.replace("-", "_"): value for name, value in config.engine.arguments(kind).items()}
        reasons = dict.fromkeys(
            record.owned & given.keys(), "can't be given: Treadle sets it from its own settings; leave it out"
        )
        if given.get("trust_remote_code", False) is not False:
            reasons["trust_remote_code"] = (
                "would run code from the model's folder, which Treadle never does; leave it out and use a model that "
                "the engine supports"
            )
        secrets = secret_names({name: given[name] for name in given if name not in record.owned})
        reasons |= dict.fromkeys(
            secrets,
            "holds a secret, which every user could read on the server's command line and later in config.json; leave "
            "it out and set the server's variable in the environment (for example HF_TOKEN)",
        )
        yield from (fault(f"--{kind}-{name.replace('_', '-')} {reason}") for name, reason in reasons.items())


@rule("all")
def addresses_are_addresses(config: Config) -> Iterator[Finding]:
    for address in config.engine.rollout_external_engine_addrs:
        if why := _why_no_address(address):
            shown = written(address if "@" not in address else f"…@{address.rpartition('@')[2]}")
            yield fault(f"rollout_external_engine_addrs has {shown}, {why}; give host:port or http://host:port")


def _why_no_address(address: str) -> str:
    """Return what is wrong with the address of a server, or an empty string."""
    try:
        parts = urlsplit(address if "://" in address else f"http://{address}")
        host, port = parts.hostname or "", parts.port
    except ValueError as error:  # a port that is no number, or brackets without an IPv6 address
        return f"which is no address ({error})"
    if "@" in parts.netloc:
        return "with a user or a password, which Treadle does not send and which config.json would keep"
    if parts.scheme not in ("http", "https"):
        return f"and servers speak http or https, not {parts.scheme}"
    if not re.fullmatch(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+(%\w+)?", host) or parts.query or parts.fragment or port == 0:
        return "which is no address"
    return "which has no port" if port is None and "://" not in address else ""


@rule("all")
def servers_are_as_many_as_engines(config: Config) -> Iterator[Finding]:
    cluster, count = config.cluster, len(config.engine.rollout_external_engine_addrs)
    if count and cluster.runtime == "ray" and cluster.num_engines != count:
        yield fault(
            f"rollout_external_engine_addrs names {count} servers and the run has {cluster.num_engines} engines; "
            f"set rollout_num_gpus = {count * cluster.rollout_num_gpus_per_engine}"
        )


@rule("all")
def servers_receive_by_their_transports(config: Config) -> Iterator[Finding]:
    transport, server = config.cluster.weight_transport, SERVERS.get(config.rollout.rollout_engine)
    if transport == "disk-delta" and server is not None:
        yield fault(
            f"weight_transport = {transport} does not reach servers of {server.title}; use shm (one machine), "
            "broadcast (a network) or disk (a shared folder)"
        )


refuse(
    "all",
    lambda c: len(set(c.engine.rollout_external_engine_addrs)) < len(c.engine.rollout_external_engine_addrs),
    "rollout_external_engine_addrs names a server twice; name each once",
)
