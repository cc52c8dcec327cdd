"""What can be known in an hour with one GPU of 48 GB or more, as a report: bash tests/gpu/first_hour.sh runs it."""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REPORT = ROOT / "outputs" / "first_hour.md"
SHAPE = "configs/qwen3_shape.toml"  # random weights, made on the spot
SHORT = ["max_steps=20", "eval.every=10"]


def launch(config, name, *more):
    return ["bash", "launch.sh", config, f"run_name=first_hour_{name}", *more]


def steps(reverse, qwen3):
    """{title: (command, minutes that it may take)}"""
    versions = "import torch, vllm, transformers as t; print(torch.__version__, vllm.__version__, t.__version__)"
    return {
        "machine": (["nvidia-smi"], 1),
        "commit": (["git", "log", "-1", "--oneline"], 1),
        "versions": ([sys.executable, "-c", versions], 2),
        "calculator": (launch("configs/calculator.toml", "calculator", "trainer.dtype=bf16"), 10),
        "values": ([sys.executable, "tests/gpu/values.py"], 10),
        "tests": (["bash", "tests/run.sh", "--fast"], 15),
        # A server with captured graphs must follow a sync as one without does. Exit code 4: random weights.
        "check, with graphs": (launch(SHAPE, "graphs", "--check"), 8),
        "check, without": (launch(SHAPE, "eager", "--check", "inference.args.enforce_eager=true"), 8),
        "toy": (launch("configs/reverse_text.toml", "toy", "trainer.dtype=bf16"), 10),
        "gemma": (launch("tests/gpu/gemma.toml", "gemma"), 10),
        "speed": (launch(SHAPE, "speed"), 10),
        "speed, LoRA": (launch(SHAPE, "lora", "trainer.use_lora=true", "trainer.learning_rate=1e-4"), 10),
        # prime-rl reports 0.14 -> 0.79 in 20 steps.
        "reverse_text": (launch("configs/reverse_text_qwen3.toml", "reverse", f"model={reverse}", *SHORT), 20),
        "gsm8k, LoRA": (launch("configs/qwen3_0.6b_1gpu.toml", "gsm8k", f"model={qwen3}", *SHORT), 20),
    }


def run(command, minutes):
    """Returns the exit code (124: it took too long, 127: no such program) and what it printed."""
    print(f"first hour: {' '.join(command)}", flush=True)
    try:
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "timeout": 60 * minutes}
        done = subprocess.run(command, cwd=ROOT, **options)
    except subprocess.TimeoutExpired as error:
        return 124, (error.stdout or b"").decode(errors="replace")
    except OSError as error:
        return 127, str(error)
    return done.returncode, done.stdout.decode(errors="replace")


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(outputs):
    """A row for each run: what it learned, how fast, and how near it came to the limits."""
    keys = {"time/step_s": ".1f", "time/train_s": ".1f", "time/sync_s": ".2f", "perf/tokens_per_s": ",.0f"}
    rows = [f"| run | evaluations | {' | '.join(keys)} | peak GiB | dlogp_mean, largest | kl_sampler, largest |"]
    rows.append("|---" * (len(keys) + 5) + "|")
    for folder in sorted(outputs.glob("first_hour_*")):
        metrics = lines(folder / "metrics.jsonl")
        if metrics:
            evals = " ".join(f"{e['reward/mean']:.3f}" for e in lines(folder / "eval.jsonl"))
            medians = [f"{statistics.median(m[key] for m in metrics):{form}}" for key, form in keys.items()]
            most = [max(m[key] for m in metrics) for key in ("perf/peak_gib", "sync/dlogp_mean", "policy/kl_sampler")]
            cells = [folder.name, evals, *medians, f"{most[0]:.1f}", f"{most[1]:.4f}", f"{most[2]:.4f}"]
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-dir", type=Path, help="has the models, on machines without the hub")
    args = parser.parse_args(argv)
    names = ("PrimeIntellect/Qwen3-0.6B-Reverse-Text-SFT", "Qwen/Qwen3-0.6B")
    todo = steps(*(args.model_dir / name.split("/")[1] if args.model_dir else name for name in names))
    told = ""
    codes = []
    for title, (command, minutes) in todo.items():
        began = time.monotonic()
        code, text = run(command, minutes)
        codes.append(code)
        end = "\n".join(line[:200] for line in text.splitlines()[-20:])
        took = (time.monotonic() - began) / 60
        told += f"\n## {title}: exit code {code}, {took:.1f} minutes\n\n```\n{end}\n```\n"
        REPORT.parent.mkdir(exist_ok=True)
        REPORT.write_text(f"# First hour on a GPU\n\n{table(REPORT.parent)}\n{told}")
    print(f"first hour: the report is {REPORT}")
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
