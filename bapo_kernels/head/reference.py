"""The head in plain PyTorch on materialised logits: the oracle, and the documentation of the arithmetic."""

import torch
from torch import Tensor

from bapo_kernels.head.inputs import HeadInputs
from bapo_kernels.head.precision import full_precision


def run(inputs: HeadInputs, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """Log-probs at the ids (N, 1 + K) and entropy (N,) or None of validated inputs; 0 in rows that do not count."""
    selection, spec, acc = inputs.selection, inputs.spec, inputs.dtype
    with full_precision(inputs.hidden.device.type):
        z = selection.take(inputs.hidden).to(acc) @ inputs.weight[: spec.vocab_size].to(acc).t()
        if inputs.bias is not None:
            z = z + inputs.bias[: spec.vocab_size].to(acc)
        z = z * spec.scale
        if spec.softcap is not None:
            z = spec.softcap * torch.tanh(z / spec.softcap)
        if inputs.inv_temperature is not None:
            z = z * inputs.inv_temperature[:, None]
        log_p = torch.log_softmax(z, dim=-1)

        known = (inputs.ids >= 0) & (inputs.ids < spec.vocab_size)
        picked = log_p.gather(1, inputs.ids.clamp(0, spec.vocab_size - 1)).masked_fill(~known, torch.nan)
        padding = inputs.ids == -1
        padding[:, 0] = False
        logprobs = selection.put(picked.masked_fill(padding, 0.0))
        if not entropy:
            return logprobs, None
        # A column of probability 0 adds 0 to the entropy and to its gradient, not 0 * -inf.
        finite = log_p.masked_fill(log_p == -torch.inf, 0.0)
        return logprobs, selection.put(-(log_p.exp() * finite).sum(-1))
