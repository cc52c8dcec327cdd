"""Estimates a run's GPU memory from the model's configuration alone: no GPU, no weights. `--check` prints it as well.

    python tools/memory.py config.toml [table.key=value ...] [--gib 24]     # else: the smallest card that it fits

The trainer's numbers come from trainer.py itself, in which every tensor has a shape and no content (FakeTensorMode),
and a group of ranks of which only the first exists. It is eager; torch.compile needs a little less. vLLM's are
arithmetic: its cache of keys and values gets what the weights, CUDA and a sampling pass leave of its share."""

import copy
import os
import sys
import weakref
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import transformers
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import configs
import trainer
from configs.runtime.role import CONFIG, RunError, require, run_role
from configs.serving.flags import server_options

GIB = 2**30
CARDS = (16, 24, 32, 40, 48, 80, 96, 141, 180)  # GiB of the cards that are sold
CONTEXT = 1.25 * GIB  # of the trainer: CUDA's context, the kernels' code, NCCL's buffers
SERVER_CONTEXT = 0.45 * GIB
DEFAULT_SHARE = 0.92  # vLLM's gpu_memory_utilization


class Need(NamedTuple):
    """Bytes on one of the trainer's GPUs, and on one of vLLM's."""

    state: int  # of the trainer between steps: weights, Adam's moments
    forward: int  # the peak in each phase of a step
    backward: int
    optimizer: int
    weights: int  # of vLLM, with the slots for adapters
    cache: int  # what is left of its share for keys and values
    share: int
    tokens: int  # how many of them fit into the cache

    @property
    def peak(self):
        return max(self.forward, self.backward, self.optimizer)


class Peak(TorchDispatchMode):
    """Counts the bytes of all storages that are alive, and the most that there ever were."""

    def __init__(self, tensors):
        super().__init__()
        self.sizes = {}
        self.now = 0
        self.most = 0
        self.look_at(tensors)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.look_at(tree_leaves(result))
        return result

    def __enter__(self):
        self.resize = resize = torch.UntypedStorage.resize_

        def resize_and_count(storage, size):  # FSDP2 frees a gathered parameter so
            resize(storage, size)
            self.set(storage._cdata, size)

        torch.UntypedStorage.resize_ = resize_and_count
        return super().__enter__()

    def __exit__(self, *error):
        torch.UntypedStorage.resize_ = self.resize
        return super().__exit__(*error)

    def look_at(self, tensors):
        for tensor in tensors:
            if torch.is_tensor(tensor):
                storage = trainer.local(tensor).untyped_storage()
                if storage._cdata not in self.sizes:
                    weakref.finalize(storage, self.set, storage._cdata, 0)
                self.set(storage._cdata, storage.nbytes())

    def set(self, key, size):
        self.now += size - self.sizes.pop(key, 0)
        if size:
            self.sizes[key] = size
        self.most = max(self.most, self.now)

    def take_most(self):
        """The peak since the last call."""
        most = self.most
        self.most = self.now
        return most


# --- the trainer ------------------------------------------------------------------------------------------------------


def without_content():
    """Makes torch and transformers build models without reading files or computing anything."""
    make_mesh = dist.init_device_mesh

    def real_mesh(*args, **kwargs):  # its tensors hold the ranks' numbers
        with unset_fake_temporarily():
            return make_mesh(*args, **kwargs)

    def from_config(name, config, dtype, attn_implementation):
        dtype = torch.float32 if dtype == "auto" else dtype  # shard() would make it that
        return transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attn_implementation
        )

    dist.init_device_mesh = real_mesh
    transformers.AutoModelForCausalLM.from_pretrained = from_config
    torch.nn.Module._apply = lambda module, function, recurse=True: module  # to(), float(): nothing moves
    torch.cuda.is_available = lambda: False  # the GPU that is here is not used


def largest_micro(cfg):
    num_rows = cfg.trainer.micro_batch_size
    width = cfg.run.max_seq_len
    index_N = torch.arange(num_rows * width).view(num_rows, width)[:, :-1].flatten()
    return {
        "ids_BW": torch.zeros(num_rows, width, dtype=torch.long),
        "index_N": index_N,
        "tokens_N": torch.zeros(len(index_N), dtype=torch.int32),
        "temperature_N": torch.ones(len(index_N)),
    }


def trainer_need(cfg, card):
    """Bytes on rank 0's GPU of `card` bytes: {phase: peak} of a step that is not the first, with two of the largest
    micro-batches, and `state`, what is there between steps."""
    cfg = copy.copy(cfg)
    cfg.trainer = cfg.trainer._replace(compile=False)
    num_ranks = cfg.trainer.gpus * int(os.environ.get("NNODES") or 1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    peaks = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        policy = trainer.build_policy(cfg)
        policy.CHUNK = card >> 9
        optimizer = trainer.make_optimizer(policy, cfg.trainer)
        micro = largest_micro(cfg)
        params = list(policy.trained().values())
        tensors = [*policy.parameters(), *policy.buffers(), *policy.extra.values()]
        with Peak(tensors) as memory:
            for _ in range(2):  # Adam's moments are there from the second micro-batch on
                logp_N, entropy_N = policy(micro)
                peaks["forward"] = memory.take_most()
                logp_N.sum().backward()
                del logp_N, entropy_N
                peaks["backward"] = memory.take_most()
                gradients = sum(p.numel() * p.element_size() for p in map(trainer.local, params))
                torch.nn.utils.clip_grad_norm_(params, 1.0)
                optimizer.step()
                peaks["optimizer"] = memory.take_most()
                optimizer.zero_grad()
            state = memory.now
    dist.destroy_process_group()
    # A step's second micro-batch runs beside the gradients of the first.
    peaks["forward"] += gradients
    peaks["backward"] += gradients
    if cfg.trainer.offload_optimizer:  # they are in host memory
        peaks = {phase: peak - state - gradients for phase, peak in peaks.items()}
        state = 0
    return peaks | {"state": state}


# --- vLLM -------------------------------------------------------------------------------------------------------------


def server_need(cfg, card, shares):
    """Bytes on one of a server's GPUs: weights, cache, share, and the tokens whose keys and values fit into it."""
    options = server_options(cfg, "", True, shares)
    num_gpus = options["tensor_parallel_size"]
    config = transformers.AutoConfig.from_pretrained(cfg.run.model)
    text = config.get_text_config()
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    size = 4 if cfg.trainer.dtype == "fp32" else 2
    num_params = sum(p.numel() for p in model.parameters())
    if cfg.sends_adapters:
        trainer.add_lora(model, cfg.trainer)
        num_lora = sum(p.numel() for p in model.parameters()) - num_params
        num_params += num_lora * options["max_loras"] * options["max_lora_rank"] // cfg.trainer.lora_rank
    # A profiling run samples for all sequences at once: logits, their sorted copy and probabilities, in fp32.
    most = options.get("max_num_seqs", 1024 if card > 64 * GIB else 256)
    used = SERVER_CONTEXT + 3 * 4 * most * text.vocab_size
    weights = num_params * size // num_gpus
    share = int(card * options.get("gpu_memory_utilization", DEFAULT_SHARE))
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    kv_heads = max(1, kv_heads // num_gpus)
    per_token = 2 * text.num_hidden_layers * kv_heads * head_dim * size
    cache = int(share - weights - used)
    return {"weights": weights, "cache": cache, "share": share, "tokens": cache // per_token}


# --- does it fit? -----------------------------------------------------------------------------------------------------


def need(cfg, card, shares):
    return Need(**trainer_need(cfg, card), **server_need(cfg, card, shares))


def problems_of(found, cfg, card, shares):
    """What does not fit, each with the keys to turn."""
    problems = []
    free = card - CONTEXT
    if shares and not cfg.inference.sleep:
        free -= found.share
    slack = 1.1 if cfg.trainer.compile else 1.0  # with it the estimate is a tenth too high
    if found.peak > slack * free:
        what = f"the trainer needs {found.peak / GIB:.1f} GiB of {free / GIB:.1f}"
        problems.append(f"{what}: {keys_to_turn(found, free, cfg.trainer)}")
    if found.tokens < cfg.run.max_seq_len and not cfg.flat["inference.urls"]:
        what = f"vLLM's cache holds {max(0, found.tokens):,} tokens, fewer than max_seq_len"
        problems.append(f"{what}: inference.args.gpu_memory_utilization higher, or tensor_parallel_size")
    return problems


def keys_to_turn(found, free, t):
    if not t.gradient_checkpointing:
        return "trainer.gradient_checkpointing = true"
    if found.state < free / 2:
        return "trainer.micro_batch_size or max_seq_len lower"
    keys = ["more trainer.gpus", "trainer.offload_optimizer = true"]
    if not t.use_lora:
        keys.insert(0, "trainer.use_lora = true")
    return ", or ".join(keys)


def describe(found, cfg, card, num_servers):
    rollouts = max(0, found.tokens) // cfg.run.max_seq_len
    wanted = cfg.orchestrator.max_concurrent // max(1, num_servers)
    trains = f"trainer {found.peak / GIB:.1f} GiB ({found.state / GIB:.1f} between steps)"
    serves = f"vLLM {found.share / GIB:.1f} GiB, room for {rollouts} rollouts of max_seq_len at once"
    queue = f" (max_concurrent asks for {wanted}: others wait or are preempted)" if rollouts < wanted else ""
    return f"estimate for a GPU of {card / GIB:.0f} GiB: {trains}; {serves}{queue}"


def estimate(cfg, cards):
    """Prints the estimate for the first of the cards (bytes) that the run fits on, or for the last one. Returns what
    does not fit on that."""
    without_content()
    num_servers = cfg.inference.gpus // cfg.inference.args["tensor_parallel_size"]
    for card in cards:
        found = need(cfg, card, is_shared(cfg))
        problems = problems_of(found, cfg, card, is_shared(cfg))
        if not problems:
            break
    print(f"check: {describe(found, cfg, card, num_servers)}", flush=True)
    return problems


def is_shared(cfg):
    """Does the trainer use vLLM's GPU? The launcher says it; without one a share of at most half does."""
    share = cfg.inference.args.get("gpu_memory_utilization", 1)
    guess = share <= 0.5 or cfg.inference.sleep
    return bool(int(os.environ.get("ROLEMODEL_SHARES", guess)))


def main(argv):
    cards = [gib * GIB for gib in CARDS]
    if torch.cuda.is_available():
        cards = [torch.cuda.get_device_properties(0).total_memory]
    if "--gib" in argv:
        at = argv.index("--gib")
        require(argv[at + 1 :], CONFIG, "--gib needs a number")
        cards = [int(float(argv[at + 1]) * GIB)]
        argv = argv[:at] + argv[at + 2 :]
    cfg = configs.arguments(__doc__, argv)
    try:
        transformers.AutoConfig.from_pretrained(cfg.run.model)
    except Exception as e:  # from the hub, the file system or JSON
        raise RunError(CONFIG, f"model = {cfg.run.model!r}: {e}") from e
    try:
        problems = estimate(cfg, cards)
    except (DataDependentOutputException, DynamicOutputShapeException) as e:  # a mixture of experts asks for values
        print(f"check: SKIP estimate of the memory: this model's shapes depend on values ({e})", flush=True)
        return
    require(not problems, CONFIG, f"does not fit: {'; '.join(problems)}")


if __name__ == "__main__":
    run_role("estimate", "tools.memory")
