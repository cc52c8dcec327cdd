"""Every causal model: random tiny ones of many families against their own forward, one row at a time."""

import os
import statistics
import subprocess
import sys

import pytest
import torch
import transformers
from conftest import BASE, ROOT, VLLM, lines, make_sequences
from ranks import replays
from safetensors.torch import load_file
from test_trainer import (
    CPU,
    adamw,
    assert_gradients_of,
    batch_of,
    gradients,
    plain_model,
    scored,
    weights_of,
    write_batches,
)

import trainer
from configs.runtime.role import RunError

ADAPTER = "adapter_model.safetensors"
WINDOW = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
GROUPED = {"intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
ATTENTION = GROUPED | {"head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 16}
SHARED = {"shared_expert_intermediate_size": 32}
PAD = {"pad_token_id": 0}
FAMILIES = {  # windows are shorter than the rows; dropout and noise are as their configurations have them, or on
    "Qwen2": GROUPED, "Qwen3": ATTENTION, "Llama": ATTENTION, "Mistral": ATTENTION | {"sliding_window": 5},
    "Gemma2": ATTENTION | WINDOW | {"query_pre_attn_scalar": 16}, "Gemma3": ATTENTION | WINDOW,
    "Phi3": GROUPED | PAD | {"resid_pdrop": 0.1}, "Olmo2": GROUPED | PAD, "SmolLM3": GROUPED | PAD,
    "Granite": GROUPED | {"logits_scaling": 8.0, "attention_multiplier": 0.1, "embedding_multiplier": 12.0},
    "Cohere2": ATTENTION | {"sliding_window": 5, "logit_scale": 0.3}, "Exaone4": ATTENTION | WINDOW,
    "GPT2": {"n_head": 4}, "GPTNeoX": GROUPED | {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "OPT": {"num_attention_heads": 4, "ffn_dim": 96, "word_embed_proj_dim": 64},
    "Starcoder2": GROUPED | {"residual_dropout": 0.1, "embedding_dropout": 0.1}, "Nemotron": GROUPED,
    "Falcon": {"num_attention_heads": 4}, "StableLm": GROUPED, "Glm4": ATTENTION | PAD,
    "Lfm2": ATTENTION | {"layer_types": ["conv", "full_attention"]}, "Qwen3_5": ATTENTION | LINEAR,
    "Qwen3Next": ATTENTION | LINEAR | EXPERTS | SHARED, "Qwen3_5Moe": ATTENTION | LINEAR | EXPERTS | SHARED,
    "Mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "expand": 2, "chunk_size": 16},
    "FalconH1": ATTENTION | MAMBA | {"mamba_d_ssm": 128}, "Bamba": GROUPED | MAMBA | {"attn_layer_indices": [1]},
    "GraniteMoeHybrid": GROUPED | MAMBA | LOCAL | {
        "shared_intermediate_size": 64, "layer_types": ["mamba", "attention"],
    },
    "Qwen3Moe": ATTENTION | EXPERTS, "Mixtral": GROUPED | LOCAL, "GptOss": ATTENTION | LOCAL | WINDOW,
    "DeepseekV3": GROUPED | {
        "num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "qk_nope_head_dim": 8, "first_k_dense_replace": 1,
    },
    "Glm4Moe": ATTENTION | PAD | {
        "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "Ernie4_5_Moe": GROUPED | PAD | {
        "moe_intermediate_size": 32, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
}  # fmt: skip
ROPE = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LONG = {"long_factor": [4.0] * 8, "short_factor": [1.0] * 8}
REFUSED = {
    "Phimoe": GROUPED | LOCAL,  # draws experts in training
    "HyperCLOVAX": ATTENTION | {"logits_scaling": 0.1},  # logits are not head(base model)
    "ModernBertDecoder": {"intermediate_size": 96, "num_attention_heads": 4, "sliding_window": 6} | PAD,
    "RecurrentGemma": ATTENTION | {"lru_width": 64, "attention_window_size": 5},
    # RoPE that depends on the length of the row
    "Llama": ATTENTION | {"max_position_embeddings": 32, "rope_parameters": ROPE | {"rope_type": "dynamic"}},
    "Phi3": GROUPED | PAD | {
        "max_position_embeddings": 128, "original_max_position_embeddings": 32,
        "rope_parameters": ROPE | LONG | {"rope_type": "longrope"},
    },
    "Llama4": ATTENTION | PAD | {"intermediate_size_mlp": 96, "num_local_experts": 2},  # has no base model
}  # fmt: skip


def make_model(family, shape, path, seed=0):
    """Two layers of 64, 102 ids, logits with as much contrast as a trained model's; as saved by Transformers."""
    config = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    kind = getattr(transformers, f"{family}ForCausalLM", None) or getattr(transformers, f"{family}LMHeadModel")
    base = {"vocab_size": 102, "hidden_size": 64, "num_hidden_layers": 2, "tie_word_embeddings": False}
    torch.manual_seed(seed)
    model = kind(config(**base | shape))
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=0.5)
    for name, w in model.state_dict().items():
        if name.endswith("score_correction_bias"):  # of a router: of some families a buffer, of others a parameter
            w.copy_(torch.tensor([0.3, -0.3, 0.31, -0.29]))
    model.save_pretrained(path)
    return path


def weights_in(path):
    """{name: tensor} of a directory's files."""
    found = {}
    for file in path.glob("*.safetensors"):
        found |= load_file(file)
    return found


def sent(policy, cfg):
    """What a sync broadcasts."""
    return weights_of(policy, trainer.DTYPES[cfg.trainer.dtype], cfg.sends_adapters)


PLAIN = "Qwen3 Llama Gemma3 Phi3 GPT2 Granite Lfm2 Qwen3_5 Mamba2 Qwen3Moe GptOss DeepseekV3 Ernie4_5_Moe".split()


@pytest.mark.parametrize("family", [f if f in PLAIN else pytest.param(f, marks=pytest.mark.long) for f in FAMILIES])
def test_every_family(family, make_cfg, tmp_path):
    """Padded and in training mode it is the model alone, it trains, and goes out as its checkpoint has it."""
    path = make_model(family, FAMILIES[family], tmp_path / "model")
    cfg, batch = make_cfg(model=path), batch_of(tmp_path, make_sequences(10, longest=30))
    policy, plain = trainer.build_policy(cfg), plain_model(cfg)
    trainer.check_policy(policy, cfg)
    assert max(len(s["tokens"]) for s in batch.sequences) > 20
    logp_N, expected_N = policy(trainer.collate(batch.sequences, CPU))[0], scored(plain, batch.sequences)[0]
    torch.testing.assert_close(logp_N, expected_N, atol=1e-5, rtol=1e-5)
    logp_N.sum().backward()
    expected_N.sum().backward()
    assert_gradients_of(plain, policy, 2e-4)

    tensors, written = sent(policy, cfg), weights_in(path)
    assert set(tensors) == set(written) and all(torch.equal(w, written[name]) for name, w in tensors.items())
    blocks = list(trainer.stream_weights(policy.model, torch.float32, False))
    assert len(blocks) > 2 and max(map(len, blocks)) < len(written) - 2  # a transformer block at most at a time

    for dtype in ("fp32", "bf16"):
        cfg = make_cfg(f"trainer.dtype={dtype}", model=path)
        policy = trainer.build_policy(cfg)
        trainer.check_policy(policy, cfg)
        metrics, before_T = trainer.train_step(policy, adamw(policy), batch, 0, cfg)
        assert not metrics["optim/skipped"] and metrics["optim/grad_norm"] > 0
        after_T = gradients(cfg, batch, policy)[2]
        assert after_T.isfinite().all() and (after_T - before_T).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["DeepseekV3", "Glm4Moe", "Ernie4_5_Moe"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_biases_of_routers(dtype, family, make_cfg, models, tmp_path):
    """What decides which experts a token gets, and has no gradient, is sent, kept in checkpoints and in final/."""
    path = make_model(family, FAMILIES[family], tmp_path / "model")
    transformers.AutoTokenizer.from_pretrained(models["untied"]).save_pretrained(path)
    cfg, batch = make_cfg(f"trainer.dtype={dtype}", model=path), batch_of(tmp_path, make_sequences(10, longest=30))
    policy, micro = trainer.build_policy(cfg), trainer.collate(batch.sequences, CPU)
    optimizer = adamw(policy, 1e-2)
    trainer.train_step(policy, optimizer, batch, 0, cfg)
    logp_N = policy(micro)[0]
    ((name, bias),) = [(name, w) for name, w in sent(policy, cfg).items() if name.endswith("score_correction_bias")]
    at_most = 1e-3 if (dtype, family) == ("bf16", "Ernie4_5_Moe") else 0  # a parameter, so the trainer has it in bf16
    expected = torch.tensor([0.3, -0.3, 0.31, -0.29]).view_as(bias)
    torch.testing.assert_close(bias.float(), expected, atol=at_most, rtol=0)

    (tmp_path / "checkpoints").mkdir()
    trainer.save_checkpoint(tmp_path, 1, policy, optimizer, cfg)
    again = trainer.build_policy(cfg)
    assert trainer.load_checkpoint(tmp_path / "checkpoints" / "step_000001", again, adamw(again), cfg) == 1
    assert torch.equal(again(micro)[0], logp_N)
    trainer.write_final(tmp_path, again, cfg)
    final = trainer.build_policy(make_cfg(f"trainer.dtype={dtype}", model=tmp_path / "final"))
    torch.testing.assert_close(final(micro)[0], logp_N, atol=1e-5 if dtype == "fp32" else 0.1, rtol=0)
    assert torch.equal(weights_in(tmp_path / "final")[name], bias)


COMPOSITE = {  # with a tower for images, which is neither trained nor wanted
    "Qwen3_5": (LINEAR, {"depth": 1, "num_heads": 2, "out_hidden_size": 64}),
    "Gemma3": (WINDOW, {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}),
}


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("family", COMPOSITE)
def test_composite_checkpoints(family, lora, make_cfg, models, tmp_path):
    """What AutoModelForCausalLM loads of them trains, and goes out under the names that the server's copy has."""
    text, images = COMPOSITE[family]
    base = {"vocab_size": 102, "hidden_size": 64, "num_hidden_layers": 2, "tie_word_embeddings": False}
    config = getattr(transformers, f"{family}Config")(
        text_config=base | ATTENTION | text, vision_config={"hidden_size": 32, "intermediate_size": 48} | images,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    path = tmp_path / "model"
    whole = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    torch.nn.init.normal_(whole.get_output_embeddings().weight, std=0.5)
    whole.save_pretrained(path)
    transformers.AutoTokenizer.from_pretrained(models["untied"]).save_pretrained(path)
    (path / "preprocessor_config.json").write_text('{"image_processor_type": "of images"}')
    cfg = make_cfg(f"trainer.use_lora={str(lora).lower()}", model=path)
    batch, policy = batch_of(tmp_path, make_sequences(10, longest=30)), trainer.build_policy(cfg)
    trainer.check_policy(policy, cfg)
    assert not any("vision" in name or "visual" in name for name in policy.trained())
    before = {name: w.clone() for name, w in sent(policy, cfg).items()}
    metrics, _ = trainer.train_step(policy, adamw(policy, 1e-2), batch, 0, cfg)
    assert metrics["optim/grad_norm"] > 0 and all(p.grad is None for p in policy.parameters())

    tensors, written = sent(policy, cfg), weights_in(path)
    assert set(tensors) <= set(written) and all(torch.equal(w, written[name]) for name, w in before.items())
    moved = {name for name, w in tensors.items() if not torch.equal(w, before[name])}
    assert moved and not any("vision" in name or "visual" in name for name in moved)
    trainer.write_final(tmp_path, policy, cfg)
    if lora:  # vLLM finds an adapter's modules by the names of the checkpoint, and skips the others without a word
        names = {name.removeprefix("base_model.model.") for name in load_file(tmp_path / "final" / ADAPTER)}
        assert len(names) > 8 and {f"{name.partition('.lora_')[0]}.weight" for name in names} <= set(written)
        cfg = make_cfg("trainer.use_lora=true", "trainer.dtype=bf16", model=path)
        assert {name for name in sent(trainer.build_policy(cfg), cfg) if "lora" in name} == names
    else:
        assert "of images" in (tmp_path / "final" / "preprocessor_config.json").read_text()  # vLLM loads none without
        again = trainer.build_policy(make_cfg(model=tmp_path / "final"))
        micro = trainer.collate(batch.sequences, CPU)
        torch.testing.assert_close(again(micro)[0], policy(micro)[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["Qwen3", "Gemma3", "GptOss"])
def test_attention_by_name(family, make_cfg, tmp_path):
    """Each computes the same; the name is Transformers' own, and none leaves out GPT-OSS's sinks."""
    path = make_model(family, FAMILIES[family], tmp_path / "model")
    micro = trainer.collate(batch_of(tmp_path, make_sequences(10, longest=30)).sequences, CPU)
    usual_N = trainer.build_policy(make_cfg(model=path))(micro)[0]
    for kind in ["eager"] if family == "GptOss" else ["eager", "sdpa"]:
        cfg = make_cfg(f"trainer.attn_implementation={kind}", model=path)
        policy = trainer.build_policy(cfg)
        trainer.check_policy(policy, cfg)
        assert policy.model.config._attn_implementation == kind
        torch.testing.assert_close(policy(micro)[0], usual_N, atol=1e-5, rtol=1e-5)
    with pytest.raises(ImportError, match="installed"):
        trainer.build_policy(make_cfg("trainer.attn_implementation=flash_attention_3", model=path))


# --- what check_policy refuses ----------------------------------------------------------------------------------------

DIFFERS = "padded rows in training mode differ from its own forward"


@pytest.mark.parametrize("family", REFUSED)
def test_what_is_not_understood_is_refused(family, make_cfg, tmp_path):
    cfg = make_cfg(model=make_model(family, REFUSED[family], tmp_path / "model"))
    with pytest.raises(RunError, match="no base model of its own" if family == "Llama4" else DIFFERS) as error:
        trainer.check_policy(trainer.build_policy(cfg), cfg)
    assert error.value.code == 2


def with_dropout(policy):
    for module in policy.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1


def with_a_scaled_head(policy):
    policy.scale *= 1.1


def with_a_leak(policy):
    """Each row's first hidden state gets the last of the row before it, as of a state that is not reset."""
    base = policy.model.base_model

    def leak(module, args, kwargs, output):
        hidden_BWD = output.last_hidden_state
        output.last_hidden_state = torch.cat([hidden_BWD[:1], hidden_BWD[1:] + 0.1 * hidden_BWD[:-1, -1:]])

    base.register_forward_hook(leak, with_kwargs=True)


@pytest.mark.parametrize("mutate", [with_dropout, with_a_scaled_head, with_a_leak])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_wrong_network_is_refused(mutate, dtype, make_cfg, tmp_path):
    cfg = make_cfg(f"trainer.dtype={dtype}", model=make_model("Llama", FAMILIES["Llama"], tmp_path / "model"))
    policy = trainer.build_policy(cfg)
    trainer.check_policy(policy, cfg)
    mutate(policy)
    with pytest.raises(RunError, match=DIFFERS) as error:
        trainer.check_policy(policy, cfg)
    assert error.value.code == 2


def test_a_replay_refuses_a_network_that_is_not_understood(make_cfg, tmp_path, monkeypatch):
    """No server is there to differ from."""
    build = trainer.build_policy

    def build_wrong(cfg):
        policy = build(cfg)
        with_a_scaled_head(policy)
        return policy

    make_cfg(model=make_model("Llama", FAMILIES["Llama"], tmp_path / "model"))
    saved = write_batches(tmp_path / "saved", 1)
    monkeypatch.setattr(trainer, "build_policy", build_wrong)
    with pytest.raises(RunError, match=DIFFERS) as error:
        replays([[tmp_path / "test.toml", "--replay", saved, f"output_dir={tmp_path}"]])
    assert error.value.code == 2


# --- on the real vLLM -------------------------------------------------------------------------------------------------

HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 96}
SERVED = {  # heads of 32 are the smallest that vLLM has on CPU; of GPT-OSS it serves the first load alone there
    "Llama": HEADS,
    "Gemma3": HEADS | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "Qwen3Moe": HEADS | EXPERTS,
    "OPT": {"num_attention_heads": 2, "ffn_dim": 96, "word_embed_proj_dim": 64},
    "Granite": HEADS | {"logits_scaling": 8.0, "attention_multiplier": 0.1},
    "Phi3": {k: v for k, v in HEADS.items() if k != "head_dim"} | PAD,
}


@pytest.mark.long
@pytest.mark.real
@pytest.mark.parametrize("family", SERVED)
def test_what_vllm_serves(family, models, tmp_path):
    """Two steps, a third after a resume, each with its canary; final/ is loaded by vLLM and by Transformers."""
    path = make_model(family, SERVED[family] | {"vocab_size": 103}, tmp_path / "model")
    transformers.AutoTokenizer.from_pretrained(models["untied"]).save_pretrained(path)
    # Rewards by chance, since the answers of a random model may all be the same.
    noise = BASE.replace('id = "reverse_text"', 'id = "think_env"\nargs = { kind = "noise" }')
    (tmp_path / "run.toml").write_text(f'output_dir = "{tmp_path}"\n' + noise.replace("{model}", str(path)))
    for steps in (2, 3):
        command = ["bash", "launch.sh", tmp_path / "run.toml", f"max_steps={steps}", "checkpoint.every=2"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    worst = max(m["sync/dlogp_max"] for m in metrics)
    assert [m["step"] for m in metrics] == [0, 1, 2] and worst < 1e-4 and not any(m["rollout/errors"] for m in metrics)
    done = subprocess.run([sys.executable, ROOT / "tests" / "final_in_vllm.py", tmp_path / "run" / "final"],
                          capture_output=True, text=True, env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"})  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    last = float(done.stdout.split()[-1])
    print(f"{family}: canary {worst:.1e}, final in vLLM {last:.1e}")
    assert last < 1e-4


SCALES = (1.001, 1.003, 1.01, 1.03, 1.1, 1.3, 2.0)
EXPERT = "model.layers.0.mlp.experts.1."


@pytest.mark.long
@pytest.mark.real
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_the_canary_catches(dtype, make_cfg, models, tmp_path, monkeypatch):
    """A table: |dlogp| where what arrives is not what was meant, in mixtures of experts on the real vLLM."""
    shape, is_fp32 = SERVED["Qwen3Moe"] | {"vocab_size": 103}, dtype == "fp32"
    paths = [make_model("Qwen3Moe", shape, tmp_path / f"model{i}", i) for i in range(1 if is_fp32 else 6)]
    transformers.AutoTokenizer.from_pretrained(models["untied"]).save_pretrained(paths[0])
    monkeypatch.setenv("ROLEMODEL_RUN_ID", "real")
    kind = {"fp32": "float32", "bf16": "bfloat16"}[dtype]
    server = VLLM(paths[0], tmp_path / "log", dtype=kind, receiver="configs.serving.cpu_receiver.WeightReceiver")
    rows, honest = {}, trainer.stream_weights
    try:
        more = [f'inference.urls=["{server.wait().url}"]', "max_seq_len=256", f"trainer.dtype={dtype}"]
        cfg = make_cfg(*more, "trainer.max_sync_dlogp=1e9", model=paths[0])
        policy = trainer.build_policy(cfg)
        sender = trainer.WeightSender(cfg, tmp_path, CPU)
        sender.connect()

        def add(what, change):
            """A sync in which each group of tensors is updated by what `change` makes of it."""
            with monkeypatch.context() as patch:
                patch.setattr(trainer, "stream_weights", lambda *x: (group | change(group) for group in honest(*x)))
                metrics = trainer.sync_weights(sender, policy, len(rows), cfg)
            rows.setdefault(what, []).append(metrics["sync/dlogp_max" if is_fp32 else "sync/dlogp_mean"])

        def scaled(name, scale):
            return lambda group: {name: group[name] * scale} if name in group else {}

        def stale(group):
            return {name: old[name] for name in group if name.startswith(EXPERT)}

        gate, up = (f"{EXPERT}{x}_proj.weight" for x in ("gate", "up"))
        for seed, path in enumerate(paths):
            old = weights_in(path)
            torch.manual_seed(seed)
            network = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
            with torch.no_grad():  # a step later
                for name, w in network.named_parameters():
                    trainer.local(policy.trained()[f"model.{name}"]).copy_(w + 0.05 * torch.randn_like(w))
            add("as meant", lambda group: {})
            add("a stale expert", stale)
            add("gate and up of an expert swapped", lambda g: {gate: g[up], up: g[gate]} if gate in g else {})
            for name in ("lm_head.weight", "model.layers.1.self_attn.v_proj.weight", f"{EXPERT}down_proj.weight"):
                for scale in SCALES:
                    add(f"{name} x {scale}", scaled(name, scale))
    finally:
        server.stop()
    limit = {"fp32": 1e-3, "bf16": 0.05}[dtype]
    for what, values in rows.items():
        caught = sum(value > limit for value in values)
        print(f"{dtype} | {what} | {min(values):.2g} to {max(values):.2g} | caught in {caught} of {len(values)}")
    assert max(rows["as meant"]) < limit and min(rows["lm_head.weight x 2.0"] + rows["a stale expert"]) > limit
    assert statistics.median(rows["gate and up of an expert swapped"]) > limit
