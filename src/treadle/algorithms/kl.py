"""Estimates of KL(policy ‖ reference) from the logprobs of sampled tokens, and a controller for their weight.

All of them read `d = logprobs - ref_logprobs` of tokens that the policy drew. Axis: `T` tokens; every estimator takes and
returns float [T].
Source: Schulman 2020, "Approximating KL Divergence" (k1, k2, k3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from treadle import catalog
from treadle.algorithms.segments import capped_exp
from treadle.errors import ConfigError

KLEstimator = Callable[[Float[Tensor, " T"], Float[Tensor, " T"]], Float[Tensor, " T"]]
"""(logprobs, ref_logprobs) → KL per token."""


def k1(logprobs: Float[Tensor, " T"], ref_logprobs: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Return `d`. It is unbiased and may be negative; as a loss its expected gradient is 0."""
    return logprobs - ref_logprobs


def k2(logprobs: Float[Tensor, " T"], ref_logprobs: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Return `d² / 2`. It is biased and never negative; its gradient is the true gradient of the KL."""
    return (logprobs - ref_logprobs).square() / 2


def k3(logprobs: Float[Tensor, " T"], ref_logprobs: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Return `exp(-d) - 1 + d`. It is unbiased and never negative.

    Beyond d = -60 (float32; -600 in float64) it grows as a straight line instead of overflowing.

    >>> k3(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 0.0])).tolist()
    [0.0, 0.3678794503211975]
    """
    difference = logprobs - ref_logprobs
    # expm1 keeps small differences exact; far out, where it would overflow, the -1 does not matter.
    near = difference > -1.0
    small = torch.expm1(-torch.where(near, difference, 0.0))
    return torch.where(near, small, capped_exp(-difference) - 1.0) + difference


def low_var_kl(logprobs: Float[Tensor, " T"], ref_logprobs: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Return k3 clamped to [-10, 10]; a clamped token gets no gradient."""
    return k3(logprobs, ref_logprobs).clamp(-10.0, 10.0)


def absolute(logprobs: Float[Tensor, " T"], ref_logprobs: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Return `|d|`."""
    return (logprobs - ref_logprobs).abs()


def k3_plus(logprobs: Float[Tensor, " T"], ref_logprobs: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Return the value of k3 with the gradient of k2: an unbiased number and an unbiased gradient."""
    straight = k2(logprobs, ref_logprobs)
    return straight + (k3(logprobs, ref_logprobs) - straight).detach()


KL_ESTIMATORS: Mapping[str, KLEstimator] = {name: record.load() for name, record in catalog.KL_ESTIMATORS.items()}
"""Every KL estimator by its name in a recipe (`kl_loss_type`)."""


def kl_per_token(
    name: str,
    logprobs: Float[Tensor, " T"],
    ref_logprobs: Float[Tensor, " T"],
    old_logprobs: Float[Tensor, " T"] | None = None,
) -> Float[Tensor, " T"]:
    """Return the KL of each token by the named estimator; with `old_logprobs`, times `ρ = exp(logprobs - old_logprobs)`.

    That factor makes the estimate unbiased for tokens that the old policy drew; its gradient is kept
    (DeepSeek-V3.2 2025, section 3.1, "unbiased KL estimate").

    Args:
        name: a key of `KL_ESTIMATORS`.
        logprobs: float [T], of the policy.
        ref_logprobs: float [T].
        old_logprobs: float [T], of the policy that drew the tokens.
    Returns:
        float [T].
    Raises:
        ConfigError: if there is no estimator of this name.
    """
    catalog.find("kl_loss_type", name, catalog.KL_ESTIMATORS)
    value = KL_ESTIMATORS[name](logprobs, ref_logprobs)
    return value if old_logprobs is None else value * capped_exp(logprobs - old_logprobs)


@dataclass(frozen=True, slots=True)
class AdaptiveKL:
    """State of a controller that steers the KL towards a target; `horizon` is in samples."""

    coef: float
    target: float
    horizon: float

    def __post_init__(self) -> None:
        if self.target <= 0 or self.horizon <= 0:
            raise ConfigError(
                f"adaptive KL needs a target and a horizon above 0, got target {self.target} and horizon {self.horizon}"
            )


def update_kl_coef(state: AdaptiveKL, measured_kl: float, num_samples: int) -> AdaptiveKL:
    """Return the controller after a step with this mean KL over this many samples.

    `coef ← coef · (1 + clip(kl / target - 1, ±0.2) · num_samples / horizon)`.
    Source: Ziegler et al. 2019, section 2.2.

    >>> update_kl_coef(AdaptiveKL(coef=0.1, target=2.0, horizon=100.0), measured_kl=9.0, num_samples=50).coef
    0.11000000000000001
    """
    error = min(max(measured_kl / state.target - 1.0, -0.2), 0.2)
    return replace(state, coef=state.coef * (1.0 + error * num_samples / state.horizon))
