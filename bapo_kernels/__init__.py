"""From hidden states and the head's weight to per-token log-probs, entropy and off-policy policy losses, without the logits."""

from bapo_kernels import losses, reference
from bapo_kernels.advantages import TargetEntropy, group_advantages
from bapo_kernels.controller import BapoBounds
from bapo_kernels.corrections import IcePop, KPop, MaskedIS, TruncatedIS
from bapo_kernels.environment import env_report
from bapo_kernels.evaluation import PolicyLossOutput, TokenDetail
from bapo_kernels.head.api import TokenStatistics, linear_logprobs
from bapo_kernels.head.divergence import linear_kl
from bapo_kernels.head.engines import Plan
from bapo_kernels.losses import (
    BAPO,
    BPO,
    CISPO,
    DAPO,
    DCPO,
    DPPO,
    DPPOKL,
    DRO,
    GMPO,
    GRPO,
    GSPO,
    LUSPO,
    PPO,
    SAPO,
    TOPR,
    VESPO,
    ClipCov,
    KLCov,
    Reinforce,
    ScoreCentering,
)  # fmt: skip
from bapo_kernels.modules import LinearLogprobs, LinearPolicyLoss
from bapo_kernels.objectives import exact_bpo_loss
from bapo_kernels.planning import plan
from bapo_kernels.policy import bapo_bounds, linear_policy_loss, policy_loss

__all__ = [
    "BAPO",
    "BPO",
    "CISPO",
    "DAPO",
    "DCPO",
    "DPPO",
    "DPPOKL",
    "DRO",
    "GMPO",
    "GRPO",
    "GSPO",
    "LUSPO",
    "PPO",
    "SAPO",
    "TOPR",
    "VESPO",
    "BapoBounds",
    "ClipCov",
    "IcePop",
    "KLCov",
    "KPop",
    "LinearLogprobs",
    "LinearPolicyLoss",
    "MaskedIS",
    "Plan",
    "PolicyLossOutput",
    "Reinforce",
    "ScoreCentering",
    "TargetEntropy",
    "TokenDetail",
    "TokenStatistics",
    "TruncatedIS",
    "bapo_bounds",
    "env_report",
    "exact_bpo_loss",
    "group_advantages",
    "linear_kl",
    "linear_logprobs",
    "linear_policy_loss",
    "losses",
    "plan",
    "policy_loss",
    "reference",
]
__version__ = "0.1.0"
