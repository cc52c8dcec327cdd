"""The documents: every link leads somewhere, and every command of the README and of docs/comparing.md works in a fresh
clone, without this shell's variables. Runs are cut short."""

import os
import re
import subprocess

import pytest
from conftest import ROOT, all_batches, append, lines

PAGES = [ROOT / "README.md", ROOT / "tools/README.md", *ROOT.glob("docs/*.md")]
SHORT = "max_steps=2 eval.num_examples=4 eval.every=1 checkpoint.every=1"  # wins over what a command says before it
NOT_HERE = ("git clone", "bash tests/", "source ")  # the clone is there, and its tests would run this test


def without_code(page):
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def anchors(page):
    """What GitHub calls the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", without_code(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_anchors(tmp_path):
    """A comment in a block of code is no heading (mergework #873)."""
    (tmp_path / "page.md").write_text("# One, two\n```bash\n# code\n```\n")
    assert anchors(tmp_path / "page.md") == {"one-two"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page):
    links = [link for link in re.findall(r"\]\(([^)]+)\)", without_code(page)) if not link.startswith("http")]
    for path, _, anchor in (link.partition("#") for link in links):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


def test_metrics_have_the_names_that_the_page_gives_them(run):
    """A dashboard that asks for another name stays empty (OpenRLHF #1281)."""
    run_dir = run(1, "{}", "eval.every=1")
    training, evaluations = (ROOT / "docs/metrics.md").read_text().split("## Evaluations")
    written = all_batches(run_dir)[0].info["metrics"], lines(run_dir / "eval.jsonl")[0]
    for text, metrics in zip((training, evaluations), written):
        first_cells = " ".join(re.findall(r"^\| (.*?) \|", text, re.MULTILINE))
        names = {name.replace("letters", "<function>") for name in metrics}
        assert names <= {*re.findall("`(.*?)`", first_cells)}


def commands(page):
    for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            command = re.sub(r"\s+#.*", "", line)
            if command and not command.startswith(NOT_HERE):
                is_run = re.match(r"bash launch.sh|python tools/(compare|replay).py", command)
                command = re.sub(r"--(seeds|states) \d+", r"--\1 1", command)
                yield f"{command} {SHORT}" if is_run else command


@pytest.mark.long
def test_commands(tmp_path):
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
    readme = (clone / "README.md").read_text()
    for name, text in re.findall(r"```python\n# (\w+)\.py: .*?\n(.*?)```", readme, re.DOTALL):
        (clone / f"configs/{name}.py").write_text(text)
    env = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_"))}
    env |= {"PATH": f"{clone}/.venv/bin:{os.environ['PATH']}", "HOME": str(tmp_path), "LANG": "C.UTF-8"}
    found = [*commands(clone / "README.md"), *commands(clone / "docs/comparing.md")]
    assert len(found) > 10
    for command in found:
        done = subprocess.run(command, shell=True, cwd=clone, env=env, capture_output=True, text=True)
        assert not done.returncode, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def test_the_picture_has_every_run_and_no_bar_without_a_width(tmp_path, monkeypatch):
    """lm-evaluation-harness #4070: none of 16 right looked as sure as none of 5000. MacroEconometricModels.jl #473:
    what came after the last color was left out."""
    monkeypatch.syspath_prepend(ROOT / "docs/pictures")
    import draw

    monkeypatch.setattr(draw, "FOLDER", tmp_path)
    for i in range(7):
        (tmp_path / f"run{i}").mkdir()
        evals = [{"step": step, "correct": share, "n": 16} for step, share in ((0, 0.0), (10, 0.5), (20, 1.0))]
        append(tmp_path / f"run{i}" / "eval.jsonl", evals)
    draw.calculator([str(tmp_path / f"run{i}") for i in range(7)])
    drawn = draw.plt.gca().containers
    assert len(drawn) == 7 and (tmp_path / "calculator.png").exists()
    ends = [end for segment in drawn[0][2][0].get_segments() for end in segment[:, 1]]
    assert ends == pytest.approx([0, 0.194, 0.28, 0.72, 0.806, 1], abs=1e-3)
