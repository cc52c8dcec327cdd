"""The seconds of a step of TRL's GRPOTrainer, with the rows, rewards and settings of a TOML whose task has one turn.

    python -m venv trl && trl/bin/pip install trl==1.16.0 torch==2.13.0 transformers==5.19.0 numpy==2.3.5
    trl/bin/python tests/peers/trl_step.py configs/lune.toml max_steps=12
    bash launch.sh configs/lune.toml max_steps=12 eval.every=0 run_name=ours    # time/step_s of its metrics.jsonl

Run them one after the other, with nothing else. TRL samples with Transformers here: vLLM's server mode needs NCCL."""

import asyncio
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
began = time.perf_counter()
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from env import load_environment
from rolemodel.config import load_config

cfg = load_config(sys.argv[1], sys.argv[2:])
o, t = cfg.orchestrator, cfg.trainer
env = load_environment(cfg.env[0].id, cfg.env[0].args)
states = [env.start(row) for row in env.dataset]
rows = Dataset.from_list([{"prompt": s["prompt"], "row": number} for number, s in enumerate(states)])


def reward(completions, row, **_):
    async def score():
        together = [states[number] | {"completion": said} for said, number in zip(completions, row)]
        return [(await env.rubric.score(state))[0] for state in together]

    return asyncio.run(score())


class Clock(TrainerCallback):
    ends = [began]

    def on_step_end(self, args, state, control, **_):
        self.ends.append(time.perf_counter())
        print(f"step {state.global_step}: {self.ends[-1] - self.ends[-2]:.2f} s", flush=True)


config = GRPOConfig(
    output_dir=f"{cfg.run.output_dir}/trl",
    use_cpu=True,
    bf16=False,
    max_steps=cfg.run.max_steps,
    per_device_train_batch_size=t.micro_batch_size,
    gradient_accumulation_steps=o.batch_size // t.micro_batch_size,
    num_generations=o.rollouts_per_example,
    max_completion_length=cfg.sampling.max_tokens,
    temperature=cfg.sampling.temperature,
    gradient_checkpointing=t.gradient_checkpointing,
    learning_rate=t.learning_rate,
    warmup_steps=t.warmup_steps,
    lr_scheduler_type=t.lr_scheduler_type,
    beta=0.0,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    model_init_kwargs={"dtype": "float32"},
)
GRPOTrainer(model=cfg.run.model, reward_funcs=reward, args=config, train_dataset=rows, callbacks=[Clock()]).train()
steps = [after - before for before, after in zip(Clock.ends, Clock.ends[1:])]
result = {"steps_s": steps, "median_s": statistics.median(steps[1:-1]), "whole_s": time.perf_counter() - began}
print(json.dumps(result))
