"""The figures of a run on a GPU: time and memory of each contestant on one head, and ours beside their predictions on all of them."""

from collections.abc import Iterator
from pathlib import Path

from batch import PATTERNS
from contestants import OURS
from gpu_report import GpuRow, in_order, provenance
from plot import BLUE, GREY, STYLE, bars, plt


def figure(rows: list[GpuRow], out: Path) -> Iterator[Path]:
    """Beside the CSV `out`."""
    timed = [r for r in rows if r.section == "timings" and r.pattern]
    with plt.rc_context(STYLE):
        heads = [(r.shape, r.dtype) for r in timed if r.seconds]
        if heads:
            yield contest([r for r in timed if (r.shape, r.dtype) == heads[0]], out.with_suffix(".png"))
        if any(r.predicted and r.seconds for r in timed):
            yield predictions(timed, out.with_name(f"{out.stem}-predicted.png"))


def contest(rows: list[GpuRow], path: Path) -> Path:
    trained, scored = [r for r in rows if r.pattern in PATTERNS], [r for r in rows if r.pattern == "score"]
    patterns = [p for p in PATTERNS if any(r.pattern == p for r in trained)]
    title = "Time, ms; a line where the cost model, which is no measurement, predicts it"
    parts = [
        (trained, patterns, "milliseconds", title, ".3g"),
        (trained, patterns, "extra_mib", "Extra memory, MiB beyond inputs and gradients", ",.0f"),
        (scored, ["score"], "milliseconds", "Time, ms, of log-probs without a gradient", ".3g"),
    ]
    parts = [part for part in parts if any(getattr(r, part[2]) is not None for r in part[0])]
    names = [list(dict.fromkeys(r.contestant for r in in_order(part[0]))) for part in parts]
    heights = [0.21 * len(n) + 0.75 for n in names]
    whole = plt.figure(figsize=(1.9 + 2.5 * max(3, len(patterns)), sum(heights) + 1.0), layout="constrained")
    bands = whole.subfigures(len(parts), 1, height_ratios=heights, squeeze=False)[:, 0]
    for band, mine, (part, panels, value, title, form) in zip(bands, names, parts, strict=True):
        axes = bars(band, part, panels, mine, value, title, form)
        for row in part:
            if row.predicted and value == "milliseconds":
                y, x = mine.index(row.contestant), row.predicted * 1e3
                axes[row.pattern].plot([x, x], [y - 0.36, y + 0.36], color="black", linewidth=1.2)
    tokens, hidden, vocab = rows[0].shape
    whole.suptitle(
        f"One DAPO step of an LM head: {tokens:,} tokens, hidden size {hidden:,}, vocabulary {vocab:,}, {rows[0].dtype}",
        x=0.01,
        ha="left",
        fontsize=11.5,
        fontweight="bold",
    )
    return drawn(whole, rows[0], path)


def predictions(rows: list[GpuRow], path: Path) -> Path:
    """Measured over predicted, for each head: 1 is what the cost model says."""
    points = [r for r in rows if r.predicted and r.seconds and r.contestant.startswith(OURS)]
    names = [f"{r.pattern}: {r.contestant}" for r in in_order(points)]
    names = list(dict.fromkeys(names))
    heads = list(dict.fromkeys((r.shape, r.dtype) for r in points))
    whole, ax = plt.subplots(figsize=(7.5, 0.24 * len(names) + 1.4), layout="constrained")
    for i, (size, dtype) in enumerate(heads):
        mine = [r for r in points if (r.shape, r.dtype) == (size, dtype)]
        ax.scatter(
            [r.seconds / r.predicted for r in mine],
            [names.index(f"{r.pattern}: {r.contestant}") for r in mine],
            s=22,
            color=BLUE,
            alpha=1 - 0.75 * i / max(len(heads), 1),
            label=f"{size}, {dtype}",
        )
    ax.axvline(1, color=GREY, linewidth=0.8, linestyle=(0, (3, 3)), zorder=0)
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.set_xlim(left=0)
    ax.set_title("Measured time over predicted time")
    ax.legend(frameon=False, fontsize=7.5, loc="center left", bbox_to_anchor=(1, 0.5))
    return drawn(whole, rows[0], path)


def drawn(whole, row: GpuRow, path: Path) -> Path:
    whole.supxlabel(provenance(row), x=0.01, ha="left", fontsize=7.5, color=GREY)
    path.parent.mkdir(parents=True, exist_ok=True)
    whole.savefig(path, dpi=200)
    plt.close(whole)
    return path
