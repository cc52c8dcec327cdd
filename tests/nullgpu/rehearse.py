"""Runs GPU recipes on null GPUs and writes a table: python rehearse.py DIRECTORY [word ...]; run.sh calls it.

DIRECTORY holds tree/, a copy of the repository with a .venv of its own, and libraries/. A case fails if its exit code
is another than expected, if the trainer waits for the device among the micro-batches of a step, if a card is overdrawn,
or if Dynamo compiles again after step 20."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
WAIT = r"(?m)^(\S+): UserWarning: called a synchronizing CUDA operation"
KNOWN_WAITS = ("masking_utils.py", "_inductor/")  # whether rows are packed, once a pass; constants, while it compiles
CARDS = {  # number, MiB, compute capability
    "1 x 24 GB": (1, 24564, 89),
    "2 x 24 GB": (2, 24564, 89),
    "4 x 24 GB": (4, 24564, 89),
    "1 x 48 GB": (1, 49140, 89),
    "3 x 80 GB": (3, 81559, 90),
    "4 x 80 GB": (4, 81559, 90),
    "8 x 80 GB": (8, 81559, 90),
}
# What every case has: short answers to a task whose rows are here, and nothing that takes long beside the GPU's part.
SHORT = [
    "max_steps=2",
    "eval.every=0",
    "env.id=reverse_text",
    "env.args={}",
    "orchestrator.sampling.max_tokens=64",
    "orchestrator.sampling.chat_template_kwargs={}",
    "orchestrator.batch_size=64",
    "orchestrator.order=",
    "orchestrator.retire_after=0",
    "orchestrator.oversampling_factor=1",
    "prepare=",
]
LORA_1 = "configs/qwen3_0.6b_1gpu.toml"
LORA_2 = "configs/qwen3_1.7b_2gpu.toml"
FULL_8 = "configs/qwen3_4b_8gpu.toml"
SHAPE = "configs/qwen3_shape.toml"
REVERSE = "configs/reverse_text_qwen3.toml"
EAGER = "trainer.compile=false"
FULL = "trainer.use_lora=false"
TWO_AND_TWO = ["inference.gpus=2", "trainer.gpus=2"]


class Case(NamedTuple):
    name: str
    cards: str
    config: str
    model: str
    more: list = []
    code: int = 0
    shows: str = ""  # in the output
    kills: str = ""  # the role whose processes are killed after the first step
    mutation: tuple = ()  # of trainer.py: text, and what comes in its place
    problem: str = ""  # that must be found
    look: Callable = lambda log: []  # further problems in the trainer's log


def recompilations(log):
    """Dynamo's, after step 20."""
    _, _, late = log.partition("step    20 ")
    return [f"compiles again: {line}" for line in re.findall("Recompiling function.*", late)]


LONG = [EAGER, "max_steps=50"]  # long enough to be killed
CASES = [
    Case("LoRA, shared, compiled", "1 x 24 GB", LORA_1, "0.6B"),
    Case("LoRA, shared, eager", "1 x 24 GB", LORA_1, "0.6B", [EAGER]),
    Case("LoRA merged in fp32", "1 x 24 GB", LORA_1, "tiny",
         ["trainer.dtype=fp32", EAGER, "inference.args.attention_backend=TRITON_ATTN"]),
    Case("LoRA, adapters by NCCL, compiled", "2 x 24 GB", LORA_2, "1.7B"),
    Case("full, shared, compiled", "1 x 48 GB", SHAPE, "0.6B"),
    Case("full, shared, sleep", "1 x 48 GB", REVERSE, "0.6B", ["inference.sleep=true", "orchestrator.max_staleness=0"]),
    # The recipe's four and four with 4B need more than 24 GiB of host memory, and 60 GB of disk.
    Case("full, 1.7B, two and two", "4 x 80 GB", FULL_8, "1.7B", [*TWO_AND_TWO, "checkpoint.every=0"]),
    Case("full, tensor parallel 2", "3 x 80 GB", LORA_2, "tiny",
         [FULL, "inference.gpus=2", "inference.args.tensor_parallel_size=2"]),
    Case("full, two servers, two ranks", "4 x 24 GB", LORA_2, "tiny", [FULL, *TWO_AND_TWO, "run_name=resumed"]),
    Case("the same, resumed", "4 x 24 GB", LORA_2, "tiny", [FULL, *TWO_AND_TWO, "run_name=resumed", "max_steps=4"],
         shows="step     3"),
    Case("--check", "1 x 24 GB", LORA_1, "0.6B", ["--check"], 4, "fits in memory"),
    Case("24 steps, compiled", "1 x 24 GB", LORA_1, "tiny", ["max_steps=24"], look=recompilations),
    Case("trainer killed", "2 x 24 GB", LORA_2, "tiny", LONG, 3, "killed by SIGKILL", "trainer"),
    Case("orchestrator killed", "2 x 24 GB", LORA_2, "tiny", LONG, 3, "killed by SIGKILL", "orchestrator"),
    Case("engine killed", "2 x 24 GB", LORA_2, "tiny", LONG, 3, "its engine", "engine"),
]  # fmt: skip
MUTATIONS = [
    Case("a tensor stays on the CPU", "1 x 24 GB", LORA_1, "tiny", [EAGER], 3, "same device",
         mutation=('micro["temperature_N"]', 'micro["temperature_N"].cpu()')),
    Case("a block that compiles to two graphs", "1 x 24 GB", LORA_1, "tiny", [], 3, "CheckpointError",
         mutation=("hidden_BWD.view_as(hidden_BWD)", "hidden_BWD")),
    Case("an .item() among the micro-batches", "1 x 24 GB", LORA_1, "tiny", [EAGER], problem="waits for the device",
         mutation=("if update == 0:", "if logp_N.sum().item() < 9:")),
    Case("a batch above the card", "1 x 24 GB", LORA_1, "0.6B",
         ["--check", "trainer.micro_batch_size=64", "trainer.gradient_checkpointing=false"], 2, "does not fit"),
    Case("shares above 1", "1 x 24 GB", LORA_1, "tiny", ["inference.args.gpu_memory_utilization=0.8"], 2,
         "at most 0.5"),
]  # fmt: skip
# Recipe, model, card of the trainer's memory, further keys.
MEMORY = [
    (LORA_1, "0.6B", "1 x 24 GB", []),
    (LORA_1, "0.6B", "1 x 24 GB", [EAGER]),
    (LORA_2, "1.7B", "2 x 24 GB", []),
    (LORA_2, "1.7B", "2 x 24 GB", [EAGER]),
    (SHAPE, "0.6B", "1 x 48 GB", []),
    (SHAPE, "0.6B", "1 x 48 GB", [EAGER]),
    (REVERSE, "0.6B", "1 x 48 GB", [EAGER]),
    (FULL_8, "4B", "8 x 80 GB", []),
    (FULL_8, "4B", "8 x 80 GB", [EAGER]),
]


def environment(place, cards, name):
    """A process in it sees null GPUs. Caches of compiled code are kept between rehearsals."""
    num, mib, capability = CARDS[cards]
    libraries = str(place / "libraries")
    env = os.environ | {
        "KIND": "gpu",
        "LD_LIBRARY_PATH": libraries,
        "TRITON_LIBCUDA_PATH": libraries,
        "PATH": f"{HERE}/bin:{os.environ['PATH']}",
        "PYTHONPATH": f"{HERE}/hooks",
        "NULLGPU_ID": name,
        "NULLGPU_COUNT": str(num),
        "NULLGPU_MIB": str(mib),
        "NULLGPU_CC": str(capability),
        "NULLGPU_LOG": f"{place}/logs/{name}.null",
        "VLLM_CACHE_ROOT": f"{place}/caches/vllm",
        "TRITON_CACHE_DIR": f"{place}/caches/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{place}/caches/inductor",
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",  # cuDNN's attention asks its library too much
        "TORCH_LOGS": "recompiles",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    env.pop("CUDA_VISIBLE_DEVICES", None)
    return env


# --- runs -------------------------------------------------------------------------------------------------------------


def pgrep(*words):
    return [int(pid) for pid in subprocess.run(["pgrep", *words], capture_output=True, text=True).stdout.split()]


def processes_of(role, name):
    """The numbers of a run's processes."""
    if role != "engine":
        return pgrep("-f", f"python.* {role}.py .*run_name={name}( |$)")
    return [
        engine for server in pgrep("-f", f"serving.server .*{name}-") for engine in pgrep("-P", str(server), "VLLM")
    ]


def launch(case, place, name):
    """Runs the case. Returns its exit code and what it printed."""
    given = " ".join(case.more)
    more = [] if "run_name=" in given else [f"run_name={name}"]
    words = [*SHORT, f"model={place}/models/{case.model}", *more, *case.more]
    command = ["bash", "launch.sh", case.config, *words]
    output = place / "logs" / f"{name}.txt"
    with open(output, "w") as file:
        env = environment(place, case.cards, name)
        process = subprocess.Popen(command, cwd=place / "tree", env=env, stdout=file, stderr=file)
        deadline = time.monotonic() + 580
        must_kill = case.kills
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.5)
            if must_kill and "\nstep     0 " in output.read_text():
                for pid in processes_of(case.kills, name):
                    os.kill(pid, signal.SIGKILL)
                must_kill = ""
        if process.poll() is None:
            process.terminate()
        return process.wait(), output.read_text()


def problems_of(case, place, name, code, text):
    """What the case shows that it should not."""
    problems = []
    if code != case.code or case.shows not in text:
        problems.append(f"exit code {code}: {text.strip().splitlines()[-1:]}")
    log = place / "tree" / "outputs" / name / "logs" / "trainer.log"
    log = log.read_text(errors="replace") if log.exists() else ""
    waits = {found for found in re.findall(WAIT, log) if not any(known in found for known in KNOWN_WAITS)}
    problems += [f"waits for the device: {found}" for found in sorted(waits)]
    null = place / "logs" / f"{name}.null"
    problems += re.findall("OUT OF MEMORY.*", null.read_text() if null.exists() else "")
    problems += case.look(log)
    left = pgrep("-f", f"run_name={name}( |$)")
    return problems + [f"left: {left}"] * bool(left)


def peak(place, name):
    """The trainer's, GiB, of the run's steps."""
    file = place / "tree" / "outputs" / name / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return max((json.loads(line).get("perf/peak_gib", 0) for line in lines), default=0)


def rehearse(case, place):
    """A row of the table, and whether it is as it should be."""
    name = re.sub(r"\W+", "_", case.name).strip("_").lower()
    given = re.search(r"run_name=(\w+)", " ".join(case.more))
    run_name = given[1] if given else name
    subprocess.run(["rm", "-f", place / "logs" / f"{name}.null"])
    if "resumed" not in case.name:
        subprocess.run(["rm", "-rf", place / "tree" / "outputs" / run_name])
    source = place / "tree" / "trainer.py"
    kept = source.read_text()
    if case.mutation:
        assert kept.count(case.mutation[0]), case
        source.write_text(kept.replace(*case.mutation))
    began = time.monotonic()
    try:
        code, text = launch(case, place, name)
    finally:
        source.write_text(kept)
    seconds = time.monotonic() - began
    problems = problems_of(case, place, run_name, code, text)
    is_right = not problems
    if case.problem:
        is_right = len(problems) > 0 and all(case.problem in found for found in problems)
    told = "; ".join(problems) or f"exit code {code}"
    row = [case.name, case.cards, Path(case.config).stem, case.model, f"{seconds:.0f}", f"{peak(place, run_name):.1f}"]
    return [*row, "as it should be" if is_right else "WRONG", told[:300]], is_right


# --- memory -----------------------------------------------------------------------------------------------------------


def memory_row(recipe, model, cards, more, place):
    """The trainer's peak by torch's allocator beside the estimate, GiB."""
    python = str(place / "tree" / ".venv" / "bin" / "python")
    words = [recipe, f"model={place}/models/{model}", *more]

    def ask(script, *flags):
        env = environment(place, cards, "memory")
        done = subprocess.run(
            [python, script, *words, *flags], cwd=place / "tree", env=env, capture_output=True, text=True
        )
        return done.stdout + done.stderr[-300:]

    rehearsed = ask("tests/nullgpu/memory.py")
    estimated = ask("tools/memory.py", "--gib", str(CARDS[cards][1] / 1024))
    found = re.findall(r"(?m)^\{.*\}$", rehearsed)
    about = re.findall(r"trainer (\S+) GiB \((\S+) between steps\); vLLM (\S+) GiB, room for (\S+)", estimated)
    if not found or not about:
        return [Path(recipe).stem, model, cards, " ".join(more), rehearsed[-200:], estimated[-200:]], False
    peaks = json.loads(found[-1])
    estimate, between, share, room = about[0]
    ratio = float(estimate) / peaks["step"]
    row = [
        Path(recipe).stem,
        model,
        cards,
        " ".join(more),
        str(peaks["build"]),
        str(peaks["step"]),
        str(peaks["gather"]),
    ]
    most = 1.1 if EAGER in more else 1.25  # the estimate is eager, and compiled blocks need a little less
    return [*row, str(peaks["reserved"]), estimate, f"{ratio:.2f}", between, share, room], 0.9 <= ratio <= most


def first_hour(place):
    """All steps of tests/gpu/first_hour.sh; their report lies in `place` afterwards."""
    env = environment(place, "1 x 48 GB", "first_hour")
    with open(place / "logs" / "first_hour.txt", "w") as file:
        command = ["bash", "tests/gpu/first_hour.sh"]
        code = subprocess.run(command, cwd=place / "tree", env=env, stdout=file, stderr=file).returncode
    report = (place / "tree" / "outputs" / "first_hour.md").read_text()
    (place / "first_hour.md").write_text(report)
    print(f"first hour | exit code {code} | {place}/first_hour.md", flush=True)
    return code == 0


def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def main(argv):
    place = Path(argv[0]).resolve()
    words = argv[1:]
    (place / "logs").mkdir(exist_ok=True)
    python = place / "tree" / ".venv" / "bin" / "python"
    env = environment(place, "1 x 24 GB", "models")
    subprocess.run([python, HERE / "models.py", place / "models"], env=env, check=True)
    began = time.monotonic()
    runs = []
    is_right = True
    for case in CASES + MUTATIONS:
        if words and not any(word in case.name for word in words):
            continue
        row, is_well = rehearse(case, place)
        runs.append(row)
        is_right = is_right and is_well
        print(" | ".join(row), flush=True)
    memory = []
    for case in MEMORY if not words or "memory" in words else []:
        row, is_well = memory_row(*case, place)
        memory.append(row)
        is_right = is_right and is_well
        print(" | ".join(row), flush=True)
    if not words or "first hour" in words:
        is_right = first_hour(place) and is_right
    text = table(["case", "cards", "recipe", "model", "s", "peak GiB", "", "told"], runs)
    if memory:
        header = [
            "recipe",
            "model",
            "cards",
            "keys",
            "build",
            "step",
            "gather",
            "reserved",
            "estimate",
            "ratio",
            "between",
            "vLLM",
        ]
        text += "\n\n" + table([*header, "full rollouts"], memory)
    (place / "report.md").write_text(text + "\n")
    print(f"{time.monotonic() - began:.0f} s; the tables are in {place}/report.md")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
