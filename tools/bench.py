"""python tools/bench.py [--quick] [part ...] -> a table, and outputs/bench.json. Parts: tests/bench/PART.py.

Each part runs by itself and measures against its limit or a peer in the same run; a row is a ratio or a median. At most
25 minutes on 2 cores, --quick 3. TRL is installed under .cache/peers on first use, beside the torch that is there."""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("step", "gpu", "broadcast", "orchestrate", "overlap", "whole", "growth")
WITH_PEERS = {"step", "whole"}
PEERS = ("trl==1.16.0", "accelerate==1.15.0")  # without what they depend on: that is there already


def install_peers():
    place = ROOT / ".cache" / "peers"
    if not (place / "trl").is_dir():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(place), *PEERS]
        subprocess.run(command, check=True, timeout=600)


def run(part, quick):
    """-> rows, seconds. A part that fails is a row, too."""
    began = time.monotonic()
    command = [sys.executable, str(ROOT / "tests" / "bench" / f"{part}.py"), *(["--quick"] if quick else [])]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "GLOO_SOCKET_IFNAME": "lo"}
    env |= {} if part == "gpu" else {"CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True
    )
    try:
        said, errors = process.communicate(timeout=1500)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # launch.sh ends what it started
        said, errors = process.communicate(timeout=60)
    if process.returncode:
        print(errors[-3000:], file=sys.stderr)
        rows = [{"measure": f"{part} failed", "value": None, "unit": "", "target": "", "met": False}]
    else:
        rows = json.loads(said.splitlines()[-1])
    return rows, time.monotonic() - began


def show(rows):
    for r in rows:
        value = "" if r["value"] is None else f"{r['value']:,.0f}" if r["value"] >= 100 else f"{r['value']:.3g}"
        verdict = {None: "", True: f"{r['target']}: yes", False: f"{r['target']}: NO"}[r["met"]]
        print(f"| {r['measure']:<84} | {value:>8} {r['unit']:<10} | {verdict:<12} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "bench.json")
    parser.add_argument("parts", nargs="*", metavar="part", help=", ".join(PARTS))
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"no such part: {sorted(unknown)}; there are {PARTS}")
    if WITH_PEERS & set(args.parts or PARTS):
        install_peers()
    model = next((x.split(":")[1].strip() for x in open("/proc/cpuinfo") if x.startswith("model name")), "")
    results = {"machine": f"{os.cpu_count()} cores, {model or platform.processor()}", "quick": args.quick, "parts": {}}
    for part in args.parts or PARTS:
        rows, seconds = run(part, args.quick)
        results["parts"][part] = {"rows": rows, "seconds": seconds}
        show(
            rows or [{"measure": f"{part}: not measured, no GPU", "value": None, "unit": "", "target": "", "met": None}]
        )
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1))
    print(f"{results['machine']}; {sum(p['seconds'] for p in results['parts'].values()):.0f} s; {args.out}")
    sys.exit(any("failed" in r["measure"] for p in results["parts"].values() for r in p["rows"]))


if __name__ == "__main__":
    main()
