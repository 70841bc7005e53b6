from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
GROUPED = {**COMMON, "num_key_value_heads": 2}
WIDE = {**GROUPED, "head_dim": 8}
GPT2 = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.2}
OPT = {k: v for k, v in COMMON.items() if k not in ("intermediate_size", "initializer_range")}
MAMBA = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "initializer_range": 0.2}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16}
DEEPSEEK = {**COMMON, **LATENT, **EXPERTS, "num_key_value_heads": 4, "first_k_dense_replace": 1}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", GROUPED),
    "llama, a key head for each query head, biases": ("LlamaConfig", {**COMMON, "attention_bias": True}),
    "qwen2": ("Qwen2Config", {**GROUPED, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", WIDE),
    "qwen3, heads of 32": ("Qwen3Config", {**WIDE, "head_dim": 32}),
    "qwen2, heads of 64": (
        "Qwen2Config",
        {**COMMON, "num_key_value_heads": 1, "hidden_size": 256, "initializer_range": 0.05},
    ),
    "llama, heads of 32, biases": (
        "LlamaConfig",
        {
            **COMMON,
            "hidden_size": 96,
            "head_dim": 32,
            "num_attention_heads": 3,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "llama, a window it ignores": ("LlamaConfig", {**GROUPED, "sliding_window": 4}),
    "qwen2, a window in one layer": (
        "Qwen2Config",
        {**GROUPED, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "mistral, sliding window": ("MistralConfig", {**WIDE, "sliding_window": 4}),
    "gemma2, soft caps": (
        "Gemma2Config",
        {
            **WIDE,
            "sliding_window": 4,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 8,
        },
    ),
    "gpt2": ("GPT2Config", GPT2),
    "gpt2, scaled by layer": ("GPT2Config", {**GPT2, "scale_attn_by_inverse_layer_idx": True}),
    "opt": ("OPTConfig", {**OPT, "ffn_dim": 64, "word_embed_proj_dim": 32, "init_std": 0.2}),
    "gpt-neox": ("GPTNeoXConfig", COMMON),
    "phi, biased head": ("PhiConfig", GROUPED),
    "granite, scaled logits": ("GraniteConfig", {**GROUPED, "logits_scaling": 3.0, "attention_multiplier": 0.3}),
    "cohere, scaled logits": ("CohereConfig", {**GROUPED, "logit_scale": 0.3}),
    "mixtral": ("MixtralConfig", {**WIDE, "num_local_experts": 4}),
    "phimoe": ("PhimoeConfig", {**GROUPED, "num_local_experts": 4}),
    "deepseek-v3, values narrower than keys": ("DeepseekV3Config", DEEPSEEK),
    "ernie, a frozen bias": (
        "Ernie4_5_MoeConfig",
        {**WIDE, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_end_index": 1},
    ),
    "diffllama": ("DiffLlamaConfig", GROUPED),
    "qwen2-moe, a window in the mask": (
        "Qwen2MoeConfig",
        {**GROUPED, "num_experts": 4, "use_sliding_window": True, "sliding_window": 4000},
    ),
    "phimoe, a window in the mask": ("PhimoeConfig", {**GROUPED, "num_local_experts": 4, "sliding_window": 4000}),
    "doge, a mask of its own": ("DogeConfig", {**COMMON, "keep_window_size": 4000}),
    "mamba": ("MambaConfig", MAMBA),
    "bloom": ("BloomConfig", {"vocab_size": 97, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "falcon": ("FalconConfig", {**COMMON, "bos_token_id": 0}),
    "gpt-oss": ("GptOssConfig", {**WIDE, "num_local_experts": 4}),
    "bert": ("BertConfig", COMMON),
    "llama4": (
        "Llama4TextConfig",
        {**WIDE, "num_local_experts": 2, "interleave_moe_layer_step": 1, "intermediate_size_mlp": 64},
    ),
}


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., Path]:
    """`make_folder("qwen2", **changes)`: the folder of a small random model of that architecture."""
    import transformers

    def make(name: str, **changes: Any) -> Path:
        config_class, values = ARCHITECTURES[name]
        torch.manual_seed(0)
        config = getattr(transformers, config_class)(**{**values, **changes})
        model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.2)
        folder = tmp_path / config_class
        model.save_pretrained(folder)
        return folder

    return make
