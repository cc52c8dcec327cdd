"""Questions over a corpus of pages, answered with two tools: search titles and texts (BM25), view a page.

corpus: a directory of .txt or .md pages, the first line its title; questions: JSON Lines with question and answer. With
neither, 200 pages about made-up people and a question on each, for a model of any size to begin with."""

import json
import random
from pathlib import Path

from configs.environments.rubrics import TurnRubric
from configs.environments.tools import ToolEnv
from env import DataError, load_rows

PAGES, EVAL_PAGES, TOP = 200, 40, 3
CONSONANTS, VOWELS = "bcdfghjklmnprstvwz", "aeiou"
# Of the toy model's vocabulary: frequent strings, as a trained tokenizer has them. The rest is spelled out.
CALL = '<tool_call>\n{"name": "%s", "arguments": {"%s": "'
TOKENS = [CALL % ("search_pages", "query"), CALL % ("view_page", "page_id"), '"}}\n</tool_call>']
TOKENS += ["Where does ", " live?", " lives in "]
WARM_UP_STEPS = 155


def word(rng, syllables):
    return "".join(rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(rng.randint(*syllables)))


def people(split, num):
    """(name, home) pairs; a name's checksum names its split, so none is in two."""
    rng, found, owner = random.Random(f"wiki_search {split}"), {}, {"pages": (0, 1, 2), "warmup": range(3, 10)}[split]
    while len(found) < num:
        name = word(rng, (2, 3))
        if sum(ord(c) * 31**i for i, c in enumerate(name)) % 10 in owner:
            found[name] = word(rng, (2, 2))
    return list(found.items())


def page(name, home):
    return f"{name} lives in {home}."


def question(name):
    return f"Where does {name} live?"


class Corpus:
    """BM25 over titles and texts. pages: {id: (title, text)}."""

    def __init__(self, pages):
        import bm25s

        self.pages, self.ids = pages, list(pages)
        self.tokenize = lambda texts: bm25s.tokenize(texts, show_progress=False)
        self.index = bm25s.BM25()
        texts = [f"{title}\n{text}" for title, text in pages.values()]
        self.index.index(self.tokenize(texts), show_progress=False)

    def search_pages(self, query: str) -> str:
        """Search the pages.

        Args:
            query: words to look for
        """
        hits, scores = self.index.retrieve(self.tokenize(query), k=min(TOP, len(self.ids)), show_progress=False)
        found = [self.ids[i] for i, score in zip(hits[0], scores[0]) if score > 0]
        return "\n".join(f"{i}: {self.pages[i][0]}" for i in found) or "nothing found"

    def view_page(self, page_id: str) -> str:
        """Read a page.

        Args:
            page_id: as search_pages gives it
        """
        if page_id not in self.pages:
            raise ValueError(f"no page {page_id!r}")
        return self.pages[page_id][1]


def read_corpus(directory):
    files = sorted(p for p in Path(directory).glob("**/*") if p.suffix in (".txt", ".md"))
    if not files:
        raise ValueError(f"env.args.corpus: no .txt or .md pages in {directory}")
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    return {str(i): (text.partition("\n")[0].lstrip("# "), text) for i, text in enumerate(texts)}


def normal(text):
    return " ".join(text.lower().replace(".", " ").split())


def correct(completion, answer):
    """The last message is the answer and nothing else."""
    return float(completion[-1]["role"] == "assistant" and normal(completion[-1]["content"] or "") == normal(answer))


def progress(completion, answer, info):
    """Per turn: 1 for the first search that finds the right page, and for the first look at a page with the answer."""
    scores, missing = [], {"search_pages": info.get("title") or answer, "view_page": answer}
    for message in completion:
        if message["role"] == "assistant":
            scores.append(0.0)
            names = {c["id"]: c["function"]["name"] for c in message.get("tool_calls") or ()}
            continue
        wanted = missing.get(name := names.get(message.get("tool_call_id")))
        if message["content"].startswith("error: "):  # it repeats what was asked
            continue
        if wanted and normal(wanted) in normal(message["content"]):
            scores[-1] += 1.0
            del missing[name]
    return scores


def demonstrations(num):
    """For the supervised warm-up of the toy model: search, view, answer; about people of no page."""
    rng, talks = random.Random(0), []
    for name, home in people("warmup", num):
        page_id = str(rng.randrange(PAGES))
        talk = [{"role": "user", "content": question(name)}]
        talk += [call("search_pages", {"query": name}), result(f"{page_id}: {name}")]
        talk += [call("view_page", {"page_id": page_id}), result(page(name, home))]
        talks.append(talk + [{"role": "assistant", "content": home}])
    return talks


def call(name, arguments):
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "0", "type": "function", "function": function}]}


def result(text):
    return {"role": "tool", "tool_call_id": "0", "content": text}


def load_environment(corpus="", questions="", max_turns=10, num_eval=EVAL_PAGES, system_prompt=""):
    """The last num_eval questions are the eval split."""
    folk = people("pages", PAGES)
    pages = read_corpus(corpus) if corpus else {str(i): (name, page(name, home)) for i, (name, home) in enumerate(folk)}
    rows = (
        load_rows(questions)
        if questions
        else [{"question": question(n), "answer": h, "info": {"title": n}} for n, h in folk]
    )
    if len(rows) <= num_eval:
        raise DataError(f"wiki_search: {len(rows)} questions, none left to train on; set env.args.num_eval")
    cut = len(rows) - num_eval
    index, rubric = Corpus(pages), TurnRubric([correct, progress], [0.6, 0.2])
    tools = [index.search_pages, index.view_page]
    return ToolEnv(
        rows[:cut], tools, max_turns, eval_dataset=rows[cut:] or None, rubric=rubric, system_prompt=system_prompt
    )
