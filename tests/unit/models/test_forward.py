"""A packed row through whole models, against the model's own forward of each sequence alone."""

import copy

import pytest
import torch

from treadle.errors import ModelError
from treadle.models.attention import PackedAttention
from treadle.models.forward import check_forward, head_of, hidden_states
from treadle.models.layout import Family, PackedLayout
from treadle.models.load import load_model

CPU = torch.device("cpu")
PACKED = [
    "llama",
    "llama, a key head for each query head, biases",
    "qwen2",
    "qwen3",
    "llama, a window it ignores",
    "qwen2, a window in one layer",
    "mistral, sliding window",
    "gemma2, soft caps",
    "gpt2",
    "gpt2, scaled by layer",
    "opt",
    "gpt-neox",
    "phi, biased head",
    "granite, scaled logits",
    "cohere, scaled logits",
    "mixtral",
    "deepseek-v3, values narrower than keys",
    "diffllama",
]
REFUSED = {
    "mamba": "Mamba (mamba) models are not supported: on a packed row a token's logits differ from the model's own",
    "bloom": "Bloom (bloom) models are not supported: on a packed row a token's logits differ from the model's own",
    "bert": "Bert (bert) models are not supported: on a packed row a token's logits differ from the model's own",
    "falcon": "Falcon (falcon) models are not supported: they do not take their attention from transformers' attention",
    "gpt-oss": "GptOss (gpt_oss) models are not supported: GptOssAttention uses attention sinks",
    "llama4": "Llama4Text (llama4_text) models are not supported: on a packed row",
    "qwen2-moe, a window in the mask": "Qwen2Moe (qwen2_moe) models are not supported: on a packed row",
    "phimoe, a window in the mask": "Phimoe (phimoe) models are not supported: on a packed row",
    "doge, a mask of its own": "Doge (doge) models are not supported: on a packed row",
}
ROW = (Family(5, (3, 7)), Family(0, (6,)), Family(9, ()), Family(2, (0, 1)))


def load(folder):
    return load_model(str(folder), torch.float32, CPU)


def tokens_of(layout: PackedLayout, vocabulary: int = 90) -> torch.Tensor:
    return torch.randint(3, vocabulary, (layout.num_tokens,), generator=torch.Generator().manual_seed(1))


def whole_sequences(layout: PackedLayout) -> list[tuple[list[int], int]]:
    """Each sequence's rows, and how many of them an earlier sequence of the family had already."""
    out = []
    for start, family in zip(layout.starts, layout.families, strict=True):
        prefix = list(range(start, start + family.prefix))
        at, seen = start + family.prefix, 0
        for length in family.suffixes or (0,):
            out.append((prefix + list(range(at, at + length)), seen))
            at, seen = at + length, family.prefix
    return out


def packed_logits(model, tokens, layout, backend):
    return head_of(model).logits(hidden_states(model, tokens, layout.position_ids, PackedAttention(layout, backend)))


def gradients(model, loss) -> dict[str, torch.Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters, materialize_grads=True), strict=True))


def assert_same_gradients(found, expected) -> None:
    for name, grad in expected.items():
        scale = max(1.0, float(grad.abs().max()))
        torch.testing.assert_close(found[name], grad, atol=1e-5 * scale, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", PACKED)
def test_logits_and_gradients_are_those_of_the_model_itself(make_folder, name):
    model = load(make_folder(name))
    own = copy.deepcopy(model)
    own.set_attn_implementation("eager")
    layout = PackedLayout(ROW)
    tokens = tokens_of(layout)
    toward = torch.randn(layout.num_tokens, 97, generator=torch.Generator().manual_seed(2))
    expected = torch.zeros_like(toward)
    loss = torch.zeros(())
    for rows, seen in whole_sequences(layout):
        logits = own(tokens[rows][None]).logits[0]
        expected[rows] = logits.detach()
        loss = loss + (logits[seen:] * toward[rows[seen:]]).sum()
    reference = gradients(own, loss)
    for backend in ("batched", "sdpa"):
        logits = packed_logits(model, tokens, layout, backend)
        torch.testing.assert_close(logits.detach(), expected, atol=1e-5, rtol=1e-5)
        assert_same_gradients(gradients(model, (logits * toward).sum()), reference)


@pytest.mark.parametrize("name", REFUSED)
def test_an_architecture_that_cannot_be_packed_is_refused_in_one_line(make_folder, name):
    folder = make_folder(name)
    with pytest.raises(ModelError) as caught:
        load(folder)
    assert REFUSED[name] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_check_forward_notices_a_wrong_logit_scale(make_folder):
    model = load(make_folder("cohere, scaled logits"))
    check_forward(model, 1e-5)
    model.config.logit_scale = 0.31
    with pytest.raises(ModelError, match="CohereForCausalLM: a packed forward differs"):
        check_forward(model, 1e-3)


def test_check_forward_notices_a_lost_sliding_window(make_folder):
    model = load(make_folder("gemma2, soft caps"))
    assert model.model.layers[0].self_attn.sliding_window == 4
    model.model.layers[0].self_attn.sliding_window = None
    with pytest.raises(ModelError, match="Gemma2ForCausalLM: a packed forward differs"):
        check_forward(model, 1e-3)


def test_check_forward_leaves_the_attention_as_it_was(tiny_model):
    check_forward(tiny_model, 1e-5)
    assert tiny_model.config._attn_implementation == "treadle"


def test_weights_that_are_not_finite_are_named(tiny_model):
    with torch.no_grad():
        tiny_model.model.layers[0].mlp.up_proj.weight[3] = float("nan")
    with pytest.raises(ModelError, match="the logits of LlamaForCausalLM are not finite: its weights are damaged"):
        check_forward(tiny_model, 1e-3)


def test_a_call_without_a_plan_is_refused(tiny_model):
    with pytest.raises(ModelError, match="did not pass Treadle's attention plan on"):
        tiny_model(torch.tensor([[3, 4, 5]]))


@pytest.mark.parametrize("backend", ["batched", "sdpa", "auto"])
@pytest.mark.parametrize("name", ["llama", "mistral, sliding window", "gemma2, soft caps"])
def test_no_gradient_reaches_another_sequence(make_folder, name, backend):
    model = load(make_folder(name))
    layout = PackedLayout(ROW)
    tokens = tokens_of(layout)
    kept = []
    model.get_input_embeddings().register_forward_hook(lambda module, args, out: kept.append(out))
    logits = packed_logits(model, tokens, layout, backend)
    toward = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3))
    everything = set(range(layout.num_tokens))
    for rows, seen in whole_sequences(layout):
        for last in range(seen, len(rows)):
            place = rows[last]
            (grad,) = torch.autograd.grad((logits[place] * toward[place]).sum(), kept[0], retain_graph=True)
            size = grad[0].abs().sum(1)
            reach = 3 if last >= 3 else last  # every layer of these models sees this far back
            assert (size[rows[last - reach : last + 1]] > 0).all()
            unseen = sorted(everything - set(rows[: last + 1]))
            assert (size[unseen] == 0).all()


@pytest.mark.parametrize("backend", ["batched", "sdpa"])
def test_a_shared_prompt_changes_neither_loss_nor_gradient(tiny_model, backend):
    prompt, suffixes = 6, (4, 2, 5)
    shared = PackedLayout((Family(prompt, suffixes),))
    apart = PackedLayout.of_lengths([prompt + n for n in suffixes])
    tokens = tokens_of(shared)
    copies, own_rows, at = [], [], prompt
    for n in suffixes:
        copies.append(torch.cat([tokens[:prompt], tokens[at : at + n]]))
        own_rows += range(sum(map(len, copies)) - n, sum(map(len, copies)))
        at += n
    together = packed_logits(tiny_model, tokens, shared, backend)[prompt:]
    separate = packed_logits(tiny_model, torch.cat(copies), apart, backend)[own_rows]
    torch.testing.assert_close(together, separate, atol=1e-5, rtol=1e-5)
    losses = [torch.logsumexp(logits, -1).sum() for logits in (together, separate)]
    found, expected = (gradients(tiny_model, loss) for loss in losses)
    assert_same_gradients(found, expected)


def test_the_head_applies_bias_scale_and_soft_cap_in_this_order():
    from treadle.models.forward import Head

    head = Head(torch.tensor([[1.0, 2.0]]), bias=torch.tensor([1.0]), scale=0.5, softcap=2.0)
    # 1·3 + 2·1 + 1 = 6; 6 · 0.5 = 3; 2 · tanh(3 / 2) = 1.8103
    assert head.logits(torch.tensor([[3.0, 1.0]])).item() == pytest.approx(1.810296, abs=1e-5)


def test_a_model_without_a_head_is_refused(tiny_model):
    with pytest.raises(ModelError, match="LlamaModel has no output embeddings"):
        head_of(tiny_model.base_model)
