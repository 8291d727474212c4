"""The trainers of `bapo_kernels.integrations.trl`. Importing this imports TRL."""

import inspect
import logging
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple, TypeGuard

import torch
from torch import Tensor

from bapo_kernels import regularizers
from bapo_kernels.aggregation import token_weights
from bapo_kernels.controller import BapoBounds
from bapo_kernels.corrections import Correction
from bapo_kernels.evaluation import PolicyLossOutput
from bapo_kernels.head.api import linear_logprobs
from bapo_kernels.head.backends import resolve_budget
from bapo_kernels.integrations.batches import Weighted, bounds_of
from bapo_kernels.integrations.heads import under_autocast
from bapo_kernels.integrations.trl import TRL, unwrapped, use_fused_head
from bapo_kernels.integrations.trl_config import aggregation_for, is_global, loss_for
from bapo_kernels.integrations.trl_head import backbone_of, check_head, head_of
from bapo_kernels.layout import Layout
from bapo_kernels.losses import BAPO, CISPO, VESPO, Loss
from bapo_kernels.losses.base import MAX_LOG_RATIO, bounded_exp
from bapo_kernels.options import PolicyOptions
from bapo_kernels.policy import linear_policy_loss, policy_loss

BOUNDS = ("optimizer-step", "generation-batch", "micro-batch")
HEADS = ("auto", "fused", "wrapped")

# The sampler's records in a batch; TRL carries the first two, `PolicyLossTrainer` the others.
TOPK = ("sampling_topk_ids", "sampling_topk_logps")

# Inputs that TRL's own forward has to see: images, and what goes with them.
_NOT_TEXT = (
    "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles", "image_sizes",
    "token_type_ids", "mm_token_type_ids", "image_position_ids",
)  # fmt: skip

_METHODS = (
    "_compute_loss", "_get_per_token_logps_and_entropies", "_generate_and_score_completions", "get_high_entropy_mask",
    "get_off_policy_mask",
)  # fmt: skip
_ATTRIBUTES = (
    "_step", "_buffered_inputs", "_metrics", "accelerator", "temperature", "loss_type", "beta", "max_completion_length",
    "top_entropy_quantile", "entropy_coef", "off_policy_mask_threshold", "use_vllm", "vllm_importance_sampling_correction",
    "aux_loss_enabled", "is_fsdp_enabled", "is_deepspeed_enabled",
)  # fmt: skip

_log = logging.getLogger(__name__)
_GRPOTrainer: Any = TRL.hook("trl.trainer.grpo_trainer", "GRPOTrainer")


class PolicyLossTrainer(_GRPOTrainer):
    """TRL's `GRPOTrainer` with a policy loss of this package, from hidden states to loss in one call.

        trainer = PolicyLossTrainer(model, reward_funcs=reward, args=GRPOConfig(...), train_dataset=dataset, policy_loss="bapo")

    Everything else is TRL's: sampling, rewards, advantages, buffering, the configuration. Its fields keep their meaning: `loss_type` is how
    the loss is averaged (grpo, bnpo, dr_grpo, dapo or luspo, exactly as there), `epsilon`, `epsilon_high`, `delta`, `sapo_*` and `vespo_*`
    are parameters of a loss given by name, `beta`, `temperature`, `entropy_coef`, `top_entropy_quantile`, `off_policy_mask_threshold` and
    `vllm_importance_sampling_*` act as there. A field that cannot be honoured is a ValueError that names it.

    Logged under TRL's names (`entropy`, `kl`, `policy_loss`, `clip_ratio/*`), and `bapo/c_low`, `bapo/c_high`, `bapo/contribution`,
    `policy/ratio_mean`, `policy/ratio_max`, `policy/approx_kl`.

    Args:
        *args, **kwargs: those of `GRPOTrainer`.
        policy_loss: a name of `bk.losses.available()` or a loss object; None: the class's own, "bapo".
        bounds: the batch that BAPO's bounds are those of, over all processes in any case.
            "optimizer-step": the micro-batches of one update, which is what the paper has. One pass without gradients scores them before
                the update; while the policy is still the sampler's there is nothing to clip, and no pass (the bounds that are logged are
                then those of micro-batches).
            "generation-batch": all `steps_per_generation` micro-batches, scored again before each update: as many passes per update.
            "micro-batch": each by itself, `per_device_train_batch_size` completions; no further pass. The fewer they are, the more the
                bounds are those of chance.
        correction: `bk.TruncatedIS`, `bk.MaskedIS`, `bk.IcePop` or `bk.KPop`, in place of TRL's `vllm_importance_sampling_correction`.
        kl_estimator: of the KL term with weight `beta`; TRL's is "k3". As there, it is multiplied by the ratio unless
            `use_bias_correction_kl=False`.
        head: "fused": loss and gradient straight from the backbone's hidden states; the model's own forward does not run. "wrapped":
            log-probs and entropy from the model's forward, with TRL's head (`use_fused_head` makes it ours). "auto": fused, but wrapped
            where the forward has to run: FSDP, ZeRO, compiled models, images, auxiliary losses, heads that are more than a linear layer, a
            scale and a softcap. `trainer.head_reason` says why.
        memory_budget: bytes for the head's temporary tiles (the fused head).

    Losses of whole sequences (`gspo`, `luspo`, `gmpo`; `importance_sampling_level="sequence"`) are in their token form: under weights of
    single tokens (vLLM's token ratio, `top_entropy_quantile`) their gradient is not that of TRL's form.

    A loss that reads the sampler's top-k (score centering) takes them from `sampling_topk_ids` and `sampling_topk_logps`, which a
    `rollout_func` returns beside its completions: for each completion, (T, K) ids (-1 is padding) and log-probs.

    Raises:
        ImportError: TRL is not installed.
        RuntimeError: a method or attribute of TRL's that this builds on is not there.
        ValueError: naming the option or the field of the configuration.
    """

    default_loss: ClassVar[str] = "bapo"

    def __init__(
        self,
        *args: Any,
        policy_loss: str | Loss | None = None,
        bounds: str = "optimizer-step",
        correction: Correction | None = None,
        kl_estimator: str = "k3",
        head: str = "auto",
        memory_budget: int | None = None,
        **kwargs: Any,
    ):
        _check_trl()
        for name, value, allowed in (("bounds", bounds, BOUNDS), ("head", head, HEADS)):
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
        super().__init__(*args, **kwargs)
        if missing := [name for name in _ATTRIBUTES if not hasattr(self, name)]:
            raise RuntimeError(f"GRPOTrainer of trl {TRL.version} has no {missing[0]}; {_tested()}")
        if self.args.use_liger_kernel and hasattr(self, "compute_liger_loss"):
            raise ValueError(f"use_liger_kernel=True puts TRL's own loss in place of this one in trl {TRL.version}")
        self.policy_loss = loss_for(self.default_loss if policy_loss is None else policy_loss, self.args)
        self.bounds, self.correction, self.kl_estimator, self.memory_budget = (
            bounds,
            correction,
            kl_estimator,
            memory_budget,
        )
        if bounds != "optimizer-step" and not _searches(self.policy_loss):
            raise ValueError(f"bounds={bounds!r} has no meaning for policy_loss={self.policy_loss}: it finds none")
        if memory_budget is not None:
            resolve_budget(memory_budget, torch.device("cpu"))
            if head == "wrapped":
                raise ValueError(f"memory_budget={memory_budget} has no effect with head='wrapped'")
        PolicyOptions(loss=self.policy_loss, correction=correction, kl_coef=self.beta, kl_estimator=kl_estimator)
        self._needs_topk = "rollout_topk_ids" in self.policy_loss.needs
        if correction is not None and self.use_vllm and self.vllm_importance_sampling_correction:
            raise ValueError(
                f"correction={correction} and vllm_importance_sampling_correction=True correct for the same thing: set one of them"
            )
        self.head_reason = self._why_wrapped() if head == "auto" else "head='wrapped'"
        if head == "fused":
            if reason := self._why_wrapped():
                raise ValueError(f"head='fused' cannot serve {type(self.model).__name__}: {reason}")
            self.head_reason = None
        if self.head_reason and self._needs_topk:
            raise ValueError(
                f"policy_loss={self.policy_loss.name!r} needs the policy's log-probs at recorded ids, which only the fused head gives, "
                f"and it cannot serve here: {self.head_reason}"
            )
        if self.head_reason and head == "auto":
            _log.warning("%s: log-probs come from the model's own forward: %s", type(self).__name__, self.head_reason)
        self._found: _Found | None = None
        # TRL scores old and reference log-probs, by its own head, whose logits are rounded where the model is of 16 bits: an unmoved policy
        # would have a ratio other than 1, and tight clips would stop it.
        self.scoring_head = use_fused_head(self) if self.fused and _has_fused_head() else None
        if self.fused and self.scoring_head is None and self._of_16_bits:
            _log.warning(
                "%s: trl %s scores old log-probs by a head that rounds logits to 16 bits; head='wrapped' compares like with like",
                *(type(self).__name__, TRL.version),
            )
        spans = self.args.steps_per_generation * self.num_iterations % self.args.gradient_accumulation_steps
        if spans and bounds == "optimizer-step" and _searches(self.policy_loss):
            raise ValueError(
                f"bounds='optimizer-step' cannot serve gradient_accumulation_steps={self.args.gradient_accumulation_steps} with "
                f"steps_per_generation={self.args.steps_per_generation} and num_iterations={self.num_iterations}: some updates span two "
                "generation batches; use bounds='micro-batch', or numbers that divide"
            )

    @property
    def _of_16_bits(self) -> bool:
        return self.accelerator.mixed_precision != "no" or next(self.model.parameters()).dtype != torch.float32

    @property
    def fused(self) -> bool:
        """Whether the model's forward is bypassed."""
        return self.head_reason is None

    # --- What TRL calls

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        # What a rollout returns beside completions is written into the rows, of which one may stand for several completions.
        rows = [dict(row) for row in inputs]
        output = super()._generate_and_score_completions(rows)
        if self._needs_topk and all(key in row for key in TOPK for row in rows):
            for key, fill in zip(TOPK, (-1, 0.0), strict=True):
                output[key] = _padded([row[key] for row in rows], output["completion_ids"], fill, key)
        return output

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        mode = "train" if self.model.training else "eval"
        accumulation = self.current_gradient_accumulation_steps if mode == "train" else 1
        given = self._given(inputs)
        loss, bounds = self._loss_on(model, inputs, mode)
        options = self._options(loss, inputs, given, mode, accumulation)

        weight = inputs["importance_sampling_ratio"] if self._trl_corrects and not self._has_ratio_in_loss else None
        kl = aux = bonus = None
        if self._in_one_call(inputs):
            options["correction"] = _with_weight(self.correction, weight)
            out = self._redirected(model, self._fused_loss, inputs, given, options)
        else:
            found = self._statistics(model, inputs, given, entropy=True)
            given = _with_records_of(given, found.logprobs)
            mask = given["mask"]
            if self.off_policy_mask_threshold is not None:
                weight = _product(weight, self._on_policy(given, found.logprobs))
            if self.top_entropy_quantile < 1:
                mask = self.get_high_entropy_mask(found.entropy.detach(), mask, 1 - self.top_entropy_quantile)
                weight = _product(weight, mask)
            options["correction"] = _with_weight(self.correction, weight)
            if self._kl_has_ratio:
                kl, options["kl_coef"] = self._kl_times_ratio(inputs, given, found.logprobs), 0.0
            entropy = found.entropy.detach()
            out = policy_loss(found.logprobs, entropy=entropy, topk_logprobs=found.topk_logprobs, **given, **options)
            if self.entropy_coef != 0:  # a mean over tokens, whatever the policy term's is
                bonus = torch.where(mask, found.entropy, 0.0).sum() / mask.sum().clamp(min=1) / accumulation
            aux = found.aux

        loss = out.loss
        if kl is not None:
            loss = loss + self.beta * (_token_weights(given["mask"], options) * kl).sum()
        # TRL logs the loss before it is divided among the micro-batches of a step, and before bonus and auxiliary loss.
        self._report(mode, out, given, bounds, kl, loss.detach() * (1 if is_global(self.loss_type) else accumulation))
        if bonus is not None:
            loss = loss - self.entropy_coef * bonus
            if mode == "train" and self.accelerator.sync_gradients:
                self._metrics[mode]["entropy_coef"].append(self.entropy_coef)
        if aux is not None:
            loss = loss + self.router_aux_loss_coef * aux / accumulation
            self._metrics[mode]["aux_loss"].append(self.accelerator.gather_for_metrics(aux).mean().item())
        return loss

    # --- What a micro-batch holds

    def _given(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The constants of a micro-batch, as arguments of `policy_loss`. Layout (B, T): completions."""
        mask = inputs["completion_mask"]
        if "tool_mask" in inputs:
            mask = mask * inputs["tool_mask"]
        old, sampling = inputs.get("old_per_token_logps"), inputs.get("sampling_per_token_logps")
        if self._trl_corrects and self._has_ratio_in_loss:
            # log w: the sum of log pi/old and the corrected log old/sampler
            old = old - inputs["importance_sampling_ratio"].log().clamp(_LEAST_LOG_RATIO, MAX_LOG_RATIO)
        given = {
            "advantages": inputs["advantages"],
            "mask": mask.bool(),
            "old_logprobs": old,
            "rollout_logprobs": sampling,
            "ref_logprobs": inputs["ref_per_token_logps"] if self.beta != 0 else None,
        }
        if self._needs_topk:
            if absent := [key for key in TOPK if key not in inputs]:
                raise ValueError(
                    f"policy_loss={self.policy_loss.name!r} needs {' and '.join(absent)} in the batch: the sampler's most likely ids "
                    "and their log-probs, (T, K) for each completion, returned by a rollout_func under these names"
                )
            given["rollout_topk_ids"], given["rollout_topk_logprobs"] = (inputs[key] for key in TOPK)
        return given if old is None else _with_records_of(given, old)

    def _options(
        self, loss: Loss, inputs: dict[str, Any], given: dict[str, Any], mode: str, accumulation: int
    ) -> dict[str, Any]:
        world = self.accelerator.num_processes
        aggregation, normalizer = aggregation_for(
            self.loss_type,
            sequences=given["mask"].shape[0],
            tokens=given["mask"].sum(),
            items=inputs["num_items_in_batch"],
            accumulation=accumulation,
            share=(accumulation / self.args.steps_per_generation if mode == "train" else 1) / world,
            max_length=self.max_completion_length,
        )
        searches = loss is self.policy_loss and isinstance(loss, BAPO)
        return {
            "loss": loss,
            "aggregation": aggregation,
            "normalizer": normalizer,
            "kl_coef": self.beta,
            "kl_estimator": self.kl_estimator,
            "dp_group": torch.distributed.group.WORLD if searches and world > 1 else None,
            "return_tokens": True,
        }

    @property
    def _trl_corrects(self) -> bool:
        return self.use_vllm and self.vllm_importance_sampling_correction

    @property
    def _has_ratio_in_loss(self) -> bool:
        """Whether TRL's correction is a factor of the loss's own ratio, and no weight on the policy term."""
        return isinstance(self.policy_loss, VESPO)

    def _on_policy(self, given: dict[str, Any], logprobs: Tensor) -> Tensor:
        """(B, 1) 0 or 1: TRL's mask of sequences that went too far from the sampler."""
        advantages = given["advantages"]
        old = logprobs.detach() if given["old_logprobs"] is None else given["old_logprobs"]
        sampling = old if given["rollout_logprobs"] is None else given["rollout_logprobs"]
        return self.get_off_policy_mask(
            advantages=advantages[:, None] if advantages.dim() == 1 else advantages,
            per_token_logps=logprobs,
            sampling_per_token_logps=sampling,
            mask=given["mask"].to(logprobs.dtype),
            off_policy_threshold=self.off_policy_mask_threshold,
        )

    @property
    def _kl_has_ratio(self) -> bool:
        return self.beta != 0 and self.args.use_bias_correction_kl

    def _kl_times_ratio(self, inputs: dict[str, Any], given: dict[str, Any], logprobs: Tensor) -> Tensor:
        """(B, T) the KL term times the ratio that TRL gives it (`use_bias_correction_kl`), both differentiable."""
        mask, old = given["mask"], inputs.get("old_per_token_logps")
        log_ratio = torch.where(mask, logprobs - (logprobs.detach() if old is None else old), 0.0)
        if self.importance_sampling_level == "sequence":
            log_ratio = log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
        ref = torch.where(mask, given["ref_logprobs"], logprobs.detach())
        return torch.where(mask, regularizers.kl(self.kl_estimator, logprobs, ref) * bounded_exp(log_ratio), 0.0)

    # --- BAPO's bounds

    def _loss_on(self, model: torch.nn.Module, inputs: dict[str, Any], mode: str) -> tuple[Loss, BapoBounds | None]:
        """The loss for a micro-batch: with the bounds of the batch that it is part of, where that is another."""
        loss, batches = self.policy_loss, self._buffered_inputs
        if not _searches(loss) or self.bounds == "micro-batch" or mode == "eval":
            return loss, None
        if batches is None or ("old_per_token_logps" not in inputs and _takes_one(loss)):
            return loss, None
        found = self._found
        if found is None or found.step != self.state.global_step or found.batches is not batches:
            if self.bounds == "generation-batch":
                scored = batches
            else:
                at = self._step % len(batches)
                scored = batches[at : at + self.current_gradient_accumulation_steps]
            found = self._found = _Found(self.state.global_step, batches, self._bounds_of(model, scored))
        return loss.within(found.bounds), found.bounds

    @torch.no_grad()
    def _bounds_of(self, model: torch.nn.Module, batches: list[dict[str, Any]]) -> BapoBounds:
        assert isinstance(self.policy_loss, BAPO)
        pieces: list[dict[str, Tensor | None]] = []
        for inputs in batches:
            given = self._given(inputs)
            logprobs = self._statistics(model, inputs, given, entropy=False).logprobs
            given = _with_records_of(given, logprobs)
            advantages = given["advantages"]
            given["advantages"] = (advantages[:, None] if advantages.dim() == 1 else advantages).expand_as(logprobs)
            pieces.append({"logprobs": logprobs, **{key: given[key] for key in _OF_BOUNDS}})
        group = torch.distributed.group.WORLD if self.accelerator.num_processes > 1 else None
        return bounds_of(pieces, self.policy_loss, group)

    # --- The model, and its head

    def _why_wrapped(self) -> str | None:
        """Why the model's own forward has to run; None: it need not."""
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            return f"{'FSDP' if self.is_fsdp_enabled else 'DeepSpeed'} hooks into it"
        if self.args.torch_compile:
            return "it is what torch_compile compiles"
        if self.aux_loss_enabled:
            return "the auxiliary loss of the router comes from it"
        model = unwrapped(self.accelerator.unwrap_model(self.model))
        if getattr(getattr(self.model, "active_peft_config", None), "is_prompt_learning", False):
            return "prompt learning puts tokens before the prompt there"
        try:
            check_head(model)
        except Exception as error:  # whatever a model may raise that does not work this way
            return f"{type(model).__name__}: {error}"
        return None

    def _fuses(self, inputs: dict[str, Any]) -> bool:
        return self.fused and not any(key in inputs for key in _NOT_TEXT)

    def _in_one_call(self, inputs: dict[str, Any]) -> bool:
        """Whether nothing has to be done between the log-probs and the loss."""
        waits = self.entropy_coef != 0 or self.top_entropy_quantile < 1 or self.off_policy_mask_threshold is not None
        waits = waits or self._kl_has_ratio
        # Records of the sampler may have gaps, which old log-probs fill, or else those that are still to come.
        gaps = "sampling_per_token_logps" in inputs and "old_per_token_logps" not in inputs
        return self._fuses(inputs) and not waits and not gaps

    def _redirected(self, model: torch.nn.Module, function: Any, *args: Any) -> Any:
        """`function(unwrapped model, *args)`, within the forward of what wraps the model: DDP has to see a forward before the backward."""
        unwrapped = self.accelerator.unwrap_model(model)
        if model is unwrapped:
            return function(model, *args)
        return TRL.hook("trl.models.utils", "_ForwardRedirection")()(model, unwrapped, function, unwrapped, *args)

    def _fused_loss(
        self, model: torch.nn.Module, inputs: dict[str, Any], given: dict[str, Any], options: dict[str, Any]
    ) -> PolicyLossOutput:
        hidden, weight, head = self._hidden_and_head(model, inputs)
        return linear_policy_loss(hidden, weight, inputs["completion_ids"], **given, **options, **head)

    def _fused_statistics(
        self, model: torch.nn.Module, inputs: dict[str, Any], given: dict[str, Any], entropy: bool
    ) -> "_Statistics":
        hidden, weight, head = self._hidden_and_head(model, inputs)
        out = linear_logprobs(
            hidden,
            weight,
            inputs["completion_ids"],
            mask=given["mask"],
            topk_ids=given.get("rollout_topk_ids"),
            return_entropy=entropy,
            **head,
        )
        return _Statistics(out.logprobs, out.entropy, out.topk_logprobs)

    def _hidden_and_head(self, model: torch.nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """The hidden states that predict the completion, (B, T, D), the head's weight, and what else the head is."""
        model = unwrapped(model)
        ids, attention = _prompt_and_completion(inputs)
        length = inputs["completion_ids"].shape[1]
        with self.accelerator.autocast():
            hidden = backbone_of(model)(input_ids=ids, attention_mask=attention, use_cache=False).last_hidden_state
            head = head_of(model)
            hidden, weight = hidden[:, -length - 1 : -1].to(head.weight.device), head.weight
            if not self.args.cast_lm_head_to_fp32:
                hidden, weight = under_autocast(hidden, weight)
        return hidden, weight, {
            **head.options(), "ignore_index": _NO_TOKEN, "temperature": self.temperature, "memory_budget": self.memory_budget
        }  # fmt: skip

    def _statistics(
        self, model: torch.nn.Module, inputs: dict[str, Any], given: dict[str, Any], *, entropy: bool
    ) -> "_Statistics":
        if self._fuses(inputs):
            return self._redirected(model, self._fused_statistics, inputs, given, entropy)
        logprobs, entropies, aux = self._get_per_token_logps_and_entropies(
            model,
            *_prompt_and_completion(inputs),
            inputs["completion_ids"].shape[1],
            compute_entropy=entropy,
            compute_aux_loss=entropy and self.aux_loss_enabled,
            **{key: inputs[key] for key in _NOT_TEXT if key in inputs},
        )
        return _Statistics(logprobs, entropies, None, aux)

    # --- Metrics

    def _report(
        self,
        mode: str,
        out: PolicyLossOutput,
        given: dict[str, Any],
        bounds: BapoBounds | None,
        kl: Tensor | None,  # (B, T), where it is not the one in `out`
        loss: Tensor,
    ) -> None:
        """Means over the tokens of all processes, in TRL's names and ours; one sum and one gather of a few numbers for all of them."""
        assert out.tokens is not None
        metrics, mask, flags = out.metrics, given["mask"], out.tokens.clipped
        positive = given["advantages"] > 0
        positive = positive[:, None] if positive.dim() == 1 else positive
        low, high = (flags < 0).float(), ((flags > 0) & positive).float()  # the dual clip, on A < 0, is not in TRL's
        tokens = metrics["num_tokens"]
        of_tokens = {
            "entropy": metrics["entropy"] * tokens,
            "policy/ratio_mean": metrics["ratio_mean"] * tokens,
            "policy/approx_kl": metrics["approx_kl"] * tokens,
            "clip_ratio/low_mean": low.sum(),
            "clip_ratio/high_mean": high.sum(),
            "clip_ratio/region_mean": (low + high).sum(),
        }
        if self.beta != 0:
            of_tokens["kl"] = metrics["kl"] * tokens if kl is None else kl.detach().sum()
        if isinstance(self.policy_loss, CISPO):
            of_tokens["cispo_clip_ratio"] = (mask & positive & (out.tokens.ratio > self.policy_loss.ratio_high)).sum()
        of_ranks = {"policy_loss": loss}
        found = metrics if bounds is None else bounds._asdict()
        of_ranks |= {f"{self.policy_loss.name}/{key}": found[key] for key in BapoBounds._fields if key in found}

        sums = torch.stack([t.to(torch.float32) for t in (tokens, *of_tokens.values(), *of_ranks.values())])
        count, *values = self.accelerator.reduce(sums, reduction="sum").tolist()
        for name, value in zip((*of_tokens, *of_ranks), values, strict=True):
            divisor = max(count, 1.0) if name in of_tokens else self.accelerator.num_processes
            self._metrics[mode][name].append(value / divisor)

        lengths = mask.sum(-1)
        rows = torch.stack(
            [low.sum(-1) / lengths, high.sum(-1) / lengths, metrics["ratio_max"].expand(lengths.shape)], 1
        )
        lows, highs, ratios = self.accelerator.gather(rows).T.tolist()
        self._metrics[mode]["clip_ratio/low_min"].append(min(_numbers(lows), default=float("nan")))
        self._metrics[mode]["clip_ratio/high_max"].append(max(_numbers(highs), default=float("nan")))
        self._metrics[mode]["policy/ratio_max"].append(max(ratios))


class BAPOTrainer(PolicyLossTrainer):
    """`PolicyLossTrainer` with "bapo" unless told otherwise."""


class BPOTrainer(PolicyLossTrainer):
    """`PolicyLossTrainer` with "bpo" unless told otherwise; its own average is `loss_type="grpo"`."""

    default_loss: ClassVar[str] = "bpo"


_NO_TOKEN = -1  # every id of a completion is one; which of them count is in the mask
_LEAST_LOG_RATIO = -18.420680743952367  # log 1e-8, as in VESPO
_OF_BOUNDS = ("advantages", "mask", "old_logprobs", "rollout_logprobs")


class _Statistics(NamedTuple):
    logprobs: Tensor  # (B, T)
    entropy: Any  # (B, T), or None where it was not asked for
    topk_logprobs: Tensor | None  # (B, T, K)
    aux: Tensor | None = None  # 0-d


class _Found(NamedTuple):
    """BAPO's bounds, and what they are those of: the policy after so many updates, on these micro-batches."""

    step: int
    batches: list[dict[str, Any]]
    bounds: BapoBounds


def _with_weight(correction: Correction | None, weight: Tensor | None) -> Correction | None:
    return correction if weight is None else Weighted(weight, correction)


def _token_weights(mask: Tensor, options: dict[str, Any]) -> Tensor:
    """(B, T) what each token counts in the loss."""
    layout = Layout.of("mask", mask.shape, None, mask.device)
    return token_weights(options["aggregation"], mask, layout, options["normalizer"], None, torch.float32)


def _product(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else a * b


def _with_records_of(given: dict[str, Any], logprobs: Tensor) -> dict[str, Any]:
    """With `logprobs` where the sampler could not say (NaN, by TRL's convention): there it is taken to have agreed."""
    sampling = given["rollout_logprobs"]
    if sampling is None:
        return given
    return {**given, "rollout_logprobs": torch.where(sampling.isnan(), logprobs.detach(), sampling)}


def _has_fused_head() -> bool:
    """From TRL 1.15 on."""
    return hasattr(TRL.module("trl.trainer.utils"), "add_fused_lm_head")


def _searches(loss: Loss) -> TypeGuard[BAPO]:
    return isinstance(loss, BAPO) and loss.searches


def _takes_one(loss: BAPO) -> bool:
    """Whether a ratio of 1, which is that of every token as long as the policy has not moved, is within all bounds."""
    return bool(loss.c_low[1] <= 1 <= loss.c_high[0])


def _prompt_and_completion(inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Ids and attention mask, (B, P + T)."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    return ids, torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)


def _padded(rows: list[Any], like: Tensor, fill: float, name: str) -> Tensor:
    """(B, T, K) of what a rollout recorded for each completion, (T_i, K_i)."""
    records = [torch.as_tensor(row, device=like.device) for row in rows]
    if wrong := [r for r in records if r.dim() != 2 or r.shape[0] > like.shape[1]]:
        raise ValueError(
            f"{name} must be (T, K) for each completion, at most {like.shape[1]} tokens, got {tuple(wrong[0].shape)}"
        )
    dtype = torch.int64 if isinstance(fill, int) else torch.float32
    padded = torch.full((*like.shape, max(r.shape[1] for r in records)), fill, dtype=dtype, device=like.device)
    for row, record in zip(padded, records, strict=True):
        row[: record.shape[0], : record.shape[1]] = record
    return padded


def _numbers(values: Iterable[float]) -> list[float]:
    return [v for v in values if v == v]


def _tested() -> str:
    return f"bapo_kernels was tested with trl {TRL.first} to {TRL.last}"


def _check_trl() -> None:
    """A trainer whose loss would not be ours must not be made."""
    TRL.check_version()
    for name in _METHODS:
        TRL.hook("trl.trainer.grpo_trainer", f"GRPOTrainer.{name}")
    TRL.hook("trl.models.utils", "_ForwardRedirection")
    if "_compute_loss" not in inspect.unwrap(_GRPOTrainer.compute_loss).__code__.co_names:
        raise RuntimeError(f"GRPOTrainer.compute_loss of trl {TRL.version} does not call _compute_loss; {_tested()}")
