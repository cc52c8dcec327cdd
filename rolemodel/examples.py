"""Examples of a data set, whatever library they come from."""

import hashlib
import json
import math
import re
from functools import partial


def without_address(text):
    return re.sub(" at 0x[0-9a-fA-F]+", "", text)


def readable(x):
    """The default of json.dumps: an object's whole text, which is the same in every process, or nan for a missing value
    of numpy or pandas."""
    text = without_address(str(x.tolist() if hasattr(x, "tolist") else x))
    return math.nan if text in ("nan", "NaN", "NaT", "None", "<NA>") else text


def as_row(row):
    """Returns an example as a dict, from a line of a JSON Lines file or from a dict. Raises ValueError or TypeError for
    anything else, if there is no prompt, and for nan, since a missing answer would become the word "nan"."""
    if isinstance(row, bytes):
        row = json.loads(row)
    if not isinstance(row, dict) or isinstance(row.get("prompt", row.get("question")), dict):  # pandas' columns
        raise TypeError(f"an example is a dict of its columns, in a file a JSON object, not a {type(row).__name__}")
    if row.get("prompt") is None and row.get("question") is None:
        raise ValueError(f"an example needs 'prompt' or 'question', but has only {', '.join(map(repr, row))}")
    json.dumps(row, default=readable, skipkeys=True, allow_nan=False)
    return dict(row)


def without_none(x):
    """Messages as they were before Arrow added keys: it gives each dict, even the arguments of a call, all keys that
    the same dict has in any example, with None as the value."""
    if isinstance(x, dict):
        return {key: without_none(value) for key, value in x.items() if value is not None}
    return [without_none(value) for value in x] if isinstance(x, list) else x


def content(x, within=()):
    """What x contains, as JSON. It is the same in every process for equal objects, and different for different ones.
    within: the ids of all objects that x is a part of, since objects may refer to each other."""
    if x is None or type(x) in (str, int, float, bool):
        return x
    if id(x) in within:
        return "itself"
    part = partial(content, within=(*within, id(x)))
    if isinstance(x, dict):
        return {key if isinstance(key, str) else json.dumps(part(key)): part(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [part(value) for value in x]
    if isinstance(x, set | frozenset):  # in a set, the order of strings differs between processes
        return sorted(map(part, x), key=json.dumps)
    if hasattr(x, "getpalette"):  # an image of PIL's, whose state has its file's name as well
        return [x.mode, x.size, x.getpalette(), x.tobytes().hex()]
    text = without_address(str(x))
    if isinstance(x, type):
        return text
    for method in ("tolist", "to_dict"):  # of arrays and tables, which leave out the middle as text
        if hasattr(x, method):
            return part(getattr(x, method)())
    # A text with an address tells where an object is, not what it contains. Other texts may leave something out as
    # well.
    has_more = text != str(x) or getattr(x, "__dict__", None)
    return [text, part(object.__getstate__(x))] if has_more else text


def fingerprint(rows):
    """A digest of examples, which is the same in every process."""
    return hashlib.sha256(json.dumps(content(rows)).encode()).hexdigest()[:16]
