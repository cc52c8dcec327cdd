"""Draws the pictures of README.md and docs/, so that they stay true:

    python docs/pictures/draw.py                                   # timeline.png, tree.png, gpus.png
    python docs/pictures/draw.py --calculator RUN [RUN ...]        # calculator.png, from finished runs

The timeline follows the rules at the top of orchestrator.py, with made-up durations. The tree is computed by
rolemodel/trees.py, and rolemodel/config.py says which GPU belongs to which role."""

import sys
from itertools import cycle
from pathlib import Path

import matplotlib
import numpy as np
import torch

matplotlib.use("Agg")
from matplotlib import pyplot as plt

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent.parent))
from rolemodel import trees
from rolemodel.config import load_config
from tools.show import Lines

COLORS = ["#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#0072b2", "#d55e00"]  # Okabe and Ito's
TRAIN, SYNC = 3.0, 0.6
SAMPLE = [3.2, 3.4, 3.1, 3.3, 3.2, 3.4]  # until every slot of a batch has its first group
REPLACE = [0.0, 0.0, 1.6, 0.0, 0.9, 0.0]  # from then on until the groups without a gradient have been replaced
EVALUATE = {3: 4.4}  # {version: duration}


def schedule(staleness: int) -> tuple[list[dict], list[float]]:
    """When each batch is sampled and trained on, and when each version is live."""
    live, batches = [SYNC], []
    for n, (sample, replace) in enumerate(zip(SAMPLE, REPLACE)):
        began = live[max(0, n - staleness)]
        first = began + sample
        ready = max(first + replace, batches[-1]["ready"] if batches else 0.0)
        held = max(ready, live[n] + EVALUATE[n]) if n in EVALUATE else ready
        start = max(held, live[n])
        batches.append({"began": began, "first": first, "ready": ready, "held": held, "start": start})
        live.append(start + TRAIN + SYNC)
    return batches, live


def timeline():
    fig, axes = plt.subplots(2, 1, figsize=(11, 6.4), sharex=True, layout="constrained")
    for staleness, axis in enumerate(axes):
        batches, live = schedule(staleness)
        for n, batch in enumerate(batches):
            row = 3 - n % 2 if staleness else 3
            color = COLORS[n]
            axis.barh(row, batch["first"] - batch["began"], left=batch["began"], color=color, height=0.7)
            axis.text((batch["began"] + batch["first"]) / 2, row, f"batch {n}", ha="center", va="center")
            how = {"color": color, "height": 0.7, "alpha": 0.45}
            axis.barh(row, batch["ready"] - batch["first"], left=batch["first"], hatch="////", edgecolor="white", **how)
            if n in EVALUATE:  # until version n is live, the trainer would not take the batch anyway
                left = max(batch["ready"], live[n])
                axis.barh(row, batch["held"] - left, left=left, fill=False, edgecolor=color, height=0.7)
            axis.barh(0, TRAIN, left=batch["start"], color=color, height=0.7)
            axis.text(batch["start"] + TRAIN / 2, 0, f"step {n}", ha="center", va="center")
            axis.barh(0, SYNC, left=batch["start"] + TRAIN, color="0.35", height=0.7)
        for n, duration in EVALUATE.items():
            axis.barh(1, duration, left=live[n], color="0.8", height=0.7)
            axis.text(live[n] + duration / 2, 1, f"of version {n}", ha="center", va="center", fontsize=8)
        for n, time in enumerate(live[:-1]):
            axis.axvline(time, color="0.35", linewidth=0.8, linestyle=":")
            axis.text(time, 3.55, f"version {n}\nlive", ha="center", va="bottom", fontsize=8)
        axis.set_ylim(-0.5, 4.35)
        rows = {0: "trainer", 1: "vLLM: evaluation", 2: "vLLM: odd batches", 3: "vLLM: even batches"}
        axis.set_yticks(
            [*rows] if staleness else [0, 1, 3],
            list(rows.values()) if staleness else ["trainer", "vLLM: evaluation", "vLLM: batches"],
        )
        behind = "batch n is sampled by version n - 1 or newer" if staleness else "batch n is sampled by version n"
        axis.set_title(f"max_staleness = {staleness}: {behind}", loc="left")
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].set(xlabel="time", xticks=[])
    looks = {
        "sampling, or training": {"color": "0.6"},
        "groups without a gradient are replaced": {"facecolor": "0.8", "hatch": "////", "edgecolor": "white"},
        "complete, but held by an evaluation": {"fill": False},
        "new weights to vLLM": {"color": "0.35"},
    }
    patches = [plt.Rectangle((0, 0), 1, 1, **look) for look in looks.values()]
    fig.legend(patches, [*looks], loc="outside lower center", ncols=4, frameon=False)
    fig.savefig(FOLDER / "timeline.png", dpi=130)


def tree():
    """Three rollouts of a prompt. The last two also share their first turn."""
    texts = ["Q U E R Y a b".split(), "Q U E R Y c d e".split(), "Q U E R Y c d f g".split()]
    numbers = {text: number for number, text in enumerate(sorted({*sum(texts, [])}))}
    sequences = [torch.tensor([numbers[text] for text in words]) for words in texts]
    places = trees.places(sequences)
    width = int(max(place_L.max() for place_L in places)) + 1
    found = trees.positions_and_ends([places], width)
    end_W, at_W = found["end_BW"][0], torch.arange(width)
    sees_WW = (at_W[None] <= at_W[:, None]) & (at_W[:, None] < end_W[None])
    line = [""] * width
    for words, place_L in zip(texts, places):
        for word, place in zip(words, place_L.tolist()):
            line[place] = word
    fig, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained", width_ratios=(1.15, 1))
    owners = [{s for s, place_L in enumerate(places) if place in place_L.tolist()} for place in range(width)]
    palette = {frozenset({0, 1, 2}): "0.8", frozenset({0}): COLORS[0], frozenset({1, 2}): COLORS[1]}
    palette |= {frozenset({1}): COLORS[2], frozenset({2}): COLORS[3]}
    for s, (words, place_L) in enumerate(zip(texts, places)):
        for position, (word, place) in enumerate(zip(words, place_L.tolist())):
            left.add_patch(plt.Rectangle((position, 4 - s), 0.94, 0.8, color=palette[frozenset(owners[place])]))
            left.text(position + 0.47, 4.4 - s, word, ha="center", va="center")
        left.text(-0.3, 4.4 - s, f"sequence {s}", ha="right", va="center")
    for place, word in enumerate(line):
        left.add_patch(plt.Rectangle((place, 0.6), 0.94, 0.8, color=palette[frozenset(owners[place])]))
        left.text(place + 0.47, 1, word, ha="center", va="center")
    left.text(-0.3, 1, "their line", ha="right", va="center")
    left.set(xlim=(-3.4, width), ylim=(0, 5.2))
    left.set_title(f"{sum(map(len, texts))} tokens in three sequences, {width} in their line", loc="left")
    left.axis("off")
    for a in range(width):
        for b in range(width):
            if sees_WW[a, b]:
                right.add_patch(plt.Rectangle((b, a), 0.94, 0.94, color=palette[frozenset(owners[b])]))
    right.set(xlim=(0, width), ylim=(width, 0), ylabel="this token ...", aspect="equal")
    right.set_xticks([place + 0.5 for place in range(width)], line)
    right.set_yticks([place + 0.5 for place in range(width)], line)
    right.xaxis.tick_top()
    right.tick_params(length=0)
    right.set_title("... sees these", fontsize="medium")
    fig.savefig(FOLDER / "tree.png", dpi=130)


def gpus():
    names = ["reverse_text_qwen3", "qwen3_0.6b_1gpu", "qwen3_1.7b_2gpu", "qwen3_4b_8gpu"]
    fig, axis = plt.subplots(figsize=(9, 2.9), layout="constrained")
    for row, name in enumerate(reversed(names)):
        cfg = load_config(FOLDER.parent.parent / "configs" / f"{name}.toml", [])
        num = cfg.inference.gpus
        is_shared = name.endswith("1gpu") or name == "reverse_text_qwen3"
        for k in range(num if is_shared else num + cfg.trainer.gpus):
            parts = [("vLLM", COLORS[0], 0.0, 0.44), ("trainer", COLORS[1], 0.46, 0.44)] if is_shared else None
            parts = parts or [("vLLM" if k < num else "trainer", COLORS[k >= num], 0.0, 0.9)]
            for text, color, left, wide in parts:
                axis.add_patch(plt.Rectangle((k + left, row), wide, 0.75, color=color))
                axis.text(
                    k + left + wide / 2, row + 0.375, text, ha="center", va="center", fontsize=7 if is_shared else 9
                )
    axis.set(xlim=(0, 8), ylim=(-0.1, len(names)))
    axis.set_yticks([row + 0.375 for row in range(len(names))], [f"{name}.toml" for name in reversed(names)])
    axis.set_xticks([k + 0.45 for k in range(8)], [f"GPU {k}" for k in range(8)])
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    fig.savefig(FOLDER / "gpus.png", dpi=130)


def calculator(runs: list[str]):
    """The share of right answers to the test questions at each step. Bars are 95% intervals over the questions
    (Wilson's, which have a width even if all answers are right, or none)."""
    fig, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for run, color, marker in zip(runs, cycle(COLORS), cycle("os^vD")):
        lines = Lines(Path(run) / "eval.jsonl").new()
        steps, p, n = np.array([(line["step"], line["correct"], line["n"]) for line in lines]).T
        middle = (p + 1.92 / n) / (1 + 3.84 / n)  # 1.92 is half of 1.96 ** 2
        half = 1.96 * np.sqrt(p * (1 - p) / n + 0.96 / n**2) / (1 + 3.84 / n)
        bars = [p - middle + half, middle + half - p]
        axis.errorbar(steps, p, yerr=bars, color=color, marker=marker, capsize=3, label=Path(run).name)
    axis.set(xticks=steps, xlabel="step", ylabel="share of right answers", ylim=(0, 1.02))
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, loc="center right")
    fig.savefig(FOLDER / "calculator.png", dpi=130)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--calculator"]:
        calculator(sys.argv[2:])
    else:
        timeline()
        tree()
        gpus()
