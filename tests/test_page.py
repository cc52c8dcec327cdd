"""tools/page.py: its page in a browser, opened from the disk; what models wrote stays text; show.py --trace."""

import base64
import contextlib
import gzip
import json
import math
import re
import shutil
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import WATCHED, launch, lines, make_sequences, write_run
from safetensors.numpy import load_file, save_file

import trainer
from configs import load_config
from orchestrator import save_batch
from tools import page, show, watch

with contextlib.suppress(ImportError):
    from playwright.sync_api import expect, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# Both together are larger than all that a run needs beside torch and vLLM, so they are no requirements.
TO_INSTALL = "needs a browser: apt-get install chromium, and pip install playwright==1.65.2"
needs_chromium = pytest.mark.skipif(not CHROMIUM or "expect" not in globals(), reason=TO_INSTALL)
HOSTILE = [
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "</script><script>alert(1)</script>", "${alert(1)}",
    "<!-- <script>", "-->", "]]>", "{{ 7 * 7 }}", "{% raw %}", "`", "&lt;b&gt;", "<svg onload=alert(1)>", "'\"><b>",
    "<a href=javascript:1>", "<iframe src=//example.org>", "<style>*{display:none}</style>", "__proto__",
    "<base href=//example.org>", "<meta http-equiv=refresh>", "\\u003cscript\\u003e", "constructor", "\u202egnp.exe",
    "\u2066a\u2069", "\u200ehidden\u200f", "a\0b", "\ud800 lone", "\udc00", "\u2028\u2029", "\x1b[2J", "x" * 1_000_000,
]  # fmt: skip


def line_of(step, group, rollout, reward, texts, **more):
    """A line of rollouts.jsonl whose texts are all of a model's."""
    about = {"step": step, "version": step, "env": "task", "example": 7 + group, "group": group, "rollout": rollout}
    about |= {"reward": reward, "turn_rewards": None, "agent_rewards": {}, "metrics": {"exact": reward}, "error": ""}
    about |= {"truncated": False, "num_turns": 1, "num_tokens": 9, "dropped": "", "answer": texts[0], "info": {}}
    answers = [{"role": "assistant", "content": text} for text in texts]
    return about | {"prompt": [{"role": "user", "content": texts[0]}], "completion": answers} | more


def write_lines(path, found):
    path.write_text("".join(json.dumps(line) + "\n" for line in found))


@pytest.fixture
def made_run(tmp_path, models):
    """A run with two groups of two. The first has a fork, an agent that is not trained and a tool call; the second was
    dropped, and its texts are hostile."""
    run = tmp_path / "made"
    (run / "batches").mkdir(parents=True)
    (run / "config.toml").write_text(f'model = "{models["untied"]}"\nenv.id = "mine"\n[trainer]\nloss = "grpo"\n')
    sequences = []
    for i, s in enumerate(make_sequences(4, group=4)):
        agent = {"agent": "critic" if i == 2 else "", "trainable": i != 2}
        routes = np.zeros((len(s["tokens"]), 2, 2), np.int16)  # of experts: more than a number per token
        about = {"env": "task", "rollout": min(i, 1), "reward": float(i > 0), "routes": routes}
        sequences.append(s | about | agent)
    save_batch(run / "batches" / "step_000000.safetensors", sequences, {})
    logp = np.concatenate([np.array(s["old_logp"]) + 0.5 * np.array(s["mask"]) for s in sequences])
    save_file({"logp": logp.astype(np.float32)}, run / "batches" / "logp_000000.safetensors")
    call = {"id": "x", "function": {"name": "double", "arguments": '{"a": 4}'}}
    talk = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    talk += [{"role": "tool", "tool_call_id": "x", "content": "it is 8"}, {"role": "assistant", "content": "8"}]
    found = [line_of(0, 0, i, float(i), ["why"], completion=talk) for i in range(2)]
    hostile = {"dropped": "flat", "error": HOSTILE[0], "env": "<b>task"}
    found += [line_of(0, 1, i, 0.0, [text], metrics={text[:99]: 0.0}, **hostile) for i, text in enumerate(HOSTILE)]
    write_lines(run / "rollouts.jsonl", found)
    write_lines(run / "metrics.jsonl", [{"step": 0, "version": 1, "loss": 0.1, "reward/mean": 0.5}])
    return run


def data_of(file):
    """What the page's script gets: the text between the tags, as a browser ends it."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script', file.read_text(), re.DOTALL)
    return json.loads(text)


def test_hostile_texts_travel_as_json(made_run, tmp_path):
    assert len(HOSTILE) == 30
    for text in HOSTILE:
        escaped = page.escaped({text: [text]})
        assert json.loads(escaped) == {text: [text]} and not re.search(r"[<>&\0]|[^ -~]", escaped)
    page.main([str(made_run), "-o", str(tmp_path / "page.html")])
    data = data_of(tmp_path / "page.html")
    (group,) = [group for group in data["runs"][0]["groups"] if group["dropped"]]
    detail = json.loads(gzip.decompress(base64.b64decode(group["data"])))
    said = [rollout["messages"][0]["text"] for rollout in detail["rollouts"]]
    assert said[:-1] == HOSTILE[:-1] and said[-1] == ["x" * 10_000, 980_000, "x" * 10_000]


def test_a_page_is_at_most_as_large_as_asked_and_says_so(made_run, tmp_path):
    places = [divmod(i, 20) for i in range(1000)]
    write_lines(
        made_run / "rollouts.jsonl", [line_of(*place, 0, 0.5, [str(place)], dropped="flat") for place in places]
    )
    most = page.BOKEH.stat().st_size / 1e6 + 0.3
    page.main([str(made_run), "--mb", str(most)])
    run = data_of(made_run / "page.html")["runs"][0]
    assert (made_run / "page.html").stat().st_size <= most * 1e6 and 100 < len(run["groups"]) < run["of"] == 1000
    assert len({group["step"] for group in run["groups"]}) == 50  # one of each step comes first


def test_what_fails_is_said(made_run, monkeypatch, capsys):
    """By the page, if tokens cannot be read; by watch.py, if there is no page."""
    (made_run / "batches" / "step_000000.safetensors").write_bytes(b"damaged")
    page.main([str(made_run)])
    (note,) = data_of(made_run / "page.html")["runs"][0]["notes"]
    assert "step 0 cannot be shown" in note and "damaged" in note
    monkeypatch.setattr(watch, "ROOT", made_run)  # it has no tools/page.py
    follower = watch.Watch(made_run, None, False)
    follower.first_rows["task"] = [1.0]
    follower.write_last_page()
    assert "warning: page.html lacks the last steps (exit=2, see watch.log): " in capsys.readouterr().out


def test_size_limits():
    """Code lines: no comments, no blank ones."""
    script = [line.strip() for line in (page.FOLDER / "page.js").read_text().splitlines()]
    num = len([line for line in script if line and not line.startswith("//")])
    assert num <= 300 and max(map(len, script)) <= 120
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b", "\n".join(script))


def test_pages_take_little_of_a_runs_time(made_run, monkeypatch):
    """The first is written at once, others while they took a twentieth of the run's time, and never two at once."""
    follower = watch.Watch(made_run, None, True)
    assert follower.has_time_for_page()
    follower.began -= 100
    for used, command, expected in ((4.0, "true", True), (6.0, "true", False), (4.0, "sleep 9", False)):
        follower.page = subprocess.Popen(["bash", "-c", command])
        if command == "true":
            follower.page.wait()
        monkeypatch.setattr(watch.os, "times", lambda: SimpleNamespace(children_user=used))
        assert follower.has_time_for_page() is expected
    follower.page.kill()
    follower.page.wait()


@pytest.mark.parametrize("loss, clips, push", [("grpo", "1", 0), ("cispo", "0", 0.8243606), ("losses:gspo", "1", 0)])
def test_a_trace_has_the_numbers_of_the_batch(made_run, capsys, loss, clips, push):
    """Of each token, in all sequences of a forked rollout. Its ratio of exp(0.5) is clipped, or weighs it."""
    config = (made_run / "config.toml").read_text()
    (made_run / "config.toml").write_text(config.replace('"grpo"', f'"{loss}"'))
    sequences = trainer.load_batch(made_run / "batches" / "step_000000.safetensors").sequences
    tokens = [(s, i) for s in sequences if s["rollout"] == 1 for i in range(len(s["tokens"]))]
    for number, (s, i) in enumerate(tokens):
        show.main([str(made_run), "--trace", "0", "7", "1", "--token", str(number)])
        found = dict(re.findall(r"^    (\w+) (not saved|[^:]+): ", capsys.readouterr().out, re.MULTILINE))
        assert int(found["id"]) == s["tokens"][i] and int(found["mask"]) == s["mask"][i]
        known = {"old_logp": s["old_logp"][i].item()} if s["mask"][i] else {}
        if s["mask"][i] and s["trainable"]:
            known |= {"logp": known["old_logp"] + 0.5, "ratio": math.exp(0.5), "adv": 0.5, "push": push}
            known["kl"] = math.exp(0.5) - 1.5
        names = ("old_logp", "logp", "ratio", "kl", "adv", "push")
        numbers = {name: found[name] for name in names if found[name] != "not saved"}
        assert {name: float(value) for name, value in numbers.items()} == pytest.approx(known, abs=2e-6)
        assert found["clipped"] == (clips if "logp" in known else "not saved")
    show.main([str(made_run), "--trace", "0", "7", "1", "--token", "99999"])
    assert len(tokens) > 20 and "no such token is saved" in capsys.readouterr().out
    show.main([str(made_run), "--trace", "0", "7", "0"])
    text = capsys.readouterr().out
    assert (
        "trainer.compute_advantages, reward 0 - mean 0.5 of the group" in text
        and "of its group: 0 1; critic 1\n" in text
    )
    assert "not the policy's, not trained" in text and "pushed down" in text and "pushed up" not in text
    assert ("push -0.82436" in text) is ("gspo" not in loss)  # gspo divides by the length of a sequence


def test_what_a_trace_cannot_know(made_run, capsys):
    """With a KL to a reference the gradient is not saved; what the loss clips still is."""
    config = (made_run / "config.toml").read_text()
    (made_run / "config.toml").write_text(config.replace("[trainer]\n", "[trainer]\nbeta = 0.1\n"))
    show.main([str(made_run), "--trace", "0", "7", "1"])
    text = capsys.readouterr().out
    assert "trained; its gradient is not saved" in text and "clipped 1: trainer.grpo" in text


@contextlib.contextmanager
def opened(file, **options):
    """The page in a browser. It may ask for nothing but its file, and report no error."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(**options)
        problems = []
        tab.on("console", lambda message: message.type in ("error", "warning") and problems.append(message.text))
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on("dialog", lambda dialog: problems.append(f"dialog {dialog.message}"))
        tab.on("request", lambda request: request.url == file.as_uri() or problems.append(request.url))
        tab.goto(file.as_uri())
        tab.wait_for_selector("#rows tr")
        yield tab
        assert problems == []


@pytest.fixture(scope="module")
def whole_run(models, tmp_path_factory):
    """A run on the fake server with evaluations, and a copy of it in which all rows were learned."""
    path = tmp_path_factory.mktemp("page")
    toml = write_run(path, models["untied"], 3, '{ kind = "turns", num_turns = 2 }')
    launch(toml, "eval.every=3", timeout=240, **WATCHED)
    shutil.copytree(path / "run", path / "copy")
    evals = lines(path / "copy" / "eval.jsonl")
    write_lines(path / "copy" / "eval.jsonl", [line | {"rows": [float(line["step"] > 0)] * 3} for line in evals])
    return path / "run"


@needs_chromium
@pytest.mark.slow
def test_a_run_in_a_browser(whole_run):
    """launch.sh has written a page. Filters, a group, a token's numbers, and the keyboard."""
    step = trainer.load_batch(whole_run / "batches" / "step_000001.safetensors")
    logp_T = load_file(whole_run / "batches" / "logp_000001.safetensors")["logp"]
    trainer.add_advantages(step.sequences, load_config(whole_run / "config.toml").trainer)
    with opened(whole_run / "page.html") as tab:
        assert tab.locator("#curves canvas").count() >= 6
        num = tab.locator("#rows tr").count()
        tab.keyboard.press("/")
        tab.keyboard.type("no such text")
        expect(tab.locator("#rows tr")).to_have_count(0)
        tab.locator("[type=reset]").click()
        expect(tab.locator("#rows tr")).to_have_count(num)
        for name in ("step_low", "step_high"):
            tab.locator(f"[name={name}]").fill("1")
        tab.locator("[name=state]").select_option("trained")
        tab.get_by_role("button", name="row", exact=True).click()
        rows = [int(row) for row in tab.locator("td.row").all_inner_texts()]
        assert rows == sorted(rows) and 0 < len(rows) < num
        tab.locator("#rows tr").first.focus()
        for key in ("ArrowDown", "ArrowUp", "Enter"):
            tab.keyboard.press(key)
        tab.wait_for_selector(".token")
        s = next(s for s in step.sequences if s["example"] == rows[0] and s["rollout"] == 0)
        i = s["mask"].tolist().index(True)
        tokens = tab.locator(".tokens").first.locator(".token")
        tokens.nth(i).hover()
        assert tab.locator("#story").inner_text().startswith(f"token {i}: ")
        tokens.nth(i - 1).click()
        tab.keyboard.press("ArrowRight")
        found = {dd.get_attribute("data-name"): dd.inner_text() for dd in tab.locator("#story [data-name]").all()}
        known = {"id": s["tokens"][i].item(), "logp": logp_T[s["at"][i]].item()}
        known |= {name: s[name][i].item() for name in ("old_logp", "adv")}
        known["ratio"] = math.exp(known["logp"] - known["old_logp"])
        assert {name: float(found[name]) for name in known} == pytest.approx(known, abs=1e-6)
        assert found["teacher_logp"] == "not saved"
        tab.keyboard.press("Escape")
        expect(tab.locator("dialog")).not_to_be_visible()


@needs_chromium
@pytest.mark.slow
def test_two_runs_and_what_was_learned(whole_run, tmp_path):
    page.main([str(whole_run), str(whole_run.parent / "copy"), "-o", str(tmp_path / "page.html")])
    with opened(tmp_path / "page.html", viewport={"width": 400, "height": 800}, color_scheme="dark") as tab:
        assert tab.evaluate("document.documentElement.scrollWidth") <= 400
        tab.get_by_label("copy", exact=True).check()
        expect(tab.locator("#shown")).to_contain_text("copy: all")
        tab.get_by_text("learned 3 rows", exact=True).click()
        tab.locator("#learned button").first.click()
        expect(tab.locator(".group h3")).to_contain_text(["copy at step 0, evaluation", "copy at step 3, evaluation"])
        tab.get_by_role("button", name="close").click()
        tab.locator("#rows tr").first.click()
        tab.get_by_role("button", name="beside run").click()
        expect(tab.locator("#dialog-title")).to_contain_text("copy, step 0, think_env, row 0 beside run, step 0")


@needs_chromium
@pytest.mark.slow
def test_hostile_texts_are_shown_as_text(made_run):
    page.main([str(made_run)])
    with opened(made_run / "page.html") as tab:
        tab.locator("[name=state]").select_option("dropped")
        tab.locator("#rows tr").click()
        tab.wait_for_selector(".card")
        said = tab.locator(".card pre").all_inner_texts()
        assert "<script>alert(1)</script>" in said and "{{ 7 * 7 }}" in said and "\\u{202e}gnp.exe" in said
        assert "a\\u{0000}b" in said and "\\u{d800} lone" in said and "\\u{2028}\\u{2029}" in said
        assert any("980000 characters are cut" in text for text in said) and max(map(len, said)) < 30_000
        expect(tab.locator("#opened :is(script, img, iframe, svg, style, a, b)")).to_have_count(0)
        tab.keyboard.press("Escape")
        tab.locator("[name=state]").select_option("trained")
        tab.locator("#rows tr").click()
        tab.wait_for_selector(".token")
        text = tab.locator("#opened").inner_text()
        assert text.count("calls double") == 2 and text.count("it is 8") == 2  # each result once, with its call
        assert "sequence 2 of 3, agent critic, not trained" in text and tab.locator(".clipped").count() > 5


# --- one wrong line at a time: each of these alone saw a change of one line -------------------------------------------


def test_the_table_says_how_a_group_was_made(made_run):
    """Its staleness is that of its oldest rollout; a prompt that is too long is no error."""
    found = [line_of(6, 0, i, reward, ["a"]) for i, reward in enumerate((1.0, None, None))]
    found[1]["error"] = "X: why"
    for line, version in zip(found, (5, 3, None)):
        line["version"] = version
    group = page.group_parts(("training", 6, "task", 0), found, {}, set())
    assert (group["staleness"], group["errors"], group["rewards"]) == (3, 1, [1.0, None, None])


def test_a_row_is_learned_if_its_mean_becomes_1(tmp_path):
    rows = [[0.0, 0.0, 1.0, 1.0, None], [0.5, 0.7 + 0.2 + 0.1, 0.5, 1.0, 1.0]]
    write_lines(tmp_path / "eval.jsonl", [{"env": "e", "step": 5 * i, "rows": found} for i, found in enumerate(rows)])
    first, second = page.find_changes(tmp_path)
    assert first == {"env": "e", "row": 1, "steps": [0, 5], "learned": True}
    assert second == {"env": "e", "row": 2, "steps": [0, 5], "learned": False}


def test_a_curve_that_is_thinned_ends_with_its_last_step():
    for num in (1, 399, 400, 1001):
        shown = page.thinned(list(range(num)))
        assert shown[-1] == num - 1 and len(shown) <= page.MOST_POINTS
