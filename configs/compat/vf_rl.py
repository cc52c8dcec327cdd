"""Translates names from vf-rl's [trainer.args] table, from TRL's GRPOTrainer and from former versions of this project.

A name under [trainer.args] keeps the meaning it has there, or is refused with a hint on what to write instead. There is
one difference: a number (eval_steps, ref_model_sync_steps) also turns on what it belongs to. Our own names are accepted
there as well."""

from configs import merged
from configs.runtime.role import CONFIG, RunError

RENAMED = {
    "run_name": "run_name",
    "max_steps": "max_steps",
    "seed": "seed",
    "max_seq_len": "max_seq_len",
    "output_dir": "output_dir",
    "batch_size": "orchestrator.batch_size",
    "rollouts_per_example": "orchestrator.rollouts_per_example",
    "num_generations": "orchestrator.rollouts_per_example",
    "group_size": "orchestrator.rollouts_per_example",
    "max_prompt_len": "orchestrator.max_prompt_len",
    "max_prompt_length": "orchestrator.max_prompt_len",
    "max_concurrent": "orchestrator.max_concurrent",
    "generation_timeout": "orchestrator.generation_timeout",
    "async_generation_timeout": "orchestrator.generation_timeout",
    "num_batches_ahead": "orchestrator.max_staleness",
    "mask_truncated_completions": "orchestrator.mask_truncated_completions",
    "zero_truncated_completions": "orchestrator.zero_truncated_completions",
    "max_tokens": "orchestrator.sampling.max_tokens",
    "max_completion_length": "orchestrator.sampling.max_tokens",
    "max_new_tokens": "orchestrator.sampling.max_tokens",
    "temperature": "orchestrator.sampling.temperature",
    "top_p": "orchestrator.sampling.top_p",
    "top_k": "orchestrator.sampling.top_k",
    "min_p": "orchestrator.sampling.min_p",
    "repetition_penalty": "orchestrator.sampling.repetition_penalty",
    "eval_steps": "eval.every",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "num_iterations": "trainer.updates_per_batch",
    "kl_coef": "trainer.beta",
    "ref_model_sync_steps": "trainer.ref_sync_steps",
    "ref_model_mixup_alpha": "trainer.ref_sync_alpha",
    "vllm_server_timeout": "inference.startup_timeout",
    "vllm_importance_sampling_clip_max": "trainer.importance_high",
    "vllm_importance_sampling_clip_min": "trainer.importance_low",
}

# {name: {value as text: the keys that it stands for}}; any other value is refused.
VALUES = {
    "bf16": {"True": {"trainer.dtype": "bf16"}, "False": {"trainer.dtype": "fp32"}},
    "fp16": {"True": {"trainer.dtype": "fp16"}, "False": {}},
    # The numbers that Transformers and TRL use if there is no eval_steps or ref_model_sync_steps.
    "eval_strategy": {"steps": {"eval.every": 500}, "no": {"eval.every": 0}},
    "save_strategy": {"steps": {}, "no": {"checkpoint.every": 0}},
    "sync_ref_model": {
        "True": {"trainer.ref_sync_steps": 512, "trainer.ref_sync_alpha": 0.6},
        "False": {"trainer.ref_sync_steps": 0},
    },
    "loss_type": {
        "dapo": {"trainer.loss": "grpo", "trainer.epsilon": 0.2, "trainer.epsilon_high": 0.2},
        "dr_grpo": {"trainer.loss": "dr_grpo", "trainer.epsilon": 0.2, "trainer.epsilon_high": 0.2},
        "cispo": {"trainer.loss": "cispo"},
    },
    "importance_sampling_level": {"token": {}},
    "vllm_importance_sampling_correction": {
        "False": {"trainer.importance": "", "trainer.importance_low": 0.0, "trainer.importance_high": 0.0},
    },
    "vllm_importance_sampling_mode": {
        name: {"trainer.importance": f"importance:{name}"}
        for name in ("sequence_mask", "sequence_truncate", "token_mask", "token_truncate")
    },
    "cast_lm_head_to_fp32": {"True": {"trainer.head_dtype": "fp32"}, "False": {}},
    "mask_env_responses": {"True": {}},
    "report_to": {
        "none": {},
        "wandb": {"tracker": "wandb"},
        "trackio": {"tracker": "trackio"},
        "tensorboard": {"tracker": "tensorboard"},
    },
    "logging_steps": {"1": {}},
}

OFF_POLICY_MASK = 'set trainer.importance = "importance:off_policy_mask" and trainer.importance_args = { high = ... }'
LEAVE_OUT_PENALTY = "leave it out: it changes the distribution token by token; see orchestrator.sampling"
BY_TOKENS = "set orchestrator.batch_size (rollouts per step); trainer.micro_batch_size sets how many tokens fit at once"

# {name, or (name, value): what to write instead}
REFUSED = {
    ("loss_type", "grpo"): 'its mean per sequence does not exist here; "dapo" takes the mean over all tokens',
    ("loss_type", "bnpo"): 'its mean over a local batch does not exist here; "dapo" takes the mean over the whole step',
    ("importance_sampling_level", "sequence"): 'leave it and loss_type out: set trainer.loss = "losses:gspo"',
    ("vllm_importance_sampling_correction", "True"): 'set vllm_importance_sampling_mode, e.g. "sequence_mask"',
    "off_policy_mask_threshold": OFF_POLICY_MASK,
    "router_aux_loss_coef": "leave it out: routers have no auxiliary loss here",
    "mask_ratio_low": 'set trainer.loss = "losses:icepop" and trainer.loss_args = { icepop_low = ... }',
    "mask_ratio_high": 'set trainer.loss = "losses:icepop" and trainer.loss_args = { ratio_cap = ... }',
    "per_device_train_batch_size": BY_TOKENS,
    "gradient_accumulation_steps": BY_TOKENS,
    "generation_batch_size": "set orchestrator.max_concurrent (rollouts under way)",
    "per_device_eval_batch_size": "leave it out: see orchestrator.max_concurrent and eval.num_examples",
    "ds3_gather_for_generation": "leave it out: weights are always gathered; see trainer.sync_backend",
    "log_completions": "leave it out: rollouts.jsonl has every rollout; show_every sets how often one is shown",
    "num_completions_to_print": "set show_every; rollouts.jsonl has every rollout",
    "num_epochs": "set max_steps",
    "num_train_epochs": "set max_steps",
    "gae_lambda": "leave it out: there is no critic; see trainer.advantage",
    "scale_rewards": "set trainer.advantage: mean, std or batch_std",
    "shuffle_dataset": "leave it out: rows are always shuffled by seed",
    "vllm_server_host": "set inference.urls",
    "vllm_server_port": "set inference.port",
    "use_liger_kernel": "leave it out: the head is always computed in chunks",
    "use_liger": "leave it out: the head is always computed in chunks",
    "adam_beta1": "leave it out: it is always 0.9; see trainer.adam_beta2",
    "save_only_model": "leave it out: checkpoints include the optimizer, final/ is the model alone",
    "remove_unused_columns": "leave it out: rows keep all their columns",
    "log_on_each_node": "leave it out: only rank 0 logs",
    "lora_use_rslora": "leave it out; for the same scale, multiply lora_alpha by the square root of lora_rank",
    "presence_penalty": LEAVE_OUT_PENALTY,
    "frequency_penalty": LEAVE_OUT_PENALTY,
}

PREFIX = "trainer.args."
# Keys of former versions that are keyword arguments of the loss now, with their former defaults, which are the losses'
# own today.
FORMER = {
    "epsilon": 0.0,
    "epsilon_high": 0.0,
    "delta": 0.0,
    "ratio_cap": 5.0,
    "icepop_low": 0.5,
    "dppo_mask": 0.2,
    "dppo_kl": 0.001,
}
# The former names of what these tables hold begin so: trainer.epsilon, trainer.importance_low.
ARGS = {"trainer.loss_args": "trainer.", "trainer.importance_args": "trainer.importance_"}
# Former keys that have become something else: what to write instead. Empty ones are dropped.
HOOKS = ("orchestrator.keep", "orchestrator.extra_groups")
A_METHOD = "this is a method of orchestrator.order's class now: see orchestrator.Order"
NO_CAP = "set epsilon_high as well, the cap of the ratio: e.g. 5.0 (TRL's own 0.2 would cap every token)"
NO_SFT = "leave it out: demonstrations carry their own weight, ce = 1.0 on the tokens to imitate and mask = 0"


def translate(given):
    """Returns {dotted key: value} of a file and its overrides with today's names for all the names above.

    Raises RunError with CONFIG for a name that is refused. If two names stand for one key, ours counts; otherwise the
    later one does, with the exceptions in turn(). Of an override, see without_ours."""
    return translate_former(translate_args(given))


def without_ours(given, override):
    """Returns `given` without our names for what an override calls by one of the names above: it would lose to them."""
    hidden = set()
    for key, value in override.items():
        name = key.removeprefix(PREFIX)
        stands_for = VALUES.get(name, {}).get(str(value)) or {RENAMED.get(name, f"trainer.{name}"): value}
        hidden |= set(stands_for) if name != key else {key}
    kept = {}
    for key, value in given.items():
        if key in ARGS and isinstance(value, dict):
            kept[key] = {name: x for name, x in value.items() if ARGS[key] + name not in hidden}
        elif key not in hidden or key in override:
            kept[key] = value
    return kept


def translate_args(given):
    """Replaces the names under [trainer.args]. What it returns may still have this project's former keys."""
    args = {key.removeprefix(PREFIX): value for key, value in given.items() if key.startswith(PREFIX)}
    loss = given.get("trainer.loss") or args.get("loss") or args.get("loss_type")
    if not loss and {"epsilon", "epsilon_high", "delta"} & set(args):
        loss = "dapo"  # TRL's default loss; our default would not use these
        given = {PREFIX + "loss_type": loss} | given
    has_cap = {"epsilon_high", "ratio_cap"} & set(args) or "trainer.ratio_cap" in given
    has_cap = has_cap or "ratio_cap" in str(given.get("trainer.loss_args"))
    if loss == args.get("loss_type") == "cispo" and not has_cap:
        refuse("loss_type", loss, NO_CAP)
    ours = {}
    for key, value in sorted(given.items(), key=turn):
        name = key.removeprefix(PREFIX)
        if name == key:
            ours[key] = value
            continue
        instead = REFUSED.get(name) or REFUSED.get((name, str(value)))
        if instead:
            refuse(name, value, instead)
        if name in VALUES:
            if str(value) not in VALUES[name]:
                refuse(name, value, f"must be one of ({', '.join(VALUES[name])})")
            ours |= VALUES[name][str(value)]
        elif name == "epsilon" and "epsilon_high" not in args:  # in TRL it is both edges then
            ours["trainer.epsilon"] = value
            ours["trainer.epsilon_high"] = value
        elif name == "epsilon_high" and loss == "cispo":  # in TRL it is the cap then
            ours["trainer.ratio_cap"] = value
        else:
            ours[RENAMED.get(name, f"trainer.{name}")] = value
    return ours


def translate_former(given):
    """Replaces the keys of this project's former versions, which a run's old config.toml has all of."""
    ours = dict(given)
    for key in HOOKS:
        value = ours.pop(key, "")
        if value:
            refuse(key, value, A_METHOD)
    if ours.get("trainer.loss") == "sft":
        refuse("trainer.loss", "sft", NO_SFT)
    importance = ours.get("trainer.importance")
    if isinstance(importance, str) and importance.startswith("losses:"):
        ours["trainer.importance"] = importance.replace("losses:", "importance:")
    loss_args = {}
    for name, default in FORMER.items():
        value = ours.pop(f"trainer.{name}", default)
        # One that was changed is kept even if the loss does not take it: the loss then refuses it.
        if value != default:
            loss_args[name] = value
    importance_args = {}
    for name in ("low", "high"):
        value = ours.pop(f"trainer.importance_{name}", 0)
        if value != 0:
            importance_args[name] = value
    for key, args in (("trainer.loss_args", loss_args), ("trainer.importance_args", importance_args)):
        if args:
            ours[key] = merged(args, ours.get(key, {}))
    return ours


def turn(item):
    """The sorting key of a name and its value. Our own names come last, so that they win. What turns something on
    (sync_ref_model = true) comes first, so that a number for it wins (ref_model_sync_steps = 9); what turns something
    off comes after the numbers and wins over them. bf16 = false comes before everything: it means fp32, unless
    fp16 = true says otherwise."""
    key, value = item
    stands_for = VALUES.get(key.removeprefix(PREFIX), {}).get(str(value))
    if not key.startswith(PREFIX):
        return 4
    if stands_for is None:
        return 2
    if key == f"{PREFIX}bf16" and not value:
        return 0
    return 1 if all(stands_for.values()) else 3


def refuse(name, value, instead):
    """Raises RunError for a key, or for a name under [trainer.args]."""
    key = name if "." in name else PREFIX + name
    raise RunError(CONFIG, f"key {key!r} = {value!r}: {instead}")
