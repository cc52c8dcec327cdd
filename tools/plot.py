"""Draws the curves of a run: python tools/plot.py outputs/run [more runs, or replays ...] [--out FILE.png]

It writes curves.png into the first run's directory: evaluation, reward, KL, entropy, canary, time. Color, line and
marker tell runs apart, even for color-blind readers and on paper. watch.py draws a picture after each evaluation."""

import math
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from itertools import cycle
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.show import Lines, half_width, parts_of, restrict, run_with

STYLES = [  # one for each run; the colors are Okabe and Ito's
    {"color": "#000000", "linestyle": "-", "marker": ""},
    {"color": "#e69f00", "linestyle": "-", "marker": "o"},
    {"color": "#0072b2", "linestyle": "--", "marker": "^"},
    {"color": "#009e73", "linestyle": "-.", "marker": ""},
    {"color": "#d55e00", "linestyle": ":", "marker": "s"},
    {"color": "#cc79a7", "linestyle": (0, (5, 5)), "marker": "D"},
]
# Any key of metrics.jsonl can have a panel; a new row needs another number in fig.subplots.
# {metric: (row, column, title)}
PANELS = {
    "reward/mean": (0, 1, "training reward"),
    "policy/kl_sampler": (0, 2, "KL(sampler || policy), nats per token"),
    "policy/entropy": (1, 0, "entropy, nats per token"),
    "sync/dlogp_max": (1, 1, "canary after each sync: largest |dlogp|"),
}
# The parts of a step, with their colors: what the trainer does, and what it waits for.
PARTS = {"training": "0.6", "sync": "0.2", "rollouts": "#56b4e9", "dropped groups": "#e69f00", "evaluation": "#009e73"}


def values(metrics: list[dict], key: str) -> list[float]:
    """One value per step, nan where there is none."""
    return [line.get(key, math.nan) for line in metrics]


def draw_evaluation(axis, run: Path, style: dict):
    """The mean reward of each environment, with its 95 % interval over the examples, and the share of successes."""
    evals = list(Lines(run / "eval.jsonl").new())
    restrict(evals)
    for env, marker in zip(sorted({line["env"] for line in evals}), cycle("os^vD")):
        lines = [line for line in evals if line["env"] == env]
        half = [half_width(line["rows"]) or 0.0 for line in lines]
        look = style | {"marker": marker, "capsize": 3, "label": f"{run.name}: {env}"}
        axis.errorbar(values(lines, "step"), values(lines, "reward/mean"), yerr=half, **look)
        axis.plot(values(lines, "step"), values(lines, "pass@1"), color=style["color"], linestyle=":", marker=marker)


def draw_time(axis, metrics: list[dict]):
    """The parts of a step, stacked."""
    metrics = [line for line in metrics if "time/wait_batch_s" in line]  # replays do not wait
    parts = [parts_of(line) for line in metrics]
    if parts:
        labels = [name if name in ("training", "sync") else f"waiting: {name}" for name in PARTS]
        heights = [[found[name] for found in parts] for name in PARTS]
        versions = values(metrics, "version")
        axis.stackplot(versions, heights, labels=labels, colors=PARTS.values(), step="pre")


def draw(runs: list[Path]):
    """Returns a figure with all panels."""
    from matplotlib.figure import Figure

    fig = Figure(figsize=(13, 6.5), layout="constrained")
    axes = fig.subplots(2, 3)
    for run, style in zip(runs, cycle(STYLES)):
        metrics = list(Lines(run / "metrics.jsonl").new())
        versions = values(metrics, "version")
        draw_evaluation(axes[0, 0], run, style)
        if run is runs[0]:
            draw_time(axes[1, 2], metrics)
        look = style | {"markevery": max(1, len(metrics) // 8), "markersize": 4, "label": run.name}
        for key, (row, column, _) in PANELS.items():
            axes[row, column].plot(versions, values(metrics, key), **look)
    axes[0, 0].set_title("evaluation: mean reward, 95 % intervals; dotted: successes")
    axes[1, 2].set_title(f"seconds per step ({runs[0].name})")
    for row, column, title in PANELS.values():
        axes[row, column].set_title(title)
    axes[0, 2].set_yscale("log")
    axes[1, 1].set_yscale("log")
    for axis in axes.flat:
        axis.set_xlabel("version (optimizer steps)")
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[1]:  # matplotlib warns about an empty one
            axis.legend(framealpha=0.5)
    return fig


def main(argv: list[str]):
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=run_with("metrics.jsonl", "eval.jsonl"))
    parser.add_argument("--out", type=Path, metavar="FILE.png")
    args = parser.parse_args(argv)
    draw(args.runs).savefig(args.out or args.runs[0] / "curves.png", dpi=90)


if __name__ == "__main__":
    main(sys.argv[1:])
