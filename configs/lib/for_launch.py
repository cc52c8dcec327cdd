"""What launch.sh asks: what a configuration resolves to, which ports are free, who failed first.

python configs/lib/for_launch.py config.toml [table.key=value ...]    shell assignments; writes the resolved TOML
python configs/lib/for_launch.py --port [PORT ...]                    a free port; fails if one of those is in use
python configs/lib/for_launch.py --exit exit.json                     shell assignments"""

import json
import re
import shlex
from pathlib import Path

from configs.lib.process import free_port, run_role
from configs.lib.runtime import RunError, difference, identity, load_config, run_directory

VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what --max-lora-rank takes


def main(argv):
    q = shlex.quote
    if argv[0] == "--exit":
        first = json.loads(Path(argv[1]).read_text())
        pid = f"{first['pid']} (rank {first['rank']})" if first["role"] == "trainer" else first["pid"]
        return print(f"name={q(first['role'])} pid={q(str(pid))} code={first['code']} cause={q(first['cause'])}")
    if argv[0] == "--port":
        return print(free_port([int(port) for port in argv[1:]]))
    cfg = load_config(argv[0], argv[1:])
    run, t, inf, run_dir = cfg.run, cfg.trainer, cfg.inference, run_directory(cfg)
    mine, theirs = identity(cfg), run_dir / "identity.json"
    used = any(next((run_dir / part).iterdir(), None) for part in ("batches", "checkpoints"))
    if (
        used
        and theirs.exists()
        and (differs := difference(json.loads(theirs.read_text()), json.loads(json.dumps(mine))))
    ):
        raise RunError(2, f"{run_dir} holds another run: {differs}. Choose another run_name, or remove it")
    done = run_dir / "done"
    complete = used and done.exists() and int(done.read_text()) >= run.max_steps
    (run_dir / "identity.json.new").write_text(json.dumps(mine))
    text = ""
    for table, header in {"run": "", "orchestrator": "orchestrator", "sampling": "orchestrator.sampling"}.items():
        text += toml_table(header, getattr(cfg, table))
    text += "".join(toml_table("[env]", table) for table in cfg.env)
    for table in ("inference", "trainer", "eval", "checkpoint"):
        text += toml_table(table, getattr(cfg, table))
    (run_dir / "config.toml.new").write_text(text)  # launch.sh renames it once the run is its own
    flags = []
    for key, value in inf.args.items():  # vLLM's flags: true is --flag, false --no-flag
        flag = key.replace("_", "-")
        flags += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    dtype = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[t.dtype]
    lora = int(cfg.sends_adapters)
    plain = {"MODEL": run.model, "PREPARE": run.prepare, "RUN_DIR": run_dir, "DTYPE": dtype, "MAX_LEN": run.max_seq_len}
    plain |= {"SEED": run.seed, "TEMPLATE": run.chat_template, "INF_GPUS": inf.gpus, "TRAIN_GPUS": t.gpus, "LORA": lora}
    plain |= {"TP": inf.args.get("tensor_parallel_size", 1), "PORT": inf.port, "STEPS": run.max_steps}
    plain |= {"COMPLETE": int(complete), "PATIENCE": cfg.orchestrator.version_timeout}
    plain |= {"STALENESS": cfg.orchestrator.max_staleness}
    plain["RANK_LORA"] = min(r for r in VLLM_LORA_RANKS if r >= t.lora_rank) if lora else 0
    print("\n".join(f"{k}={q(str(v))}" for k, v in plain.items()))
    print(f"URLS=({' '.join(map(q, inf.urls))})\nARGS=({' '.join(map(q, flags))})")


SECRET = re.compile(r"(^|_)(key|token|secret|password)$", re.IGNORECASE)  # of env.args and inference.args: not on disk


def toml_table(header, table):
    def value(key, v):
        if type(v) is dict:
            return "{ " + ", ".join(f"{json.dumps(k)} = {value(k, x)}" for k, x in v.items()) + " }"
        return json.dumps("REDACTED" if type(v) is str and SECRET.search(key) else v)

    lines = [f"{k} = {value(k, v)}\n" for k, v in table._asdict().items()]
    return (f"\n[{header}]\n" if header else "") + "".join(lines)


if __name__ == "__main__":
    run_role("config", main)
