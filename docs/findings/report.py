"""Computes the table and the picture of docs/findings.md from the directory of a study:

    python docs/findings/report.py outputs/findings

The measure is a share: how much of its reference's gain in reward a variant has reached. 1 is as much as the reference,
0 is nothing, and below 0 the model has become worse. Comparisons whose runs are not there are left out."""

import sys
from pathlib import Path

import matplotlib
import numpy as np
from safetensors.torch import load_file

matplotlib.use("Agg")
from matplotlib import pyplot as plt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
from rolemodel.config import load_config
from tools.compare import find_runs, holm, interval, p_value, read_results
from tools.show import Lines, with_interval

ROWS = [  # number of the finding, what is compared, variant, reference, the share that was claimed
    (1, "20% of rewards flipped", "flip20", "base", None),
    (1, "40% of rewards flipped", "flip40", "base", 0.95),
    (1, "40% flipped, a sixth of the rate", "flip40slow", "base", 0.95),
    (2, "rewards shuffled in each group", "permuted", "base", 0.0),
    (3, "groups of 2, not 8", "g2", "base", 0.976),
    (3, "groups of 16, not 8", "g16", "base", 1.0),
    (4, "LoRA of rank 1, not 8", "rank1", "base", 1.0),
    (4, "all weights, not LoRA", "full", "base", 1.0),
    (5, "SGD, not AdamW", "sgd", "full", 1.0),
    (6, "the 20% of tokens with the highest entropy", "highest", "base", 1.0),
    (6, "a random 20% of tokens", "random", "base", None),
    (7, "advantage not divided by the std", "mean", "base", 1.0),
    (8, "8 steps stale", "s8", "base", None),
    (8, "8 steps stale, ipo", "s8ipo", "base", 1.0),
    (9, "8 steps stale, reinforce", "s8reinforce", "base", None),
    (9, "8 steps stale, reinforce with centering", "s8centered", "base", 1.0),
]


def measure(study: Path, variant: str, reference: str) -> tuple[float, float, float, int]:
    """The share, half of its 95% interval, the p of the difference within a seed, and the number of seeds."""
    lines = read_results(find_runs([f"{arm}={study}/{arm}-seed*" for arm in (variant, reference)]))
    lines = [line for line in lines if line["exit"] is not None]  # it has ended
    scores = {arm: {line["seed"]: line for line in lines if line["arm"] == arm} for arm in (variant, reference)}
    pairs = [(scores[variant][seed], line) for seed, line in scores[reference].items() if seed in scores[variant]]
    gain = np.mean([line["score"] - line["points"][0][1] for _, line in pairs])
    differences = [a["score"] - b["score"] for a, b in pairs]
    mean, half = interval(differences)
    return 1 + mean / gain, (half or 0.0) / gain, p_value(differences), len(pairs)


def of_runs(study: Path, arm: str, number) -> str:
    """The mean of number(run) over the runs of an arm, with its 95% interval."""
    values = [number(run) for run in sorted(study.glob(f"{arm}-seed*")) if (run / "done").exists()]
    return f"{arm}: {with_interval(*interval(values))} ({len(values)} seeds)" if values else f"{arm}: not run"


def passed(run: Path, key: str) -> float:
    """By how much pass@1, or pass@k, has risen in training."""
    first, *_, last = Lines(run / "eval.jsonl").new()
    return last[key] - first[key]


def changed(run: Path) -> float:
    """The share of the model's weights that training has changed, after rounding to bf16."""
    begin, end = (
        load_file(folder / "model.safetensors")
        for folder in (Path(load_config(run / "config.toml").run.model), run / "final")
    )
    same = sum(int((begin[name].bfloat16() == end[name].bfloat16()).sum()) for name in end)
    return 1 - same / sum(tensor.numel() for tensor in end.values())


def law(run: Path) -> float:
    """The error of R = -a exp(H) + b, fitted to reward R and entropy H of the first half of a run's steps, for the mean
    reward of the last five steps."""
    lines = [*Lines(run / "metrics.jsonl").new()]
    reward, entropy = (np.array([line[key] for line in lines]) for key in ("reward/mean", "policy/entropy"))
    half = len(lines) // 2
    slope, constant = np.polyfit(np.exp(entropy[:half]), reward[:half], 1)
    return float(np.mean(slope * np.exp(entropy[-5:]) + constant - reward[-5:]))


def main(study: Path):
    rows = [row for row in ROWS if all([*study.glob(f"{arm}-seed*/eval.jsonl")] for arm in row[2:4])]
    measured = [measure(study, *row[2:4]) for row in rows]
    corrected = holm([p for *_, p, _ in measured])
    print(
        "| finding | variant | reference | claimed share | measured share | p | seeds |\n|---|---|---|---|---|---|---|"
    )
    figure, axis = plt.subplots(figsize=(9, 6.5), layout="constrained")
    for y, ((number, _, variant, reference, claimed), (share, half, _, seeds)) in enumerate(zip(rows, measured)):
        cells = f"{number} | {variant} | {reference} | {'' if claimed is None else claimed}"
        print(f"| {cells} | {share:.2f} ± {half:.2f} | {corrected[y]:.2g} | {seeds} |")
        axis.errorbar(share, y, xerr=half, color="#0072b2", marker="o", capsize=3, label="" if y else "measured, 95%")
    claims = [(row[-1], y) for y, row in enumerate(rows) if row[-1] is not None]
    axis.plot(*zip(*claims), "D", color="#d55e00", fillstyle="none", label="claimed, roughly")
    print("\nrise of pass@1,", of_runs(study, "passk", lambda run: passed(run, "pass@1")))
    print("rise of pass@64,", of_runs(study, "passk", lambda run: passed(run, "pass@k")))
    for arm in ("full", "sgd"):
        print("share of weights that changed,", of_runs(study, arm, changed))
    print("entropy law, predicted - actual reward,", of_runs(study, "base", law))
    axis.set_yticks(range(len(rows)), [f"{number}. {label}" for number, label, *_ in rows])
    axis.invert_yaxis()
    axis.axvline(1, color="black", linewidth=0.8)
    axis.axvline(0, color="black", linewidth=0.8, linestyle=":")
    axis.set_xlim(-2.5, 2.5)
    axis.set_xlabel("share of the gain (1: as good as the reference, below 0: became worse)")
    axis.grid(axis="x", alpha=0.3)
    axis.legend()
    figure.savefig(study / "findings.png", dpi=90)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
