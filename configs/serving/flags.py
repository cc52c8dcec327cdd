"""The command line of vLLM's server for a configuration."""

import json

CPU_RECEIVER = "configs.serving.cpu_receiver.WeightReceiver"
GPU_RECEIVER = "trainer.WeightReceiver"
ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"  # by its path, since vLLM turns "uni" into "mp"


def server_flags(cfg, name, has_gpus, shares_gpus):
    """Returns all flags but --port, as words."""
    return as_flags(server_options(cfg, name, has_gpus, shares_gpus))


def server_options(cfg, name, has_gpus, shares_gpus):
    """Returns {option: value}: ours, then those of inference.args, which replace them."""
    rank = 1 << (cfg.trainer.lora_rank - 1).bit_length()
    is_single = cfg.inference.args["tensor_parallel_size"] == 1
    ours = {
        "model": cfg.run.model,
        "host": "127.0.0.1",
        "served_model_name": name,
        "dtype": cfg.trainer.dtype.replace("fp", "float").replace("bf", "bfloat"),
        "max_model_len": cfg.run.max_seq_len,
        "seed": str(cfg.run.seed),
        "logprobs_mode": "processed_logprobs",
        "scheduling_policy": "priority",
        "worker_extension_cls": GPU_RECEIVER if has_gpus else CPU_RECEIVER,
        "chat_template": cfg.run.chat_template,
        "enable_lora": cfg.sends_adapters,
        "max_lora_rank": max(8, rank) if cfg.sends_adapters else None,  # vLLM takes powers of two from 8 to 512
        "max_loras": cfg.orchestrator.max_staleness + 3 if cfg.sends_adapters else None,
        "enforce_eager": not has_gpus,
        "distributed_executor_backend": ONE_PROCESS if is_single and not has_gpus else None,
        "gpu_memory_utilization": 0.4 if shares_gpus else None,
        "hf_overrides": {"head_dtype": "float32"} if cfg.trainer.head_dtype else None,
        "enable_sleep_mode": cfg.inference.sleep,
        "enable_return_routed_experts": cfg.trainer.replay_routing,
    }
    given = {key: value for key, value in ours.items() if value}
    return given | cfg.inference.args


def as_flags(options):
    """Returns a table as words: true becomes --key, false --no-key, and a list several words."""
    flags = []
    for key, value in options.items():
        name = key.replace("_", "-")
        flags.append(f"--no-{name}" if value is False else f"--{name}")
        if isinstance(value, list):
            flags += map(str, value)
        elif not isinstance(value, bool):
            flags.append(value if isinstance(value, str) else json.dumps(value))
    return flags
