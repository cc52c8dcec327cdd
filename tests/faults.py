"""Holds a run for a minute where trainer.py calls a function for the n-th time, and a test may kill any process:

    PYTHONPATH=tests HOLD="identity 2" bash launch.sh config.toml trainer.loss=faults:loss

The second checkpoint is then written, but not yet renamed. "[hold]" appears in a log."""

import os
import time

import trainer

loss = trainer.cispo
name, _, number = os.environ.get("HOLD", "").partition(" ")
calls = []


def held(*args):
    calls.append(args)
    if len(calls) == int(number):
        print("[hold]", flush=True)
        time.sleep(60)
    return honest(*args)


if name:
    honest = getattr(trainer, name)
    setattr(trainer, name, held)
