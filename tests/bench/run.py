"""Measures the parts of the trainer: python tests/bench/run.py [--quick] [part ...]. Parts are files beside it.

It prints a table and writes outputs/bench.json. Each part runs by itself and is measured against its limit, or against
a peer in the same run; a row is a ratio or a median. It takes at most 25 minutes on 2 cores, with --quick 3. TRL is
installed under .cache/peers on first use and runs on the torch that is installed already."""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PARTS = ("step", "gpu", "broadcast", "orchestrate", "overlap", "whole", "growth")
WITH_PEERS = {"step", "whole"}
PEERS = ("trl==1.16.0", "accelerate==1.15.0")  # without their dependencies, which are installed already


def install_peers():
    place = ROOT / ".cache" / "peers"
    if not (place / "trl").is_dir():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(place), *PEERS]
        subprocess.run(command, check=True, timeout=600)


def note(text, is_met=None):
    """A row without a number."""
    return {"measure": text, "value": None, "unit": "", "target": "", "met": is_met}


def run(part, quick):
    """Returns the rows of a part, and the seconds that it took. A failure is a row as well."""
    began = time.monotonic()
    command = [sys.executable, str(ROOT / "tests" / "bench" / f"{part}.py")]
    if quick:
        command.append("--quick")
    env = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "GLOO_SOCKET_IFNAME": "lo"}
    if part != "gpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=env, start_new_session=True, **pipes)
    try:
        output, errors = process.communicate(timeout=1500)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # the launcher ends what it started
        output, errors = process.communicate(timeout=60)
    if process.returncode:
        print(errors[-3000:], file=sys.stderr)
        rows = [note(f"{part} failed", False)]
    else:
        rows = json.loads(output.splitlines()[-1])
    return rows, time.monotonic() - began


def show(row):
    value = row["value"]
    text = ""
    if value is not None:
        text = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    verdict = ""
    if row["met"] is not None:
        verdict = f"{row['target']}: {'yes' if row['met'] else 'NO'}"
    print(f"| {row['measure']:<84} | {text:>8} {row['unit']:<10} | {verdict:<12} |", flush=True)


def name_of_machine():
    name = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            name = line.split(":")[1].strip()
    return f"{os.cpu_count()} cores, {name}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "bench.json")
    parser.add_argument("parts", nargs="*", metavar="part", help=", ".join(PARTS))
    args = parser.parse_args()
    unknown = sorted(set(args.parts) - set(PARTS))
    if unknown:
        parser.error(f"no such part: {unknown}; the parts are {PARTS}")
    chosen = args.parts or PARTS
    if WITH_PEERS & set(chosen):
        install_peers()
    results = {"machine": name_of_machine(), "quick": args.quick, "parts": {}}
    total = 0.0
    has_failed = False
    for part in chosen:
        rows, seconds = run(part, args.quick)
        results["parts"][part] = {"rows": rows, "seconds": seconds}
        for row in rows or [note(f"{part}: not measured, no GPU")]:
            show(row)
            has_failed = has_failed or "failed" in row["measure"]
        total += seconds
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1))
    print(f"{results['machine']}; {total:.0f} s; {args.out}")
    sys.exit(has_failed)


if __name__ == "__main__":
    main()
