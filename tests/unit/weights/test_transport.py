"""Transports are found by name or path, and a run takes one that it can use."""

from pathlib import Path

import pytest

from treadle.catalog import TRANSPORTS
from treadle.errors import ConfigError
from treadle.weights import choose_transport, find_transport

OWN = """
from treadle.weights import Transport
from treadle.weights.shm import ShmReceiver, ShmSender

TRANSPORT = Transport("mine", lambda weights, plan: ShmSender(weights), ShmReceiver, needs_gpu=True)
number = 3
"""


@pytest.mark.parametrize("name", [*(name for name in TRANSPORTS if name != "auto"), "inproc", "sglang-group"])
def test_a_built_in_transport_is_found_by_its_name(name):
    assert find_transport(name).name == name


def test_a_user_s_own_is_found_by_its_path(tmp_path):
    file = tmp_path / "own_transport.py"
    file.write_text(OWN)
    assert find_transport(f"{file}:TRANSPORT").name == "mine"
    with pytest.raises(ConfigError, match=r"is a int; give a treadle\.weights\.Transport"):
        find_transport(f"{file}:number")
    with pytest.raises(ConfigError, match="needs weights on a GPU, and this run has none"):
        choose_transport(f"{file}:TRANSPORT", on_one_node=True, on_gpu=False)


def test_an_unknown_name_is_refused_with_the_remedy():
    with pytest.raises(ConfigError, match=r"unknown weight transport 'pigeon'.*file\.py:object"):
        find_transport("pigeon")


@pytest.mark.parametrize(
    ("asked", "on_one_node", "chosen"),
    [("auto", True, "shm"), ("auto", False, "broadcast"), ("disk", False, "disk"), ("disk-delta", True, "disk-delta")],
)
def test_the_transport_of_a_run(asked, on_one_node, chosen):
    assert choose_transport(asked, on_one_node=on_one_node, on_gpu=False) == chosen


def test_shared_memory_does_not_reach_other_nodes():
    with pytest.raises(ConfigError, match="shm needs trainer and engines on one node, and this run has several"):
        choose_transport("shm", on_one_node=False, on_gpu=False)


def test_each_built_in_transport_has_a_file_and_a_record():
    import treadle.weights

    folder = Path(treadle.weights.__file__).parent
    files = {path.stem for path in folder.glob("*.py") if "\nTRANSPORT = " in path.read_text()}
    assert files == {r.function or n for n, r in TRANSPORTS.items() if n != "auto"} | {"in_process", "sglang_group"}
