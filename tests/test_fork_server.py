"""The fork server runs commands as the console script does."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fork_server import ForkServer


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer() as found:
        yield found


def test_code_and_output_are_those_of_the_command(server: ForkServer, tmp_path: Path):
    done = server.run(["--version"], cwd=tmp_path, timeout=10)
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.startswith("treadle ")
    refused = server.run(["tran"], cwd=tmp_path, timeout=10)
    assert refused.code == 2
    assert refused.stderr == "treadle: error: no command 'tran'; did you mean 'train'?\n"


def test_a_child_is_killed_without_harm_to_the_server(server: ForkServer, tmp_path: Path, tiny_model_dir: Path):
    child = server.start(["plan", "--hf-checkpoint", str(tiny_model_dir), "--prompt-data", "x"], cwd=tmp_path)
    child.kill()
    assert child.finish(10).code == -signal.SIGKILL
    assert server.run(["--version"], cwd=tmp_path, timeout=10).code == 0
