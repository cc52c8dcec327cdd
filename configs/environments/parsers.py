"""Parsers: from what the policy wrote to what a reward function compares. Names and methods follow verifiers."""

import re
from types import SimpleNamespace


def assistant_texts(completion):
    """Texts of the policy's own messages; a text stands for one message."""
    if isinstance(completion, str):
        return [completion]
    return [m if isinstance(m, str) else m.get("content") or "" for m in completion if not is_others(m)]


def is_others(message):
    return isinstance(message, dict) and message["role"] != "assistant"


class Parser:
    """The whole text, through extract_fn. parse_answer takes the last message of the policy; None: no answer found."""

    def __init__(self, extract_fn=lambda text: text):
        self.extract_fn = extract_fn

    def parse(self, text):
        return self.extract_fn(text)

    def parse_answer(self, completion):
        texts = assistant_texts(completion)
        return self.parse(texts[-1]) if texts else None

    def follows_format(self, text):
        """-> 0 to 1."""
        return 1.0

    def get_format_reward_func(self):
        """A reward function: the mean of follows_format over the policy's messages."""

        def format_reward(completion):
            texts = assistant_texts(completion)
            return sum(map(self.follows_format, texts)) / max(len(texts), 1)

        return format_reward


class ThinkParser(Parser):
    """What follows </think>; without it, nothing: an unfinished thought is no answer."""

    def parse(self, text):
        return self.extract_fn(text.rpartition("</think>")[2].strip() if "</think>" in text else "")

    def follows_format(self, text):
        thought, end, answer = text.strip().partition("</think>")
        return float(thought.count("<think>") == 1 and thought.startswith("<think>") and end != "" and
                     answer.strip() != "" and "think>" not in answer)  # fmt: skip


class XMLParser(Parser):
    """Fields in XML tags, or tuples of tags that mean the same: XMLParser(["reasoning", ("code", "answer")])."""

    def __init__(self, fields, answer_field="answer", extract_fn=lambda text: text):
        super().__init__(extract_fn)
        self.fields = [(field,) if isinstance(field, str) else tuple(field) for field in fields]
        self.answer_field = answer_field
        tags = [tag for field in self.fields for tag in field]
        if len(set(tags)) != len(tags) or answer_field not in tags:
            raise ValueError(f"XMLParser: answer_field {answer_field!r} must be one of distinct fields, not {tags}")

    def parse(self, text, last=False):
        """-> namespace with an attribute per tag: the first (or last) content, stripped, or None."""
        found = {}
        for field in self.fields:
            for tag in field:
                contents = re.findall(rf"<{tag}>((?:(?!<{tag}>).)*?)</{tag}>", text, re.DOTALL)
                found[tag] = contents[-1 if last else 0].strip() if contents else None
        return SimpleNamespace(**found)

    def parse_answer(self, completion):
        for text in reversed(assistant_texts(completion)):
            answer = getattr(self.parse(text, last=True), self.answer_field)
            if answer is not None:
                return self.extract_fn(answer)
        return None

    def format(self, **values):
        """The text that parses to these values."""
        tags = [next((tag for tag in field if tag in values), None) for field in self.fields]
        return "\n".join(f"<{tag}>\n{values[tag]}\n</{tag}>" for tag in tags if tag)

    def get_format_str(self):
        return "\n".join(f"<{'/'.join(field)}>\n...\n</{'/'.join(field)}>" for field in self.fields)

    def follows_format(self, text):
        """Half for the share of fields that occur exactly once, half for nothing but the fields, in order."""
        once = sum(
            len(re.findall(f"<({'|'.join(f)})>(?:(?!<\\1>).)*?</\\1>", text, re.DOTALL)) == 1 for f in self.fields
        )
        tags = [f"<(?P<t{i}>{'|'.join(f)})>(?:(?!</?(?P=t{i})>).)*</(?P=t{i})>" for i, f in enumerate(self.fields)]
        exact = re.fullmatch(r"\s*".join(tags), text.strip(), re.DOTALL) is not None
        return (once / len(self.fields) + (exact and once == len(self.fields))) / 2


def extract_boxed_answer(text):
    r"""The content of the last \boxed{...}, braces matched, or the whole text without one."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return text
    depth = 0
    for i in range(start + 6, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[start + 7 : i]
    return text
