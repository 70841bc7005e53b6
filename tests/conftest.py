"""What tests of several packages share: a tiny random Llama on disk, its tokenizer, and random scored groups.

Fixtures: `tiny_model_dir`, `make_wide_model`, `wide_model_dir`, `vllm_python`, `sglang_python`, `tiny_model`, `tiny_codec`, `make_groups`,
`make_config`, `make_trainer`, `shapes_unchecked`, `as_nobody`.
"""

from __future__ import annotations

import os
import shutil
import string
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by torch's import; programs side by side wait for each other

import hypothesis
import jaxtyping
import numpy as np
import pytest
import torch

import tests.shape_checks  # so that the hook finds it  # noqa: F401
from treadle.types import NO_VERSION, Group, Prompt, Sample, Status

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from treadle.chat import Codec
    from treadle.config import Config
    from treadle.training.trainer import Trainer

SPECIAL_TOKENS = ("<eos>", "<user>", "<bot>")  # ids 0, 1, 2
CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " "
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<bot>{% else %}<user>{% endif %}{{ m.content }}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)
VOCABULARY = len(SPECIAL_TOKENS) + len(CHARACTERS)
CONTEXT = 256
ENGINE_PYTHONS = {"vllm": "TREADLE_VLLM_PYTHON", "sglang": "TREADLE_SGLANG_PYTHON"}
"""Variables that name the interpreter of each engine; scripts/test-engines makes them."""

jaxtyping.install_import_hook(
    ["treadle.algorithms", "treadle.training", "treadle.models"], "tests.shape_checks.check_tensors"
)
hypothesis.settings.register_profile("no deadline", deadline=None)  # a busy machine is not a failure
hypothesis.settings.load_profile("no deadline")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of a file, and all that share one Ray, on one worker of pytest-xdist (`--dist loadgroup`)."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        uses_ray = "ray_here" in getattr(item, "fixturenames", ())
        item.add_marker(pytest.mark.xdist_group("ray" if uses_ray else str(item.path)))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matmuls are quicker on one thread, and results do not depend on the machine's cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def shapes_unchecked() -> Iterator[None]:
    """Annotated shapes are not checked, as for users: what breaks a contract is caught by the contract's own checks."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def as_nobody(tmp_path: Path) -> Callable[..., str]:
    """`as_nobody(act)`: the text that `act` returns in a child process that has no rights of root's.

    `tmp_path` and the folders above it are opened to it for reading.
    """

    def run(act: Callable[[], str]) -> str:
        if os.geteuid() != 0:
            return act()
        for path in (tmp_path, *tmp_path.parents):
            if path.stat().st_mode & 0o005 != 0o005:
                path.chmod(path.stat().st_mode | 0o055)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
                os.write(write, act().encode())
            except BaseException as error:
                os.write(write, repr(error).encode())
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read) as stream:
            answer = stream.read()
        os.waitpid(child, 0)
        return answer

    return run


def _tokenizer() -> Any:
    """One token for each character; text goes to ids and back unchanged."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        pad_token="<eos>",
        additional_special_tokens=["<user>", "<bot>"],
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random Llama with tied embeddings, float32, about 22 thousand parameters, and its tokenizer.

    Read only: a test that changes files copies the folder first.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny_llama")
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.2,  # far from uniform, so that a wrong logit is seen
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def make_wide_model(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`make_wide_model(tied=True)`: folder of a tiny Llama with heads as wide as vLLM's kernels want them."""
    import torch
    from transformers import AutoConfig, LlamaForCausalLM

    def make(*, tied: bool, num_key_value_heads: int = 1) -> Path:
        folder = tmp_path_factory.mktemp("wide_llama")
        sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": num_key_value_heads}
        config = AutoConfig.from_pretrained(tiny_model_dir, tie_word_embeddings=tied, head_dim=32, **sizes)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            LlamaForCausalLM(config).save_pretrained(folder)
        for path in tiny_model_dir.glob("*token*"):
            shutil.copy(path, folder)
        shutil.copy(tiny_model_dir / "chat_template.jinja", folder)
        return folder

    return make


@pytest.fixture(scope="session")
def wide_model_dir(make_wide_model: Callable[..., Path]) -> Path:
    """The tied one. Read only."""
    return make_wide_model(tied=True)


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """The interpreter that has vllm."""
    return _interpreter("vllm")


@pytest.fixture(scope="session")
def sglang_python() -> str:
    """The interpreter that has sglang, and for a CPU what is in tests/engines/sglang_cpu."""
    return _interpreter("sglang")


def _interpreter(engine: str) -> str:
    name = ENGINE_PYTHONS[engine]
    python = os.environ.get(name)
    if not python:
        pytest.skip(f"{name} names no interpreter that has {engine}; scripts/test-engines makes one and runs this")
    return python


@pytest.fixture
def tiny_model(tiny_model_dir: Path) -> PreTrainedModel:
    """A fresh float32 copy of the tiny Llama, with Treadle's attention."""
    from treadle.models.load import load_model

    return load_model(str(tiny_model_dir), torch.float32, torch.device("cpu"))


@pytest.fixture(scope="session")
def tiny_codec(tiny_model_dir: Path) -> Codec:
    from treadle.chat import load_codec

    return load_codec(str(tiny_model_dir))


def _make_groups(
    sizes: Sequence[int] = (3, 2, 4),
    *,
    seed: int = 0,
    prompt_lengths: Sequence[int] = (7, 5, 9),
    response_lengths: tuple[int, int] = (1, 9),
    temperature: float = 1.0,
    rewards: Sequence[Sequence[float]] | None = None,
    first_group_id: int = 10,
) -> list[Group]:
    """Scored groups of random tokens: `sizes[g]` samples of one prompt of `prompt_lengths[g % …]` tokens.

    Response lengths are drawn from `response_lengths` (both ends included), rewards from {0, 0.5, 1} unless given.
    Everything after the prompt is trained.
    """
    rng = np.random.default_rng(seed)
    groups = []
    for g, size in enumerate(sizes):
        prompt_length = prompt_lengths[g % len(prompt_lengths)]
        prompt = Prompt(
            group_id=first_group_id + g,
            token_ids=tuple(int(t) for t in rng.integers(3, VOCABULARY, prompt_length)),
            text=f"prompt {g}",
        )
        samples = []
        for i in range(size):
            length = int(rng.integers(response_lengths[0], response_lengths[1] + 1))
            reward = float(rng.choice([0.0, 0.5, 1.0])) if rewards is None else float(rewards[g][i])
            response = rng.integers(3, VOCABULARY, length)
            samples.append(
                Sample(
                    group_id=prompt.group_id,
                    index=i,
                    trajectory_id=i,
                    token_ids=np.concatenate([prompt.token_ids, response]).astype(np.int32),
                    loss_mask=np.arange(prompt_length + length) >= prompt_length,
                    rollout_logprobs=np.concatenate([np.zeros(prompt_length), -rng.random(length)]).astype(np.float32),
                    weight_versions=np.concatenate(
                        [np.full(prompt_length, NO_VERSION), np.zeros(length, dtype=int)]
                    ).astype(np.int32),
                    temperature=temperature,
                    status=Status.COMPLETED,
                    reward=reward,
                )
            )
        groups.append(Group(prompt, tuple(samples)))
    return groups


@pytest.fixture(scope="session")
def make_groups() -> Callable[..., list[Group]]:
    """The function above: `make_groups(sizes=(3, 2, 4), seed=0, temperature=1.0, rewards=None, …)`."""
    return _make_groups


def _make_config(**fields: Any) -> Config:
    """A configuration from flat field names; each goes to the section that owns it."""
    from treadle.config import Config

    sections: dict[str, dict[str, Any]] = {}
    for name, value in fields.items():
        owner = next(s for s, info in Config.model_fields.items() if name in info.annotation.model_fields)
        sections.setdefault(owner, {})[name] = value
    return Config.model_validate(sections)


@pytest.fixture(scope="session")
def make_config() -> Callable[..., Config]:
    """`make_config(rollout_batch_size=4, lr=1e-3, …)`."""
    return _make_config


@pytest.fixture
def make_trainer(tiny_model_dir: Path) -> Callable[..., Trainer]:
    """`make_trainer(warn=…, reference_noise=0.0, teacher_noise=0.0, **config fields)`: a trainer of a fresh tiny model.

    AdamW's epsilon is 1 and its rates are 0.9 and 0.95 unless given: an update is then close to the gradient itself,
    so that weights after a step tell whether gradients agree. The reference model, built where the objective needs
    one, is the same model with `reference_noise` times normal noise on its weights (seed 0); so is the teacher of
    distillation, with `teacher_noise` (seed 1).
    """
    import copy

    from treadle.config import batch_arithmetic
    from treadle.models.load import load_model
    from treadle.training.objective import build_objective
    from treadle.training.reference import Reference
    from treadle.training.trainer import Trainer

    loaded = load_model(str(tiny_model_dir), torch.float32, torch.device("cpu"))

    def make(
        *,
        warn: Callable[[str], None] = print,
        total_steps: int = 10,
        reference_noise: float = 0.0,
        teacher_noise: float = 0.0,
        **fields: Any,
    ) -> Trainer:
        config = _make_config(**{"adam_eps": 1.0, "lr": 1.0, "clip_grad": 1e9, **fields})
        reference = None
        if build_objective(config.algorithm, 64, config.reward.part_weights).needs.ref_logprobs:
            other = copy.deepcopy(loaded).requires_grad_(False)
            generator = torch.Generator().manual_seed(0)
            for param in other.parameters():
                param.add_(torch.randn(param.shape, generator=generator), alpha=reference_noise)
            reference = Reference(other, config.algorithm)
        teacher = copy.deepcopy(loaded).requires_grad_(False) if config.algorithm.opd_kl_coef else None
        if teacher is not None:
            generator = torch.Generator().manual_seed(1)
            for param in teacher.parameters():
                param.add_(torch.randn(param.shape, generator=generator), alpha=teacher_noise)
        return Trainer(
            copy.deepcopy(loaded), config, batch_arithmetic(config), total_steps, reference, warn, teacher=teacher
        )

    return make
