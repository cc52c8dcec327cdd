"""python tools/plot.py outputs/run [more runs, or their replays ...] -> curves.png in the first: eval, reward, KL by
age, entropy, canary, time. Shades of grey and line styles, for paper. launch.sh draws one after each evaluation."""

import json
import os
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from configs.lib.runtime import read_lines

STYLES = [(line, shade) for shade in ("0", "0.6") for line in ("-", "--", ":", "-.")]  # readable without colour


def read(path):
    return [json.loads(line) for line in read_lines(path)]


def plot(runs, out):
    fig, axes = plt.subplots(2, 3, figsize=(13, 6.5), layout="constrained")
    for run, (style, shade) in zip(runs, STYLES * len(runs)):
        metrics, evals = read(run / "metrics.jsonl"), read(run / "eval.jsonl")
        steps = [m["version"] for m in metrics]
        axis = axes[0, 0]
        names = sorted({e["env"] for e in evals})
        for i, env in enumerate(names):  # one curve per environment
            mine = [e for e in evals if e["env"] == env]
            name = next(name for name in ("exact", "correct", "reward/mean") if name in mine[0])
            label = f"{run.name}{f' {env}' if len(names) > 1 else ''}: {name}"
            axis.errorbar([e["step"] for e in mine], [e[name] for e in mine], yerr=[e["ci95"] for e in mine],
                          fmt="os^vD"[i % 5], linestyle=style, capsize=3, color=shade, label=label)  # fmt: skip
        axis.set_title("evaluation (95 % interval of the reward)")
        axis = axes[0, 1]
        axis.plot(steps, [m.get("reward/mean") for m in metrics], style, color=shade)
        low, high = ([m.get(f"reward/p{q}") for m in metrics] for q in (10, 90))
        if None not in low:
            axis.fill_between(steps, low, high, color="0.85", alpha=1 / len(runs))
        axis.set_title("training reward: mean, 10th to 90th percentile")
        ages = sorted({int(k[13:]) for m in metrics for k in m if k.startswith("policy/kl_age")})
        for age, line in zip(ages if len(runs) == 1 else (), (":", "--", "-.", (0, (1, 4)), (0, (5, 5)), (0, (9, 3)))):
            values = [m.get(f"policy/kl_age{age}") or float("nan") for m in metrics]
            axes[0, 2].plot(steps, values, linestyle=line, color="0.4", label=f"{age} versions old")
        for axis, key, title in (
            (axes[0, 2], "policy/kl_sampler", "KL(sampler || policy), k3, nats"),
            (axes[1, 0], "policy/entropy", "entropy (nats)"),
            (axes[1, 1], "sync/dlogp_max", "canary after each sync: largest |dlogp|"),
        ):
            axis.plot(
                steps, [m.get(key) if m.get(key) is not None else float("nan") for m in metrics], style, color=shade
            )
            axis.set_title(title)
        for axis in (axes[0, 2], axes[1, 1]):
            axis.set_yscale("log")
        if len(runs) == 1 and len(ages) > 1:
            axes[0, 2].legend()
        if run is not runs[0]:
            continue
        axis, below = axes[1, 2], [0.0] * len(metrics)
        for key, shade, hatch in (
            ("wait_batch", "1.0", ""),
            ("train", "0.7", "//"),
            ("sync", "0.3", ""),
            ("checkpoint", "0.9", ".."),
        ):
            above = [b + (m.get(f"time/{key}_s") or 0) for b, m in zip(below, metrics)]
            axis.fill_between(
                steps, below, above, color=shade, hatch=hatch, edgecolor="black", linewidth=0.3, label=key
            )
            below = above
        axis.set_title("seconds of a step" + f" ({run.name})" * (len(runs) > 1))
        axis.legend()
    for axis in axes.flat:
        axis.set_xlabel("version")
        axis.grid(alpha=0.3)
    if axes[0, 0].has_data():
        axes[0, 0].legend(framealpha=0.5)
    if len(runs) > 1:  # replays have no evaluation
        axes[1, 0].legend([run.name for run in runs])
    fig.savefig(tmp := out.with_suffix(f".{os.getpid()}.tmp"), dpi=90, format="png")
    os.replace(tmp, out)  # a reader sees a whole picture


if __name__ == "__main__":
    folders = [Path(arg) for arg in sys.argv[1:]]
    plot(folders, folders[0] / "curves.png")
