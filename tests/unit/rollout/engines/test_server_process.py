"""A server's processes end with the process that started them."""

import os
import subprocess
import sys

import psutil
import pytest

from tests.server_checks import is_running, wait_until


@pytest.mark.parametrize("killed", ["owner", "guard"])
def test_a_server_ends_when_its_owner_or_its_guard_is_killed(killed, tmp_path):
    """Also what the server started."""
    owner = f"""
import sys, time
from pathlib import Path
from treadle.rollout.engines.server_process import ServerProcess
script = "import subprocess, sys; c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); " \\
    "print(c.pid, flush=True); c.wait()"
server = ServerProcess.start("x", [sys.executable, "-c", script], {{}}, Path({str(tmp_path / "log")!r}))
print(server.process.pid, flush=True)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    guard = int(process.stdout.readline())
    log = tmp_path / "log"
    wait_until(lambda: log.is_file() and log.read_text().strip())
    grandchild = int(log.read_text())
    (process if killed == "owner" else psutil.Process(guard)).kill()
    wait_until(lambda: not is_running(guard) and not is_running(grandchild))
    process.kill()
    process.wait()
