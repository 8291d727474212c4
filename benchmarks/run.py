"""One step of the LM head under a policy loss (forward and backward), beside other packages, on this machine's CPU.

    python benchmarks/run.py                             # everything, for the head of a 0.5 B model
    python benchmarks/run.py --quick                     # everything, tiny: does it run?
    python benchmarks/run.py --section peers --patterns rl --head llama3.2-1b
    python benchmarks/run.py --contestants plain,trl,"bapo_kernels one-pass" --vocab 20000
    python benchmarks/run.py --markdown                  # measures nothing: tables of --out
    python benchmarks/run.py --plot                      # measures nothing: figure of --out, beside it

Sections
  agreement  every contestant's loss and gradients against fp64 on a small batch, on policy and with clipped tokens
  peers      time, memory and error of every contestant for each pattern
  options    other losses and options of ours beside our DAPO step
  scaling    time per token and memory from 1024 to 65536 tokens
  small      a head that fits in a cache: the cost of a call
  floor      bare matrix products: the rate that no contestant can pass

Patterns: "full": every token has a gradient. "rl": 70 % of the tokens count, 25 % of all have a gradient (the others have no advantage).
"frozen", "rl-frozen": the same, and the weight needs no gradient. Contestants take turns, so that the machine's mood is shared; times
are medians, the first turn warms up. GFLOP/s count the passes over the head that the pattern needs, whoever does more. Extra memory is
the peak beyond inputs and gradients, each in a process of its own (Linux).
"""

import argparse
import sys
from pathlib import Path

import contestants
import report
import torch
from arguments import parser_of, some_of
from batch import HEADS, PATTERNS
from measure import machine
from options import OPTIONS
from sections import SCALING_TOKENS, SECTIONS

HERE = Path(__file__).parent


def main() -> int:
    a = parse()
    if a.markdown:
        print(report.markdown(report.read(a.out)), end="")
    if a.plot:
        from plot import figure

        figure(report.read(a.out), a.out.with_suffix(".png") if a.plot is True else a.plot)
    if a.markdown or a.plot:
        return 0
    if a.threads:
        torch.set_num_threads(a.threads)
    facts = machine()
    print(", ".join(f"{k} {v or 'missing'}" for k, v in facts.items()))
    wrong = False
    for section in a.section:
        for rows in SECTIONS[section](a):
            for row in rows:
                vars(row).update(facts)
            report.save(a.out, rows)
            wrong |= any(r.wrong for r in rows)
    print(f"\nwritten to {a.out}")
    if wrong:
        print(f"an error is above {report.TOLERANCE}: that contestant does not compute the same", file=sys.stderr)
    return int(wrong)


def parse() -> argparse.Namespace:
    names = contestants.names()
    parser = parser_of(__doc__, SECTIONS)
    add = parser.add_argument
    add("--patterns", type=some_of(PATTERNS), default=list(PATTERNS), help=f"of {','.join(PATTERNS)}; default: all")
    add("--contestants", type=some_of(names), default=list(contestants.DEFAULT), help=f"of {', '.join(names)}")
    add("--head", choices=HEADS, help="hidden size and vocabulary of a model; default: qwen2.5-0.5b")
    add("--tokens", type=int)
    add("--hidden", type=int)
    add("--vocab", type=int)
    add("--repeats", type=int, help="turns that count; default: 3")
    add("--threads", type=int)
    add(
        "--memory",
        type=some_of([*names, *OPTIONS, "none"]),
        help="contestants whose memory is measured; default: all; 'none'",
    )
    add("--quick", action="store_true", help="tiny sizes, two patterns, a few memory measurements")
    add("--out", type=Path, help="CSV; default: benchmarks/results/cpu.csv (--quick: quick.csv)")
    add("--markdown", action="store_true", help="print the tables of --out")
    add("--plot", type=Path, nargs="?", const=True, help="draw the figure of --out; default: --out, as .png")
    a = parser.parse_args()
    tokens, (hidden, vocab), repeats = 1024, HEADS[a.head or "qwen2.5-0.5b"], 3
    a.scaling_tokens = SCALING_TOKENS
    if a.quick:
        tokens, hidden, vocab, repeats = 48, 32, 2000, 2
        a.scaling_tokens = (64,)
        a.memory = a.memory or [contestants.OURS]
        a.patterns = [p for p in a.patterns if p in ("full", "rl")]
    a.tokens, a.hidden, a.vocab = a.tokens or tokens, a.hidden or hidden, a.vocab or vocab
    a.repeats = a.repeats or repeats
    a.out = a.out or HERE / "results" / ("quick.csv" if a.quick else "cpu.csv")
    return a


if __name__ == "__main__":
    sys.exit(main())
