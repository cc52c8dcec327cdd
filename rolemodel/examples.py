"""Examples: the rows of a data set, whatever library they come from."""

import hashlib
import json
import math
import re


def readable(x):
    """For json.dumps: its whole text, the same in every process, or nan for what is missing to numpy and pandas."""
    text = re.sub(" at 0x[0-9a-f]+", "", str(x.tolist() if hasattr(x, "tolist") else x))
    return math.nan if text in ("nan", "NaN", "NaT", "None", "<NA>") else text


def as_row(row):
    """A dict, from a line of a JSON Lines file or from a dict. Raises ValueError or TypeError for anything else, for
    what has no prompt, and for nan, since an answer that is missing would be the word "nan"."""
    if isinstance(row, bytes):
        row = json.loads(row)
    if not isinstance(row, dict) or isinstance(row.get("prompt", row.get("question")), dict):  # pandas' columns
        raise TypeError(f"an example is a dict of its columns, in a file a JSON object, not a {type(row).__name__}")
    if row.get("prompt") is None and row.get("question") is None:
        raise ValueError(f"an example needs 'prompt' or 'question', but has only {', '.join(map(repr, row))}")
    json.dumps(row, default=readable, skipkeys=True, allow_nan=False)
    return dict(row)


def without_none(x):
    """Messages as they were: Arrow gives each dict, also of a call's arguments, every key that another row's has."""
    if isinstance(x, dict):
        return {key: without_none(value) for key, value in x.items() if value is not None}
    return [without_none(value) for value in x] if isinstance(x, list) else x


def fingerprint(rows):
    """The same for the same examples, in every process."""
    text = json.dumps(rows, default=readable, skipkeys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
