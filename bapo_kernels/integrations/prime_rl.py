"""prime-rl: a custom loss, which that trainer calls for one sample at a time.

[trainer.loss]
type = "custom"
import_path = "bapo_kernels.integrations.prime_rl.policy_loss"
kwargs = { loss = "bapo", c_low = 0.6, c_high = 1.4 }
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from bapo_kernels import losses, regularizers
from bapo_kernels.integrations.batches import Weighted
from bapo_kernels.integrations.packages import Package
from bapo_kernels.policy import policy_loss as per_sample_loss

PRIME_RL = Package("prime-rl", "0.8", "0.8")
WHOLE_BATCH = (losses.ClipCov, losses.KLCov)  # losses that choose among the tokens of a batch


def policy_loss(
    inputs: Any,  # prime_rl LossInputs, of one sample
    loss: str | losses.Loss = "ppo",
    *,
    c_low: float | None = None,
    c_high: float | None = None,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    **parameters: Any,
) -> Any:
    """One of our losses, summed over the tokens of a sample: prime-rl divides by the tokens of the global batch afterwards.

        total = sum over `loss_mask` of loss_weights * (policy term + kl_coef * KL)

    All vectors of `inputs` are (T,): `trainer_logprobs` is the policy in training; `inference_logprobs` stands for both the old policy and
    the sampler, since this trainer recomputes no log-probs. So a ratio holds all mismatch of trainer and sampler, and there is nothing for
    a correction to do.

    A sample at a time, no loss can look at the batch: BAPO's bounds have to be given, and `clip-cov` and `kl-cov` are refused. Losses
    of sequences (`gspo`, `gmpo`, `topr`, `vespo`) see one sequence, which is what they want.

    Args:
        loss: a name of `bk.losses.available()`, or a loss object.
        c_low, c_high: BAPO's bounds on the ratio, as `bk.bapo_bounds` finds them on a whole batch, or as the paper's runs end up with.
        kl_coef, kl_estimator: KL to the reference (`inputs.ref_logprobs`), "k1", "k2", "k3" or "k3+".
        **parameters: hyper-parameters of a loss given by name: `loss="dapo", clip_high=0.3`.

    Returns:
        prime-rl's LossOutputs. Metrics are 0-d and detached; the trainer averages them over samples.

    Raises:
        ValueError: where a loss cannot be had here, naming the reason. TypeError: for a parameter that the loss does not have.
        ImportError: where prime-rl is missing.
    """
    rule = _rule(loss, c_low, c_high, parameters)
    regularizers.check(kl_coef, kl_estimator, 0.0, None)
    logprobs, weights = inputs.trainer_logprobs, inputs.loss_weights
    out = per_sample_loss(
        logprobs,
        inputs.advantages,
        loss=rule,
        mask=inputs.loss_mask,
        old_logprobs=inputs.inference_logprobs,
        rollout_logprobs=inputs.inference_logprobs,
        correction=None if weights is None else Weighted(weights),
        aggregation="token-sum",
    )
    total, metrics = out.loss, {name: value for name, value in out.metrics.items() if name not in ("entropy", "kl")}
    if kl_coef != 0:
        kl = _kl(kl_estimator, inputs)
        total = total + kl_coef * (kl if weights is None else kl * torch.where(inputs.loss_mask, weights, 0.0)).sum()
        metrics["kl"] = kl.detach().sum() / inputs.loss_mask.sum().clamp(min=1)
    return _outputs()(loss=total, metrics=metrics)


def _rule(
    loss: str | losses.Loss, c_low: float | None, c_high: float | None, parameters: dict[str, Any]
) -> losses.Loss:
    if loss == "bapo":
        if c_low is None or c_high is None:
            raise ValueError(
                "loss='bapo' needs its bounds, c_low and c_high: prime-rl calls the loss for one sample at a time, "
                "and bounds are a matter of the whole batch (bk.bapo_bounds finds them)"
            )
        return losses.BAPO.fixed(c_low, c_high, **parameters)
    if c_low is not None or c_high is not None:
        raise ValueError(f"c_low and c_high are bounds of loss='bapo', got loss={loss!r}")
    if isinstance(loss, losses.Loss) and parameters:
        raise TypeError(f"a loss object has its parameters: {sorted(parameters)[0]!r} goes with a name")
    rule = losses.resolve(loss) if not parameters else losses.get(loss, **parameters)  # type: ignore[arg-type]
    if isinstance(rule, losses.BAPO) and rule.searches:
        raise ValueError(
            "loss is a BAPO that searches its bounds, which takes the whole batch; pass BAPO.fixed(c_low, c_high)"
        )
    if isinstance(rule, WHOLE_BATCH):
        raise ValueError(
            f"loss {rule.name!r} chooses among the tokens of a batch, and prime-rl shows it one sample at a time"
        )
    if "rollout_topk_ids" in rule.needs:
        raise ValueError(f"loss {rule} needs rollout_topk_ids, which prime-rl does not hand to a loss")
    return rule


def _kl(estimator: str, inputs: Any) -> Tensor:
    """(T,) KL of each token to the reference, 0 where masked."""
    if inputs.ref_logprobs is None:
        raise ValueError("kl_coef needs inputs.ref_logprobs: an algorithm of prime-rl that scores with a reference")
    mask = inputs.loss_mask
    logprobs, reference = (torch.where(mask, t, 0.0) for t in (inputs.trainer_logprobs, inputs.ref_logprobs.detach()))
    return regularizers.kl(estimator, logprobs, reference)


@cache
def _outputs() -> type:
    found = PRIME_RL.hook("prime_rl.trainer.rl.loss", "LossOutputs")
    PRIME_RL.check_version()
    return found
