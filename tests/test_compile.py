"""A compiled model that calls the head: the same loss and gradients as uncompiled, at every length."""

import torch
from helpers import close, integers, normal

import bapo_kernels as bk


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(6, 5, dtype=torch.float64)
        self.head = torch.nn.Linear(5, 40, dtype=torch.float64)

    def forward(self, x, targets, advantages, mask):
        hidden = torch.tanh(self.body(x))
        out = bk.linear_policy_loss(
            hidden, self.head.weight, targets, advantages, bias=self.head.bias, mask=mask, loss="dapo", entropy_coef=0.1
        )
        return 2 * out.loss


def test_compiled_equals_eager():
    torch.manual_seed(0)
    model, compiled_frames = Model(), []

    def count_and_run(graph, _):
        compiled_frames.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=count_and_run, dynamic=True)
    for n in (20, 21, 40):
        inputs = (normal(n, 6, seed=n), integers(40, n), normal(n, seed=n + 1), integers(3, n) > 0)
        grads = []
        for module in (model, compiled):
            model.zero_grad()
            loss = module(*inputs)
            loss.backward()
            grads.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
        for a, b in zip(*grads, strict=True):
            close(a, b)
    assert 1 <= len(compiled_frames) <= 12  # not one more for each length
