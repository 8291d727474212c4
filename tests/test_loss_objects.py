"""The loss objects: names, published defaults and aggregations, validation of every field, and that every field does something."""

import dataclasses
import pickle

import naive_losses
import numpy as np
import pytest
import torch
from batches import LAYOUTS
from helpers import INF, NAN, assert_bits
from loss_batches import NAMES, batch_of, call

import bapo_kernels as bk

CLASSES = {
    "bapo": "BAPO",
    "bpo": "BPO",
    "score-centering": "ScoreCentering",
    "grpo": "GRPO",
    "ppo": "PPO",
    "dapo": "DAPO",
    "gspo": "GSPO",
    "luspo": "LUSPO",
    "cispo": "CISPO",
    "dppo-tv": "DPPO",
    "dppo-kl": "DPPOKL",
    "topr": "TOPR",
    "dcpo": "DCPO",
    "sapo": "SAPO",
    "gmpo": "GMPO",
    "vespo": "VESPO",
    "reinforce": "Reinforce",
    "dro": "DRO",
    "clip-cov": "ClipCov",
    "kl-cov": "KLCov",
}


def test_names():
    assert set(NAMES) == set(CLASSES) == set(naive_losses.RULES)
    assert set(bk.losses.available()) >= set(NAMES)
    assert bk.losses.available() == sorted(bk.losses.available())


@pytest.mark.parametrize("name", NAMES)
def test_published_defaults(name):
    loss = bk.losses.get(name)
    assert type(loss) is getattr(bk, CLASSES[name]) is getattr(bk.losses, CLASSES[name])
    assert loss.name == name
    assert dataclasses.asdict(loss) == naive_losses.DEFAULTS[name]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_own_aggregation(name, layout):
    own = naive_losses.OWN_AGGREGATION[name]
    assert bk.losses.get(name).aggregation == own
    batch = batch_of(layout)
    by_default, explicit = call(batch, name).tensors(), call(batch, name, aggregation=own).tensors()
    other = call(batch, name, aggregation="token-mean" if name == "luspo" else "seq-mean-token-sum").tensors()
    for k, t in by_default.items():
        assert_bits(explicit[k], t, k)
    assert not torch.equal(other["grad"], by_default["grad"])


@pytest.mark.parametrize("name", NAMES)
def test_losses_are_frozen_hashable_values(name):
    loss, again = bk.losses.get(name), bk.losses.get(name)
    assert loss == again and hash(loss) == hash(again) and loss is not None
    assert {loss: 1}[again] == 1
    assert pickle.loads(pickle.dumps(loss)) == loss
    assert dataclasses.replace(loss) == loss
    assert str(loss).startswith(f"{name}(")
    assert len({bk.losses.get(n) for n in NAMES}) == len(NAMES)  # even where the numbers are the same
    for field in dataclasses.fields(loss):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(loss, field.name, 1)
        with pytest.raises(dataclasses.FrozenInstanceError):
            delattr(loss, field.name)
    with pytest.raises(TypeError, match="no_such"):
        bk.losses.get(name, no_such=1)
    with pytest.raises(TypeError):
        type(loss)(no_such=1)


# Other values of every field, each of which must change what a call computes.
CHANGES = {
    "bpo": {"smoothing": [0.5], "cap": [0.8], "clip_low": [0.05], "clip_high": [0.05]},
    "score-centering": {
        "weight": ["tis", "mis"],
        "tis_cap": [0.9],
        "mis_low": [0.95],
        "mis_high": [1.05],
        "tail_floor": [0.9],
    },
    **{key: {"clip_low": [0.05], "clip_high": [0.05], "dual_clip": [1.3]} for key in ("grpo", "ppo", "dapo")},
    **{key: {"clip_low": [0.3], "clip_high": [0.3]} for key in ("gspo", "luspo")},
    "cispo": {"ratio_low": [0.9], "ratio_high": [1.1]},
    "dppo-tv": {"divergence": ["kl"], "delta_low": [0.01], "delta_high": [0.01], "ratio_cap": [0.9]},
    "dppo-kl": {"divergence": ["tv"], "delta_low": [0.001], "delta_high": [0.001], "ratio_cap": [0.9]},
    "topr": {"ratio": ["token"], "floor": [0.5], "cap": [1.7]},
    "dcpo": {"eps_low": [0.01], "eps_high": [0.01], "ratio_cap": [1.05], "dual_clip": [1.3]},
    "sapo": {"tau_pos": [2.0], "tau_neg": [2.0]},
    "gmpo": {"clip_low": [0.1], "clip_high": [0.1]},
    "vespo": {"k_pos": [1.0], "lambda_pos": [1.0], "k_neg": [1.0], "lambda_neg": [1.0]},
    "reinforce": {},
    "dro": {"beta": [0.2]},
    "clip-cov": {
        "fraction": [0.9],
        "cov_low": [0.1],
        "cov_high": [0.3],
        "clip_low": [0.05],
        "clip_high": [0.05],
        "seed": [1, 2, 3],
    },
    "kl-cov": {"fraction": [0.9], "beta": [0.3]},
}
# Where a field only matters beside another.
BASE = {
    ("score-centering", "tis_cap"): {"weight": "tis"},
    ("score-centering", "mis_low"): {"weight": "mis"},
    ("score-centering", "mis_high"): {"weight": "mis"},
    ("clip-cov", "fraction"): {"cov_low": -100.0},
    ("clip-cov", "seed"): {"fraction": 0.3, "cov_low": -100.0},
    ("clip-cov", "cov_high"): {"fraction": 0.9, "cov_low": 0.0},
    ("clip-cov", "cov_low"): {"fraction": 0.9, "cov_high": 100.0},
}


@pytest.mark.parametrize(("name", "field"), [(n, f) for n in CHANGES for f in CHANGES[n]])
def test_every_field_changes_something(name, field):
    assert set(CHANGES[name]) == set(naive_losses.DEFAULTS[name])
    base = bk.losses.get(name, **BASE.get((name, field), {}))

    def outcome(loss, seed):
        batch = batch_of(seed=100 * seed)
        found = call(batch, loss, seed).tensors()
        return torch.cat([found["grad"].flatten(), found.get("grad of topk", found["grad"]).flatten()])

    for value in CHANGES[name][field]:
        changed = dataclasses.replace(base, **{field: value})
        assert changed != base
        assert any(not torch.equal(outcome(base, s), outcome(changed, s)) for s in range(12)), value


NOT_NUMBERS = (NAN, INF, -INF, "0.2", True, None, [0.2], torch.tensor(0.2), 1j)
NEGATIVE = (*NOT_NUMBERS, -0.1)
NOT_POSITIVE = (*NEGATIVE, 0.0)
DUAL = tuple(x for x in (*NOT_POSITIVE, 1.0, 0.5) if x is not None)
DPPO = {"divergence": ("TV", None), "delta_low": NEGATIVE, "delta_high": NEGATIVE, "ratio_cap": NOT_POSITIVE}
BAD = {
    "bpo": {"smoothing": NOT_POSITIVE, "cap": NOT_POSITIVE, "clip_low": NEGATIVE, "clip_high": NEGATIVE},
    "score-centering": {
        "weight": ("TIS", None, 1),
        "tis_cap": NOT_POSITIVE,
        "mis_low": NEGATIVE,
        "mis_high": (*NEGATIVE, 0.4),
        "tail_floor": [*NOT_POSITIVE, 1.5],
    },
    **{key: {"clip_low": NEGATIVE, "clip_high": NEGATIVE, "dual_clip": DUAL} for key in ("grpo", "ppo", "dapo")},
    **{key: {"clip_low": NEGATIVE, "clip_high": NEGATIVE} for key in ("gspo", "luspo", "gmpo")},
    "cispo": {"ratio_low": tuple(x for x in NEGATIVE if x is not None), "ratio_high": NOT_POSITIVE},
    "dppo-tv": DPPO,
    "dppo-kl": DPPO,
    "topr": {"ratio": ("seq", None), "floor": NEGATIVE, "cap": NEGATIVE},
    "dcpo": {"eps_low": NEGATIVE, "eps_high": NEGATIVE, "ratio_cap": (*NOT_POSITIVE, 0.9), "dual_clip": DUAL},
    "sapo": {"tau_pos": NOT_POSITIVE, "tau_neg": NOT_POSITIVE},
    "vespo": dict.fromkeys(("k_pos", "lambda_pos", "k_neg", "lambda_neg"), NEGATIVE),
    "dro": {"beta": NEGATIVE},
    "clip-cov": {
        "fraction": (*NEGATIVE, 1.1),
        "cov_low": NOT_NUMBERS,
        "cov_high": NOT_NUMBERS,
        "clip_low": NEGATIVE,
        "clip_high": NEGATIVE,
        "seed": (0.5, None, "0", True),
    },
    "kl-cov": {"fraction": (*NEGATIVE, 1.1), "beta": NEGATIVE},
}


@pytest.mark.parametrize(("name", "field"), [(n, f) for n in BAD for f in BAD[n]])
def test_every_field_is_validated(name, field):
    assert set(BAD[name]) == set(naive_losses.DEFAULTS[name])
    for value in BAD[name][field]:
        for make in (getattr(bk, CLASSES[name]), lambda **fields: bk.losses.get(name, **fields)):
            with pytest.raises(ValueError, match=f"{CLASSES[name]}.*{field}"):
                make(**{field: value})


def test_pairs_that_contradict_each_other_are_refused():
    for make, field in (
        (lambda: bk.CISPO(ratio_low=2.0, ratio_high=1.5), "CISPO.*ratio_high"),
        (lambda: bk.TOPR(floor=0.5, cap=0.4), "TOPR.*cap"),
        (lambda: bk.ScoreCentering(mis_low=2.0, mis_high=1.0), "ScoreCentering.*mis_high"),
    ):
        with pytest.raises(ValueError, match=field):
            make()


def test_an_empty_band_of_clip_cov_is_refused():
    with pytest.raises(ValueError, match=r"ClipCov.*cov_high"):
        bk.ClipCov(cov_low=5.0, cov_high=1.0)


def test_a_seed_that_no_generator_takes_is_refused():
    with pytest.raises(ValueError, match=r"ClipCov.*seed"):
        bk.ClipCov(seed=2**70)


@pytest.mark.parametrize("name", NAMES)
def test_limits_that_are_allowed(name):
    """0 where a parameter may be 0, and NumPy's numbers."""
    for field, bad in BAD.get(name, {}).items():
        if field in ("seed", "cov_low", "cov_high", "mis_high", "ratio_cap", "cap", "floor") or "None" in str(bad[:1]):
            continue
        if NAN in bad and 0.0 not in bad:
            dataclasses.replace(bk.losses.get(name), **{field: 0})
        if NAN in bad and 1.5 not in bad and field != "fraction":
            loss = bk.losses.get(name, **{field: np.float32(1.5)})
            assert call(batch_of(), loss).out.loss.isfinite()


def test_losses_that_are_not_losses_are_refused():
    batch = batch_of()
    for loss in ("no-such", bk.SAPO, 3, lambda x: x, {"name": "sapo"}):
        with pytest.raises(ValueError, match="loss"):
            batch.call(loss=loss)
