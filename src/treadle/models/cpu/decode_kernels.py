"""Operations of an engine's decode step, compiled for this processor: norms, positions, gate, attention, sampling.

For a few rows each of torch's operations costs more than its arithmetic, and attention takes twenty of them a layer;
here each is one call of decode_kernels.cpp. Without GCC (library.py), or if a model's sizes don't fit, the caller gets
None and uses torch's operations. Tests compare the two.

Axis letters: `N` rows, `D` hidden size, `F` units of the MLP, `H` query heads, `K` key/value heads, `Q` query heads per
key/value head, `E` head size, `T` tokens.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from treadle.models.attention import LayerAttention, Pair
from treadle.models.cpu.known_layer import KnownLayer
from treadle.models.cpu.library import addresses, load, structure
from treadle.models.model_config import kv_heads_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SOURCE = Path(__file__).with_suffix(".cpp")
CHUNK = 32
"""Sizes are multiples of it."""
MOST_ROWS = 8
"""Largest number of rows for `project` and `finish`: reading a layer's weights takes longer than computing with them."""
DTYPES = {torch.float32: "float", torch.bfloat16: "bfloat16"}
_Layer, _Decode = structure(SOURCE, "Layer"), structure(SOURCE, "Decode")


class CpuKernels:
    """The compiled functions, for tensors of one dtype. Rows are dense, and so are tensors unless a method says otherwise."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype):
        self.library, self.dtype = library, dtype

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return `x · weight / √(mean(x²) + eps)` [N, D] of x [N, D] with any stride and weight float32 [D]."""
        out, (rows, size) = x.new_empty(x.shape), x.shape
        self.library.rms_norm(out.data_ptr(), x.data_ptr(), weight.data_ptr(), rows, size, x.stride(0), eps)
        return out

    def silu_times(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) · up [N, F] of both side by side [N, 2·F]."""
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, size)
        self.library.silu_times(out.data_ptr(), gate_up.data_ptr(), rows, size)
        return out

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return x [N, H, E], of any stride from row to row, at the positions of `signed_halves` [N, 1, E]."""
        out, (rows, heads, _) = x.new_empty(x.shape), x.shape
        self.library.rotate(out.data_ptr(), x.data_ptr(), cos.data_ptr(), sin.data_ptr(), rows, heads, x.stride(0))
        return out

    def draw(self, logits: Tensor, temperature: Tensor, greedy: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor, int]:
        """Sample one token for each row by inverse CDF.

        Args:
            logits: [N, V].
            temperature: float32 [N], positive; 1 for greedy rows.
            greedy: bool [N], rows that take the most likely token.
            uniform: float64 [N] in [0, 1).
        Returns:
            Tokens int64 [N], their logprobs float32 [N], and the number of rows that are not finite.
        """
        rows, vocab = logits.shape
        tokens, logprobs = (logits.new_empty(rows, dtype=dtype) for dtype in (torch.int64, torch.float32))
        given = (x.data_ptr() for x in (tokens, logprobs, logits, temperature, greedy, uniform))
        return tokens, logprobs, self.library.draw(*given, rows, vocab)


class LayerKernel:
    """A decoder layer without its attention, for a few rows, on the weights as they lie in its module."""

    def __init__(self, layer: KnownLayer, kernels: CpuKernels):
        self._library, dtype = kernels.library, kernels.dtype
        self._kept: list[Tensor] = []
        self._head_size, self._heads = layer.head_size, layer.heads + 2 * layer.kv_heads
        linears = layer.query, layer.key, layer.value, layer.out, layer.gate, layer.up, layer.down
        norms = layer.norm_in, layer.norm_mlp, layer.norm_query, layer.norm_key
        size, units = layer.down.weight.shape
        self._layer = _Layer(
            *((self._at(part.weight, dtype), self._at(part.bias, dtype)) for part in linears),
            *(None if norm is None else self._at(norm.weight, torch.float32) for norm in norms),
            *(size, layer.heads, layer.kv_heads, units),
            *(0.0 if norm is None else norm.variance_epsilon for norm in norms),
        )
        self._address = ctypes.addressof(self._layer)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply norm, projections and positions to at most `MOST_ROWS` rows x [N, D].

        Returns:
            Queries, keys and values side by side, [N, H + 2·K, E].
        """
        out = x.new_empty(len(x), self._heads, self._head_size)
        given = (y.data_ptr() for y in (x, cos, sin))
        self._library.project(out.data_ptr(), self._address, *given, len(x))
        return out

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Return the layer's output [N, D] of its input x [N, D] and the result of its attention [N, H, E]."""
        out, attended = x.new_empty(x.shape), attended.contiguous()
        self._library.finish(out.data_ptr(), self._address, x.data_ptr(), attended.data_ptr(), len(x))
        return out

    def _at(self, tensor: Tensor | None, dtype: torch.dtype) -> int | None:
        """Return the address of a tensor in this dtype, and keep it from being freed."""
        if tensor is None:
            return None
        self._kept.append(tensor.detach().to(dtype).contiguous())
        return self._kept[-1].data_ptr()


class DecodeKernel:
    """The attention of one decode step.

    The new token of row i is stored at `places[i]`; its prompt is `slots[i]`, of `prompt_lengths[slots[i]]` tokens.
    """

    def __init__(self, kernels: CpuKernels, places: Tensor, slots: Tensor, prompt_lengths: Tensor):
        self._attend = kernels.library.attend
        self._kept = places, slots, prompt_lengths
        given = addresses(places=places, slots=slots, prompt_lengths=prompt_lengths)
        self._decode = _Decode(**given, rows=len(places))

    def attend(
        self, new: tuple[Tensor, Tensor, Tensor], rows: Pair, prompts: Pair, layer: LayerAttention, known: Pair | None
    ) -> Tensor:
        """Store the new tokens' keys and values, then attend to prompt and row.

        Args:
            new: query [N, H, E], key and value [N, K, E], each with any stride from row to row.
            rows: keys and values [≥ N, K, T, E], written to.
            prompts: keys and values [slots, K, T, E].
            known: the attention to the prompts [N, H, E] and the log of the sum of their softmax, float32 [N, H], if that
                was computed before; the prompts are not read then.
        Returns:
            [N, H, E].
        """
        query, key, value = new
        out = query.new_empty(query.shape)
        decode = self._decode
        decode.query, decode.key, decode.value = query.data_ptr(), key.data_ptr(), value.data_ptr()
        decode.query_stride, decode.key_stride, decode.value_stride = query.stride(0), key.stride(0), value.stride(0)
        decode.row_keys, decode.row_values = rows[0].data_ptr(), rows[1].data_ptr()
        decode.prompt_keys, decode.prompt_values = prompts[0].data_ptr(), prompts[1].data_ptr()
        decode.of_prompt, decode.prompt_totals = (None, None) if known is None else (x.data_ptr() for x in known)
        decode.row_span, decode.prompt_span = rows[0].shape[2], prompts[0].shape[2]
        decode.out, decode.kv_heads = out.data_ptr(), key.shape[1]
        decode.window, decode.scale = layer.sliding_window or 0, layer.scaling
        self._attend(ctypes.byref(decode))
        return out


def cpu_kernels(config: PretrainedConfig, dtype: torch.dtype) -> CpuKernels | None:
    """Return the kernels for a model's sizes; None if there is no compiler or a size does not fit."""
    heads, (kv_heads, head_size) = config.num_attention_heads, kv_heads_of(config)
    fits = all(size % CHUNK == 0 for size in (head_size, config.hidden_size, config.intermediate_size))
    if not fits or dtype not in DTYPES or heads % kv_heads:
        return None
    return load_kernels(dtype, heads // kv_heads, head_size)


@functools.cache
def load_kernels(dtype: torch.dtype, heads_per_kv_head: int, head_size: int) -> CpuKernels | None:
    """Return the kernels for a shape of heads, head_size a multiple of 32; compile them unless the cache has them."""
    types = {"DTYPE": DTYPES[dtype], "ITEM_SIZE": dtype.itemsize}
    library = load(SOURCE, {**types, "HEADS_PER_KV_HEAD": heads_per_kv_head, "HEAD_SIZE": head_size})
    return None if library is None else CpuKernels(library, dtype)
