"""BAPO: the clipped surrogate whose bounds are found anew for each batch (controller.py has the search)."""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from bapo_kernels.checks import is_number
from bapo_kernels.controller import CONTRIBUTIONS, MAX_STEPS, MEASURES, ORDERS, WEIGHTINGS, find_bounds
from bapo_kernels.losses.base import Loss, TokenLoss, Tokens
from bapo_kernels.losses.clip import clipped_surrogate


@dataclass(frozen=True, eq=False)
class BAPO(Loss):
    """Clipped surrogate with bounds c_low, c_high on the ratio (not offsets), moved until positives contribute enough.

        loss = -min(r A, clip(r, c_low, c_high) A)       coef = -A r, and 0 where clipped

    BAPO (Xi et al. 2025, arXiv 2510.18927). `c_low` and `c_high` are (start, end) of each bound; while the share of the tokens with
    A > 0 in the loss is below `target`, c_high rises by `step_high`, then c_low by `step_low`. The search is `bapo_bounds`.

    Readings of the paper, and deviations of public code:
        contribution: "share" S+/(S+ + S-); "signed" S+/|S+ - S-|, the paper's equation read literally, singular at balance;
            "ratio" S+/S-, the test of the authors' code.
        measure: "surrogate" sums the clipped loss, as the paper writes it; its S- grows with c_low, so that raising c_low never
            helps. "gradient" sums only unclipped tokens, and improves with both moves.
        weighting: "rollout" weighs tokens by their probability under the sampler (paper); "none" as the authors' code.
        order: "high-first" (paper) or "low-first" (authors' code).
        dual_clip: off (paper); the authors' code keeps 3. The search ignores it.
    """

    target: float = 0.4
    c_low: tuple[float | Tensor, float | Tensor] = (0.6, 0.9)
    c_high: tuple[float | Tensor, float | Tensor] = (1.2, 3.0)
    step_low: float = 0.02
    step_high: float = 0.05
    contribution: str = "share"
    measure: str = "surrogate"
    weighting: str = "rollout"
    order: str = "high-first"
    dual_clip: float | None = None

    name: ClassVar[str] = "bapo"
    aggregation: ClassVar[str] = "token-mean"

    def __post_init__(self):
        self._require_numbers("target")
        self._require_numbers("step_low", "step_high", strict=True)
        self._require_numbers("dual_clip", low=1.0, strict=True, optional=True)
        for name in ("c_low", "c_high"):
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, value := tuple(value))
            self._require(name, isinstance(value, tuple) and len(value) == 2, "a pair (start, end) of ratio bounds")
            if value[0] is not value[1]:  # a bound fixed to a tensor is one object twice; its value stays on the device
                self._require(
                    name,
                    all(map(is_number, value)) and 0 <= value[0] <= value[1],
                    "(start, end) with 0 <= start <= end",
                )
            elif isinstance(value[0], Tensor):
                self._require(name, value[0].dim() == 0, "a number or a 0-d tensor where it is fixed")
            else:
                self._require(name, is_number(value[0]) and value[0] >= 0, "(start, end) with 0 <= start <= end")
        low, high = self.c_low[1], self.c_high[0]
        if not isinstance(low, Tensor) and not isinstance(high, Tensor):
            self._require("c_high", high >= low, f"at least c_low throughout, {self.c_low}")
        for name, step in (("c_low", self.step_low), ("c_high", self.step_high)):
            start, end = getattr(self, name)
            if start is not end:
                self._require(name, bool((end - start) / step <= MAX_STEPS), f"within {MAX_STEPS} steps of {step:g}")
        for name, allowed in (
            ("contribution", CONTRIBUTIONS),
            ("measure", MEASURES),
            ("weighting", WEIGHTINGS),
            ("order", ORDERS),
        ):
            self._require(name, getattr(self, name) in allowed, f"one of {', '.join(allowed)}")

    @classmethod
    def fixed(cls, c_low: float | Tensor, c_high: float | Tensor, **fields) -> "BAPO":
        """The loss with given bounds: numbers, or 0-d tensors as `bapo_bounds` returns them (no host synchronisation).

        For trainers that call the loss for each sequence or micro-batch: find the bounds once on the whole batch, then pass this."""
        return cls(c_low=(c_low, c_low), c_high=(c_high, c_high), **fields)

    @cached_property
    def brackets(self) -> tuple[Loss, ...]:
        """The bounds at the start and at the end: a token that both of them clip, or neither, every point between treats alike."""
        ends = ((low, high) for low, high in zip(self.c_low, self.c_high, strict=True))
        first, last = (replace(self, c_low=(low, low), c_high=(high, high)) for low, high in ends)
        return (first,) if first == last else (first, last)

    def rule(self, x: Tokens) -> TokenLoss:
        bounds = find_bounds(self, x)
        metrics = {k: v.to(x.logprobs.dtype) for k, v in bounds._asdict().items()}
        term = clipped_surrogate(x, metrics["c_low"], metrics["c_high"], dual_clip=self.dual_clip, metrics=metrics)
        # Bounds that a NaN of the batch has decided are no bounds: it has to show.
        shown = torch.where(bounds.contribution.isnan(), torch.nan, 1.0).to(term.loss.dtype)
        return replace(term, loss=term.loss * shown)

    def _key(self) -> tuple:
        """Tensors count as the objects they are: comparing their values would read them on the host."""
        values = (getattr(self, f.name) for f in fields(self))
        return tuple(id(v[0]) if isinstance(v, tuple) and isinstance(v[0], Tensor) else v for v in values)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())
