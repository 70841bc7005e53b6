"""The factor on each token's policy loss: the rollout correction, and 0 for tokens that are left out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxtyping import Float
from torch import Tensor

from treadle.algorithms.corrections import correct, m2po_mask, top_entropy_mask
from treadle.catalog import CORRECTIONS, Bound, CorrectionSettings, Level, find
from treadle.config import AlgorithmSection
from treadle.errors import ConfigError
from treadle.training.batch import Batch
from treadle.training.ranks import ALONE, Ranks


def correction_settings(section: AlgorithmSection) -> CorrectionSettings | None:
    """Return the configured correction with the configured numbers; None if there is none.

    Raises `ConfigError` for an unknown name, or a bound that is on the wrong side of the other, usual one.
    """
    if section.rollout_correction is None:
        return None
    given: dict[str, Any] = {
        "bound": None if section.correction_bound is None else Bound(section.correction_bound),
        "low": section.correction_low,
        "high": section.correction_high,
        "reject_level": None if section.correction_reject_level is None else Level(section.correction_reject_level),
        "reject_low": section.correction_reject_low,
        "reject_high": section.correction_reject_high,
        "veto_below": section.correction_veto,
        "batch_mean_one": section.correction_batch_mean_one,
    }
    usual = find("rollout_correction", section.rollout_correction, CORRECTIONS).settings
    low = usual.low if section.correction_low is None else section.correction_low
    high = usual.high if section.correction_high is None else section.correction_high
    if low > high:
        raise ConfigError(
            f"rollout_correction {section.rollout_correction} would have bounds {low:g} to {high:g}, one of them its usual "
            "one; give correction_low and correction_high in order"
        )
    return replace(usual, **{name: value for name, value in given.items() if value is not None})


def loss_factor(
    section: AlgorithmSection, settings: CorrectionSettings | None, batch: Batch, ranks: Ranks = ALONE
) -> Float[Tensor, " T"] | None:
    """Return the factor of each token of a rank's share of a rollout; None if no factor is configured.

    It is the correction's weight, and 0 for tokens that m2po drops or that have a low entropy.
    """
    factors: list[Tensor] = []
    if settings is not None:
        assert batch.old_logprobs is not None
        found = correct(
            batch.old_logprobs, batch.rollout_logprobs, batch.sample_index, settings, batch.loss_mask, ranks.sum
        )
        factors.append(found.weights)
    if section.m2po_threshold is not None:
        assert batch.old_logprobs is not None
        kept = m2po_mask(
            batch.old_logprobs, batch.rollout_logprobs, section.m2po_threshold, batch.loss_mask, ranks.gather
        )
        factors.append(kept.float())
    if section.top_entropy_fraction is not None:
        assert batch.entropy is not None
        chosen = top_entropy_mask(batch.entropy, section.top_entropy_fraction, batch.loss_mask, ranks.gather)
        factors.append(chosen.float())
    if not factors:
        return None
    product = factors[0]
    for factor in factors[1:]:
        product = product * factor
    return product
