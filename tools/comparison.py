"""What may be said of several runs of each arm: intervals and tests over seeds; compare.py's table and its picture.

Everything here is a function of the lines of compare.jsonl, and of each run's curve."""

import itertools
import math
from collections import Counter, namedtuple

import numpy as np
from scipy.stats import t as student_t

from tools.plot import STYLES, save
from tools.show import with_interval

# What a run came to. line: its line of compare.jsonl; points: [(step, score), ...].
Result = namedtuple("Result", "line points")

LEGEND = """score: {score}, with the 95 % interval of its mean over seeds (Student's t). Medians of the runs: steps and
seconds to the threshold (a run that never gets there counts as later than all others; seconds from the first step on,
too few if a run was interrupted), area (mean height of the curve), KL (sampler || policy), and entropy kept (last /
first). collapsed: ended below half of its best score, or below its first by more than the 95 % interval over rows."""
REPLAY_LEGEND = """Means over the steps, with the 95 % interval over seeds (Student's t). Losses of different functions
are not comparable."""
HOLM = """p is corrected for {num} comparisons (Holm), and a difference is claimed if p is below 0.05; the intervals
are not corrected."""

# --- statistics -------------------------------------------------------------------------------------------------------


def interval(values):
    """Returns the mean and half the width of its 95 % interval by Student's t, which is None for fewer than two."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, None
    error = np.std(values, ddof=1) / math.sqrt(len(values))
    return mean, float(student_t.ppf(0.975, len(values) - 1) * error)


def has_spread(values):
    """Whether values differ by more than rounding. Equal ones do not say how far others would be from them."""
    if len(values) < 2:
        return False
    return np.ptp(values) > 1e-9 * max(1.0, np.abs(values).max())


def p_value(values):
    """Returns the two-sided p-value of Student's t-test for a mean of 0, and 1 if there is nothing to judge by."""
    if not has_spread(values):
        return 1.0
    error = np.std(values, ddof=1) / math.sqrt(len(values))
    return float(2 * student_t.sf(abs(np.mean(values)) / error, len(values) - 1))


def holm(p_values):
    """Returns p-values that are corrected for their number by Holm's method."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    corrected = [1.0] * len(p_values)
    highest = 0.0
    for rank, i in enumerate(order):
        highest = max(highest, (len(p_values) - rank) * p_values[i])
        corrected[i] = min(1.0, highest)
    return corrected


def compare_pairs(scores):
    """Returns a sentence for each pair of arms: all pairs of up to four arms, otherwise the first arm with each other.

    scores: {arm: {seed: score}}; a score is None if the run has none. A claim is made of pairs that have all of them:
    those that are left may be the better ones."""
    pairs = list(itertools.combinations(scores, 2))
    if len(scores) > 4:
        pairs = pairs[: len(scores) - 1]
    differences = []
    missing = []
    for one, other in pairs:
        shared = sorted(scores[one].keys() & scores[other].keys())
        both = [(scores[one][seed], scores[other][seed]) for seed in shared]
        known = [a - b for a, b in both if None not in (a, b)]
        differences.append(known)
        missing.append(len(both) - len(known))
    corrected = holm([p_value(values) for values in differences])
    return [verdict(*pair, *found) for pair, *found in zip(pairs, differences, corrected, missing)]


def verdict(one, other, differences, p, num_missing):
    """Says what may be claimed of two arms. differences: those of their scores, by seed; p: corrected; num_missing:
    seeds for which one of them has a run without a score."""
    if not differences:
        return f"{one} and {other}: no seed has a score in both"
    mean, half = interval(differences)
    if half is None:
        return f"{one} and {other}: one run shows nothing ({mean:+.3f})"
    about = f"{len(differences)} seeds, p = {p:.2g}"
    if num_missing:
        shown = with_interval(mean, half)
        return f"{one} and {other}: nothing can be claimed, {num_missing} more seeds lack a score ({shown}; {about})"
    if p < 0.05:
        better, worse = (one, other) if mean > 0 else (other, one)
        return f"**{better} is better than {worse}** by {with_interval(abs(mean), half)} ({about})"
    if abs(mean) > 1e-9 and not has_spread(differences):
        return f"{one} and {other}: all {len(differences)} differences are {mean:+.3f}, which gives no interval"
    return f"{one} and {other}: no difference can be claimed ({with_interval(mean, half)}; {about})"


# --- the table --------------------------------------------------------------------------------------------------------


def median_cell(values):
    """Returns the median of what is known."""
    known = [value for value in values if value is not None]
    return f"{np.median(known):.3g}" if known else "-"


def time_cell(values):
    """Returns the median over all runs, where one that did not get there is later than all, and how many got there."""
    num_reached = sum(value is not None for value in values)
    middle = np.median([math.inf if value is None else value for value in values])
    shown = f"{middle:.4g}" if math.isfinite(middle) else "-"
    return f"{shown} ({num_reached} of {len(values)})"


def mean_cell(values):
    """Returns the mean of what is known, with its interval."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    missing = "" if len(known) == len(values) else f" ({len(known)} of {len(values)} runs)"
    return with_interval(*interval(known)) + missing


def small_cell(values):
    """Returns the mean of what is known, which may be a tiny number, with its interval. Replays of different seeds have
    equal numbers if nothing in them is drawn."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    mean, half = interval(known)
    if half is None:
        return f"{mean:.3g}"
    return f"{mean:.3g} +- {half:.2g}" if has_spread(known) else f"{mean:.3g}, equal in all runs"


def by_arm(results):
    """Returns {arm: its lines}."""
    arms = {}
    for result in results:
        arms.setdefault(result.line["arm"], []).append(result.line)
    return arms


COLUMNS = {  # {title: (figure of a run, how those of an arm are shown)}
    "score": ("score", mean_cell),
    "steps to {threshold:g}": ("steps_to_threshold", time_cell),
    "seconds to {threshold:g}": ("seconds_to_threshold", time_cell),
    "area": ("area", median_cell),
    "KL": ("kl", median_cell),
    "entropy kept": ("entropy_kept", median_cell),
    "collapsed": ("collapsed", sum),
    "ended by itself": ("ended", sum),
}
REPLAY_COLUMNS = {
    "loss": ("mean_loss", small_cell),
    "KL": ("mean_kl", small_cell),
    "gradient norm": ("mean_grad_norm", small_cell),
    "entropy kept": ("entropy_kept", median_cell),
    "ended by itself": ("ended", sum),
}


def table(results, columns, threshold):
    """Returns a table in Markdown, a row for each arm."""
    heads = [head.format(threshold=threshold) for head in columns]
    rows = [["arm", "runs", *heads], ["---"] * (2 + len(heads))]
    for name, lines in by_arm(results).items():
        row = [name, len(lines)]
        for key, show in columns.values():
            row.append(show([(line | line["time"])[key] for line in lines]))
        rows.append(row)
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)


def notes(results):
    """Returns what a reader of the table must know of single runs."""
    found = []
    for line, _ in results:
        who = f"{line['arm']}, seed {line['seed']}"
        if line["ended"]:
            text = f"{who} ended at step {line['steps']} of {line['max_steps']}, exit code {line['exit']}:"
            score = "" if line["score"] is None else f" Its score is the last one, of version {line['score_step']}."
            found.append(f"{text} {line['cause']}.{score} To run it again, remove its directory.")
        elif line["exit"] is None:
            steps = f"{line['steps']} of {line['max_steps']} steps"
            found.append(f"{who} is not finished: it has {steps}, and is in nothing above.")
        if line["lost"]:
            found.append(
                f"Warning: {who}: {line['lost']} rollouts of its last evaluation were lost and count in no mean."
            )
    return found + warnings(results)


def warnings(results):
    """Returns what makes runs less comparable than they look."""
    found = []
    arms = by_arm(results)
    num_arms = Counter(line["seed"] for line, _ in results)
    alone = [seed for seed in num_arms if num_arms[seed] < len(arms)]
    if alone:
        found.append(f"Warning: not every arm has a run of seed {', '.join(map(str, sorted(alone)))}.")
    for name, lines in arms.items():
        inside = set()
        for line in lines:
            unlike_first = line["differs"].items() - lines[0]["differs"].items()
            inside |= {key for key, _ in unlike_first}
        if inside:
            found.append(f"Warning: runs of {name} differ among themselves in {', '.join(sorted(inside))}.")
    origins = {}
    for line, _ in results:
        for name, text in ((line["versions"] or {}) | {"this project": line["commit"] or "unknown"}).items():
            origins.setdefault(name, set()).update(text.split(", "))
    for name, versions in origins.items():
        if len(versions) > 1:
            found.append(f"Warning: the runs are of different versions of {name}: {', '.join(sorted(versions))}.")
    kinds = {line["has_evaluations"] for line, points in results if points}
    if len(kinds) > 1:
        found.append("Warning: only some runs have evaluations; the scores of the others are training rewards.")
    return found


def as_line(text):
    """Returns a text without the line breaks that it has in this file."""
    return " ".join(text.split())


def report(title, results, threshold, is_replay):
    """Returns the text of compare.md."""
    finished = [result for result in results if result.line["exit"] is not None]
    arms = by_arm(results)
    score = "mean reward of the last evaluation"
    if not any(line["has_evaluations"] for line, _ in results):
        score = "training reward, mean over the last tenth of the steps"
    legend = REPLAY_LEGEND if is_replay else LEGEND.format(score=score)
    keys = ", ".join(results[0].line["differs"]) or "none"
    columns = REPLAY_COLUMNS if is_replay else COLUMNS
    about = f"{as_line(legend)}\nKeys in which runs differ: {keys}."
    parts = [f"# {title}", table(finished, columns, threshold), about]
    if max(map(len, arms.values())) < 2:
        parts.append("One run shows nothing: give --seeds 5.")
    if len(arms) > 1 and not is_replay:
        scores = {}
        for name, lines in arms.items():
            scores[name] = {line["seed"]: None if line["exit"] is None else line["score"] for line in lines}
        sentences = compare_pairs(scores)
        text = "Differences of scores, paired by seed, with 95 % intervals (Student's t)."
        if len(sentences) > 1:
            text += f" {as_line(HOLM.format(num=len(sentences)))}"
        parts.append("\n".join(["## Differences\n", f"{text}\n", *(f"- {sentence}" for sentence in sentences)]))
    lines = notes(results)
    if lines:
        parts.append("\n".join(["## Notes\n", *(f"- {line}" for line in lines)]))
    return "\n\n".join(parts) + "\n"


# --- the picture ------------------------------------------------------------------------------------------------------


def held(points, step):
    """Returns the score at a step: that of the last point up to there."""
    return [score for at, score in points if at <= step][-1]


def draw(results, out):
    """Draws each arm's mean over seeds, with its 95 % interval. A run that ended keeps its last score: without it the
    mean would rise where a bad run ends."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for name, style in zip(by_arm(results), STYLES * len(results)):
        own = [result for result in results if result.line["arm"] == name and result.line["exit"] is not None]
        curves = [points for _, points in own if points]
        first = max((points[0][0] for points in curves), default=0)
        steps = sorted({step for points in curves for step, _ in points if step >= first})
        means = []
        halves = []
        for step in steps:
            middle, half = interval([held(points, step) for points in curves])
            means.append(middle)
            halves.append(half or 0.0)
        look = style | {"marker": (style["marker"] or ".") if len(steps) <= 50 else ""}
        axis.plot(steps, means, label=f"{name}, {len(curves)} runs", **look)
        ends = (np.subtract(means, halves), np.add(means, halves))
        axis.fill_between(steps, *ends, color=style["color"], alpha=0.12, linewidth=0)
        for end in ends:
            axis.plot(steps, end, color=style["color"], linewidth=0.6)
    is_evaluated = any(line["has_evaluations"] for line, _ in results)
    axis.set_title("mean over seeds, with 95 % intervals")
    axis.set(xlabel="version (optimizer steps)", ylabel=f"{'evaluation' if is_evaluated else 'training'}: mean reward")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.3)
    axis.legend(framealpha=0.5)
    save(fig, out)
