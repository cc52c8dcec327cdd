"""tools/memory.py: what a run needs of a GPU, from the model's configuration alone. tests/nullgpu/ compares it with
what torch's own allocator says."""

import json
import subprocess
import sys

import pytest
import transformers
from conftest import BASE, ROOT

from tools import memory

# One process for all cases: it takes seconds to import torch.
SCRIPT = """
import json, sys, configs
from tools import memory
memory.without_content()
for overrides in json.loads(sys.argv[2]):
    cfg = configs.load_config(sys.argv[1], overrides)
    found = memory.need(cfg, 16 << 30, memory.is_shared(cfg))
    problems = memory.problems_of(found, cfg, 16 << 30, memory.is_shared(cfg))
    small = memory.problems_of(found, cfg, int(1.36 * 2**30), False)  # CUDA's context takes most of it
    tight = memory.problems_of(found, cfg, int(memory.CONTEXT + found.peak / 1.05), False)
    print(json.dumps(found._asdict() | {"problems": problems, "small": small, "tight": len(tight)}))
"""
LORA = "trainer.use_lora=true"
LAYERS, HIDDEN, INNER, VOCAB = 4, 256, 1024, 8192
HEAD_DIM, HEADS, KV_HEADS = 64, 4, 2


@pytest.fixture(scope="module")
def config_only(tmp_path_factory):
    """A directory with a configuration, and without weights or a tokenizer."""
    path = tmp_path_factory.mktemp("config_only")
    transformers.Qwen3Config(
        architectures=["Qwen3ForCausalLM"], hidden_size=HIDDEN, num_hidden_layers=LAYERS, intermediate_size=INNER,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, vocab_size=VOCAB,
        tie_word_embeddings=True,
    ).save_pretrained(path)  # fmt: skip
    return path


FULL = "trainer.use_lora=false"
KEPT = "trainer.gradient_checkpointing=false"
CASES = {
    "full": [FULL],
    "two ranks": [FULL, "trainer.gpus=2"],
    "offload": [FULL, "trainer.offload_optimizer=true"],
    "LoRA": [LORA, "trainer.lora_rank=8", "trainer.compile=true"],
    "larger": [LORA, "trainer.micro_batch_size=8"],
    "kept": [LORA, KEPT],
    "half": [LORA, "inference.args.gpu_memory_utilization=0.5"],
    "tensor parallel": [LORA, "inference.args.tensor_parallel_size=2", "inference.gpus=2", "trainer.dtype=bf16"],
    "no cache": [LORA, "inference.args.gpu_memory_utilization=0.03"],
    "elsewhere": [LORA, "inference.args.gpu_memory_utilization=0.03", 'inference.urls=["http://127.0.0.1:1"]'],
}


@pytest.fixture(scope="module")
def needed(tmp_path_factory, config_only):
    """{case: {"backward": bytes, ..., "problems": [text, ...]}}"""
    path = tmp_path_factory.mktemp("needed") / "a.toml"
    path.write_text(BASE.format(model=config_only))
    plain = [
        "trainer.dtype=bf16",
        "max_seq_len=512",
        "trainer.micro_batch_size=4",
        "trainer.gradient_checkpointing=true",
    ]
    cases = json.dumps([plain + overrides for overrides in CASES.values()])
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(path), cases], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, map(json.loads, done.stdout.splitlines())))


def num_params():
    head = HEADS * HEAD_DIM
    kv_head = KV_HEADS * HEAD_DIM
    attention = HIDDEN * (2 * head + 2 * kv_head) + 2 * HEAD_DIM
    return VOCAB * HIDDEN + LAYERS * (attention + 3 * HIDDEN * INNER + 2 * HIDDEN) + HIDDEN


def test_between_steps_there_are_weights_and_moments(needed):
    """By hand: fp32 weights and two moments, 12 bytes a parameter; a rank of two has half of them."""
    expected = 12 * num_params()
    assert needed["full"]["state"] == pytest.approx(expected, rel=0.01)
    assert needed["two ranks"]["state"] == pytest.approx(expected / 2, rel=0.01)
    factors = LAYERS * 8 * (3 * (HIDDEN + INNER) + 2 * (HIDDEN + HEADS * HEAD_DIM) + 2 * (HIDDEN + KV_HEADS * HEAD_DIM))
    assert needed["LoRA"]["state"] == pytest.approx(2 * num_params() + 12 * factors, rel=0.01)
    # A step's last backward has the gradients as well.
    assert needed["full"]["backward"] > needed["full"]["state"] + 4 * num_params()
    assert needed["full"]["backward"] - needed["offload"]["backward"] == pytest.approx(16 * num_params(), rel=0.01)


def test_activations_grow_with_the_micro_batch_and_shrink_with_recomputation(needed):
    """A block that is recomputed keeps its input; one that is not keeps the MLP's inner values at least."""
    tokens = 4 * 512
    peaks = {case: found["backward"] for case, found in needed.items()}
    assert peaks["larger"] - peaks["LoRA"] > LAYERS * tokens * HIDDEN * 2
    assert peaks["kept"] - peaks["LoRA"] > (LAYERS - 1) * tokens * 3 * INNER * 2
    assert peaks["two ranks"] < peaks["full"]


def test_what_is_left_of_vllms_share_is_its_cache(needed):
    """By hand: keys and values of all layers in bf16; two GPUs that share a server have half of the heads each."""
    found = needed["half"]
    assert found["share"] == 8 << 30
    per_token = 2 * LAYERS * KV_HEADS * HEAD_DIM * 2
    assert found["tokens"] == found["cache"] // per_token
    assert found["weights"] > 2 * num_params() and found["cache"] < found["share"] - found["weights"]
    halves = needed["tensor parallel"]
    assert halves["tokens"] == halves["cache"] // (per_token // 2)


def test_it_says_which_key_to_turn(needed, tmp_path, config_only):
    assert needed["LoRA"]["problems"] == []
    assert (needed["larger"]["tight"], needed["LoRA"]["tight"]) == (1, 0)  # compiled it needs a tenth less
    assert needed["LoRA"]["small"][0].endswith(": trainer.micro_batch_size or max_seq_len lower")
    assert ": trainer.use_lora = true, or more trainer.gpus, or trainer.offload" in needed["full"]["small"][0]
    assert "trainer.gradient_checkpointing = true" in needed["kept"]["small"][0]
    told = "vLLM's cache holds 0 tokens, fewer than max_seq_len: inference.args.gpu_memory_utilization"
    assert told in needed["no cache"]["problems"][0] and needed["elsewhere"]["problems"] == []
    (tmp_path / "a.toml").write_text(BASE.format(model=config_only))
    command = [sys.executable, "tools/memory.py", str(tmp_path / "a.toml"), LORA, "--gib", "0.1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "check: estimate for a GPU of 0 GiB: trainer 0." in done.stdout
    assert done.returncode == 2 and "[estimate] exit=2 does not fit: the trainer needs 0." in done.stderr


# --- one wrong line at a time: each of these alone saw a change of one line -------------------------------------------


def test_a_trainer_beside_vllm_has_what_is_left_of_the_card(make_cfg):
    gib = memory.GIB
    found = memory.Need(gib, 7 * gib, 7 * gib, 2 * gib, gib, 6 * gib, 8 * gib, 640)
    cfg = make_cfg("orchestrator.max_concurrent=30")
    assert memory.problems_of(found, cfg, 16 * gib, False) == []
    (problem,) = memory.problems_of(found, cfg, 16 * gib, True)
    assert problem.startswith("the trainer needs 7.0 GiB of 6.8: ")
    told = "room for 10 rollouts of max_seq_len at once (max_concurrent asks for 15"
    assert told in memory.describe(found, cfg, gib, 2)


def test_a_server_of_adapters_has_a_slot_for_each_version(needed):
    """max_staleness + 3 of them, of the rank that vLLM is told."""
    factors = LAYERS * 8 * (3 * (HIDDEN + INNER) + 2 * (HIDDEN + HEADS * HEAD_DIM) + 2 * (HIDDEN + KV_HEADS * HEAD_DIM))
    assert needed["LoRA"]["weights"] - needed["full"]["weights"] == 2 * 4 * factors
