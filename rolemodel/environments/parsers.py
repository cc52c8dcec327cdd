"""Parsers turn what the policy wrote into what a reward function compares. Names and methods follow verifiers."""

import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from types import SimpleNamespace

from env import Messages


def assistant_texts(completion: Messages) -> list[str]:
    """The texts of the policy's own messages."""
    return [message.get("content") or "" for message in completion if message["role"] == "assistant"]


THOUGHTS = {"think", "reasoning"}


def without_thoughts(text: str, tags=THOUGHTS) -> str:
    """The text as a grader should read it, stripped. What is inside <think> or <reasoning> is not an answer. A thought
    without an end was cut off, and one without a beginning was opened by the template, in the prompt.

    If the template opened a thought and it was then cut off, there is no tag at all. To recognize this, set
    inference.args.reasoning_parser, which takes thoughts out of the content."""
    for tag in tags:
        text = re.sub(f"<{tag}>.*?</{tag}>", "", text, flags=re.DOTALL)
        text = text.rpartition(f"</{tag}>")[2].partition(f"<{tag}>")[0]
    return text.strip()


def number(text: str | None) -> Decimal | None:
    """A text such as "$1,200.50" as a Decimal, or None if it is not a single number. Decimals are equal with or without
    zeros at the end and, unlike floats, are never equal because of rounding."""
    plain = (text or "").replace("\u2212", "-").replace("{,}", ",")
    plain = re.sub(r"\\?\$\s*", "", plain).strip().rstrip(".,")
    is_number = re.fullmatch(r"[-+]?(([0-9]+|[0-9]{1,3}(,[0-9]{3})+)(\.[0-9]*)?|\.[0-9]+)", plain)
    return Decimal(plain.replace(",", "")) if is_number else None


class XMLParser:
    """Parses fields in XML tags. Tags in a tuple mean the same: XMLParser(["reasoning", ("code", "answer")])."""

    def __init__(self, fields: Sequence[str | tuple], answer_field: str = "answer"):
        self.fields = [(field,) if isinstance(field, str) else field for field in fields]
        self.answer_field = answer_field

    def parse(self, text: str, last: bool = False) -> SimpleNamespace:
        """Returns a namespace with an attribute per tag: its first (or last) content, stripped, or None. What is inside
        a thought is ignored, unless the tag is itself that of a thought."""
        found = {}
        for tag in [tag for field in self.fields for tag in field]:
            where = text if tag in THOUGHTS else without_thoughts(text)
            contents = re.findall(rf"<{tag}>((?:(?!<{tag}>).)*?)</{tag}>", where, re.DOTALL)
            found[tag] = contents[-1 if last else 0].strip() if contents else None
        return SimpleNamespace(**found)

    def parse_answer(self, completion: Messages) -> str | None:
        """The answer field of the policy's last message that has one."""
        for text in reversed(assistant_texts(completion)):
            answer = getattr(self.parse(text, last=True), self.answer_field)
            if answer is not None:
                return answer
        return None

    def format(self, **values) -> str:
        """Returns the text that parses to these values."""
        lines = []
        for field in self.fields:
            given = [tag for tag in field if tag in values]
            if given:
                lines.append(f"<{given[0]}>\n{values[given[0]]}\n</{given[0]}>")
        return "\n".join(lines)

    def get_format_str(self) -> str:
        names = ["/".join(field) for field in self.fields]
        return "\n".join(f"<{name}>\n...\n</{name}>" for name in names)

    def follows_format(self, text: str) -> float:
        """From 0 to 1. Half is the share of fields that occur exactly once, and half is for a text that has nothing but
        the fields, in order. A thought that is not a field is ignored, since some models begin with one whatever they
        are told."""
        text = without_thoughts(text, THOUGHTS.difference(*self.fields))
        num_once = 0
        patterns = []
        for i, field in enumerate(self.fields):
            tags = "|".join(field)
            found = re.findall(rf"<({tags})>(?:(?!<\1>).)*?</\1>", text, re.DOTALL)
            if len(found) == 1:
                num_once += 1
            patterns.append(rf"<(?P<t{i}>{tags})>(?:(?!</?(?P=t{i})>).)*</(?P=t{i})>")
        is_exact = num_once == len(self.fields) and re.fullmatch(r"\s*".join(patterns), text, re.DOTALL)
        return (num_once / len(self.fields) + bool(is_exact)) / 2

    def get_format_reward_func(self) -> Callable[[Messages], float]:
        """Returns a reward function: the mean of follows_format over the policy's messages."""

        def format_reward(completion: Messages) -> float:
            texts = assistant_texts(completion)
            return sum(map(self.follows_format, texts)) / max(len(texts), 1)

        return format_reward


def extract_boxed_answer(text: str) -> str:
    r"""Returns the content of the last \boxed{...} that is closed, with balanced braces, or the whole text if there is
    none. \{ and \} do not count as braces, and thoughts are ignored."""
    text = without_thoughts(text)
    opened = []  # for each open brace: where the content of its box begins, or -1
    last = -1
    answer = text
    for match in re.finditer(r"\\boxed\{|\\.|[{}]", text, re.DOTALL):
        if match[0] == "}" and opened:
            start = opened.pop()
            if start > last:
                last = start
                answer = text[start : match.start()]
        elif match[0] == "{":
            opened.append(-1)
        elif match[0] == r"\boxed{":
            opened.append(match.end())
    return answer
