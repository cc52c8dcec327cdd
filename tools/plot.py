"""python tools/plot.py outputs/run [more runs, or their replays ...] -> curves.png in the first: evaluation, reward, KL
by age, entropy, canary, time. Runs are told apart by color, for the color-blind, too, and by line and marker, on
paper. watch.py draws one after each evaluation. --evaluation: that panel alone; --out FILE.png: elsewhere.

    python tools/plot.py outputs/reverse_text
    python tools/plot.py outputs/a outputs/b --evaluation --out compared.png"""

import argparse
import math
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.show import Lines, eval_statistics, run_with

STYLES = [  # of each run; the colors are Okabe and Ito's
    {"color": "#000000", "linestyle": "-", "marker": ""},
    {"color": "#e69f00", "linestyle": "-", "marker": "o"},
    {"color": "#0072b2", "linestyle": "--", "marker": "^"},
    {"color": "#009e73", "linestyle": "-.", "marker": ""},
    {"color": "#d55e00", "linestyle": ":", "marker": "s"},
    {"color": "#cc79a7", "linestyle": (0, (5, 5)), "marker": "D"},
]
DASHES = (":", "--", "-.", (0, (1, 4)), (0, (5, 5)), (0, (9, 3)))  # of each age
PARTS = {"wait_batch": ("1.0", ""), "train": ("0.7", "//"), "sync": ("0.3", ""), "checkpoint": ("0.9", "..")}


def wilson(p, n, z=1.96):
    """95 % interval of a share p of n."""
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)


def read(run):
    """-> lines of metrics.jsonl, with what watch.py has added, and of eval.jsonl."""
    metrics, more, evals = (list(Lines(run / f"{name}.jsonl").new()) for name in ("metrics", "watch", "eval"))
    added = {line["step"]: line for line in more}
    return [added.get(m["step"], {}) | m for m in metrics], evals


def interval(line, name):
    """-> value, how far its own 95 % interval goes down and up. A share of n rows has the binomial one, even with
    several rollouts of a row, which are less than independent."""
    value = line[name]
    if name == "reward/mean":
        half = eval_statistics(line["rows"])["ci95"] or 0.0  # of a single row nothing is known
        return value, half, half
    low, high = wilson(value, line["n"])
    return value, max(0.0, value - low), max(0.0, high - value)  # rounding leaves -1e-16 at 0 and at 1


def draw_evaluation(axis, run, evals, style):
    """One curve per environment: a share where there is one of rows solved, else the reward."""
    names = sorted({e["env"] for e in evals})
    for i, env in enumerate(names):
        mine = [e for e in evals if e["env"] == env]
        shares = [key for key in ("exact", "correct") if all(0 <= e.get(key, -1) <= 1 for e in mine)]
        name = (shares or ["reward/mean"])[0]
        value, low, high = zip(*(interval(e, name) for e in mine))
        label = f"{run.name}{f' {env}' if len(names) > 1 else ''}: {name}"
        marker = {"marker": "os^vD"[i % 5]}
        axis.errorbar([e["step"] for e in mine], value, yerr=[low, high], capsize=3, label=label, **style | marker)


def draw_time(axis, metrics):
    below, versions = [0.0] * len(metrics), [m["version"] for m in metrics]
    for key, (shade, hatch) in PARTS.items():
        above = [b + (m.get(f"time/{key}_s") or 0) for b, m in zip(below, metrics)]
        look = {"color": shade, "hatch": hatch, "edgecolor": "black", "linewidth": 0.3}
        axis.fill_between(versions, below, above, label=key, **look)
        below = above
    legend(axis)


def legend(axis):
    if axis.get_legend_handles_labels()[1]:  # else matplotlib warns
        axis.legend(framealpha=0.5)


def plot(runs, out, only_evaluation=False):
    import matplotlib  # here, since others import this file for its numbers

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    if only_evaluation:
        fig, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
        for run, style in zip(runs, STYLES * len(runs)):
            draw_evaluation(axis, run, read(run)[1], style)
        axis.set(xlabel="version (optimizer steps)", ylabel="evaluation, 95 % intervals")
        axis.grid(alpha=0.3)
        legend(axis)
        return save(fig, out)
    fig, axes = plt.subplots(2, 3, figsize=(13, 6.5), layout="constrained")
    panels = {
        "reward/mean": (axes[0, 1], "training reward: mean, 10th to 90th percentile"),
        "policy/kl_sampler": (axes[0, 2], "KL(sampler || policy), k3, nats"),
        "policy/entropy": (axes[1, 0], "entropy (nats)"),
        "sync/dlogp_max": (axes[1, 1], "canary after each sync: largest |dlogp|"),
    }
    for run, style in zip(runs, STYLES * len(runs)):
        metrics, evals = read(run)
        versions = [m["version"] for m in metrics]

        def values(key, metrics=metrics):
            return [math.nan if m.get(key) is None else m[key] for m in metrics]

        draw_evaluation(axes[0, 0], run, evals, style)
        if len(runs) == 1:
            axes[0, 1].fill_between(versions, values("reward/p10"), values("reward/p90"), color="0.85")
            ages = sorted({int(k[13:]) for m in metrics for k in m if k.startswith("policy/kl_age")})
            for age, dash in zip(ages if len(ages) > 1 else (), DASHES):
                label = f"{age} versions old"
                kl = [x if x > 1e-8 else math.nan for x in values(f"policy/kl_age{age}")]  # less is rounding
                axes[0, 2].plot(versions, kl, linestyle=dash, color="0.4", label=label)
        for key, (axis, title) in panels.items():
            every = max(1, len(versions) // 8)
            axis.plot(versions, values(key), markevery=every, markersize=4, label=run.name, **style)
            axis.set_title(title)
        if run is runs[0]:
            draw_time(axes[1, 2], metrics)
            axes[1, 2].set_title(f"seconds of a step ({run.name})")
    axes[0, 0].set_title("evaluation, with 95 % intervals")
    axes[0, 2].set_yscale("log")
    axes[1, 1].set_yscale("log")
    for axis in axes.flat:
        axis.set_xlabel("version")
        axis.grid(alpha=0.3)
    for axis in (axes[0, 0], axes[0, 2], axes[1, 0]):
        legend(axis)
    save(fig, out)


def save(fig, out):
    """A reader sees a whole picture."""
    import matplotlib.pyplot as plt

    out.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(tmp := out.with_suffix(f".{os.getpid()}.tmp"), dpi=90, format="png")
    os.replace(tmp, out)
    plt.close(fig)


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=run_with("metrics.jsonl", "eval.jsonl"))
    parser.add_argument("--evaluation", action="store_true")
    parser.add_argument("--out", type=Path, metavar="FILE.png")
    args = parser.parse_args(argv)
    plot(args.runs, args.out or args.runs[0] / "curves.png", args.evaluation)


if __name__ == "__main__":
    main(sys.argv[1:])
