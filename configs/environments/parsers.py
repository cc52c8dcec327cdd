"""Parsers turn what the policy wrote into what a reward function compares. Names and methods follow verifiers."""

import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace

from env import Messages


def assistant_texts(completion: Messages) -> list[str]:
    """The texts of the policy's own messages."""
    return [message.get("content") or "" for message in completion if message["role"] == "assistant"]


class Parser:
    """Parses the whole text with extract_fn. parse_answer parses the policy's last message; None means that there is no
    answer."""

    def __init__(self, extract_fn: Callable = str):
        self.extract_fn = extract_fn

    def parse(self, text: str):
        return self.extract_fn(text)

    def parse_answer(self, completion: Messages):
        texts = assistant_texts(completion)
        return self.parse(texts[-1]) if texts else None

    def follows_format(self, text: str) -> float:
        """Returns how well a text follows the format, from 0 to 1."""
        return 1.0

    def get_format_reward_func(self) -> Callable[[Messages], float]:
        """Returns a reward function: the mean of follows_format over the policy's messages."""

        def format_reward(completion: Messages) -> float:
            texts = assistant_texts(completion)
            return sum(map(self.follows_format, texts)) / max(len(texts), 1)

        return format_reward


class ThinkParser(Parser):
    """Parses the text after </think>. Without it there is nothing to parse: an unfinished thought is no answer.

    prompt_opens_thought: the chat template ends a prompt with <think>, as DeepSeek-R1's does, so that the policy never
    writes it: the format then asks for none."""

    def __init__(self, extract_fn: Callable = str, prompt_opens_thought: bool = False):
        super().__init__(extract_fn)
        self.prompt_opens_thought = prompt_opens_thought

    def parse(self, text: str):
        answer = text.rpartition("</think>")[2].strip() if "</think>" in text else ""
        return self.extract_fn(answer)

    def follows_format(self, text: str) -> float:
        if self.prompt_opens_thought:
            text = f"<think>{text}"
        thought, end, answer = text.strip().partition("</think>")
        is_thought = thought.startswith("<think>") and thought.count("<think>") == 1 and end != ""
        return float(is_thought and answer.strip() != "" and "think>" not in answer)


class XMLParser(Parser):
    """Parses fields in XML tags. Tags in a tuple mean the same: XMLParser(["reasoning", ("code", "answer")])."""

    def __init__(self, fields: Sequence[str | tuple], answer_field: str = "answer", extract_fn: Callable = str):
        super().__init__(extract_fn)
        self.fields = [(field,) if isinstance(field, str) else field for field in fields]
        self.answer_field = answer_field

    def parse(self, text: str, last: bool = False) -> SimpleNamespace:
        """Returns a namespace with an attribute per tag: its first (or last) content, stripped, or None."""
        found = {}
        for tag in [tag for field in self.fields for tag in field]:
            contents = re.findall(rf"<{tag}>((?:(?!<{tag}>).)*?)</{tag}>", text, re.DOTALL)
            found[tag] = contents[-1 if last else 0].strip() if contents else None
        return SimpleNamespace(**found)

    def parse_answer(self, completion: Messages):
        for text in reversed(assistant_texts(completion)):
            answer = getattr(self.parse(text, last=True), self.answer_field)
            if answer is not None:
                return self.extract_fn(answer)
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
        """Half is for the share of fields that occur exactly once, half for nothing but the fields, in order."""
        num_once = 0
        patterns = []
        for i, field in enumerate(self.fields):
            tags = "|".join(field)
            found = re.findall(rf"<({tags})>(?:(?!<\1>).)*?</\1>", text, re.DOTALL)
            if len(found) == 1:
                num_once += 1
            patterns.append(rf"<(?P<t{i}>{tags})>(?:(?!</?(?P=t{i})>).)*</(?P=t{i})>")
        is_exact = num_once == len(self.fields) and re.fullmatch(r"\s*".join(patterns), text.strip(), re.DOTALL)
        return (num_once / len(self.fields) + bool(is_exact)) / 2


def extract_boxed_answer(text: str) -> str:
    r"""Returns the content of the last \boxed{...} that is closed, with balanced braces, or the whole text if there is
    none. \{ and \} are no braces."""
    opened = []  # braces: where the content of a box begins, or -1
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
