"""Write docs/models.md: what Treadle does with every causal language model family of the installed transformers.

Each family's config, of full size and with its default settings, goes through the checks that loading and
`treadle plan` run. No weights are needed; it takes about a minute. Run by `scripts/docs`.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from treadle.errors import ModelError
from treadle.models.architecture import check_architecture
from treadle.models.cpu.fused_layers import FusedAttention, FusedMLP
from treadle.rollout.engines.torch_engine.check import check_generation

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
WINDOW = {"use_sliding_window": True, "sliding_window": 4096}
NEEDED: dict[str, dict[str, Any]] = {
    "bert": {"is_decoder": True},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}, "head_dim": 128},
    "dbrx": {
        "attn_config": {"kv_n_heads": 8, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 3584, "moe_num_experts": 16, "moe_top_k": 4},
    },
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 6},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 8, "moe_topk": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
}
"""Values that a config lacks by default, but every published model of the family has."""
LONG_ROPE = {
    **ROPE,
    "rope_type": "longrope",
    "original_max_position_embeddings": 4096,
    "short_factor": [1.0 + i / 20 for i in range(48)],
    "long_factor": [1.0 + 2 * i for i in range(48)],
}
SETTINGS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("llama", "`sliding_window` (Llama ignores it)", {"sliding_window": 4096}),
    ("llama", "`dynamic` positions", {"rope_parameters": {**ROPE, "rope_type": "dynamic", "factor": 4.0}}),
    ("phi3", "`longrope` positions", {"rope_parameters": LONG_ROPE, "max_position_embeddings": 131072}),
    ("mistral", "`sliding_window`", {"sliding_window": 4096}),
    ("mixtral", "`sliding_window`", {"sliding_window": 4096}),
    ("mixtral", "`router_jitter_noise` (never applied)", {"router_jitter_noise": 0.3}),
    ("qwen2", "`use_sliding_window`", {**WINDOW, "max_window_layers": 20}),
    ("qwen3", "`use_sliding_window`", {**WINDOW, "max_window_layers": 20}),
    ("qwen2_moe", "`use_sliding_window`", WINDOW),
    ("qwen3_moe", "`use_sliding_window`", WINDOW),
    ("phi3", "`sliding_window`", {"sliding_window": 2047}),
    ("phimoe", "`sliding_window`", {"sliding_window": 2047}),
    ("starcoder2", "`sliding_window`", {"sliding_window": 4096}),
    ("granitemoehybrid", "attention layers only", {"layer_types": ["attention"] * 32}),
    ("minimax_m3_vl_text", "sparse layers", {"layer_types": ["full_attention", "minimax_m3_sparse"] * 30}),
)

CAUSES = {
    "recurrent, convolutional or linear layers, which carry state from one packed sequence to the next": """
        bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 lfm2_moe mamba mamba2 minimax nemotron_h
        olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next recurrent_gemma rwkv xlstm zamba zamba2""",
    "a bias by distance (ALiBi) in the attention mask": "bloom mpt",
    "chunked attention, which is in the mask only": "llama4 llama4_text",
    "a mask that depends on keys (sparse or dynamic attention)": "axk2 deepseek_v32 doge glm_moe_dsa hy_v4",
    "attention sinks": "deepseek_v4 gpt_oss granite_swa granitemoe_swa mimo_v2_flash",
    "attention of its own, not transformers' attention interface": "codegen falcon git gpt_neo gptj",
    "attention that does not pass keyword arguments on": "moshi nemotron stablelm",
    "an encoder, or the decoder of an encoder-decoder model": """
        bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small camembert data2vec-text electra ernie
        marian mbart megatron-bert mvp pegasus plbart prophetnet rembert roberta roberta-prelayernorm roc_bert roformer trocr
        xlm xlm-roberta xlm-roberta-xl xmod""",
}
"""Known causes of refusals; the checks measure only that a family fails."""


@dataclass(frozen=True)
class Verdict:
    """Results of the checks of one family with one setting; `why` is empty if all pass."""

    name: str
    trains: bool
    generates: bool
    fused: bool
    why: str


def verdict(model_type: str, **settings: Any) -> Verdict:
    """Run the checks on a config of this family."""
    try:
        config = CONFIG_MAPPING[model_type](**{**NEEDED.get(model_type, {}), **settings})
    except Exception:
        return Verdict(model_type, False, False, False, "its config has no defaults to check")
    try:
        probe = check_architecture(config)
    except ModelError as error:
        return Verdict(model_type, False, False, False, reason(error))
    fused = any(isinstance(module, FusedAttention | FusedMLP) for module in probe.ours.modules())
    try:
        check_generation(probe)
    except ModelError as error:
        return Verdict(model_type, True, False, fused, reason(error))
    return Verdict(model_type, True, True, fused, "")


def reason(error: ModelError) -> str:
    """Return what a refusal says, without the model's name and without measured numbers."""
    said = str(error).partition("models are not supported: ")[2]
    if said.startswith("on a packed row a token's logits differ"):
        return "not equal on a packed row"
    return re.sub(r"\s+", " ", said).replace("|", "\\|").partition(" (RuntimeError: ")[0]


def page() -> str:
    """Return docs/models.md."""
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    found = [verdict(name) for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    supported, refused = [v for v in found if v.trains], [v for v in found if not v.trains]
    lines = [
        "# Model families",
        "",
        f"Generated by `scripts/model_families.py` with transformers {transformers.__version__}: {len(found)} families of causal "
        f"language models, {len(supported)} supported. A long test compares this page with a fresh one.",
        "",
        "Supported means exact: on a packed row, with short samples beside long ones and shared prompts, logits and gradients are",
        "those of transformers' own forward and backward pass of each sequence alone, past every window and every length at which",
        "the architecture changes what it does; and the torch engine's prefill and decode have the same logits. `treadle plan` and",
        "`treadle train` run these checks on a small random model of the same config (about 0.3 s) before they read weights, and",
        "refuse a model in one line that names it. With the weights loaded, both are compared once more on a few tokens.",
        "",
        "- *torch engine*: it generates; families without it can be trained with `--rollout-engine vllm` or `sglang`.",
        "- *fused*: on a CPU its layers and its decode run as fused operations. All others run as transformers' modules.",
        "- Multimodal families are trained on text; the sizes that count are those of their text config.",
        "- The context of models with `longrope` or `dynamic` positions ends where their factors switch",
        "  (`original_max_position_embeddings`, `max_position_embeddings`): beyond it the numbers of a token depend on how long the",
        "  sample becomes, so that no engine can sample what the trainer would compute. Longer samples are refused.",
        "",
        "## Supported",
        "",
        "| family | trains | torch engine | fused | |",
        "|---|---|---|---|---|",
        *(f"| {v.name} | yes | {_yes(v.generates)} | {_yes(v.fused)} | {v.why} |" for v in supported),
        "",
        "## With settings",
        "",
        "| family | setting | trains | torch engine | |",
        "|---|---|---|---|---|",
    ]
    for name, said, settings in SETTINGS:
        v = verdict(name, **settings)
        lines.append(f"| {name} | {said} | {_yes(v.trains)} | {_yes(v.generates)} | {v.why} |")
    known = {name: cause for cause, names in CAUSES.items() for name in names.split()}
    lines += ["", "## Refused", "", "| family | why |", "|---|---|"]
    lines += [f"| {v.name} | {known.get(v.name, v.why)} |" for v in refused]
    return "\n".join(lines) + "\n"


def _yes(fact: bool) -> str:
    return "yes" if fact else "no"


if __name__ == "__main__":
    print(page(), end="")
