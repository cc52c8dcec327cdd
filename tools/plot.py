"""Draws the curves of a run: python tools/plot.py outputs/run [more runs, or their replays ...]

It writes curves.png into the first run: evaluation, reward, KL by staleness, entropy, canary, time. Color, line and
marker tell runs apart, also for color-blind readers and on paper. watch.py draws a picture after each evaluation.
--evaluation draws that panel alone; --out FILE.png writes elsewhere.

    python tools/plot.py outputs/reverse_text
    python tools/plot.py outputs/a outputs/b --evaluation --out compared.png"""

import argparse
import math
import os
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.show import Lines, eval_statistics, run_with

STYLES = [  # one for each run; the colors are Okabe and Ito's
    {"color": "#000000", "linestyle": "-", "marker": ""},
    {"color": "#e69f00", "linestyle": "-", "marker": "o"},
    {"color": "#0072b2", "linestyle": "--", "marker": "^"},
    {"color": "#009e73", "linestyle": "-.", "marker": ""},
    {"color": "#d55e00", "linestyle": ":", "marker": "s"},
    {"color": "#cc79a7", "linestyle": (0, (5, 5)), "marker": "D"},
]
# One for each staleness.
DASHES = [":", "--", "-."]
DASHES += [(0, (1, 4)), (0, (5, 5)), (0, (9, 3))]
# The parts of a step, with their shade and hatching.
PARTS = {
    "wait_batch": ("1.0", ""),
    "train": ("0.7", "//"),
    "sync": ("0.3", ""),
    "checkpoint": ("0.9", ".."),
}
PANELS = {  # {metric: (row, column, title)}
    "reward/mean": (0, 1, "training reward: mean, 10th to 90th percentile"),
    "policy/kl_sampler": (0, 2, "KL(sampler || policy), k3, nats"),
    "policy/entropy": (1, 0, "entropy (nats)"),
    "sync/dlogp_max": (1, 1, "canary after each sync: largest |dlogp|"),
}

# --- numbers ----------------------------------------------------------------------------------------------------------


def wilson(share, n, z=1.96):
    """The ends of the 95 % interval of a share of n."""
    middle = share + z * z / (2 * n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return (middle - half) / scale, (middle + half) / scale


def read(run):
    """Returns the lines of metrics.jsonl, each with what watch.py has added to it, and those of eval.jsonl."""
    added = {line["step"]: line for line in Lines(run / "watch.jsonl").new()}
    metrics = [added.get(line["step"], {}) | line for line in Lines(run / "metrics.jsonl").new()]
    return metrics, list(Lines(run / "eval.jsonl").new())


def by_staleness(line):
    """{versions: KL} of a line. Former versions of watch.py said kl_age."""
    found = {}
    for key, value in line.items():
        match = re.fullmatch(r"policy/kl_(?:staleness|age)(\d+)", key)
        if match:
            found[int(match[1])] = value
    return found


def interval(line, name):
    """Returns a value and how far its 95 % interval reaches down and up. A share of n rows has the binomial interval,
    even with several rollouts per row, which are less than independent."""
    value = line[name]
    if name == "reward/mean":
        half = eval_statistics(line["rows"])["ci95"] or 0.0  # a single row has none
        return value, half, half
    low, high = wilson(value, line["n"])
    return value, max(0.0, value - low), max(0.0, high - value)  # rounding leaves -1e-16 at 0 and at 1


def values(metrics, key):
    """One value per step, nan where there is none."""
    return [math.nan if line.get(key) is None else line[key] for line in metrics]


# --- panels -----------------------------------------------------------------------------------------------------------


def draw_evaluation(axis, run, evals, style):
    """One curve per environment: the share of rows solved if it has one, otherwise the reward."""
    names = sorted({line["env"] for line in evals})
    for i, env in enumerate(names):
        mine = [line for line in evals if line["env"] == env]
        name = "reward/mean"
        for key in ("correct", "exact"):
            if all(0 <= line.get(key, -1) <= 1 for line in mine):
                name = key
        steps = [line["step"] for line in mine]
        points = [interval(line, name) for line in mine]
        value, low, high = zip(*points)
        label = f"{run.name} {env}: {name}" if len(names) > 1 else f"{run.name}: {name}"
        look = style | {"marker": "os^vD"[i % 5], "capsize": 3, "label": label}
        axis.errorbar(steps, value, yerr=[low, high], **look)


def draw_spread(axis, metrics):
    """The 10th to 90th percentile of the training reward."""
    versions = values(metrics, "version")
    axis.fill_between(versions, values(metrics, "reward/p10"), values(metrics, "reward/p90"), color="0.85")


def draw_staleness(axis, metrics):
    """KL by staleness, if the run has rollouts of more than one."""
    table = [by_staleness(line) for line in metrics]
    known = set().union(*table)
    if len(known) < 2:
        return
    for staleness, dash in zip(sorted(known), DASHES):
        kl = [row.get(staleness, math.nan) for row in table]
        kl = [x if x > 1e-8 else math.nan for x in kl]  # less is rounding
        label = f"{staleness} versions old"
        axis.plot(values(metrics, "version"), kl, linestyle=dash, color="0.4", label=label)


def draw_time(axis, metrics):
    """The parts of a step, one above the other."""
    below = [0.0] * len(metrics)
    for key, (shade, hatch) in PARTS.items():
        above = []
        for start, line in zip(below, metrics):
            above.append(start + (line.get(f"time/{key}_s") or 0))
        look = {"color": shade, "hatch": hatch, "edgecolor": "black", "linewidth": 0.3}
        axis.fill_between(values(metrics, "version"), below, above, label=key, **look)
        below = above
    add_legend(axis)


def add_legend(axis):
    if axis.get_legend_handles_labels()[1]:  # matplotlib warns about an empty one
        axis.legend(framealpha=0.5)


# --- pictures ---------------------------------------------------------------------------------------------------------


def plot(runs, out, only_evaluation=False):
    import matplotlib  # not above: others import this file for its numbers

    matplotlib.use("Agg")
    fig = draw_evaluations(runs) if only_evaluation else draw_all(runs)
    save(fig, out)


def draw_evaluations(runs):
    import matplotlib.pyplot as plt

    fig, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for run, style in zip(runs, STYLES * len(runs)):
        _, evals = read(run)
        draw_evaluation(axis, run, evals, style)
    axis.set(xlabel="version (optimizer steps)", ylabel="evaluation, 95 % intervals")
    axis.grid(alpha=0.3)
    add_legend(axis)
    return fig


def draw_all(runs):
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(2, 3, figsize=(13, 6.5), layout="constrained")
    for run, style in zip(runs, STYLES * len(runs)):
        metrics, evals = read(run)
        draw_evaluation(axes[0, 0], run, evals, style)
        if len(runs) == 1:
            draw_spread(axes[0, 1], metrics)
            draw_staleness(axes[0, 2], metrics)
        if run is runs[0]:
            draw_time(axes[1, 2], metrics)
        look = style | {"markevery": max(1, len(metrics) // 8), "markersize": 4, "label": run.name}
        for key, (row, column, _) in PANELS.items():
            axes[row, column].plot(values(metrics, "version"), values(metrics, key), **look)
    axes[0, 0].set_title("evaluation, with 95 % intervals")
    axes[1, 2].set_title(f"seconds per step ({runs[0].name})")
    for row, column, title in PANELS.values():
        axes[row, column].set_title(title)
    axes[0, 2].set_yscale("log")
    axes[1, 1].set_yscale("log")
    for axis in axes.flat:
        axis.set_xlabel("version")
        axis.grid(alpha=0.3)
    for axis in (axes[0, 0], axes[0, 2], axes[1, 0]):
        add_legend(axis)
    return fig


def save(fig, out):
    """Writes by a rename: a reader never sees half a picture."""
    import matplotlib.pyplot as plt

    out.parent.mkdir(parents=True, exist_ok=True)
    tmp = out.with_suffix(f".{os.getpid()}.tmp")
    fig.savefig(tmp, dpi=90, format="png")
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
