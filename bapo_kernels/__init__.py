"""From hidden states and the head's weight to per-token log-probs, entropy and off-policy policy losses, without the logits."""

from bapo_kernels import losses, reference
from bapo_kernels.controller import BapoBounds
from bapo_kernels.environment import env_report
from bapo_kernels.head.api import TokenStatistics, linear_logprobs
from bapo_kernels.losses import BAPO, DAPO, GRPO, PPO
from bapo_kernels.modules import LinearLogprobs, LinearPolicyLoss
from bapo_kernels.policy import PolicyLossOutput, TokenDetail, bapo_bounds, linear_policy_loss, policy_loss

__all__ = [
    "BAPO",
    "DAPO",
    "GRPO",
    "PPO",
    "BapoBounds",
    "LinearLogprobs",
    "LinearPolicyLoss",
    "PolicyLossOutput",
    "TokenDetail",
    "TokenStatistics",
    "bapo_bounds",
    "env_report",
    "linear_logprobs",
    "linear_policy_loss",
    "losses",
    "policy_loss",
    "reference",
]
__version__ = "0.1.0"
