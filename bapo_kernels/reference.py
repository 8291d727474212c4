"""The public functions on materialised logits, in plain PyTorch autograd: same signatures, same arguments. The oracle.

The loss is the one rule that every path evaluates, on vectors of N numbers; what differs is the head. Its forward is fp32 whatever the
process has set; its backward is PyTorch's, so run it outside of autocast and with tf32 off.
"""

from functools import wraps

from bapo_kernels.head import api
from bapo_kernels.losses import triton as fused
from bapo_kernels.policy import linear_policy_loss as _linear_policy_loss
from bapo_kernels.policy import policy_loss as _policy_loss

__all__ = ["linear_logprobs", "linear_policy_loss", "policy_loss"]


def _on_reference(function):
    @wraps(function)
    def call(*args, backend: str = "reference", **kwargs):
        if backend not in ("auto", "reference"):
            raise ValueError(f"backend must be 'reference' here, got {backend!r}")
        return function(*args, backend="reference", **kwargs)

    return call


linear_logprobs = _on_reference(api.linear_logprobs)
linear_policy_loss = _on_reference(_linear_policy_loss)


@wraps(_policy_loss)
def policy_loss(*args, **kwargs):
    with fused.using("reference"):
        return _policy_loss(*args, **kwargs)
