"""Conversations that no policy of ours sampled -> samples: demonstrations, and text for offline training."""

from configs.lib.client import as_template_sees


def tokenize_conversation(tokenizer, messages, tools=None, first=0, **template_kwargs):
    """-> samples as orchestrator.py makes them, with the tokens of the assistant's messages from
    number `first` on as loss tokens, each message a turn.

    Their logp is nan: nobody knows it, and the trainer takes its own. What a template writes after the end-of-sequence
    token (a newline, mostly) was never the policy's to say."""
    from orchestrator import extend_or_fork

    def ids_of(part, **more):
        part = [as_template_sees(message) for message in part]
        return tokenizer.apply_chat_template(part, tools=tools, return_dict=False, **template_kwargs, **more)

    samples, turns = [], [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= first]
    for turn, i in enumerate(turns):
        prompt, whole = ids_of(messages[:i], add_generation_prompt=True), ids_of(messages[: i + 1])
        if whole[: len(prompt)] != prompt:
            raise ValueError(f"the chat template writes message {i} otherwise than its generation prompt begins it")
        ids = whole[len(prompt) :]
        if tokenizer.eos_token_id in ids:
            ids = ids[: ids.index(tokenizer.eos_token_id) + 1]
        extend_or_fork(samples, prompt, ids, [float("nan")] * len(ids), turn)
    return samples
