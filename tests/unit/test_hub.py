"""A hub that can't be reached is said so within seconds."""

import os
import socket
import time

import pytest

from treadle import hub
from treadle.chat import load_codec
from treadle.data.arrow_reader import read_hub
from treadle.errors import DataError, ModelError
from treadle.models.model_config import load_config


@pytest.fixture
def hub_at(monkeypatch):
    """`hub_at(address)`: the hub is there, and nobody has asked for it yet."""
    import datasets
    from huggingface_hub import constants

    def point(address):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)

    hub._ask_once.cache_clear()
    yield point
    hub._ask_once.cache_clear()
    monkeypatch.undo()
    os.environ.pop("HF_HUB_OFFLINE", None)


@pytest.fixture
def silent():
    """The address of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_names_of_a_hub_that_is_cut_off_fail_quickly_in_one_line(hub_at):
    hub_at("http://127.0.0.1:9")  # nobody listens there
    began = time.monotonic()
    for error, load in (
        (ModelError, lambda: load_config("some-org/some-model")),
        (ModelError, lambda: load_codec("some-org/some-model")),
        (DataError, lambda: read_hub("some-org/some-data", None, None)),
    ):
        with pytest.raises(
            error, match=r"no (model|tokenizer|data set) .*'some-org/some-.*([Cc]ouldn't|offline)"
        ) as caught:
            load()
        assert "\n" not in str(caught.value)
    assert time.monotonic() - began < 10  # the client alone tries for 24 s each time
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_a_hub_that_never_answers_is_cut_off(hub_at, silent, monkeypatch):
    hub_at(silent)
    monkeypatch.setattr(hub, "PROBE_SECONDS", 0.3)
    with pytest.raises(ModelError, match="couldn't connect"):
        load_config("some-org/some-model")


def test_nothing_is_asked_for_a_folder(hub_at, silent, tmp_path, monkeypatch):
    hub_at(silent)
    monkeypatch.setattr(hub, "_answers", lambda address: pytest.fail("the hub was asked"))
    hub.work_offline_if_cut_off(str(tmp_path))
    assert "HF_HUB_OFFLINE" not in os.environ
