"""Compare the logits of prefill and decode with those of a forward pass over whole sequences.

`check_generation` runs a miniature of the architecture (models/architecture.py) past its attention windows, before any
weights are read. `check_decode` runs the model itself for a few tokens, with the kernels of its sizes and its dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from treadle.errors import ModelError
from treadle.models.architecture import TOLERANCE, Probe, token_gap
from treadle.models.cpu.inference import InferenceModel, inference_model
from treadle.models.forward import embeddings_of, packed_logits
from treadle.models.layout import PackedLayout
from treadle.models.load import FORWARD_TOLERANCE
from treadle.rollout.engines.torch_engine.attention import decode, prefill
from treadle.rollout.engines.torch_engine.kv_store import KVShape, KVStore, round_up, token_shape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

REMEDY = "the torch engine can't generate with it; choose --rollout-engine vllm or sglang"


@functools.cache
def check_generation(probe: Probe, *, fused: bool = True) -> None:
    """Generate with the miniature of an architecture and compare with transformers' forward pass of each sequence alone.

    Raises:
        ModelError: if the logits differ, or the architecture does not run token by token.
    """
    short, new = 3, probe.longest // 2
    prompts = probe.longest - new, short
    try:
        gaps = _gaps(probe.ours, inference_model(probe.ours, fused=fused), prompts, new, probe.own_logits)
    except ModelError as error:
        raise ModelError(f"{probe.name} models are not supported: {error}") from error
    except Exception as error:  # a model's code may fail in any way with a single token
        raise ModelError(f"{probe.name} models are not supported: {REMEDY} ({error!r})") from error
    _refuse(probe.name, max(gaps), TOLERANCE)


def check_decode(model: PreTrainedModel, inference: InferenceModel) -> KVShape:
    """Generate a few tokens with the model itself, compare with its packed forward pass, and return its store's shape.

    Raises:
        ModelError: if the logits differ.
    """

    def packed(tokens: Tensor) -> Tensor:
        return packed_logits(model, tokens, PackedLayout.of_lengths([len(tokens)], tokens.device))

    shape = token_shape(model)
    gaps = _gaps(model, inference, (6, 3), 3, packed)
    inference.release()
    # The mean: in bfloat16 a router may send single tokens to other experts.
    _refuse(type(model).__name__, sum(gaps) / len(gaps), FORWARD_TOLERANCE[shape.dtype])
    return shape


def _refuse(name: str, gap: float, tolerance: float) -> None:
    if not gap <= tolerance:
        raise ModelError(
            f"{name} models are not supported: token by token the logits differ from a plain forward pass by "
            f"{gap:.2g} standard deviations; {REMEDY}"
        )


@torch.no_grad()
def _gaps(
    model: PreTrainedModel,
    inference: InferenceModel,
    prompts: tuple[int, int],
    new: int,
    own_logits: Callable[[Tensor], Tensor],
) -> list[float]:
    """Return the distance of each step's logits from `own_logits` of the whole sequences.

    Two samples of one prompt and one of another are generated, `new` tokens each.
    """
    embeddings = embeddings_of(model)
    device, vocabulary = embeddings.device, embeddings.shape[0]
    slots, lengths = torch.tensor([0, 1, 0], device=device), torch.tensor(prompts, device=device)
    texts = [
        (torch.arange(1, n + 1, device=device) + 31 * i) * 7919 % (vocabulary - 4) + 3 for i, n in enumerate(prompts)
    ]
    more = (torch.arange(3 * new, device=device).view(3, new) * 104729 + 5) % (vocabulary - 4) + 3
    wanted = [own_logits(torch.cat([texts[slot], more[i]])) for i, slot in enumerate(slots.tolist())]

    inference.refresh()
    shape = replace(
        token_shape(model), slots=2, rows=3, prefix_capacity=round_up(max(prompts)), row_capacity=round_up(new)
    )
    store = KVStore(shape, device)
    first = prefill(inference, store, torch.cat(texts), prompts, (0, 1))
    gaps = [token_gap(first.float(), torch.stack([wanted[i][prompts[i] - 1] for i in (0, 1)]).float())]
    for place in range(new):
        logits = decode(inference, store, more[:, place].contiguous(), slots, torch.full_like(slots, place), lengths)
        expected = torch.stack([wanted[i][prompts[slot] + place] for i, slot in enumerate(slots.tolist())])
        gaps.append(token_gap(logits.float(), expected.float()))
    return gaps
