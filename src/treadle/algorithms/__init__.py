"""The maths of Treadle: pure functions from tensors to tensors, float32 or float64, inputs never changed.

A token's loss mask is True if the token is trained. Per-token vectors hold the tokens of many samples one after the
other, with the ascending `sample_index`; samples know their group by id. `ESTIMATORS`, `POLICY_LOSSES`,
`KL_ESTIMATORS` and `CORRECTIONS` are tables by name, made from the records of `treadle.catalog`.
"""

from treadle.algorithms.advantages import (
    ESTIMATORS,
    AdvantageInputs,
    Advantages,
    AdvantageSettings,
    Estimator,
    compute_advantages,
    find_estimator,
    whiten,
    whitening_sums,
)
from treadle.algorithms.corrections import (
    CORRECTIONS,
    Bound,
    Correction,
    CorrectionSettings,
    Level,
    correct,
    m2po_mask,
    top_entropy_mask,
)
from treadle.algorithms.gae import discounted_returns, gae
from treadle.algorithms.kl import KL_ESTIMATORS, AdaptiveKL, kl_per_token, update_kl_coef
from treadle.algorithms.logprobs import logprobs_and_entropy
from treadle.algorithms.losses import (
    POLICY_LOSSES,
    PolicyLoss,
    PolicyLossFn,
    PolicyLossInputs,
    ValueLoss,
    find_policy_loss,
    opsm_mask,
    sft,
    value_loss,
)
from treadle.algorithms.reduce import (
    Denominators,
    Mode,
    sample_means,
    token_weights,
    trained_tokens,
    trajectory_tokens,
    weighted_sum,
)
from treadle.algorithms.shaping import (
    RunningMoments,
    clip_rewards,
    combine_rewards,
    normalize_running,
    overlong_penalty,
    update_moments,
)
