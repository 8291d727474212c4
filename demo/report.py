"""What a run leaves behind: the table and the plot."""

from pathlib import Path
from statistics import mean, stdev

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

import bapo_kernels as bk

# name of a method -> one history per seed: a list per key of PER_UPDATE, and `accuracy`, a list of (update, accuracy)
History = dict[str, list]
Results = dict[str, list[History]]

PER_UPDATE = ("entropy", "clip_frac_low", "clip_frac_high", "c_low", "c_high", "rows_with_gradient")


def table(results: Results) -> str:
    """Markdown. Accuracies are mean ± standard deviation over seeds; the other columns are means over all updates and seeds."""
    head = (
        "loss",
        "seeds",
        "before",
        "after",
        "entropy at end",
        "clipped low / high",
        "mean c_low / c_high",
        "rows with gradient",
    )
    lines = [head, ("---",) * len(head)]
    for name, runs in results.items():
        average = {key: mean(x for run in runs for x in run[key]) for key in PER_UPDATE}
        lines.append(
            (
                name,
                str(len(runs)),
                spread([run["accuracy"][0][1] for run in runs]),
                spread([run["accuracy"][-1][1] for run in runs]),
                f"{mean(x for run in runs for x in run['entropy'][-10:]):.3f}",
                f"{average['clip_frac_low']:.3f} / {average['clip_frac_high']:.3f}",
                f"{average['c_low']:.3f} / {average['c_high']:.3f}",
                f"{average['rows_with_gradient']:.3f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "| " + " | ".join(cell.ljust(n) for cell, n in zip(line, widths, strict=True)) + " |" for line in lines
    )


def spread(values: list[float]) -> str:
    return f"{mean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def verdict(results: Results, draws: int) -> str:
    """What the accuracies after training do and do not show."""
    after = [[run["accuracy"][-1][1] for run in runs] for runs in results.values()]
    error = max((x * (1 - x) / draws) ** 0.5 for values in after for x in values)
    text = f"± is the standard deviation over seeds; the sampling of the {draws} held-out answers alone gives about {error:.3f}.\n"
    if len(after) == 1:
        return text
    means = [mean(values) for values in after]
    gap, noise = max(means) - min(means), max([error, *(stdev(values) for values in after if len(values) > 1)])
    text += f"After training, the losses lie within {gap:.3f} of each other"
    return text + (": too close for so few seeds to tell them apart." if gap < 2 * noise else ".")


def controller(name: str, loss: bk.BAPO, runs: list[History]) -> str:
    """One line on what BAPO's search for bounds did."""
    start = (loss.c_low[0], loss.c_high[0])
    bounds = [pair for run in runs for pair in zip(run["c_low"], run["c_high"], strict=True)]
    moved = sum(max(abs(x - y) for x, y in zip(pair, start, strict=True)) > 1e-5 for pair in bounds)
    found = [x for run in runs for x in run["contribution"]]
    line = f"{name}: contribution of positive tokens {min(found):.2f} to {max(found):.2f} on the bounds used, target {loss.target:g}; "
    if moved == 0:
        return (
            line
            + f"the bounds never left their start, [{start[0]:g}, {start[1]:g}]: this run is a clip with constant bounds."
        )
    return line + f"the bounds moved in {moved} of {len(bounds)} updates."


PANELS = {
    "accuracy": "held-out accuracy, one sampled answer each",
    "clip_frac_high": "share of tokens stopped by the upper bound",
    "c_high": "upper bound on the ratio",
    "entropy": "entropy of the answer tokens (nats)",
    "clip_frac_low": "share of tokens stopped by the lower bound",
    "c_low": "lower bound on the ratio",
}


def plot(results: Results, path: Path, title: str) -> None:
    figure, axes = plt.subplots(2, 3, figsize=(14, 7), layout="constrained", sharex=True)
    for ax, (key, label) in zip(axes.flat, PANELS.items(), strict=True):
        for i, (name, runs) in enumerate(results.items()):
            values = [run[key] for run in runs]
            updates = list(range(1, len(values[0]) + 1))
            if key == "accuracy":
                updates = [update for update, _ in values[0]]
                values = [[solved for _, solved in run] for run in values]
            by_update = list(zip(*values, strict=True))
            ax.fill_between(
                updates,
                [min(v) for v in by_update],
                [max(v) for v in by_update],
                color=f"C{i}",
                alpha=0.15,
                linewidth=0,
            )
            width = max(3.5 - i, 1)  # curves may coincide: the first stays visible under the last
            ax.plot(updates, [mean(v) for v in by_update], color=f"C{i}", linewidth=width, label=name)
        ax.set_title(label, fontsize=10, loc="left")
        ax.grid(alpha=0.25)
    for ax in axes[1]:
        ax.set_xlabel("update")
    axes[0, 0].legend()
    seeds = len(next(iter(results.values())))
    figure.suptitle(f"{title}\nline: mean of {seeds} seeds, band: their range" if seeds > 1 else title, fontsize=11)
    figure.savefig(path, dpi=120)
    plt.close(figure)
