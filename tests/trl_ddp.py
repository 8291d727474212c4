"""What `test_trl.py` runs in two processes."""

import sys

import torch
import trl_trainers as h

import bapo_kernels as bk


def main(folder):
    for policy_loss, fields in (("grpo", {}), ("grpo", {"entropy_coef": 0.1}), (bk.BAPO(target=0.5), {})):
        trained = h.trainer(folder, policy_loss=policy_loss, config={"gradient_accumulation_steps": 1, **fields})
        trained.current_gradient_accumulation_steps = 1
        rank, world = trained.accelerator.process_index, trained.accelerator.num_processes
        assert world == 2 and trained.fused
        batches = [h.on_policy(trained, h.inputs(seed)) for seed in range(world)]
        model = trained.accelerator.prepare(trained.model)
        assert type(model).__name__ == "DistributedDataParallel"
        found = trained._bounds_of(model, [batches[rank]]) if policy_loss != "grpo" else None

        trained.model.zero_grad()
        trained._compute_loss(model, batches[rank]).backward()
        gradients = {name: p.grad.clone() for name, p in trained.model.named_parameters()}
        if policy_loss == "grpo":
            trained.model.zero_grad()
            h.GRPOTrainer._compute_loss(trained, model, batches[rank]).backward()
            want = {name: p.grad for name, p in trained.model.named_parameters()}
            torch.testing.assert_close(gradients, want, rtol=1e-5, atol=1e-5)
            for name, values in trained._metrics["train"].items():
                if len(values) == 2:
                    assert abs(values[0] - values[1]) < 1e-5, name
        else:
            logprobs = [
                b["old_per_token_logps"] - h.inputs(seed)["old_per_token_logps"] for seed, b in enumerate(batches)
            ]
            counts = [b["completion_mask"] * b["tool_mask"] for b in batches]
            want = bk.bapo_bounds(
                torch.cat(logprobs), torch.cat([b["advantages"] for b in batches]), mask=torch.cat(counts), loss=policy_loss,
                old_logprobs=torch.cat([b["old_per_token_logps"] for b in batches]),
            )  # fmt: skip
            torch.testing.assert_close(tuple(found), tuple(want), rtol=1e-4, atol=1e-4)
            metrics = trained._metrics["train"]
            assert abs(metrics["bapo/contribution"][0] - float(want.contribution)) < 1e-4
            assert abs(metrics["bapo/c_high"][0] - float(want.c_high)) < 1e-4
        # DDP has summed: every rank holds the same.
        mine = torch.cat([g.flatten() for g in gradients.values()])
        other = trained.accelerator.gather(mine[None])
        torch.testing.assert_close(other[0], other[1])


main(sys.argv[1])
