"""Routing replay: a mixture of experts learns with the experts that the sampler chose."""

import base64
import functools
import io
import json

import numpy as np
import pytest
import torch
import transformers
from conftest import all_batches, launch, lines, make_sequences, run_trainer, write_run
from test_models import FAMILIES, make_model
from test_trainer import CPU, UNCLIPPED, batch_of, gradients, plain_model, same, scored

import trainer
from configs.algorithms import routing
from configs.runtime.role import RunError
from env import DataError
from orchestrator import Rollout

ON = "trainer.replay_routing=true"


@pytest.fixture
def mixture(tmp_path, models):
    """mixture("Qwen3Moe") -> the directory of a model with 2 layers, and 2 of 16 experts for each token."""

    def make(family):
        shape = {"num_experts": 16, "norm_topk_prob": True} if family == "Qwen3Moe" else {"num_local_experts": 16}
        path = make_model(family, FAMILIES[family] | shape, tmp_path / family)
        transformers.AutoTokenizer.from_pretrained(models["untied"]).save_pretrained(path)
        return path

    return make


def routers_of(model):
    return [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]


def with_routes(model, sequences):
    """The sequences with the experts that this model chooses, as vLLM encodes them, by routing.add_fields."""
    for s in sequences:
        chosen = []
        hooks = [r.register_forward_hook(lambda r, args, output: chosen.append(output[2])) for r in routers_of(model)]
        model(torch.as_tensor(s["tokens"])[None].long())
        for hook in hooks:
            hook.remove()
        reply = encoded(torch.stack(chosen, 1)[:-1].numpy().astype(np.uint8))
        r = Rollout({"replies": [reply]}, [s])
        routing.add_fields(r)
    return sequences


def encoded(routes_TLK):
    file = io.BytesIO()
    np.save(file, routes_TLK)
    return {"choices": [{"routed_experts": base64.b64encode(file.getvalue()).decode()}]}


@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral"])
def test_replay_closes_the_gap(family, mixture, make_cfg, tmp_path):
    """A sampler whose routers differ a little, as another engine's do by rounding: where it takes other experts, the
    log-probabilities are far off. With its experts nine tenths of that are gone, padded or not."""
    cfg = make_cfg(ON, model=mixture(family))
    sampler = plain_model(cfg)
    torch.manual_seed(1)
    with torch.no_grad():
        for router in routers_of(sampler):
            router.weight += 3e-3 * router.weight.std() * torch.randn_like(router.weight)
        sequences = with_routes(sampler, make_sequences(200, longest=40))
        sampled_N, _ = scored(sampler, sequences)
    batch = batch_of(tmp_path, sequences)
    policy = trainer.build_policy(cfg)
    gaps = {}
    for name in ("replayed", "own"):
        rows = [{key: x for key, x in s.items() if key != "routes" or name == "replayed"} for s in batch.sequences]
        with torch.no_grad():
            logp_N, _ = policy(trainer.collate(rows, CPU))
        gaps[name] = (logp_N - sampled_N).abs().mean().item()
    print(family, gaps)
    assert gaps["replayed"] < 0.1 * gaps["own"], gaps


@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral"])
@pytest.mark.parametrize("recompute", ["true", "false"])
def test_experts_of_its_own_change_nothing(family, recompute, mixture, make_cfg, tmp_path):
    """With the experts that the routers choose themselves, values and gradients are those without replay."""
    path = mixture(family)
    sequences = make_sequences(12)
    found = []
    for key in (ON, "trainer.replay_routing=false"):
        cfg = make_cfg(key, f"trainer.gradient_checkpointing={recompute}", model=path)
        with_experts = with_routes(plain_model(cfg), sequences) if key == ON else sequences
        found.append(gradients(cfg, batch_of(tmp_path, with_experts)))
    same(found[0][1], found[1][1], 1e-6)
    assert (found[0][2] - found[1][2]).abs().max() < 1e-6
    assert all(found[0][1][name].abs().max() > 0 for name in found[0][1] if name.endswith("gate.weight"))


@pytest.mark.long
@pytest.mark.parametrize("recompute", ["true", "false"])
def test_compiled(recompute, mixture, make_cfg, tmp_path, monkeypatch):
    """Compiled blocks take the experts of the micro-batch at hand, and not those of the one they were compiled with."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    load = trainer.load_model

    def load_with_products(cfg):  # what stands in for grouped ones on a CPU cannot be compiled
        model = load(cfg)
        model.set_experts_implementation("batched_mm")
        return model

    monkeypatch.setattr(trainer, "load_model", load_with_products)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    path = mixture("Qwen3Moe")
    rng = np.random.default_rng(0)
    sequences = make_sequences(24)
    for s in sequences:
        order = rng.permuted(np.tile(np.arange(16), (len(s["tokens"]), 2, 1)), axis=-1)
        s["routes"] = order[:, :, :2].astype(np.int16)
    batch = batch_of(tmp_path, sequences)
    found = []
    for compiled in ("false", "true"):
        more = (f"trainer.compile={compiled}", f"trainer.gradient_checkpointing={recompute}")
        cfg = make_cfg(ON, UNCLIPPED, "trainer.micro_batch_size=1", *more, model=path)
        found.append(gradients(cfg, batch))
    same(found[0][1], found[1][1], 1e-5)
    assert torch._dynamo.utils.counters["frames"]["ok"] and not torch._dynamo.utils.counters["unimplemented"]


def test_gradients_of_other_experts(mixture, make_cfg, tmp_path):
    """Against float64: the experts of the model's last choice in place of its first, by masking the logits of all
    others before the softmax. So the weights of two experts sum to one, and the routers learn."""
    cfg = make_cfg(ON, UNCLIPPED, model=mixture("Qwen3Moe"))
    plain = plain_model(cfg).double()
    plain.set_experts_implementation("eager")
    sequences = make_sequences(12)
    rng = np.random.default_rng(0)
    for s in sequences:
        order = rng.permuted(np.tile(np.arange(16), (len(s["tokens"]), 2, 1)), axis=-1)
        s["routes"] = order[:, :, :2].astype(np.int16)
    batch = batch_of(tmp_path, sequences)
    _, found, _ = gradients(cfg, batch)
    # The reference: a router that sees only the experts it must take.
    now = {}

    def only(layer):
        def hook(router, args, output):
            logits_NE = output[0]
            routes_NK = now["routes"][:, layer].long()
            masked_NE = torch.full_like(logits_NE, -torch.inf).scatter(1, routes_NK, logits_NE.gather(1, routes_NK))
            return logits_NE, masked_NE.softmax(-1).gather(1, routes_NK), routes_NK

        return hook

    for layer, router in enumerate(routers_of(plain)):
        router.register_forward_hook(only(layer))
    total = 0
    num = sum(int(s["mask"].sum()) for s in batch.sequences)
    for s in batch.sequences:
        now["routes"] = s["routes"]
        logp_N, _ = scored(plain, [s])
        r_N = (logp_N.detach() - s["old_logp"][s["mask"]]).exp().clamp(max=5)
        total = total - (r_N * s["adv"][s["mask"]] * logp_N).sum() / num
    total.backward()
    for name, p in plain.named_parameters():
        torch.testing.assert_close(found[f"model.{name}"].double(), p.grad, atol=2e-6, rtol=1e-4)


def test_two_ranks_are_one(mixture, make_cfg, tmp_path):
    """Equal on 1 and 2 ranks, sharded, and over sizes of micro-batches."""
    cfg = make_cfg(model=mixture("Qwen3Moe"))
    model = plain_model(cfg)
    saved = tmp_path / "saved"
    saved.mkdir()
    for n in range(2):
        batch_of(saved, with_routes(model, make_sequences(10, seed=n)), step=n)
        (saved / "step_000000.safetensors").rename(saved / f"step_{n:06d}.safe")
    for path in saved.glob("*.safe"):
        path.rename(path.with_suffix(".safetensors"))
    finals = []
    for ranks, size in ((1, 8), (2, 1)):
        more = [
            ON,
            f"trainer.micro_batch_size={size}",
            f"trainer.gpus={ranks}",
            f"run_name=ranks_{ranks}",
            "max_steps=2",
        ]
        run_trainer(tmp_path / "test.toml", f"output_dir={tmp_path}", *more, "--replay", saved, ranks=ranks)
        found = [
            line["policy/kl_sampler"] for line in lines(tmp_path / f"ranks_{ranks}-replay-cispo" / "metrics.jsonl")
        ]
        finals.append(found)
    assert np.allclose(*finals, rtol=1e-5), finals


@pytest.mark.long
def test_a_whole_run(mixture, tmp_path):
    """By launch.sh, with a server that says which experts it took: nothing differs at version 0, over several turns.
    The fake server cannot split experts as vLLM does, so it keeps the weights that it has."""
    toml = write_run(tmp_path, mixture("Qwen3Moe"), 2, '{ kind = "turns" }')
    launch(toml, ON, "trainer.learning_rate=1e-9", "orchestrator.max_staleness=0", FAKE='{"discard": true}')
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    assert metrics[0]["policy/kl_sampler"] < 1e-9
    for batch in all_batches(tmp_path / "run"):
        for s in batch.sequences:
            assert s["routes"].shape == (len(s["tokens"]), 2, 2)
            assert (s["routes"][:-1] >= 0).all() and (s["routes"][-1] == routing.UNKNOWN).all()
    assert max(int(s["turn"].max()) for s in all_batches(tmp_path / "run")[0].sequences) > 0


def test_what_is_wrong_is_said(make_cfg, models):
    with pytest.raises(RunError, match="routers of Qwen3-MoE or Mixtral") as e:
        trainer.build_policy(make_cfg(ON))
    assert e.value.code == 2
    sequence = {"tokens": [1, 2, 3], "turn": [0, 0, 0]}
    for reply, problem in (
        ({"choices": [{}]}, "no routed_experts"),
        (encoded(np.zeros((3, 2, 2))), "of 3 tokens, not of 2"),
    ):
        with pytest.raises(DataError, match=problem):
            routing.add_fields(Rollout({"replies": [reply]}, [sequence]))


# --- one wrong line at a time: each of these alone saw a change of one line -------------------------------------------


def test_weights_of_experts_add_up_to_one_only_if_the_models_do(mixture, make_cfg, tmp_path):
    path = mixture("Qwen3Moe")
    config = json.loads((path / "config.json").read_text()) | {"norm_topk_prob": False}
    (path / "config.json").write_text(json.dumps(config))
    cfg = make_cfg(ON, model=path)
    model = plain_model(cfg)
    batch = batch_of(tmp_path, with_routes(model, make_sequences()))
    with torch.no_grad():
        found_N, _ = trainer.build_policy(cfg)(trainer.collate(batch.sequences, CPU))
        torch.testing.assert_close(found_N, scored(model, batch.sequences)[0], atol=1e-5, rtol=0)
