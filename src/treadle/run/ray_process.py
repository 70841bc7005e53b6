"""The Ray that a run uses: one that is there already, one that is joined, or one that is started and ended with it."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from treadle.config import ClusterSection
from treadle.errors import ConfigError
from treadle.observe.progress import Progress

LOOPBACK = ("127.0.0.1", "localhost", "::1")
NO_IDLE_WORKERS = {"prestart_worker_first_driver": False}
"""Ray's setting not to start a process for each CPU in advance: a run's workers have an environment of their own, so
they would never be used."""


@contextmanager
def ray_running(cluster: ClusterSection, progress: Progress) -> Iterator[bool]:
    """Have Ray inside the `with`; yields whether the cluster may grow beyond what it has now.

    Raises `ConfigError` where Ray is not installed or the address does not answer.
    """
    own = cluster.ray_address is None
    if own and cluster.ray_bind_address in LOOPBACK:
        # Ray's switch for nodes that are alone: all its servers then listen on loopback. Read when it is imported.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise ConfigError("runtime = ray needs Ray: pip install 'treadle[ray]', or use --runtime local") from error
    if ray.is_initialized():  # by whoever calls us, who also ends it
        yield True
        return
    progress.phase("starting Ray" if own else f"joining Ray at {cluster.ray_address}")
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if own:
            bind = None if cluster.ray_bind_address in LOOPBACK else cluster.ray_bind_address
            with hangups_ignored():
                ray.init(
                    address="local",  # not one that somebody left running here
                    num_cpus=cluster.ray_num_cpus,
                    include_dashboard=cluster.ray_dashboard,
                    dashboard_host=cluster.ray_bind_address,
                    _node_ip_address=bind,
                    _system_config=NO_IDLE_WORKERS,
                    **quiet,
                )
        else:
            ray.init(address=cluster.ray_address, **quiet)
    except Exception as error:  # a node that is slow to start is a bare Exception
        line = (str(error).splitlines() or [repr(error)])[0]
        where = "can't start Ray" if own else f"no Ray at {cluster.ray_address}"
        raise ConfigError(f"{where}: {line}; check --ray-address and `ray status`") from error
    try:
        yield not own
    finally:
        ray.shutdown()


@contextmanager
def hangups_ignored() -> Iterator[None]:
    """Start processes that outlive the terminal: this one saves when it is closed, and needs them to do so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # which they inherit
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)
