"""The Ray that a run uses: the caller's, one that is joined, or one that is started and ended with the run."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from treadle.config import ClusterSection
from treadle.errors import ConfigError
from treadle.observe.progress import Progress

LOOPBACK = ("127.0.0.1", "localhost", "::1")
NO_IDLE_WORKERS = {"prestart_worker_first_driver": False}
"""Ray's setting not to start a process for each CPU in advance: a run's workers have an environment of their own, so
they would never be used."""
REACH_SECONDS = 10.0

MAX_FOLDER_BYTES = 107 - len("/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store")
"""Longest path of the folder with Ray's sessions: the path of a socket has at most 107 bytes."""


@contextmanager
def ray_running(cluster: ClusterSection, progress: Progress) -> Iterator[bool]:
    """Have Ray inside the `with`; yields whether the cluster may grow beyond what it has now.

    Raises `ConfigError` if Ray is not installed or the address does not answer.
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
    if ray.is_initialized():  # by the caller, which also ends it
        yield True
        return
    progress.phase("starting Ray" if own else f"joining Ray at {cluster.ray_address}")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    sessions: Path | None = None
    try:
        keep_token_private(makes_one=own)
        if own:
            sessions = private_sessions()
            options |= {
                "address": "local",  # not one that somebody left running here
                "num_cpus": cluster.ray_num_cpus,
                "include_dashboard": cluster.ray_dashboard,
                "dashboard_host": cluster.ray_bind_address,
                "_node_ip_address": None if cluster.ray_bind_address in LOOPBACK else cluster.ray_bind_address,
                "_temp_dir": str(sessions),
                "_system_config": NO_IDLE_WORKERS,
            }
        else:
            reach(str(cluster.ray_address))
            options["address"] = cluster.ray_address
        with hangups_ignored() if own else nullcontext():
            ray.init(**options)
    except Exception as error:  # a node that is slow to start is a bare Exception
        line = (str(error).splitlines() or [repr(error)])[0]
        where = "can't start Ray" if own else f"no Ray at {cluster.ray_address}"
        _remove(sessions)
        raise ConfigError(f"{where}: {line}; check --ray-address and `ray status`") from error
    try:
        yield not own
    except Exception as error:
        if sessions is not None and not isinstance(error, ConfigError):
            progress.note(f"the logs of Ray's workers are kept in {sessions}")
            sessions = None
        raise
    finally:
        ray.shutdown()
        _remove(sessions)


def reach(address: str) -> None:
    """Connect to `host:port` and hang up; raises `OSError` if that fails. Ray itself would try for minutes."""
    if address != "auto":
        host, _, port = address.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_SECONDS).close()


def private_sessions() -> Path:
    """Return a new folder for sockets, logs and spilled objects of a Ray, below one that only this user can enter.

    Ray opens its own folders to everybody. `RAY_TMPDIR` is followed unless the paths of sockets would be too long there.
    """
    for base in (os.environ.get("RAY_TMPDIR"), tempfile.gettempdir(), "/tmp"):
        if base and len(os.fsencode(base)) + len("/treadle-ray-12345678/ray") <= MAX_FOLDER_BYTES:
            break
    return Path(tempfile.mkdtemp(prefix="treadle-ray-", dir=base)) / "ray"


def _remove(sessions: Path | None) -> None:
    if sessions is not None:
        shutil.rmtree(sessions.parent, ignore_errors=True)


def keep_token_private(*, makes_one: bool) -> None:
    """Make the token that lets a process into this user's Ray readable by this user alone.

    Ray writes it for everybody to read. `makes_one` writes a token if there is none yet and Ray would.
    """
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return
    path = Path.home() / ".ray" / "auth_token"
    if makes_one and not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
    if path.exists() and path.stat().st_uid == os.geteuid() and stat.S_IMODE(path.stat().st_mode) & 0o077:
        path.chmod(0o600)


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
