"""What the embedded engine generates is compared with the model before a run starts."""

import pytest
import torch
import transformers

from treadle.errors import ModelError
from treadle.models.architecture import check_architecture
from treadle.models.attention import LayerAttention, PackedAttention
from treadle.models.forward import head_of, hidden_states
from treadle.models.layout import PackedLayout
from treadle.models.load import load_model
from treadle.rollout.engines.torch_engine.attention import DecodeAttention
from treadle.rollout.engines.torch_engine.check import check_generation
from treadle.rollout.engines.torch_engine.engine import generate_step
from treadle.rollout.engines.torch_engine.kv_store import token_shape
from treadle.rollout.engines.torch_engine.model_runner import ModelRunner
from treadle.rollout.engines.torch_engine.scheduler import EngineLimits, Request, Scheduler
from treadle.types import SamplingParams

LIMITS = EngineLimits(max_rows=8, kv_bytes=1 << 26)
KINDS = [
    "LlamaConfig",
    "DiffLlamaConfig",
    "HrmTextConfig",
    "JetMoeConfig",
    "GPTBigCodeConfig",
    "DeepseekV2Config",
    "PersimmonConfig",
    "Gemma4TextConfig",
    "Gemma3Config",
]


def probe_of(kind: str, **settings):
    settings = {"num_experts_per_tok": 2, **settings} if kind == "DeepseekV2Config" else settings
    return check_architecture(getattr(transformers, kind)(**settings))


@pytest.mark.parametrize("kind", KINDS)
def test_architectures_generate_what_their_forward_pass_says(kind):
    check_generation(probe_of(kind))


@pytest.mark.parametrize("kind", ["DiffLlamaConfig", "DeepseekV2Config", "Gemma3Config", "Gemma4TextConfig"])
def test_a_scheduler_samples_with_the_logprobs_of_the_packed_forward(kind):
    model = probe_of(kind).ours
    runner = ModelRunner(model, LIMITS)
    line = Scheduler(runner.store, frozenset(), lambda tokens: "")
    prompt = [5, 9, 40, 7, 22, 8, 31]
    line.waiting.append(Request(prompt, SamplingParams(9, seed=3), 2))
    done = []
    while line.has_work:
        done += [completion for _, completion in generate_step(line, runner)]
    assert len(done) == 2
    for completion in done:
        tokens = torch.tensor([*prompt, *completion.token_ids.tolist()])
        layout = PackedLayout.of_lengths([len(tokens)])
        with torch.no_grad():
            hidden = hidden_states(model, tokens, layout.position_ids, PackedAttention(layout))
            logprobs = head_of(model).logits(hidden).log_softmax(-1)
        want = logprobs[len(prompt) - 1 : -1].gather(1, tokens[len(prompt) :, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(completion.logprobs), want, atol=1e-4, rtol=1e-4)


def test_the_store_has_room_for_every_call_and_the_widest_head():
    shapes = {
        kind: token_shape(probe_of(kind).ours) for kind in ("DiffLlamaConfig", "DeepseekV2Config", "GPTBigCodeConfig")
    }
    assert shapes["DiffLlamaConfig"].layers == 2 * probe_of("DiffLlamaConfig").ours.config.num_hidden_layers
    assert shapes["DeepseekV2Config"].head_dim == 16 + 8  # keys; values have 16
    assert shapes["GPTBigCodeConfig"].kv_heads == 1


def test_layers_with_different_numbers_of_heads_are_refused(tiny_model):
    class TwoKinds(torch.nn.Module):
        config, base_model = tiny_model.config, None

        def get_input_embeddings(self):
            return tiny_model.get_input_embeddings()

        def forward(self, input_ids, position_ids, use_cache, treadle_plan):
            for heads in (2, 4):
                part = torch.zeros(1, heads, 8)
                treadle_plan.attend(part, part, part, LayerAttention(1.0))
            return type("Out", (), {"last_hidden_state": torch.zeros(1, 1, 32)})

    model = TwoKinds()
    model.base_model = model.model = model.forward
    with pytest.raises(ModelError, match=r"TwoKinds has layers of 2 and 4 key/value heads, .* choose --rollout-engine"):
        token_shape(model)


def without_window(monkeypatch):
    attend = DecodeAttention.attend
    blind = lambda self, q, k, v, layer: attend(self, q, k, v, LayerAttention(layer.scaling))  # noqa: E731
    monkeypatch.setattr(DecodeAttention, "attend", blind)


def test_a_decode_that_ignores_a_window_is_refused_by_name(monkeypatch):
    without_window(monkeypatch)
    probe = probe_of("MistralConfig", sliding_window=4000)
    want = (
        r"MistralForCausalLM models are not supported: token by token the logits differ .* choose --rollout-engine vllm"
    )
    with pytest.raises(ModelError, match=want):
        check_generation(probe)


def test_the_model_itself_is_checked_for_a_few_tokens(monkeypatch, tiny_model_dir):
    model = load_model(str(tiny_model_dir), torch.float32, torch.device("cpu"))
    assert ModelRunner(model, LIMITS).store.shape.num_bytes == 0
    attend = DecodeAttention.attend
    doubled = lambda self, q, k, v, layer: attend(self, q, k, 2 * v, layer)  # noqa: E731
    monkeypatch.setattr(DecodeAttention, "attend", doubled)
    with pytest.raises(ModelError, match="LlamaForCausalLM models are not supported: token by token"):
        ModelRunner(model, LIMITS)
