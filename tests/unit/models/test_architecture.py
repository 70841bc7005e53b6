"""Architectures are checked past their windows and switches, on configs of full size and without weights."""

import pytest
import torch
import transformers

from treadle.errors import ModelError
from treadle.models import architecture
from treadle.models.architecture import check_architecture
from treadle.models.attention import LayerAttention, PackedAttention
from treadle.models.cpu.fused_layers import FusedAttention
from treadle.models.load import check_loadable

WINDOW = {"use_sliding_window": True, "sliding_window": 4096}
SOUND = {
    "a window it ignores": transformers.LlamaConfig(sliding_window=4096),
    "a window in some layers": transformers.Qwen2Config(**WINDOW, max_window_layers=20),
    "soft caps": transformers.Gemma2Config(),
    "two calls in a layer": transformers.DiffLlamaConfig(),
    "layers that run again": transformers.HrmTextConfig(),
    "latent keys and values": transformers.DeepseekV3Config(),
    "one key head": transformers.GPTBigCodeConfig(),
    "mixture of attention": transformers.JetMoeConfig(),
    "a composite config": transformers.Gemma3Config(),
    "a soft cap in the text part": transformers.Gemma4Config(text_config={"final_logit_softcapping": 1.0}),
    "layers with other heads": transformers.Gemma4TextConfig(),
    "jitter": transformers.MixtralConfig(router_jitter_noise=0.3),
}
REFUSED = {
    "a window in the mask": (transformers.Qwen2MoeConfig(**WINDOW), r"Qwen2Moe \(qwen2_moe\)"),
    "another window in the mask": (transformers.PhimoeConfig(sliding_window=2047), r"Phimoe \(phimoe\)"),
    "a dynamic mask": (transformers.DogeConfig(), r"Doge \(doge\)"),
    "chunks": (transformers.Llama4TextConfig(), r"Llama4Text \(llama4_text\)"),
    "a bias in the mask": (transformers.BloomConfig(), r"Bloom \(bloom\)"),
    "sinks": (transformers.GptOssConfig(), r"GptOss \(gpt_oss\) .* attention sinks"),
    "recurrent layers": (transformers.Qwen3NextConfig(), r"Qwen3Next \(qwen3_next\)"),
    "attention of its own": (transformers.FalconConfig(), r"Falcon \(falcon\) .* attention interface"),
}


@pytest.mark.parametrize("kind", SOUND)
def test_an_architecture_that_is_exact_past_its_windows_passes(kind):
    probe = check_architecture(SOUND[kind])
    assert probe.longest > 5 * 5
    assert check_architecture(SOUND[kind]) is probe  # one check a process


@pytest.mark.parametrize("kind", REFUSED)
def test_an_architecture_that_is_not_is_refused_by_name(kind):
    config, named = REFUSED[kind]
    with pytest.raises(ModelError, match=named) as caught:
        check_architecture(config)
    assert "\n" not in str(caught.value)
    assert "models are not supported: " in str(caught.value)


def test_what_is_no_causal_language_model_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"can't load a causal language model from 'x': T5 \(t5\) is none"):
        check_loadable("x", transformers.T5Config())


@pytest.fixture
def fresh(monkeypatch):
    """Forget what passed before, and what passes within the test."""
    monkeypatch.setattr(architecture, "_checked", {})


@pytest.mark.usefixtures("fresh")
def test_a_fused_layer_that_takes_a_window_from_elsewhere_is_noticed(monkeypatch):
    plain = FusedAttention.__init__

    def wrong(self, attention):
        plain(self, attention)
        self.declared = LayerAttention(self.declared.scaling, attention.config.sliding_window)

    monkeypatch.setattr(FusedAttention, "__init__", wrong)
    config = SOUND["a window it ignores"]
    with pytest.raises(ModelError, match=r"Llama \(llama\) .* logits differ"):
        check_architecture(config)
    check_architecture(config, fused=False)


@pytest.mark.usefixtures("fresh")
def test_a_lost_gradient_is_noticed(monkeypatch):
    attend = PackedAttention.attend
    monkeypatch.setattr(PackedAttention, "attend", lambda self, q, k, v, layer: attend(self, q, k.detach(), v, layer))
    with pytest.raises(ModelError, match=r"the weight 'model.layers.0.self_attn.k_proj.weight' gets no gradient"):
        check_architecture(transformers.LlamaConfig())


@pytest.mark.usefixtures("fresh")
def test_random_numbers_go_on_as_if_nothing_had_been_checked():
    before = torch.get_rng_state()
    check_architecture(transformers.LlamaConfig())
    assert torch.equal(torch.get_rng_state(), before)
