"""The head of the sampler's distribution: the ids and log-probabilities of the k likeliest tokens at each sampled token
(k is orchestrator.top_logprobs, or sampling.top_k). It takes 8 k bytes for each token of a batch file.

A batch has it as two fields with k columns: `head_ids`, -1 where there is none, and `old_head_logp`, in nats, nan where
there is none. A loss gets them as micro["head_ids_NK"] and micro["old_head_logp_NK"], along with the policy's own
log-probabilities of the same ids, with a gradient: micro["head_logp_NK"]. Two things need it:

- score centering (losses:centered);
- sampling that is cut off by top_p, top_k or min_p. vLLM's log-probabilities are then those of a distribution over the
  tokens that it kept, so the trainer's must be as well (within_kept)."""

import math

import numpy as np

FLOOR = -9999  # vLLM's number for -inf, a token that was cut off


def dtype_and_nothing(name: str) -> tuple[type, float]:
    """The dtype of a further field of a batch, and the number that it has where there is no value. The name of a field
    with ids ends in _ids."""
    return (np.int32, -1) if name.endswith("_ids") else (np.float32, np.nan)


def request(cfg, is_trained: bool) -> dict:
    """The part of a request that asks vLLM for the heads of a turn that is trained on. vLLM may put the sampled token
    in place of the last one that it was asked for. So one more is asked for, and the head is the same whatever was
    sampled."""
    if not (cfg.head_size and is_trained):
        return {}
    return {"top_logprobs": cfg.head_size + 1, "return_tokens_as_token_ids": True}


def read(content: list[dict], body: dict) -> dict[str, list[list]]:
    """Returns the two fields, with a list for each sampled token, from the logprobs of a chat completion. body: its
    request. If this asked for no head, returns {}. Raises ValueError if the server names tokens by their text."""
    if not body.get("return_tokens_as_token_ids"):
        return {}
    fields = {"head_ids": [], "old_head_logp": []}
    for token in content:
        found = [(x["logprob"], int(x["token"].removeprefix("token_id:"))) for x in token["top_logprobs"]]
        found = [pair for pair in sorted(found, reverse=True) if pair[0] > FLOOR]
        nothing = [(math.nan, -1)] * body["top_logprobs"]
        logps, ids = zip(*(found + nothing)[: body["top_logprobs"] - 1])
        fields["head_ids"].append([*ids])
        fields["old_head_logp"].append([*logps])
    return fields


def within_kept(micro: dict, logp_N, head_logp_NK):
    """Returns the policy's log-probabilities of the sampled tokens [N] and of their heads [N, K], in nats. Where the
    sampler's distribution was cut off (top_k_N > 0), they are over the tokens that it kept, which are the head.
    Elsewhere, and where there is no head, they are over the whole vocabulary; nan where head_ids_NK is -1.

    If several logits at the cutoff are equal, a sampler keeps more than top_k tokens. The head H then has only the part
    q(H) of the sampler's mass. The policy's mass on all tokens that were kept is taken to be p(H) / q(H), which is
    exact while policy and sampler are the same. coverage() counts such tokens."""
    is_none_NK = micro["head_ids_NK"] < 0
    log_p_N, log_q_N = (
        x_NK.masked_fill(is_none_NK, -math.inf).logsumexp(-1) for x_NK in (head_logp_NK, micro["old_head_logp_NK"])
    )
    is_cut_N = (micro["top_k_N"] > 0) & ~is_none_NK.all(-1)
    shift_N = (log_p_N - log_q_N).where(is_cut_N, 0)
    return logp_N - shift_N, (head_logp_NK - shift_N[:, None]).masked_fill(is_none_NK, math.nan)


def coverage(micro: dict) -> dict:
    """Metrics of the heads, {metric: value_N}. policy/head_mass: the sampler's probability of the whole head.
    policy/head_short: whether the sampler kept tokens that are not in the head. This happens if logits at the cutoff
    are equal, and at every token if a server runs without --logprobs-mode processed_logprobs."""
    if "old_head_logp_NK" not in micro:
        return {}
    mass_N = micro["old_head_logp_NK"].exp().nansum(-1)
    return {"policy/head_mass": mass_N, "policy/head_short": (micro["top_k_N"] > 0) & (mass_N < 1 - 1e-4)}
