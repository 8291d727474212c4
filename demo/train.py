"""Stale rollouts in minutes on a CPU: from one warm-up checkpoint, a small Llama learns countdown with GRPO and with BAPO.

The package is two calls here: `linear_logprobs` in `warm_up`, and `linear_policy_loss` in `reinforce`.
"""

import argparse
import ast
import copy
import math
import random
import time
from collections import defaultdict, deque
from pathlib import Path

import report
import torch
from policy import answer_states, new_model, sample
from task import ANSWER_LENGTH, demonstration, problems, prompts, rewards
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaForCausalLM

import bapo_kernels as bk

SFT_BATCH, SFT_RATE = 192, 4e-3
CLEAN, CORRECT = 0.75, 0.35  # after this share of the warm-up, only this share of its demonstrations is correct
PROMPTS, GROUP = 16, 8  # of an update: 16 problems, 8 answers to each
RL_RATE, RAMP = 6e-4, 10  # the rate is reached after so many updates
EVALUATE_EVERY = 20
LOSSES = "grpo,bapo,bapo:target=0.53"  # 0.53 lies in the range of the contribution on this task: there the bounds have to move


def warm_up(steps: int) -> LlamaForCausalLM:
    """Supervised steps, the last of them on mostly wrong demonstrations: the skill is there, but seldom sampled."""
    model, rng = new_model(seed=0), random.Random(0)
    optimizer, schedule = adam(model, SFT_RATE, lambda done: min((done + 1) / 40, 1.0) * max(1 - done / steps, 0.1))
    bar = tqdm(range(steps), desc="warm-up")
    for i in bar:
        batch = rng.choices(problems()[0], k=SFT_BATCH)
        answers = torch.tensor([demonstration(p, rng, 1.0 if i < CLEAN * steps else CORRECT) for p in batch])
        hidden = answer_states(model, prompts(batch), answers)
        loss = -bk.linear_logprobs(hidden, model.lm_head.weight, answers).logprobs.mean()
        step(model, optimizer, schedule, loss)
        bar.set_postfix(loss=f"{loss.item():.2f}", refresh=False)
    return model


def reinforce(
    model: LlamaForCausalLM, loss: bk.losses.Loss, *, name: str, seed: int, updates: int, staleness: int
) -> report.History:
    """Train `model` on answers that were sampled from it as it was `staleness` updates ago. Returns what to report."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    optimizer, schedule = adam(model, RL_RATE, lambda done: min((done + 1) / RAMP, 1.0))
    sampler, snapshots = copy.deepcopy(model), deque(maxlen=staleness + 1)
    history: report.History = defaultdict(list, accuracy=[(0, accuracy(model, seed))])
    bar = tqdm(range(1, updates + 1), desc=f"{name}, seed {seed}")
    for update in bar:
        snapshots.append(copy.deepcopy(model.state_dict()))
        sampler.load_state_dict(snapshots[0])

        batch = [p for p in rng.choices(problems()[0], k=PROMPTS) for _ in range(GROUP)]
        answers, mask, rollout_logprobs = sample(sampler, prompts(batch), ANSWER_LENGTH)
        out = bk.linear_policy_loss(
            answer_states(model, prompts(batch), answers),
            model.lm_head.weight,
            answers,
            bk.group_advantages(rewards(batch, answers, mask), group_size=GROUP),  # one for each answer
            loss=loss,
            mask=mask,
            old_logprobs=rollout_logprobs,  # what the ratio divides by: here the stale sampler itself
            rollout_logprobs=rollout_logprobs,
            aggregation="token-mean",  # the same for every loss
            return_tokens=True,  # only to count the rows with a gradient
        )
        step(model, optimizer, schedule, out.loss)

        row = {key: value.item() for key, value in out.metrics.items()}
        row["rows_with_gradient"] = (out.tokens.coef[mask] != 0).float().mean().item()
        if not isinstance(loss, bk.BAPO):  # its bounds, if it has any, are constants
            row |= {
                "c_low": 1 - getattr(loss, "clip_low", math.nan),
                "c_high": 1 + getattr(loss, "clip_high", math.nan),
            }
        for key, value in row.items():
            history[key].append(value)
        if update % EVALUATE_EVERY == 0 or update == updates:
            history["accuracy"].append((update, accuracy(model, seed)))
        solved, entropy, bounds = (
            history["accuracy"][-1][1],
            row["entropy"],
            f"[{row['c_low']:.2f}, {row['c_high']:.2f}]",
        )
        bar.set_postfix_str(f"accuracy {solved:.2f}, entropy {entropy:.2f}, bounds {bounds}", refresh=False)
    return history


def adam(model, rate, factor):
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, betas=(0.9, 0.99))
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def step(model, optimizer, schedule, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()


def accuracy(model: LlamaForCausalLM, seed: int) -> float:
    """Share of the held-out problems that one sampled answer each solves."""
    batch = problems()[1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        answers, mask, _ = sample(model, prompts(batch), ANSWER_LENGTH)
    return rewards(batch, answers, mask).mean().item()


def parse_loss(text: str) -> bk.losses.Loss:
    """`bapo` or, with parameters, `bapo:target=0.5:measure=gradient`."""
    name, *parameters = text.split(":")
    overrides = {}
    for parameter in parameters:
        key, _, value = parameter.partition("=")
        try:
            overrides[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            overrides[key] = value  # a word, such as `gradient`
    return bk.losses.get(name, **overrides)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "--losses",
        default=LOSSES,
        help="names of bk.losses.available() that need no top-k, or with parameters as in the default",
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each loss, from the same warm-up checkpoint")
    parser.add_argument("--updates", type=int, default=120)
    parser.add_argument("--staleness", type=int, default=16, help="age of the sampler's weights, in updates")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="where the plot goes")
    parser.add_argument("--quick", action="store_true", help="one seed and 40 updates of the first two losses")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.losses = ",".join(arguments.losses.split(",")[:2])
        arguments.seeds, arguments.updates = 1, min(arguments.updates, 40)
    return arguments


def main() -> None:
    arguments, began = parse_arguments(), time.perf_counter()
    losses = {text: parse_loss(text) for text in arguments.losses.split(",")}
    torch.set_num_threads(1)  # at this size, threads would only wait for each other
    warm = warm_up(steps=240)
    setup = f"staleness {arguments.staleness}, {sum(p.numel() for p in warm.parameters()):,} parameters"
    results = {
        name: [
            reinforce(
                copy.deepcopy(warm),
                loss,
                name=name,
                seed=seed,
                updates=arguments.updates,
                staleness=arguments.staleness,
            )
            for seed in range(arguments.seeds)
        ]
        for name, loss in losses.items()
    }

    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "bapo_vs_grpo.png"
    report.plot(results, path, f"countdown: {setup}")
    print(f"\ncountdown, {len(problems()[1])} held-out problems, {setup}, {arguments.updates} updates\n")
    print(report.table(results) + "\n")
    print(report.verdict(results, draws=len(problems()[1])))
    for name, loss in losses.items():
        if isinstance(loss, bk.BAPO):
            print(report.controller(name, loss, results[name]))
    print(f"{path}   ({time.perf_counter() - began:.0f} s)")


if __name__ == "__main__":
    main()
