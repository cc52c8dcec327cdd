"""TRL's GRPOTrainer on the same rollouts, and on the same task, as trainer.py gets; for run.py.

    python trl_peer.py step MODEL ROLLOUTS.json STEPS [trim]       -> {"train_s": [seconds per optimizer step, ...]}
    python trl_peer.py run MODEL STEPS SEED RATE GOAL BATCH TOKENS -> {"reward": [...], "at": [s], "tokens": [...], ...}

As shipped: 8 sequences a micro-batch, padded to the longest of the whole batch; trim: to the longest of its own.
Neither recomputes activations, as ours does not; TRL would by default."""

import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def options(**more):
    return GRPOConfig(
        output_dir="/tmp/trl", report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False, beta=0.0,
        scale_rewards="none", lr_scheduler_type="constant", warmup_steps=0, save_strategy="no", shuffle_dataset=False,
        temperature=1.0, logging_strategy="no", disable_tqdm=True, weight_decay=0.0, adam_beta2=0.999, **more,
    )  # fmt: skip


class Timed(GRPOTrainer):
    """Measures what is not training, so that it can be subtracted; trims a micro-batch if asked to."""

    trim, other_s = False, 0.0

    def _generate_and_score_completions(self, inputs):
        started = time.perf_counter()
        out = super()._generate_and_score_completions(inputs)
        self.other_s += time.perf_counter() - started
        return out

    def _prepare_inputs(self, generation_batch):
        inputs = super()._prepare_inputs(generation_batch)
        if not self.trim:
            return inputs
        right, left = (int(inputs[f"{k}_mask"].sum(1).max()) for k in ("completion", "prompt"))
        cut = {k: v[:, :right] for k, v in inputs.items() if k.startswith("completion_") and v.dim() == 2}
        cut |= {k: v[:, -left:] for k, v in inputs.items() if k.startswith("prompt_") and v.dim() == 2}
        return inputs | cut


class Clock(TrainerCallback):
    def __init__(self):
        self.trainer, self.train_s, self.step_s, self.is_enough = None, [], [], lambda: False

    def on_step_begin(self, *_, **__):
        self.began, self.before = time.perf_counter(), self.trainer.other_s

    def on_step_end(self, args, state, control, **_):
        self.step_s.append(time.perf_counter() - self.began)
        self.train_s.append(self.step_s[-1] - (self.trainer.other_s - self.before))
        control.should_training_stop |= self.is_enough()


def step(model, rollouts, steps, trim=""):
    rows = json.loads(Path(rollouts).read_text())  # [{"prompt": ids, "completion": ids}, ...]

    def stored(prompts, trainer):
        ids, answers = ([row[k] for row in rows] for k in ("prompt", "completion"))
        return {"prompt_ids": ids, "completion_ids": answers, "logprobs": [[-4.6] * len(a) for a in answers]}

    config = options(
        per_device_train_batch_size=8, gradient_accumulation_steps=len(rows) // 8, num_generations=8,
        max_completion_length=256, max_steps=int(steps), learning_rate=1e-4,
    )  # fmt: skip
    reward = lambda completions, **_: torch.rand(len(completions)).tolist()  # noqa: E731
    data = Dataset.from_list([{"prompt": "a"}] * len(rows) * 2)
    clock = Clock()
    trainer = Timed(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), reward, config, data, rollout_func=stored,
        processing_class=AutoTokenizer.from_pretrained(model), callbacks=[clock],
    )  # fmt: skip
    clock.trainer, trainer.trim = trainer, bool(trim)
    trainer.train()
    return {"train_s": clock.train_s}


def run(model, steps, seed, learning_rate, goal, batch, tokens):
    """The quickstart's task, groups of 16 answers in our orchestrator's order, until three batches have the goal's
    mean."""
    from configs import load_config
    from configs.tasks import reverse_text
    from orchestrator import Order

    env, means, at, tokens_of, began = reverse_text.load_environment(), [], [], [], time.perf_counter()
    order = Order(env.dataset, load_config(ROOT / "configs" / "reverse_text.toml", [f"seed={seed}"]))
    rows = [env.dataset[order.take(0)[1]] for _ in range(int(batch) // 16 * int(steps))]
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": r["question"]}], **r} for r in rows])

    def reward(completions, answer, completion_ids, **_):
        pairs = list(zip(completions, answer))
        scores = [0.5 * reverse_text.similarity(c, a) + 0.5 * reverse_text.exact(c, a) for c, a in pairs]
        means.append(sum(scores) / len(scores))
        at.append(time.perf_counter() - began)
        tokens_of.append(sum(map(len, completion_ids)) / len(completion_ids))
        return scores

    config = options(
        per_device_train_batch_size=int(batch), num_generations=16, max_completion_length=int(tokens),
        max_steps=int(steps), learning_rate=float(learning_rate), seed=int(seed),
    )  # fmt: skip
    clock = Clock()
    trainer = Timed(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), reward, config, data,
        processing_class=AutoTokenizer.from_pretrained(model), callbacks=[clock],
    )  # fmt: skip
    clock.trainer, clock.is_enough = trainer, lambda: len(means) > 2 and sum(means[-3:]) / 3 >= float(goal)
    began = time.perf_counter()
    trainer.train()
    return {"reward": means, "at": at, "tokens": tokens_of, "step_s": clock.step_s, "train_s": clock.train_s}


if __name__ == "__main__":
    torch.manual_seed(0)
    print("\n" + json.dumps({"step": step, "run": run}[sys.argv[1]](*sys.argv[2:])))
