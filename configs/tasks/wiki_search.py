"""Questions about a corpus of pages, answered with two tools: search titles and texts (BM25), and view a page.

corpus: a directory of .txt or .md pages whose first lines are their titles. questions: JSON Lines with question and
answer. Without them there are 200 pages about made-up people with a question about each, which suit any model."""

import functools
import json
import random
from pathlib import Path

from configs.environments.echo import echo
from configs.environments.rubrics import TurnRubric
from configs.environments.tools import ToolEnv
from env import ensure, load_rows

PAGES = 200
EVAL_PAGES = 40
TOP = 3  # pages that a search finds at most
CONSONANTS = "bcdfghjklmnprstvwz"
VOWELS = "aeiou"
SPLITS = {"pages": range(3), "warmup": range(3, 10)}  # {split: checksums of its names}
# Frequent strings are tokens of the toy model, as in a trained tokenizer. It spells out everything else.
CALL = '<tool_call>\n{"name": "%s", "arguments": {"%s": "'
TOKENS = [CALL % ("search_pages", "query"), CALL % ("view_page", "page_id"), '"}}\n</tool_call>']
TOKENS += ["Where does ", " live?", " lives in "]
WARM_UP_STEPS = 155


def word(rng, syllables):
    parts = [rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(rng.randint(*syllables))]
    return "".join(parts)


def people(split, num):
    """Returns (name, home) pairs. A name's checksum decides on its split, so that no name is in two."""
    rng = random.Random(f"wiki_search {split}")
    found = {}
    while len(found) < num:
        name = word(rng, (2, 3))
        checksum = sum(ord(c) * 31**i for i, c in enumerate(name)) % 10
        if checksum in SPLITS[split]:
            found[name] = word(rng, (2, 2))
    return list(found.items())


def page(name, home):
    return f"{name} lives in {home}."


def question(name):
    return f"Where does {name} live?"


class Corpus:
    """An index (BM25) of titles and texts. pages: {id: (title, text)}."""

    def __init__(self, pages):
        import bm25s

        self.pages = pages
        self.ids = list(pages)
        self.tokenize = functools.partial(bm25s.tokenize, show_progress=False)
        self.index = bm25s.BM25()
        texts = [f"{title}\n{text}" for title, text in pages.values()]
        self.index.index(self.tokenize(texts), show_progress=False)

    def search_pages(self, query: str) -> str:
        """Search the pages.

        Args:
            query: words to look for
        """
        most = min(TOP, len(self.ids))
        hits, scores = self.index.retrieve(self.tokenize(query), k=most, show_progress=False)
        found = [self.ids[i] for i, score in zip(hits[0], scores[0]) if score > 0]
        lines = [f"{page_id}: {self.pages[page_id][0]}" for page_id in found]
        return "\n".join(lines) or "nothing found"

    def view_page(self, page_id: str) -> str:
        """Read a page.

        Args:
            page_id: as search_pages gives it
        """
        if page_id not in self.pages:
            raise ValueError(f"no page {page_id!r}")
        return self.pages[page_id][1]


def read_corpus(directory):
    """Returns {id: (title, text)}."""
    files = sorted(path for path in Path(directory).glob("**/*") if path.suffix in (".txt", ".md"))
    ensure(files, f"env.args.corpus: no .txt or .md pages in {directory}")
    pages = {}
    for i, file in enumerate(files):
        text = file.read_text(encoding="utf-8", errors="replace")
        title = text.partition("\n")[0].lstrip("# ")
        pages[str(i)] = (title, text)
    return pages


def normal(text):
    return " ".join(text.lower().replace(".", " ").split())


def correct(completion, answer):
    """1 if the last message is the answer and nothing else."""
    last = completion[-1]
    is_right = normal(last["content"] or "") == normal(answer)
    return float(last["role"] == "assistant" and is_right)


def progress(completion, answer, info):
    """A number per turn: 1 for the first search that finds the right page, and 1 for the first view of a page with the
    answer."""
    scores = []
    missing = {"search_pages": info.get("title") or answer, "view_page": answer}
    for message in completion:
        if message["role"] == "assistant":
            scores.append(0.0)
            calls = message.get("tool_calls") or []
            names = {call["id"]: call["function"]["name"] for call in calls}
            continue
        name = names.get(message.get("tool_call_id"))
        is_error = message["content"].startswith("error: ")  # an error repeats the words of the call
        wanted = missing.get(name)
        if wanted and not is_error and normal(wanted) in normal(message["content"]):
            scores[-1] += 1.0
            del missing[name]
    return scores


def demonstrations(num):
    """Conversations for the toy model's supervised warm-up: search, view and answer, about people without a page."""
    rng = random.Random(0)
    talks = []
    for name, home in people("warmup", num):
        page_id = str(rng.randrange(PAGES))
        talk = [
            {"role": "user", "content": question(name)},
            call("search_pages", {"query": name}),
            result(f"{page_id}: {name}"),
            call("view_page", {"page_id": page_id}),
            result(page(name, home)),
            {"role": "assistant", "content": home},
        ]
        talks.append(talk)
    return talks


def call(name, arguments):
    function = {"name": name, "arguments": json.dumps(arguments)}
    tool_call = {"id": "0", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [tool_call]}


def result(text):
    return {"role": "tool", "tool_call_id": "0", "content": text}


def load_environment(corpus="", questions="", max_turns=10, num_eval=EVAL_PAGES, system_prompt="", foresee=0.0):
    """The last num_eval questions are the eval split. foresee: weight of imitating the tools' results (echo.py)."""
    pages = {}
    rows = []
    for i, (name, home) in enumerate(people("pages", PAGES)):
        pages[str(i)] = (name, page(name, home))
        rows.append({"question": question(name), "answer": home, "info": {"title": name}})
    if corpus:
        pages = read_corpus(corpus)
    if questions:
        rows = load_rows(questions)
    problem = f"wiki_search: {len(rows)} questions, none left to train on; set env.args.num_eval"
    ensure(len(rows) > num_eval, problem)
    cut = len(rows) - num_eval
    index = Corpus(pages)
    env = ToolEnv(
        rows[:cut],
        tools=[index.search_pages, index.view_page],
        max_turns=max_turns,
        eval_dataset=rows[cut:] or None,
        rubric=TurnRubric([correct, progress], [0.6, 0.2]),
        system_prompt=system_prompt,
    )
    return echo(env, foresee) if foresee else env
