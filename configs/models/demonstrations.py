"""Turns text that our policy did not sample into training sequences, as orchestrator.py makes them. Their token ids are
those that the policy would have sampled. For the warm-up of toy.py, and for tools/evaluate.py."""

import json
import math
from contextlib import suppress

from env import ensure
from orchestrator import extend_or_fork

# Texts that stand before a completion if its prompt's last token would merge with its first.
BEFORE = ("\n", "a", "0", ".")


def stop_ids(model, tokenizer):
    """Returns the set of ids that end a turn on vLLM: eos_token_id of the model's generation_config.json, which may be
    several, or of its config.json, and the tokenizer's own."""
    from transformers import AutoConfig, GenerationConfig

    try:
        config = GenerationConfig.from_pretrained(model)
    except OSError:  # there is none
        config = GenerationConfig.from_model_config(AutoConfig.from_pretrained(model))
    found = config.eos_token_id
    ids = found if isinstance(found, list) else [found]
    return {*ids, tokenizer.eos_token_id} - {None}


def continuation(tokenizer, prompt, text):
    """Returns the ids of a text that goes on from a prompt, as a policy samples them: without the mark that some
    tokenizers write before each text, and without bos and eos.

    Raises DataError if the tokenizer merges the text with whatever is before it."""
    for before in (prompt, *BEFORE):
        known = tokenizer.encode(before, add_special_tokens=False)
        ids = tokenizer.encode(before + text, add_special_tokens=False)
        if ids[: len(known)] == known:
            return ids[len(known) :]
    ensure(False, f"the tokenizer has no ids for {text[:100]!r} after another text")


def up_to_stop(ids, stops):
    """The ids up to the first that ends a turn, or all: whatever a template writes after it, mostly a newline, the
    policy never has to say."""
    for n, token in enumerate(ids):
        if token in stops:
            return ids[: n + 1]
    return ids


def up_to_string(text, strings):
    """The text up to the end of the first of sampling.stop's strings in it, and whether it has one: the server ends a
    turn there, so that the policy says no stop token."""
    found = [text.find(string) + len(string) for string in strings if string in text]
    return (text[: min(found)], True) if found else (text, False)


def tokenize_text(tokenizer, prompt, text, stops=(), stop_strings=(), is_truncated=False):
    """Returns the training sequence of a base model's completion, in a list. A truncated one never said its end.

    stops: ids that end a completion, besides the tokenizer's eos. stop_strings: sampling.stop."""
    stops = {*stops, tokenizer.eos_token_id} - {None}
    text, is_ended = up_to_string(text, stop_strings)
    ids = up_to_stop(continuation(tokenizer, prompt, text), stops)
    is_ended = is_ended or is_truncated or (ids and ids[-1] in stops)
    if not is_ended and tokenizer.eos_token_id is not None:
        ids = [*ids, tokenizer.eos_token_id]
    sequences = []
    extend_or_fork(sequences, tokenizer.encode(prompt), ids, [math.nan] * len(ids), 0)
    return sequences


def tokenize_conversation(tokenizer, messages, tools=None, first=0, stops=(), stop_strings=(), **template_kwargs):
    """Returns the training sequences of a conversation. mask is 1 on the assistant's messages from number `first` on;
    each of them is a turn, and ends with the stop token that the policy would have sampled. old_logp is nan, since
    nobody knows it.

    stops: ids that end a turn, besides the tokenizer's eos. stop_strings: sampling.stop. Raises DataError if the chat
    template does not begin a message with its own generation prompt, unless it is text alone."""
    stops = {*stops, tokenizer.eos_token_id} - {None}

    def text_of(part, **more):
        part = [as_template_sees(message) for message in part]
        return tokenizer.apply_chat_template(part, tools=tools, tokenize=False, **template_kwargs, **more)

    sequences = []
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= first]
    for turn, i in enumerate(answers):
        prompt = text_of(messages[:i], add_generation_prompt=True)
        whole = text_of(messages[: i + 1])
        answer = whole[len(prompt) :]
        if not whole.startswith(prompt):
            # DeepSeek-R1's prompt opens a thought, which its template takes away from answers. Plain text is what the
            # policy said; how it said a call, or a thought that is a field of its own, nobody knows then.
            answer = messages[i].get("content")
            is_plain = isinstance(answer, str) and not (messages[i].get("tool_calls") or messages[i].get("reasoning"))
            ensure(is_plain, f"the chat template does not begin message {i} with its own generation prompt")
        text, is_ended = up_to_string(answer, stop_strings)
        ids = up_to_stop(continuation(tokenizer, prompt, text), stops)
        if not (is_ended or (ids and ids[-1] in stops)):
            ids = ids + stop_after(i, messages, text_of, tokenizer, stops)
        prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
        extend_or_fork(sequences, prompt_ids, ids, [math.nan] * len(ids), turn)
    return sequences


def stop_after(i, messages, text_of, tokenizer, stops):
    """Returns the id, in a list, with which the policy ends message i if its text has no stop token: the one that the
    template writes after another answer. If it writes none, as GLM's, the next message begins with it. Otherwise it is
    the tokenizer's eos, if there is one."""
    so_far = [*messages[:i], {"role": "assistant", "content": "."}]
    text = text_of(so_far)
    before, dot, after = text.rpartition(".")
    ids = up_to_stop(continuation(tokenizer, before + dot, after), stops)
    if ids and ids[-1] in stops:
        return ids[-1:]
    followers = [{"role": "user", "content": "."}]
    if messages[i].get("tool_calls"):
        followers.insert(0, {"role": "tool", "content": "."})
    for follower in messages[i + 1 : i + 2] + followers:
        longer = text_of([*so_far, follower])
        if longer.startswith(text):
            ids = continuation(tokenizer, text, longer[len(text) :])
            if ids and ids[0] in stops:
                return ids[:1]
    return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


def as_demonstration(sequence):
    """The same sequence, to be imitated: its loss tokens get ce = 1, and none is left to the policy gradient."""
    weights = [float(is_loss) for is_loss in sequence["mask"]]
    return sequence | {"ce": weights, "mask": [0] * len(weights)}


def as_template_sees(message):
    """A message in OpenAI's format as vLLM hands it to the chat template: arguments of tool calls are objects."""
    message = dict(message)
    if message.get("reasoning"):
        message["reasoning_content"] = message["reasoning"]
    if message.get("tool_calls"):
        message["tool_calls"] = [with_object(call) for call in message["tool_calls"]]
    return message


def with_object(call):
    """A tool call with its arguments as an object, parsed if they are JSON; if they are neither, an empty one."""
    value = call["function"]["arguments"]
    if isinstance(value, str):
        with suppress(json.JSONDecodeError):
            value = json.loads(value)
    value = value if isinstance(value, dict) else {}
    return call | {"function": call["function"] | {"arguments": value}}
