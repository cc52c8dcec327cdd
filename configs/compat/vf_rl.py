"""Names of vf-rl's [trainer.args] table and of TRL's GRPOTrainer, and what they are here.

configs/__init__.py reads this for a file with a [trainer.args] table and for no other. A name gets the meaning that it
has there, or is refused with what to write instead; but a number (eval_steps, ref_model_sync_steps) also turns on what
it is for. Names of ours under [trainer] are taken as they are."""

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
    "vllm_importance_sampling_clip_max": "trainer.importance_args.high",
    "vllm_importance_sampling_clip_min": "trainer.importance_args.low",
}

# name -> value (as text) -> the keys that it stands for; another value is refused
VALUES = {
    "bf16": {"True": {"trainer.dtype": "bf16"}, "False": {"trainer.dtype": "fp32"}},
    "fp16": {"True": {"trainer.dtype": "fp16"}, "False": {}},
    # without eval_steps and ref_model_sync_steps: the numbers that Transformers and TRL have then
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

LEAVE_OUT_PENALTY = "leave it out: it changes the distribution token by token; see orchestrator.sampling"
BY_TOKENS = "set orchestrator.batch_size (rollouts per step); a batch is cut up by tokens, see trainer.micro_batch_size"

# name, or (name, value) -> what to write instead
REFUSED = {
    ("loss_type", "grpo"): 'TRL takes a mean per sequence first, which is not here; "dapo" is the mean over all tokens',
    ("loss_type", "bnpo"): 'TRL takes the mean over the tokens of a local batch; "dapo" is that of the whole step',
    ("importance_sampling_level", "sequence"): 'leave it and loss_type out: set trainer.loss = "losses:gspo"',
    ("vllm_importance_sampling_correction", "True"): 'set vllm_importance_sampling_mode, e.g. "sequence_mask"',
    "off_policy_mask_threshold": 'set trainer.importance = "losses:off_policy_mask" and trainer.importance_high',
    "router_aux_loss_coef": "leave it out: there is no auxiliary loss for a router here",
    "mask_ratio_low": 'leave it out: set trainer.loss = "losses:icepop" and trainer.icepop_low',
    "mask_ratio_high": 'leave it out: set trainer.loss = "losses:icepop" and trainer.ratio_cap',
    "per_device_train_batch_size": BY_TOKENS,
    "gradient_accumulation_steps": BY_TOKENS,
    "generation_batch_size": "set orchestrator.max_concurrent (rollouts under way)",
    "per_device_eval_batch_size": "leave it out: see orchestrator.max_concurrent; eval.num_examples sets eval's size",
    "ds3_gather_for_generation": "leave it out: weights are always gathered; see trainer.sync_backend",
    "log_completions": "leave it out: every rollout is in rollouts.jsonl; show_every sets how often one is shown",
    "num_completions_to_print": "set show_every; every rollout is in rollouts.jsonl",
    "num_epochs": "set max_steps",
    "num_train_epochs": "set max_steps",
    "gae_lambda": "leave it out: there is no critic; see trainer.advantage",
    "scale_rewards": "set trainer.advantage: mean, std or batch_std",
    "shuffle_dataset": "leave it out: the order is always a shuffle given by seed",
    "vllm_server_host": "set inference.urls",
    "vllm_server_port": "set inference.port",
    "use_liger_kernel": "leave it out: the head is always computed in chunks",
    "use_liger": "leave it out: the head is always computed in chunks",
    "adam_beta1": "leave it out: 0.9; see trainer.adam_beta2",
    "save_only_model": "leave it out: checkpoints hold the optimizer, final/ the model alone",
    "remove_unused_columns": "leave it out: rows keep what they have",
    "log_on_each_node": "leave it out: rank 0 alone logs",
    "lora_use_rslora": "leave it out; rank-stabilised: lora_alpha times the square root of lora_rank",
    "presence_penalty": LEAVE_OUT_PENALTY,
    "frequency_penalty": LEAVE_OUT_PENALTY,
}

PREFIX = "trainer.args."


def translate(given):
    """{dotted key: value} of a file and its overrides -> the same with our names for those of [trainer.args].

    RunError 2 for what is refused. Of two names for one key ours holds, else the later, with exceptions in turn()."""
    args = {key.removeprefix(PREFIX): value for key, value in given.items() if key.startswith(PREFIX)}
    loss = given.get("trainer.loss") or args.get("loss") or args.get("loss_type")
    if not loss and {"epsilon", "epsilon_high", "delta"} & set(args):
        loss = "dapo"  # TRL's default; with ours they would do nothing
        given = {PREFIX + "loss_type": loss} | given
    has_cap = "epsilon_high" in args or "ratio_cap" in args or "trainer.ratio_cap" in given
    if loss == args.get("loss_type") == "cispo" and not has_cap:
        refuse(
            "loss_type", loss, "set epsilon_high, too, the cap of the ratio: e.g. 5.0 (TRL's own 0.2 caps all tokens)"
        )
    ours = {}
    for key, value in sorted(given.items(), key=turn):
        name = key.removeprefix(PREFIX)
        if name == key:
            ours[key] = value
        elif instead := REFUSED.get(name) or REFUSED.get((name, str(value))):
            refuse(name, value, instead)
        elif name in VALUES:
            if str(value) not in VALUES[name]:
                refuse(name, value, f"must be one of {list(VALUES[name])}")
            ours |= VALUES[name][str(value)]
        elif name == "epsilon" and "epsilon_high" not in args:  # TRL: both edges
            ours |= {"trainer.epsilon": value, "trainer.epsilon_high": value}
        elif name == "epsilon_high" and loss == "cispo":  # TRL: no edge, but the cap
            ours["trainer.ratio_cap"] = value
        else:
            ours[RENAMED.get(name, f"trainer.{name}")] = value
    return ours


def turn(item):
    """For sorting. Our own names come last, and hold. What turns something on (sync_ref_model = true) comes first, so
    that a number for it holds (ref_model_sync_steps = 9); what turns it off comes after, and holds against any number.
    bf16 = false comes before all: it says fp32 where no fp16 = true says more."""
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
    raise RunError(CONFIG, f"key '{PREFIX}{name}' = {value!r}: {instead}")
