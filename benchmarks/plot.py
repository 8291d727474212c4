"""The figure: time and memory of each contestant for each pattern, and ours as the batch grows."""

from pathlib import Path
from textwrap import shorten

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from batch import PATTERNS
from contestants import OURS
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator
from report import Row, of_one_machine, provenance

# Okabe and Ito's colours, which hold for colour-blind eyes: ours, the plain path, everyone else
BLUE, SKY, GREY, LIGHT = "#0072B2", "#56B4E9", "#5F5F5F", "#BDBDBD"
MARKERS = {"plain": "s", OURS: "o", f"{OURS} recompute": "^"}
TITLES = {
    "full": "full: every token has a gradient",
    "frozen": "frozen: as full, weight not trained",
    "rl": "rl: 70 % count, 25 % have a gradient",
    "rl-frozen": "rl-frozen: as rl, weight not trained",
    "busy": "busy: 70 % count, 49 % have a gradient",
    "score": "score: log-probs, no gradient",
}
STYLE = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 8.5,
    "axes.titlelocation": "left",
    "axes.edgecolor": "#999999",
    "figure.facecolor": "white",
}


def figure(rows: list[Row], path: Path) -> None:
    rows = of_one_machine(rows)
    peers = [r for r in rows if r.section == "peers"]
    scaled = [r for r in rows if r.section == "scaling" and r.seconds is not None]
    if not peers:
        raise SystemExit("nothing to draw: no row of the section peers has numbers")
    shape = (peers[0].tokens, peers[0].hidden, peers[0].vocab)  # one size to a figure
    peers = [r for r in peers if (r.tokens, r.hidden, r.vocab) == shape]
    patterns = [p for p in PATTERNS if any(r.pattern == p for r in peers)]
    names = list(dict.fromkeys(r.contestant for r in peers))
    with plt.rc_context(STYLE):
        height = 0.21 * len(names) + 0.75
        tall = [height, height, 2.6][: 3 if scaled else 2]
        whole = plt.figure(figsize=(1.7 + 2.6 * max(2, len(patterns)), sum(tall) + 1.0), layout="constrained")
        bands = whole.subfigures(len(tall), 1, height_ratios=tall)
        bars(bands[0], peers, patterns, names, "ratio", "Time, plain = 1", form=".2f")
        bars(bands[1], peers, patterns, names, "extra_mib", "Extra memory, MiB beyond inputs and gradients")
        if scaled:
            scaling(bands[2], scaled)
        tokens, hidden, vocab = shape
        whole.suptitle(
            f"One DAPO step of an LM head: {tokens:,} tokens, hidden size {hidden:,}, vocabulary {vocab:,}, fp32",
            x=0.01,
            ha="left",
            fontsize=11.5,
            fontweight="bold",
        )
        whole.supxlabel(provenance(peers[0]), x=0.01, ha="left", fontsize=7.5, color=GREY)
        path.parent.mkdir(parents=True, exist_ok=True)
        whole.savefig(path, dpi=200)
        plt.close(whole)


def bars(
    band, rows: list, patterns: list[str], names: list[str], field: str, title: str, form: str = ",.0f"
) -> dict[str, Axes]:
    """A panel for each pattern, contestants in the same order in all of them, numbers at the bars."""
    value = {(r.pattern, r.contestant): getattr(r, field) for r in rows}
    reason = {(r.pattern, r.contestant): r.reason for r in rows}
    known = [v for v in value.values() if v is not None]
    if not known:
        return {}
    heading(band, title)
    axes = band.subplots(1, len(patterns), sharey=True, squeeze=False)[0]
    for ax, pattern in zip(axes, patterns, strict=True):
        for y, name in enumerate(names):
            v = value.get((pattern, name))
            if v is None:
                ax.text(
                    0.01,
                    y,
                    shorten(reason.get((pattern, name)) or "not measured", 40),
                    va="center",
                    fontsize=7.5,
                    color=GREY,
                    transform=ax.get_yaxis_transform(),
                )
                continue
            ax.barh(y, v, height=0.72, color=colour(name))
            weight = "bold" if name.startswith(OURS) else "normal"
            behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
            ax.text(v + 0.02 * max(known), y, format(v, form), va="center", fontsize=8, fontweight=weight, bbox=behind)
        if field == "ratio":
            ax.axvline(1, color=GREY, linewidth=0.8, linestyle=(0, (3, 3)), zorder=0)
        ax.set_title(TITLES[pattern])
        ax.set_xlim(0, 1.17 * max(known))
        ax.spines["bottom"].set_visible(False)
        ax.set_xticks([])
        ax.tick_params(axis="y", length=0)
        ax.set_yticks(range(len(names)), names)
    axes[0].set_ylim(len(names) - 0.5, -0.5)
    for label in axes[0].get_yticklabels():
        label.set_fontweight("bold" if label.get_text().startswith(OURS) else "normal")
    return dict(zip(patterns, axes, strict=True))


def heading(band, text: str) -> None:
    band.suptitle(text, x=0.01, ha="left", fontsize=9.5, fontweight="bold", color="#333333")


def scaling(band, rows: list[Row]) -> None:
    """Time per token and memory over tokens, solid where every token has a gradient, dashed for the pattern of RL."""
    heading(band, f"As the batch grows: hidden size {rows[0].hidden:,}, vocabulary {rows[0].vocab:,}")
    time, memory = band.subplots(1, 2)
    for ax, value, label in (
        (time, lambda r: r.seconds / r.tokens * 1e6, "microseconds per token"),
        (memory, lambda r: r.extra_mib or None, "extra memory, MiB"),
    ):
        for name in dict.fromkeys(r.contestant for r in rows):
            for pattern, line in (("full", "-"), ("rl", (0, (4, 2)))):
                points = sorted(
                    (r.tokens, value(r)) for r in rows if (r.contestant, r.pattern) == (name, pattern) and value(r)
                )
                if points:
                    ax.plot(
                        *zip(*points, strict=True),
                        color=colour(name),
                        linestyle=line,
                        marker=MARKERS[name],
                        markersize=4,
                        linewidth=1.4,
                        label=f"{name}, {pattern}",
                    )
        ax.set_xscale("log", base=2)
        ax.set_xticks(sorted({r.tokens for r in rows}))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:,.0f}"))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.grid(axis="y", color="#E6E6E6", linewidth=0.7)
        ax.set_axisbelow(True)
        ax.set_xlabel("tokens", color=GREY)
        ax.set_title(label)
    time.set_ylim(bottom=0)
    if memory.lines:
        logarithmic(memory)
    band.legend(*time.get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)


def logarithmic(ax: Axes) -> None:
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}" if v >= 1 else f"{v:g}"))
    ax.yaxis.set_minor_locator(NullLocator())


def colour(name: str) -> str:
    if name.startswith(OURS):
        return BLUE if name == OURS else SKY
    return GREY if name == "plain" else LIGHT
