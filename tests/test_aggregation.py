"""Aggregation: hand-made numbers, micro-batches that add up, empty sequences, the two layouts, per-sequence advantages."""

import pytest
import torch
from batches import Batch
from helpers import assert_bits, close, normal

import bapo_kernels as bk

AGGREGATIONS = {  # what the normalizer counts
    "token-mean": "tokens",
    "seq-mean-token-mean": "sequences",
    "seq-mean-token-sum": "sequences",
    "seq-mean-token-sum-norm": "sequences",
}


def extra(aggregation):
    return {"max_length": 6} if aggregation.endswith("norm") else {}


def test_masked_tokens_leave_numerator_and_denominator():
    """loss [[1, 100], [1, -50]] under the mask [[1, 0], [1, 0]]: 1, with gradients 1/2."""
    logprobs = torch.zeros(2, 2, requires_grad=True)
    out = bk.policy_loss(
        logprobs, -torch.tensor([[1.0, 100.0], [1.0, -50.0]]), loss="ppo", mask=torch.tensor([[1, 0], [1, 0]])
    )
    out.loss.backward()
    assert out.loss.item() == 1.0
    assert logprobs.grad.tolist() == [[0.5, 0.0], [0.5, 0.0]]


@pytest.mark.parametrize(
    ("aggregation", "want"),
    [
        ("token-mean", (1 + 2 + 3 + 10) / 4),
        ("seq-mean-token-mean", (2 + 10) / 2),
        ("seq-mean-token-sum", (6 + 10) / 2),
        ("seq-mean-token-sum-norm", (6 + 10) / 2 / 6),
        ("token-sum", 16),
    ],
)
def test_known_numbers(aggregation, want):
    """Sequences of losses 1 2 3, 10, and one without an active token, which does not count."""
    advantages = -torch.tensor([[1.0, 2.0, 3.0], [10.0, 99.0, 99.0], [99.0, 99.0, 99.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    options = {"loss": "ppo", "aggregation": aggregation, **extra(aggregation)}
    assert bk.policy_loss(torch.zeros(3, 3), advantages, mask=mask, **options).loss.item() == pytest.approx(want)
    packed = -torch.tensor([1.0, 2.0, 3.0, 10.0])
    for edges in ([0, 3, 4], [0, 0, 3, 3, 4, 4]):
        out = bk.policy_loss(torch.zeros(4), packed, cu_seqlens=torch.tensor(edges, dtype=torch.int32), **options)
        assert out.loss.item() == pytest.approx(want)


@pytest.mark.parametrize("loss", ["grpo", "dapo", bk.BAPO.fixed(0.8, 1.2)], ids=str)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_packed_equals_padded(aggregation, loss):
    """The three sequences of the packed batch, padded to six tokens."""
    packed = Batch.random("packed")
    options = {
        "loss": loss,
        "aggregation": aggregation,
        "kl_coef": 0.1,
        "entropy_coef": 0.1,
        "return_tokens": True,
        **extra(aggregation),
    }
    out, logprobs, _ = packed.call(**options)
    out.loss.backward()
    keep = torch.arange(6) < torch.tensor([[3], [6], [5]])
    fields = ("logprobs", "advantages", "mask", "old_logprobs", "rollout_logprobs", "ref_logprobs", "entropy")
    spread = {
        f: torch.zeros(3, 6, dtype=getattr(packed, f).dtype).masked_scatter(keep, getattr(packed, f)) for f in fields
    }
    padded_out, padded_logprobs, _ = Batch(**spread, cu_seqlens=None, sequence=[], sequences=3).call(**options)
    padded_out.loss.backward()
    close(out.loss, padded_out.loss)
    close(logprobs.grad, padded_logprobs.grad[keep])
    for k, v in out.metrics.items():
        close(v, padded_out.metrics[k], k, rtol=1e-6)
    for a, b in zip(out.tokens, padded_out.tokens, strict=True):
        close(a, b[keep])


@pytest.mark.parametrize("kind", ["number", "float", "tensor", "int tensor"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_micro_batches_add_up(aggregation, kind):
    batch = Batch.random("padded", masked=True)
    count = int(batch.mask.sum() if AGGREGATIONS[aggregation] == "tokens" else batch.mask.any(1).sum())
    normalizer = {
        "number": count,
        "float": float(count),
        "tensor": torch.tensor(float(count)),
        "int tensor": torch.tensor(count),
    }[kind]
    options = {"loss": "grpo", "aggregation": aggregation, "kl_coef": 0.1, "entropy_coef": 0.1, **extra(aggregation)}
    whole, logprobs, _ = batch.call(**options)
    whole.loss.backward()
    total = 0.0
    for rows in (slice(0, 1), slice(1, 3), slice(3, 3)):
        fields = ("logprobs", "advantages", "mask", "old_logprobs", "rollout_logprobs", "ref_logprobs", "entropy")
        part = Batch(**{f: getattr(batch, f)[rows] for f in fields}, cu_seqlens=None, sequence=[], sequences=0)
        out, part_logprobs, _ = part.call(normalizer=normalizer, **options)
        out.loss.backward()
        total = total + out.loss
        close(part_logprobs.grad, logprobs.grad[rows])
    close(total, whole.loss)


def test_the_split_does_not_show():
    """[loss 2] and [0, 0, 0] with the global count 4 add up to 0.5; local means would give 1."""
    parts = ([-2.0], [0.0, 0.0, 0.0])
    total = sum(bk.policy_loss(torch.zeros(len(a)), torch.tensor(a), loss="ppo", normalizer=4).loss for a in parts)
    assert total.item() == 0.5


@pytest.mark.parametrize("normalizer", [0, 0.0, torch.tensor(0), torch.tensor(0.0)], ids=str)
def test_a_normalizer_of_zero_with_nothing_active(normalizer):
    logprobs = torch.zeros(2, 3, requires_grad=True)
    out = bk.policy_loss(logprobs, torch.ones(2, 3), loss="grpo", mask=torch.zeros(2, 3), normalizer=normalizer)
    out.loss.backward()
    assert out.loss.item() == 0
    assert_bits(logprobs.grad, torch.zeros(2, 3))


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("loss", ["bapo", "grpo"])
def test_advantages_per_sequence(loss, layout):
    batch = Batch.random(layout)
    per_sequence = torch.tensor([1.0, -0.5, 0.25], dtype=torch.float64)
    batch.advantages = per_sequence[torch.tensor(batch.sequence)].reshape(batch.logprobs.shape)
    want, want_lp, _ = batch.call(loss=loss)
    want.loss.backward()
    forms = (
        [per_sequence]
        if layout == "packed"
        else [per_sequence, per_sequence[:, None], per_sequence[:, None].expand(3, 6)]
    )
    for form in forms:
        batch.advantages = form
        got, lp, _ = batch.call(loss=loss)
        got.loss.backward()
        assert_bits(got.loss, want.loss)
        assert_bits(lp.grad, want_lp.grad)


def test_advantages_of_a_square_batch_are_per_sequence():
    """B = T: (B,) means sequences."""
    advantages, logprobs = normal(4, seed=1), normal(4, 4, seed=2)
    got = bk.policy_loss(logprobs, advantages, loss="ppo", return_tokens=True)
    assert_bits(got.tokens.loss, -advantages[:, None].expand(4, 4))


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        ("padded", (6,)),
        ("padded", (1, 6)),
        ("padded", (1, 3)),
        ("padded", (6, 3)),
        ("padded", (18,)),
        ("padded", (1,)),
        ("padded", ()),
        ("padded", (3, 6, 1)),
        ("packed", (3, 1)),
        ("packed", (1, 14)),
        ("packed", (14, 1)),
        ("packed", (4,)),
        ("packed", (1,)),
        ("flat", (3,)),
    ],
)
def test_advantages_of_other_shapes_are_refused(layout, shape):
    batch = Batch.random(layout)
    batch.advantages = torch.ones(shape)
    with pytest.raises(ValueError, match="advantages") as caught:
        batch.call(loss="ppo")
    assert str(tuple(shape)) in str(caught.value)
    assert str(tuple(batch.logprobs.shape)) in str(caught.value)


def test_as_many_sequences_as_tokens_are_tokens():
    """Packed with S = N: (N,) is the layout; the answer is the same either way."""
    out = bk.policy_loss(
        torch.zeros(3), torch.tensor([1.0, 2.0, 4.0]), loss="ppo", cu_seqlens=torch.tensor([0, 1, 2, 3])
    )
    assert out.loss.item() == pytest.approx(-7 / 3)
