"""The public functions in plain PyTorch autograd, on materialised logits: same signatures, same arguments. The oracle."""

from functools import wraps

from bapo_kernels import policy
from bapo_kernels.head import api

__all__ = ["linear_logprobs", "linear_policy_loss", "policy_loss"]


def _on_reference(function):
    @wraps(function)
    def call(*args, backend: str = "reference", **kwargs):
        if backend not in ("auto", "reference"):
            raise ValueError(f"backend must be 'reference' here, got {backend!r}")
        with policy.plain_autograd():
            return function(*args, backend="reference", **kwargs)

    return call


linear_logprobs = _on_reference(api.linear_logprobs)
linear_policy_loss = _on_reference(policy.linear_policy_loss)


@wraps(policy.policy_loss)
def policy_loss(*args, **kwargs):
    with policy.plain_autograd():
        return policy.policy_loss(*args, **kwargs)
