"""What the integrations share: weights that a trainer has, and BAPO's bounds of a batch in pieces."""

import torch
from helpers import integers, normal

import bapo_kernels as bk
from bapo_kernels.integrations.batches import Weighted, bounds_of

B, T = 6, 9


def batch() -> dict[str, torch.Tensor]:
    old = -normal(B, T, seed=1).abs() - 0.5
    return {
        "logprobs": old + 0.4 * normal(B, T, seed=2),
        "advantages": normal(B, T, seed=3),
        "mask": integers(4, B, T, seed=4) > 0,
        "old_logprobs": old,
        "rollout_logprobs": old + 0.3 * normal(B, T, seed=5),
    }


def coefficients(given: dict, correction: bk.corrections.Correction | None) -> torch.Tensor:
    return bk.policy_loss(**given, loss="dapo", correction=correction, return_tokens=True).tokens.coef


def test_a_weight_multiplies_the_policy_term_and_what_a_correction_finds():
    given, weight = batch(), normal(B, T, seed=6).abs()
    given["rollout_logprobs"][~given["mask"]] = torch.nan
    weight[~given["mask"]] = torch.nan  # of tokens that do not count, nothing is read
    for correction in (None, bk.TruncatedIS(cap=1.1), bk.MaskedIS(0.9, 1.1, level="sequence")):
        plain = coefficients(given, correction)
        assert plain.count_nonzero()
        got = coefficients(given, Weighted(weight, correction))
        torch.testing.assert_close(got, torch.where(given["mask"], plain * weight, 0.0), rtol=1e-12, atol=0.0)
        of_sequences = coefficients(given, Weighted(torch.arange(1.0, B + 1)[:, None], correction))
        torch.testing.assert_close(of_sequences, plain * torch.arange(1, B + 1)[:, None], rtol=1e-12, atol=0.0)


def test_bounds_of_pieces_are_those_of_the_whole():
    given, loss = batch(), bk.BAPO(target=0.75)
    want = bk.bapo_bounds(**given, loss=loss)
    assert want.c_high > 1.2  # they have moved
    pieces = [{name: t[i : i + 2] for name, t in given.items()} for i in range(0, B, 2)]
    torch.testing.assert_close(list(bounds_of(pieces, loss, None)), list(want))
    without = [piece | {"rollout_logprobs": None} for piece in pieces]
    want = bk.bapo_bounds(**given | {"rollout_logprobs": None}, loss=loss)
    torch.testing.assert_close(list(bounds_of(without, loss, None)), list(want))


def test_a_loss_within_bounds_is_the_one_that_finds_them():
    given, loss = batch(), bk.BAPO(target=0.75, dual_clip=2.0, weighting="none")
    bounds = bk.bapo_bounds(**given, loss=loss)
    within = loss.within(bounds)
    assert loss.searches
    assert not within.searches
    assert (within.dual_clip, within.weighting) == (2.0, "none")
    found, given_bounds = (bk.policy_loss(**given, loss=one, return_tokens=True) for one in (loss, within))
    for name in ("c_low", "c_high"):
        assert found.metrics[name] == given_bounds.metrics[name]
    assert torch.equal(found.tokens.coef, given_bounds.tokens.coef)
    assert found.tokens.clipped.count_nonzero()
