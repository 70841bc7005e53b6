"""Check once whether the model hub can be reached: its own client retries for half a minute per file."""

from __future__ import annotations

import functools
import os
import sys
import threading
from pathlib import Path

PROBE_SECONDS = 4.0


def work_offline_if_cut_off(name: str) -> None:
    """Have the hub's client use its cache alone, for the rest of this process, if the hub can't be reached.

    Args:
        name: the model or data set to load. Nothing is checked for a local file or folder.
    """
    if not Path(name).exists():
        _ask_once()


@functools.cache
def _ask_once() -> None:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or _answers(constants.ENDPOINT):
        return
    os.environ["HF_HUB_OFFLINE"] = "1"  # for child processes
    constants.HF_HUB_OFFLINE = True
    if "datasets" in sys.modules:  # which copies the setting when it is imported
        sys.modules["datasets"].config.HF_HUB_OFFLINE = True


def _answers(address: str) -> bool:
    """Return whether a server answers in time with any status; the hub's client applies the proxy settings."""
    from huggingface_hub import get_session

    answered = threading.Event()

    def ask() -> None:
        try:
            get_session().head(address, timeout=PROBE_SECONDS)
        except Exception:  # no name, no route, no answer, no certificate
            return
        answered.set()

    thread = threading.Thread(target=ask, daemon=True)  # looking up a name has no deadline of its own
    thread.start()
    thread.join(PROBE_SECONDS)
    return answered.is_set()
