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
    """Starts instant.py. Returns the process and its port."""
    import conftest

    text = "zyxwvutsrqponmlkjihgfedcbazyxwv"
    tokens = [*tokenizer.encode(text), tokenizer.eos_token_id]
    content = [{"token": c, "logprob": -4.6, "bytes": [ord(c)], "top_logprobs": []} for c in text + "."]
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop", "token_ids": tokens}
    choice |= {"index": 0, "logprobs": {"content": content}}
    asked = [{"role": "user", "content": "abcdefgh"}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    replies = {"/v1/chat/completions": {"choices": [choice], "prompt_token_ids": prompt}}
    (place / "replies.json").write_text(json.dumps(replies))
    port = conftest.free_port()
    command = ["taskset", "-c", str(core), sys.executable, "tests/bench/instant.py", str(port)]
    process = conftest.start([*command, str(place / "replies.json")], place / "instant.log")
    time.sleep(1)
    return process, port


def measure(batches, core):
    """Rollouts/s, CPU s per 1,000, and MiB more at the end than a third of the way, per 1,000 rollouts."""
    os.sched_setaffinity(0, {core})
    import conftest
    import torch
    from transformers import AutoTokenizer

    torch.set_num_threads(1)
    marks = []
    save = conftest.orchestrator.save_batch

    def save_and_mark(*args):
        save(*args)
        marks.append((time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF), resident()))

    with tempfile.TemporaryDirectory() as place:
        place = Path(place)
        model = make_model(place / "model", "0.8M")
        process, port = serve(place, AutoTokenizer.from_pretrained(model), (core + 1) % os.cpu_count())
        cfg = config(
            place, model, f'inference.urls=["http://127.0.0.1:{port}"]', f"max_steps={batches}",
            f"orchestrator.batch_size={BATCH}", "orchestrator.sampling.max_tokens=32",
        )  # fmt: skip
        conftest.orchestrator.save_batch = save_and_mark
        try:
            conftest.orchestrate(cfg)
        finally:
            conftest.stop(process)
    (t0, use0, _), (t1, use1, last) = marks[0], marks[-1]
    num, third = BATCH * (batches - 1), marks[len(marks) // 3][2]
    cpu = use1.ru_utime + use1.ru_stime - use0.ru_utime - use0.ru_stime
    return num / (t1 - t0), 1000 * cpu / num, (last - third) / (num * 2 / 3) * 1000


def main(quick):
    command = [sys.executable, __file__, "measure", "5" if quick else "13"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    rate, cpu, growth = json.loads(done.stdout.splitlines()[-1])
    tell([
        row("orchestrator on one core, a request for each rollout", rate, "rollouts/s", ">= 300"),
        row("orchestrator: CPU per 1,000 rollouts", cpu, "s"),
        row("orchestrator: memory per 1,000 rollouts", growth, "MiB", "<= 1"),
    ])  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        tell(measure(int(sys.argv[2]), 0))
    else:
        main("--quick" in sys.argv)
