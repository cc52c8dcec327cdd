"""Holds a run for a minute where the trainer calls a function for the n-th time, and a test may kill any process:

    PYTHONPATH=tests HOLD="rename 2" bash launch.sh config.toml trainer.loss=faults:loss

The second checkpoint is then written, but not yet renamed. "[hold]" appears in a log."""

import os
import time
from types import SimpleNamespace

import trainer
from rolemodel import checkpoints

loss = trainer.cispo
name, _, number = os.environ.get("HOLD", "").partition(" ")
calls = []


def held(*args):
    calls.append(args)
    if len(calls) == int(number):
        print("[hold]", flush=True)
        time.sleep(60)
    return honest(*args)


if name == "rename":
    honest, checkpoints.os = os.rename, SimpleNamespace(rename=held, sync=os.sync)
elif name:
    module = trainer if hasattr(trainer, name) else checkpoints
    honest = getattr(module, name)
    setattr(module, name, held)
