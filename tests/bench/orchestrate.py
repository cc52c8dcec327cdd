"""orchestrator.py against a server that answers at once: rollouts a second on one core, 1,024 in flight.

python orchestrate.py [--quick]"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import config, make_model, resident, row, tell

BATCH = 1024


def serve(place, tokenizer, core):
    """Starts instant.py -> process, port."""
    import conftest

    ids = lambda *more: tokenizer.apply_chat_template(  # noqa: E731
        [{"role": "user", "content": "abcdefgh"}, *more], add_generation_prompt=True, return_dict=False
    )
    text = "zyxwvutsrqponmlkjihgfedcbazyxwv"
    tokens = [*tokenizer.encode(text), tokenizer.eos_token_id]
    content = [{"token": c, "logprob": -4.6, "bytes": [ord(c)], "top_logprobs": []} for c in text + "."]
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop", "token_ids": tokens}
    choice |= {"logprobs": {"content": content}}
    replies = {}
    for n in (1, 16):
        prompt = ids(*([{"role": "user", "content": "x"}] if n == 1 else []))
        choices = [choice | {"index": i} for i in range(n)]
        replies[f"/v1/chat/completions {n}"] = {"choices": choices, "prompt_token_ids": prompt}
    (place / "replies.json").write_text(json.dumps(replies))
    port = conftest.free_port()
    command = ["taskset", "-c", str(core), sys.executable, "tests/bench/instant.py", str(port)]
    command.append(str(place / "replies.json"))
    process = conftest.start(command, place / "instant.log")
    time.sleep(1)
    return process, port


def one(how, batches, core):
    """-> rollouts/s, CPU s per 1,000, MiB more at the end than a third of the way, per 1,000 rollouts."""
    os.sched_setaffinity(0, {core})
    import conftest
    import torch
    from transformers import AutoTokenizer

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        place = Path(place)
        model = make_model(place / "model", "0.8M")
        process, port = serve(place, AutoTokenizer.from_pretrained(model), (core + 1) % os.cpu_count())
        cfg = config(
            place, model, f'inference.urls=["http://127.0.0.1:{port}"]',
            f"env.args.one_each={str(how == 'one').lower()}",
            f"max_steps={batches}", f"orchestrator.batch_size={BATCH}", "orchestrator.sampling.max_tokens=32",
        )  # fmt: skip
        marks = []

        def mark(info, save=conftest.orchestrator.save_batch):
            marks.append((time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF), resident()))

        save = conftest.orchestrator.save_batch
        conftest.orchestrator.save_batch = lambda path, samples, info: (save(path, samples, info), mark(info))
        try:
            conftest.orchestrate(cfg)
        finally:
            conftest.stop(process)
    (t0, use0, _), (t1, use1, last) = marks[0], marks[-1]
    num, third = BATCH * (batches - 1), marks[len(marks) // 3][2]
    cpu = use1.ru_utime + use1.ru_stime - use0.ru_utime - use0.ru_stime
    return num / (t1 - t0), 1000 * cpu / num, (last - third) / (num * 2 / 3) * 1000


def main(quick):
    rows, batches = [], 5 if quick else 13
    for how, name, target in (("group", "n = 16 in a request", ">= 600"), ("one", "a request each", ">= 300")):
        done = subprocess.run([sys.executable, __file__, how, str(batches)], stdout=subprocess.PIPE, check=True)
        rate, cpu, growth = json.loads(done.stdout.splitlines()[-1])
        rows.append(row(f"orchestrator on one core, {name}", rate, "rollouts/s", target))
        rows.append(row(f"orchestrator, {name}: CPU per 1,000 rollouts", cpu, "s"))
        rows.append(row(f"orchestrator, {name}: memory per 1,000 rollouts", growth, "MiB", "<= 1"))
    tell(rows)


if __name__ == "__main__":
    if sys.argv[1:2] in (["group"], ["one"]):
        tell(one(sys.argv[1], int(sys.argv[2]), 0))
    else:
        main("--quick" in sys.argv)
