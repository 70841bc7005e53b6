"""The engine's fused forward pass against the module itself."""

import pytest
import torch

from treadle.models.attention import PackedAttention
from treadle.models.cpu.decode_kernels import MOST_ROWS, load_kernels
from treadle.models.cpu.inference import FusedInference, InferenceModel, can_fuse, inference_model
from treadle.models.layout import Family, PackedLayout
from treadle.models.load import load_model

WITH_KERNELS = ["qwen3, heads of 32", "qwen2, heads of 64", "llama, heads of 32, biases"]
FUSED = [
    "llama",
    "llama, a key head for each query head, biases",
    "qwen2",
    "qwen3",
    "llama, a window it ignores",
    "qwen2, a window in one layer",
    "mistral, sliding window",
    *WITH_KERNELS,
]
PLAIN = ["gemma2, soft caps", "gpt2", "granite, scaled logits", "cohere, scaled logits", "mixtral"]
ROW = PackedLayout((Family(5, (3, 7)), Family(0, (6,)), Family(9, ()), Family(2, (0, 1))))
TOKENS = torch.randint(3, 90, (ROW.num_tokens,), generator=torch.Generator().manual_seed(1))


def load(folder, dtype=torch.float32):
    return load_model(str(folder), dtype, torch.device("cpu"))


@torch.no_grad()
def logits_of(inference, layout: PackedLayout = ROW) -> torch.Tensor:
    tokens = TOKENS[: layout.num_tokens]
    return inference.logits(inference.hidden_states(tokens, layout.position_ids, PackedAttention(layout)))


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).abs().mean() / other.double().std())


@pytest.mark.parametrize("name", FUSED)
def test_fused_logits_are_the_modules(make_folder, name):
    model = load(make_folder(name))
    fused = inference_model(model, fused=True)
    assert isinstance(fused, FusedInference)
    assert (fused.kernels is not None) == (name in WITH_KERNELS and load_kernels(torch.float32, 1, 32) is not None)
    fused.refresh()
    torch.testing.assert_close(logits_of(fused), logits_of(InferenceModel(model)), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", FUSED)
def test_fused_logits_in_bfloat16_are_no_further_from_exact_than_the_modules(make_folder, name):
    folder = make_folder(name)
    exact = logits_of(InferenceModel(load(folder)))
    model = load(folder, torch.bfloat16)
    fused = FusedInference(model)
    fused.refresh()
    assert distance(logits_of(fused), exact) <= 1.3 * distance(logits_of(InferenceModel(model)), exact)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, MOST_ROWS, MOST_ROWS + 1])
@pytest.mark.parametrize("name", WITH_KERNELS)
def test_few_rows_have_a_way_of_their_own(make_folder, name, rows):
    folder, layout = make_folder(name), PackedLayout.of_lengths([rows])
    model = load(folder)
    fused = FusedInference(model)
    fused.refresh()
    exact = logits_of(InferenceModel(model), layout)
    torch.testing.assert_close(logits_of(fused, layout), exact, atol=2e-5, rtol=2e-5)

    model = load(folder, torch.bfloat16)
    fused = FusedInference(model)
    fused.refresh()
    gaps = (distance(logits_of(part, layout), exact) for part in (fused, InferenceModel(model)))
    assert next(gaps) <= 2 * next(gaps)  # of few numbers


@pytest.mark.parametrize("name", PLAIN)
def test_an_architecture_it_does_not_know_runs_as_it_is(make_folder, name):
    model = load(make_folder(name))
    assert not can_fuse(model)
    assert type(inference_model(model, fused=True)) is InferenceModel


def test_fused_operations_can_be_switched_off(tiny_model):
    assert type(inference_model(tiny_model, fused=False)) is InferenceModel


def test_a_layer_that_is_not_what_its_name_says_runs_as_it_is(tiny_model):
    class Doubled(torch.nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon
            self.norm = [norm]

        def forward(self, x):
            return 2 * self.norm[0](x)

    layer = tiny_model.model.layers[1]
    layer.post_attention_layernorm = Doubled(layer.post_attention_layernorm)
    assert type(inference_model(tiny_model, fused=True)) is InferenceModel


def test_refresh_reads_the_weights_anew(tiny_model):
    fused = FusedInference(tiny_model)
    fused.refresh()
    before = logits_of(fused)
    with torch.no_grad():
        for p in tiny_model.parameters():
            p.mul_(1.1)
    fused.refresh()
    torch.testing.assert_close(logits_of(fused), logits_of(InferenceModel(tiny_model)), atol=2e-5, rtol=2e-5)
    assert distance(logits_of(fused), before) > 0.01


def test_released_weights_must_be_read_again(tiny_model):
    fused = FusedInference(tiny_model)
    fused.refresh()
    fused.release()
    with pytest.raises(AssertionError, match="refresh"):
        logits_of(fused)
