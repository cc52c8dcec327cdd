"""Writes a page about a run: python tools/page.py outputs/run [more runs] [-o FILE.html] [--mb 5]

It has curves, a table of groups, the answers of a group side by side with every token's numbers, evaluations, and which
rows were learned or unlearned; of several runs also the same rows beside each other. The page is one file that needs no
server and no network, and may be sent by mail. It has at most --mb megabytes: of a larger run it shows a sample, and
says how much. The same rows are preferred in every run, so that they can be compared. watch.py writes it after each
evaluation. Whatever a model wrote is shown as text: it travels as JSON, and page.js puts it into the page as text."""

import argparse
import base64
import gzip
import hashlib
import itertools
import json
import os
import sys
import zlib
from collections import Counter, namedtuple
from pathlib import Path

import bokeh
import numpy as np
from bokeh.embed import json_item
from bokeh.models import HoverTool
from bokeh.plotting import figure
from bokeh.themes import Theme
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools import plot, show

FOLDER = Path(__file__).resolve().parent / "page"  # the template, the style and the script
BOKEH = Path(bokeh.__file__).parent / "server" / "static" / "js" / "bokeh.min.js"
FILES = {"evaluation": "eval_rollouts.jsonl", "training": "rollouts.jsonl"}
MOST_TEXT = 20_000  # characters of a message; longer ones are cut in the middle
MOST_TOKENS = 4_000  # of a training sequence
MOST_POINTS = 400  # of a curve
BYTES_PER_TOKEN = 14  # in the page, about
CHANGES_A_TURN = 20  # rows that changed for each group of every step
# Where the lines of a group are in their file, which row it is, and about how many bytes its rollouts take in the page.
Place = namedtuple("Place", "row positions sizes")
PANELS = {  # {title: {metric: its name in the legend}}; of several runs only the first metric is drawn
    "Training reward": {"reward/mean": "mean"},
    "Loss": {"loss": "loss"},
    "KL(sampler || policy), nats per token": {"policy/kl_sampler": "KL"},
    "Entropy, nats per token": {"policy/entropy": "entropy"},
    "Staleness, versions": {"staleness/mean": "mean", "staleness/max": "max"},
    "Seconds per step": {"time/step_s": "all", "time/train_s": "training", "time/wait_batch_s": "waiting"},
}
# Nearly Okabe and Ito's, to be seen on white and on black.
COLORS = ["#0a84d6", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#808080"]
# These stand for colors of the reader's scheme, which page.js puts in their place.
INK = "#123456"
GRID = "#654321"
THEME = {
    "Plot": {"background_fill_alpha": 0, "border_fill_alpha": 0, "outline_line_color": None, "height": 180},
    "Axis": {"major_label_text_color": INK, "axis_line_color": GRID, "major_tick_line_color": GRID},
    "LinearAxis": {"minor_tick_line_color": None},
    "Grid": {"grid_line_color": GRID, "grid_line_alpha": 0.4},
}

# --- what a group becomes ---------------------------------------------------------------------------------------------


def pack(value):
    """JSON as text that is short: compressed, in base64. page.js unpacks it when it is looked at."""
    data = gzip.compress(escaped(value).encode(), 6)
    return base64.b64encode(data).decode()


def cut(value):
    """Whatever a message holds as text, or as [its beginning, how many characters are left out, its end]."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    if len(text) <= MOST_TEXT:
        return text
    half = MOST_TEXT // 2
    return [text[:half], len(text) - 2 * half, text[-half:]]


def conversation(messages):
    """Messages as page.js shows them: each tool call has its result with it."""
    parts = []
    calls = {}
    for message in show.as_messages(messages or []):
        text = cut(message.get("content") or "")
        call = calls.get(str(message.get("tool_call_id", "")))
        if call:
            call["result"] = text
            continue
        made = [as_call(call) for call in message.get("tool_calls") or ()]
        calls |= {call["id"]: call for call in made if call["id"]}
        thoughts = cut(message.get("reasoning_content") or message.get("reasoning") or "")
        parts.append({"role": cut(message.get("role", "text")), "text": text, "thoughts": thoughts, "calls": made})
    return parts


def as_call(call):
    """A tool call with its name and arguments, or whatever stands in its place."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return {"id": "", "name": "?", "arguments": cut(call)}
    arguments = cut(function.get("arguments"))
    return {"id": str(call.get("id", "")), "name": cut(function.get("name")), "arguments": arguments}


def sequence_parts(s, seen):
    """A training sequence with the numbers of its tokens, rounded to 1e-7. seen: gets the ids of its tokens."""
    kept = {}
    for name, values in show.token_columns(s).items():
        is_empty = all(value is None for value in values)
        if not is_empty and name not in ("ratio", "kl"):  # page.js makes these of the log-probabilities
            kept[name] = [round(x, 7) if isinstance(x, float) else x for x in values[:MOST_TOKENS]]
    seen.update(kept["id"])
    about = {name: s.get(name) for name in ("agent", "trainable", "sources")}
    return about | {"num": len(s["tokens"]), "columns": kept}


def group_parts(key, lines, rollouts, seen):
    """A group for the page: what the table says of it, and the rest, packed. rollouts: the sequences of its step."""
    first = lines[0]
    detail = {"answer": cut(first["answer"]), "prompt": conversation(first["prompt"]), "rollouts": []}
    names = ("rollout", "reward", "metrics", "error", "truncated", "num_turns", "turn_rewards", "agent_rewards")
    for line in lines:
        parts = {name: line.get(name) for name in names}
        parts["messages"] = conversation(line["completion"])
        parts["prompt"] = [] if line["prompt"] == first["prompt"] else conversation(line["prompt"])
        parts["sequences"] = [sequence_parts(s, seen) for s in rollouts.get(show.rollout_key(line), ())]
        detail["rollouts"].append(parts)
    versions = [line["version"] for line in lines if line["version"] is not None]
    return dict(zip(("kind", "step", "env", "group"), key)) | {
        "row": first["example"],
        "rewards": [line["reward"] for line in lines],
        "dropped": first["dropped"],
        "errors": sum(bool(line["error"]) for line in lines),
        "truncated": sum(bool(line["truncated"]) for line in lines),
        "staleness": key[1] - min(versions, default=key[1]),
        "prompt": show.text_of(show.as_messages(first["prompt"] or "")[-1])[:80],
        "data": pack(detail),
    }


# --- which groups are shown -------------------------------------------------------------------------------------------


def find_groups(run):
    """Returns {(kind, step, environment, group): a Place}. The lines themselves are read when they are wanted: a long
    run has gigabytes of them."""
    places = {}
    for kind, name in FILES.items():
        lines = show.Lines(run / name)
        position = 0
        for line in lines.new():
            key = (kind, line["step"], line["env"], line["group"])
            place = places.setdefault(key, Place(line["example"], [], []))
            place.positions.append(position)
            each = BYTES_PER_TOKEN if kind == "training" and not line["dropped"] else 0
            size = 100 + min(lines.position - position, MOST_TEXT) / 4
            size += each * min(line["num_tokens"], MOST_TOKENS)
            place.sizes.append(size)
            position = lines.position
    return places


def find_changes(run):
    """Returns the rows that became right between the first evaluation and the last, or wrong. A row is right if its
    mean reward is 1 or more."""
    evals = list(show.Lines(run / "eval.jsonl").new())
    first = {line["env"]: line for line in reversed(evals)}
    last = {line["env"]: line for line in evals}
    changes = []
    for env, line in first.items():
        steps = [line["step"], last[env]["step"]]
        for row, rewards in enumerate(zip(line["rows"], last[env]["rows"])):
            are_right = [reward is not None and reward > 1 - 1e-6 for reward in rewards]
            if None not in rewards and are_right[0] != are_right[1]:
                changes.append({"env": env, "row": row, "steps": steps, "learned": are_right[1]})
    return changes


def draw(*values):
    """A number that depends on nothing else: the same rows are drawn in every run."""
    return zlib.crc32(repr(values).encode())


def choose(places, changes, most):
    """Returns keys of groups, the most wanted first, of about `most` bytes: one group of each step, and some of the
    rows that changed, then a second one of each step, and so on."""
    turns = {}
    num = Counter()
    for key in sorted(places, key=lambda key: (draw(key[2], places[key].row), key)):
        step = key[:2]
        turns[key] = (num[step], draw(*step))
        num[step] += 1
    for i, change in enumerate(changes):
        for step in change["steps"]:
            turns["evaluation", step, change["env"], change["row"]] = (i // CHANGES_A_TURN, i)
    keys = [key for key in sorted(turns, key=turns.get) if key in places]
    return take(keys, [sum(places[key].sizes) for key in keys], most)


def take(keys, sizes, most):
    """The first keys, whose sizes add up to at most `most`."""
    return [key for key, size in zip(keys, itertools.accumulate(sizes)) if size <= most]


# --- a run ------------------------------------------------------------------------------------------------------------


def attempt(notes, what, work, *args):
    """What `work` returns. If it fails, the page says so, and goes without it."""
    try:
        return work(*args)
    except Exception as e:  # a damaged file, an advantage of the user's that is gone, a model that has moved
        notes.append(f"{what}: {e}")
        return {}


def read_line(file, position):
    file.seek(position)
    return json.loads(file.readline())


def read_words(run, ids):
    """{token id: its text}"""
    return dict(zip(ids, show.load_tokenizer(run).batch_decode([[token] for token in ids])))


def run_parts(run, most):
    """Everything that page.js shows of a run, in about `most` bytes."""
    places = find_groups(run)
    changes = find_changes(run)
    notes = []
    seen = set()
    groups = {}
    chosen = choose(places, changes, 1.3 * most)  # sizes are estimated: what turns out too much is left out below
    for (kind, step), keys in itertools.groupby(sorted(chosen), key=lambda key: key[:2]):
        rollouts = {}
        if kind == "training":
            rollouts = attempt(notes, f"The tokens of step {step} cannot be shown", show.read_batch, run, step)
        with open(run / FILES[kind], "rb") as file:
            for key in keys:
                lines = [read_line(file, position) for position in places[key].positions]
                groups[key] = group_parts(key, lines, rollouts, seen)
    words = {}
    if seen:
        words = attempt(notes, "Tokens have ids, but no text", read_words, run, sorted(seen))
    kept = take(chosen, [len(escaped(groups[key])) for key in chosen], most)
    shown = [groups[key] for key in sorted(kept)]
    about = {"name": run.resolve().name, "of": len(places), "notes": notes, "changes": changes}
    return about | {"words": pack(words), "groups": shown}


# --- curves -----------------------------------------------------------------------------------------------------------


def draw_curves(runs):
    """Returns the panels: each as Bokeh embeds it, and what it shows in words, for those who cannot see it."""
    curves = {}  # {title: (name, lines, metric) of each curve}
    for run in runs:
        metrics, evals = plot.read(run)
        prefix = f"{run.resolve().name} " if len(runs) > 1 else ""
        for env in sorted({line["env"] for line in evals}):
            mine = [line for line in evals if line["env"] == env]
            curves.setdefault("Evaluation: mean reward", []).append((prefix + env, thinned(mine), "reward/mean"))
        for title, names in PANELS.items():
            for key, name in itertools.islice(names.items(), 1 if prefix else None):
                mine = thinned([line for line in metrics if key in line])
                if mine:
                    curves.setdefault(title, []).append((prefix + name, mine, key))
    return [draw_panel(title, found) for title, found in curves.items()]


def draw_panel(title, curves):
    """A panel; page.js writes its title and its legend."""
    fig = figure(tools="", toolbar_location=None, sizing_mode="stretch_width")
    legend = [draw_curve(fig, *curve, color) for curve, color in zip(curves, itertools.cycle(COLORS))]
    return {"title": title, "legend": legend, "item": json_item(fig, theme=Theme(json={"attrs": THEME}))}


def draw_curve(fig, label, lines, key, color):
    """Draws a curve, whose points say their numbers when the mouse is over them. Returns its entry in the legend, and
    what it shows in words."""
    steps = [line["step"] for line in lines]
    values = [line[key] for line in lines]
    if "rows" in lines[0]:  # an evaluation
        _, below, above = zip(*[plot.interval(line, key) for line in lines])
        low = np.subtract(values, below)
        high = np.add(values, above)
        fig.segment(steps, low, steps, high, color=color)
    data = {"step": steps, "value": values, "label": [label] * len(steps)}
    fig.line("step", "value", source=data, color=color, width=1.5)
    points = fig.scatter("step", "value", source=data, color=color, size=3)
    tips = [("", "@label"), ("step", "@step"), ("value", "@value{0.[0000000]}")]
    fig.add_tools(HoverTool(tooltips=tips, renderers=[points], mode="vline"))
    words = f"{label} goes from {values[0]:.4g} at step {steps[0]} to {values[-1]:.4g} at step {steps[-1]}"
    return {"label": label, "color": color, "words": words}


def thinned(lines):
    """At most MOST_POINTS of the lines, the last one included."""
    stride = 1 + len(lines) // MOST_POINTS
    return lines[::-stride][::-1]


# --- the page ---------------------------------------------------------------------------------------------------------


def escaped(value):
    """JSON that ends no element, begins no comment and breaks no line of JavaScript, whatever texts are in it."""
    text = json.dumps(value, separators=(",", ":"))  # in ASCII: U+2028 and surrogates are escaped as well
    return text.translate({ord(character): f"\\u{ord(character):04x}" for character in "<>&"})


def make_page(runs, most):
    """The page as text, of at most `most` bytes."""
    scripts = [BOKEH.read_text(), (FOLDER / "page.js").read_text()]
    digests = [hashlib.sha256(script.encode()).digest() for script in scripts]
    hashes = [base64.b64encode(digest).decode() for digest in digests]
    curves = draw_curves(runs)
    left = most - sum(map(len, scripts)) - len(escaped(curves)) - 50_000
    parts = [run_parts(run, max(0, left) / len(runs)) for run in runs]
    data = {"runs": parts, "curves": curves, "ink": INK, "grid": GRID}
    data |= {"sources": show.SOURCES, "field": show.FIELD}
    texts = {"style": (FOLDER / "page.css").read_text(), "data": escaped(data)}
    texts = {name: Markup(text) for name, text in texts.items()}  # as they are: `data` alone has what models wrote
    loader = FileSystemLoader(FOLDER)
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True)
    names = [run.resolve().name for run in runs]
    template = environment.get_template("page.html")
    return template.render(names=names, hashes=hashes, scripts=map(Markup, scripts), **texts)


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=show.run_with("rollouts.jsonl", "metrics.jsonl"))
    parser.add_argument("-o", "--out", type=Path, help="default: page.html in the first run")
    parser.add_argument("--mb", type=float, default=5, help="its size in megabytes: 5")
    args = parser.parse_args(argv)
    out = args.out or args.runs[0] / "page.html"
    tmp = out.with_suffix(f".{os.getpid()}.tmp")
    tmp.write_text(make_page(args.runs, args.mb * 1e6))
    tmp.replace(out)  # a reader never sees half a page
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main(sys.argv[1:])
