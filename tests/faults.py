"""Holds a run for a minute at an exact point, where a test may kill any of its processes:

    PYTHONPATH=tests HOLD="save 2" bash launch.sh config.toml trainer.loss=faults:loss

The second checkpoint is then written, but not yet renamed. The points are those below; "[hold]" appears in a log."""

import os
import time

import trainer

loss = trainer.cispo
POINTS = {
    "train": "train_step",
    "gather": "stream_weights",
    "canary": "canary",  # the weights have arrived, but their version is not live
    "save": "identity",  # all parts of a checkpoint are written
    "final": "write_final",
}
point, _, number = os.environ.get("HOLD", "").partition(" ")
calls = []


def held(*args):
    calls.append(args)
    if len(calls) == int(number):
        print("[hold]", flush=True)
        time.sleep(60)
    return honest(*args)


if point:
    honest = getattr(trainer, POINTS[point])
    setattr(trainer, POINTS[point], held)
