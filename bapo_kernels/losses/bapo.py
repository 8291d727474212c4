"""BAPO: the clipped surrogate whose bounds are found anew for each batch (controller.py has the search)."""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from bapo_kernels.checks import is_number
from bapo_kernels.controller import CONTRIBUTIONS, MAX_STEPS, MEASURES, ORDERS, WEIGHTINGS, BapoBounds, find_bounds
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

    @classmethod
    def authors_recipe(
        cls,
        adv_ratio_target: float = 1.0,
        ratio_lower_start: float | None = None,
        ratio_lower_max: float | None = None,
        ratio_lower_step: float = 0.05,
        ratio_upper_start: float | None = None,
        ratio_upper_max: float | None = None,
        ratio_upper_step: float = 0.05,
        eps: float = 1e-8,
        *,
        clip_ratio_low: float = 0.2,
        clip_ratio_high: float = 0.2,
        clip_ratio_c: float | None = 3.0,
    ) -> "BAPO":
        """BAPO as the authors' published code has it (WooooDyy/BAPO, recipe/bapo, commit 3b8389c), from the names of its fields.

        A start that is not given is 1 - clip_ratio_low, or 1 + clip_ratio_high; an end that is not given, or lies below its start, is the
        start, and so is any end with a step of 0: that bound stays. As published, the defaults move nothing.

        Where this code differs from the paper: it compares S+/S- with the target, not a share (a share of 0.4 is a ratio of 0.67); tokens
        weigh the same, whatever their probability under the sampler; c_low rises first, although that makes S- larger, so that it ends
        at its maximum whenever the target is missed at the start; and the dual clip is on.

        Where this object differs from that code, beyond rounding (sums are fp32 there, fp64 here): with no token of A > 0 the bounds stay
        at their start, there both run to their ends; `eps`, added to S- there, is not added. That the code aggregates by the
        micro-batch alone is no matter of the loss.

        Raises:
            ValueError: a range that is no whole number of steps (there a shorter last step ends it), eps above 1e-6, or an invalid value.
        """
        given = {"adv_ratio_target": adv_ratio_target, "ratio_lower_step": ratio_lower_step}
        given |= {"ratio_upper_step": ratio_upper_step, "eps": eps}
        for name, value in given.items():
            if not is_number(value) or value < 0:
                raise ValueError(f"{name} must be a finite number >= 0, got {value!r}")
        if eps > 1e-6:
            raise ValueError(
                f"eps must be at most 1e-6, where it changes nothing: it is not added to S- here, got {eps!r}"
            )

        def bound(
            name: str, start: float | None, default: float, end: float | None, step: float
        ) -> tuple[float, float]:
            start = default if start is None else start
            for part, value in (("start", start), ("max", end)):
                if value is not None and not is_number(value):
                    raise ValueError(f"{name}_{part} must be a finite number or None, got {value!r}")
            if end is None or end <= start or step == 0:
                return start, start
            steps = (end - start) / step
            if abs(steps - round(steps)) > 1e-6:
                raise ValueError(
                    f"{name}_max={end} must be a whole number of {name}_step={step} above {name}_start={start}, got {steps:.3f}"
                )
            return start, end

        return cls(
            target=adv_ratio_target,
            c_low=bound("ratio_lower", ratio_lower_start, 1.0 - clip_ratio_low, ratio_lower_max, ratio_lower_step),
            c_high=bound("ratio_upper", ratio_upper_start, 1.0 + clip_ratio_high, ratio_upper_max, ratio_upper_step),
            step_low=ratio_lower_step or cls.step_low,  # of a bound that stays, any will do
            step_high=ratio_upper_step or cls.step_high,
            contribution="ratio",
            weighting="none",
            order="low-first",
            dual_clip=clip_ratio_c,
        )

    @property
    def searches(self) -> bool:
        """Whether the bounds hang on the batch."""
        return len(self.brackets) > 1

    def within(self, bounds: BapoBounds) -> "BAPO":
        """The same loss with the bounds that were found for a batch."""
        low, high = bounds.c_low, bounds.c_high
        return replace(self, c_low=(low, low), c_high=(high, high))

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
