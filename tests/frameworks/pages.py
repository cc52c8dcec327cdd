"""The two tools of the task wiki_search over a file of pages, with nothing but the standard library."""

import json
import sys
from pathlib import Path

QUESTION, FILE = sys.argv[1:]
PAGES = json.loads(Path(FILE).read_text())  # {id: [title, text]}
FAULT = 17  # the exit code that says that the policy is to blame


def search_pages(query: str) -> str:
    """Search the pages.

    Args:
        query: words to look for
    """
    words = set(query.lower().split())
    found = [f"{number}: {title}" for number, (title, _) in PAGES.items() if words & set(title.lower().split())]
    return "\n".join(found[:3]) or "nothing found"


def view_page(page_id: str) -> str:
    """Read a page.

    Args:
        page_id: as search_pages gives it
    """
    return PAGES[page_id][1] if page_id in PAGES else f"error: no page {page_id!r}"
