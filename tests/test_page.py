"""tools/page.py: its page in a browser, opened from the disk; what models wrote stays text; how large a page gets."""

import math
import shutil

import pytest
from conftest import append
from test_show import make_run, rollout_line

from tools import page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = ["</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "<!--", "&lt;b&gt;", "\u202egnp.exe"]
HOSTILE += ["a\0b", "\ud800 lone", "\u2028", "<style>*{display:none}</style>", "x" * 1_000_000]


def test_a_page_of_a_large_run_has_some_groups_of_steps_from_end_to_end(tmp_path):
    """The last line may be half written."""
    append(tmp_path / "rollouts.jsonl", [rollout_line(i // 10, i % 10, 0, 0.5) for i in range(1000)])
    append(tmp_path / "eval_rollouts.jsonl", [rollout_line(50 * (i // 20), i % 20, 0, 0.5) for i in range(60)])
    with open(tmp_path / "rollouts.jsonl", "a") as file:
        file.write('{"step": 99, "env')
    groups, num_all = page.choose(tmp_path, 50_000)
    assert num_all == 1060 and len(groups) > 50 and sum(len(page.pack(group)) for group in groups) < 55_000
    assert {0, 99} < {group["step"] for group in groups if group["kind"] == "training"}
    places = [(group["step"], group["row"]) for group in groups if group["kind"] == "evaluation"]
    rows = [{row for step, row in places if step == end} for end in (0, 100)]
    assert rows[0] == rows[1] != set()  # which were learned can be told


@pytest.mark.long
@pytest.mark.skipif(not CHROMIUM, reason="apt-get install chromium, and pip install playwright==1.65.2")
def test_a_page_in_a_browser(tmp_path, models):
    """It asks for nothing but its file, and reports no error. Hostile texts stay text; a token's numbers are the
    run's."""
    sync_api = pytest.importorskip("playwright.sync_api")
    run, sequences = make_run(tmp_path / "run", models["untied"], '[trainer]\nloss = "grpo"\n')
    about = [{"error": text, "answer": text, "metrics": {text[:99]: 0.0}, "dropped": "flat"} for text in HOSTILE]
    hostile = [rollout_line(0, 2, i, 0.0, text, **about[i]) for i, text in enumerate(HOSTILE)]
    append(run / "rollouts.jsonl", hostile)
    evals = [(0, 0, 0.5), (0, 1, 1.0), (0, 2, 0.0), (4, 0, 0.7 + 0.2 + 0.1), (4, 1, 0.9), (4, 2, 0.0)]
    append(run / "eval_rollouts.jsonl", [rollout_line(step, row, 0, reward) for step, row, reward in evals])
    page.main([str(run)])
    problems = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 400, "height": 900}, color_scheme="dark")
        tab.on("console", lambda message: problems.append(message.text))
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on("request", lambda request: request.url.startswith(("file:", "data:")) or problems.append(request.url))
        tab.goto((run / "page.html").as_uri())
        tab.wait_for_selector("#rows tr")
        # 1. A group with hostile texts, found by a search.
        tab.keyboard.press("/")
        tab.keyboard.type("ONERROR")
        tab.locator("#rows tr").click()
        said = tab.locator(".card pre").all_inner_texts()
        escapes = ["\\u{202e}gnp.exe", "a\\u{0000}b", "\\u{d800} lone", "\\u{2028}"]
        assert said[:-1] == HOSTILE[:4] + escapes + HOSTILE[8:-1]
        assert len(said[-1]) < 21_000
        assert tab.locator("#opened :is(script, img, iframe, svg, style, a, b)").count() == 0
        tab.keyboard.press("Escape")
        tab.locator("[type=reset]").click()
        # 2. The tokens of a group that was trained on.
        tab.locator("[name=state]").select_option("trained")
        tab.locator("#rows tr").first.focus()
        tab.keyboard.press("Enter")
        tokens = tab.locator(".tokens").nth(1).locator(".token")
        s = sequences[1]
        i = s.mask.tolist().index(True)
        tokens.nth(i).click()
        found = {dd.get_attribute("data-name"): dd.inner_text() for dd in tab.locator("#story [data-name]").all()}
        known = {"id": s.tokens[i], "old_logp": s.old_logp[i], "logp": s.old_logp[i] + 0.5, "ratio": math.exp(0.5)}
        known |= {"adv": 0.5, "push": 0.0, "policy/clip_frac": 1.0}
        assert {name: float(found[name]) for name in known} == pytest.approx(known, rel=1e-4)
        tab.keyboard.press("Escape")
        # 3. What changed between the evaluations.
        assert tab.locator("summary").all_inner_texts() == ["learned: 1 of 3 rows", "unlearned: 1 of 3 rows"]
        browser.close()
    assert problems == []
