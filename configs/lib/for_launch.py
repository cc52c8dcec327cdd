"""What launch.sh asks: what a configuration resolves to, which ports are free, who failed first.

python configs/lib/for_launch.py config.toml [table.key=value ...]    shell assignments; writes the resolved TOML
python configs/lib/for_launch.py --port [PORT ...]                    a free port; fails if one of those is in use
python configs/lib/for_launch.py --exit exit.json                     shell assignments"""

import json
import shlex
from pathlib import Path

from configs.lib.process import free_port, run_role
from configs.lib.runtime import RunError, arguments, difference, identity, redacted, run_directory

VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what --max-lora-rank takes


def main(argv):
    q = shlex.quote
    if argv[0] == "--exit":
        first = json.loads(Path(argv[1]).read_text())
        pid = f"{first['pid']} (rank {first['rank']})" if first["role"] == "trainer" else first["pid"]
        return print(f"name={q(first['role'])} pid={q(str(pid))} code={first['code']} cause={q(first['cause'])}")
    if argv[0] == "--port":
        return print(free_port([int(port) for port in argv[1:]]))
    if any(arg.startswith("--rep") for arg in argv):
        raise RunError(2, "--replay needs no servers: torchrun trainer.py config.toml --replay DIR")
    new, cfg = Path(argv[0]), arguments(__doc__, argv[1:])[0]  # launch.sh takes over what is in `new` with the lock
    run, t, inf, run_dir = cfg.run, cfg.trainer, cfg.inference, run_directory(cfg)
    mine, theirs = identity(cfg), run_dir / "identity.json"
    used = any(next((run_dir / part).iterdir(), None) for part in ("batches", "checkpoints"))
    if used and theirs.exists():
        if not (known := theirs.read_text(errors="replace")).endswith("}"):
            raise RunError(6, f"{theirs} is damaged: remove it to go on with the run in {run_dir}")
        if differs := difference(json.loads(known), json.loads(json.dumps(mine))):
            raise RunError(2, f"{run_dir} holds another run: {differs}. Choose another run_name, or remove it")
    done = (run_dir / "done").read_text().strip() if (run_dir / "done").exists() else ""
    complete = used and done.isdecimal() and int(done) >= run.max_steps
    (new / "identity.json").write_text(json.dumps(mine))
    text = ""
    for table, header in {"run": "", "orchestrator": "orchestrator", "sampling": "orchestrator.sampling"}.items():
        text += toml_table(header, getattr(cfg, table))
    text += "".join(toml_table("[env]", table) for table in cfg.env)
    for table in ("inference", "trainer", "eval", "checkpoint"):
        text += toml_table(table, getattr(cfg, table))
    (new / "config.toml").write_text(text)
    flags = []
    for key, value in inf.args.items():  # vLLM's flags: true is --flag, false --no-flag
        flag = key.replace("_", "-")
        flags += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    dtype = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[t.dtype]
    lora = int(cfg.sends_adapters)
    makes = run.prepare if not any(arg.startswith("model=") for arg in argv) else ""  # the TOML's model, no other
    plain = {"MODEL": run.model, "PREPARE": makes, "RUN_DIR": run_dir, "DTYPE": dtype, "MAX_LEN": run.max_seq_len}
    plain |= {"SEED": run.seed, "TEMPLATE": run.chat_template, "INF_GPUS": inf.gpus, "TRAIN_GPUS": t.gpus, "LORA": lora}
    plain |= {"TP": inf.args.get("tensor_parallel_size", 1), "PORT": inf.port, "STEPS": run.max_steps}
    plain |= {"COMPLETE": int(complete), "PATIENCE": cfg.orchestrator.version_timeout, "PREPARE_S": run.prepare_timeout}
    plain |= {"TRACKER": run.tracker, "STALENESS": cfg.orchestrator.max_staleness}
    plain["RANK_LORA"] = min(r for r in VLLM_LORA_RANKS if r >= t.lora_rank) if lora else 0
    print("\n".join(f"{k}={q(str(v))}" for k, v in plain.items()))
    print(f"URLS=({' '.join(map(q, inf.urls))})\nARGS=({' '.join(map(q, flags))})")


def toml_table(header, table):
    def value(key, v):
        if type(v) is dict:
            return "{ " + ", ".join(f"{json.dumps(k, ensure_ascii=False)} = {value(k, x)}" for k, x in v.items()) + " }"
        return json.dumps(redacted(key, v), ensure_ascii=False)  # TOML knows no surrogates

    lines = [f"{k} = {value(k, v)}\n" for k, v in table._asdict().items()]
    return (f"\n[{header}]\n" if header else "") + "".join(lines)


if __name__ == "__main__":
    run_role("config", main)
