"""Sends a run to wandb, trackio or TensorBoard: tools/watch.py calls it if the configuration has a `tracker`."""

import importlib
import json
import os
import re
from pathlib import Path

from tools import show


class TensorBoard:
    """TensorBoard with those of wandb's functions that Tracker uses, under the same names."""

    def init(self, dir, config, **kwargs):
        self.writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(dir / "tensorboard"))
        self.writer.add_text("config", json.dumps(config))

    def log(self, values):
        for name, x in values.items():
            add = self.writer.add_text if isinstance(x, str) else self.writer.add_scalar
            add(name, x, values["version"])

    def Table(self, columns, data):
        return json.dumps([dict(zip(columns, row)) for row in data])

    def finish(self):
        self.writer.close()


class Tracker:
    """Sends everything once. A file in the run's directory, for each tracker, knows what has been sent, so a run may be
    sent later or in parts, and steps that a resumed run trains again are not sent again. Account and project are set in
    the usual way of wandb and trackio: WANDB_PROJECT, WANDB_MODE=offline, ... TensorBoard's files are in the run's
    directory."""

    COLUMNS = ["step", "env", "example", "member", "reward", "truncated", "prompt", "completion"]

    def __init__(self, name: str, run: Path, cfg):
        self.file = run / f"tracker-{name}.json"
        self.sent = {"id": f"{run.name}-{os.urandom(4).hex()}"}
        if self.file.exists():
            self.sent = json.loads(self.file.read_text())
        # wandb allows few kinds of characters in an id, and with the name of a table no more than 128. The end tells
        # runs apart.
        self.sent["id"] = re.sub(r"[^A-Za-z0-9_.-]", "-", self.sent["id"])[-100:]
        self.write()  # another attempt must find the id
        self.wandb = TensorBoard() if name == "tensorboard" else importlib.import_module(name)
        group = os.environ.get("ROLEMODEL_GROUP", "")[:100] or None
        place = {"project": os.environ.get("WANDB_PROJECT", "rolemodel"), "group": group, "name": self.sent["id"]}
        if name != "trackio":  # it knows runs by their names, and stores them in its own place
            place |= {"id": self.sent["id"], "dir": run}
        self.wandb.init(**place, resume="allow", config=cfg.flat)
        if name == "wandb":
            self.wandb.define_metric("*", step_metric="version")

    def log(self, kind: str, version: int, values: dict):
        """values: {name: a number, or a table of the tracker's}."""
        if version > self.sent.get(kind, -1):
            self.wandb.log(values | {"version": version})
            self.sent[kind] = version

    def add_step(self, line: dict, rollouts: list[dict]):
        """Sends a line of metrics.jsonl and, at every tenth step, a table of the batch's first rollouts."""
        self.log("metrics", line["version"], {key: x for key, x in line.items() if "/" in key or key == "loss"})
        if line["step"] % 10 or not rollouts:
            return
        rows = []
        for rollout in rollouts[:64]:
            texts = {}
            for key in ("prompt", "completion"):
                messages = show.as_messages(rollout[key])
                texts[key] = "\n".join(f"{message['role']}: {show.text_of(message)}" for message in messages)
            rows.append([(rollout | texts)[column] for column in self.COLUMNS])
        self.log("rollouts", line["version"], {"rollouts": self.wandb.Table(columns=self.COLUMNS, data=rows)})

    def add_evaluation(self, line: dict):
        name = f"eval/{line['env']}"
        numbers = {f"{name}/{key}": x for key, x in line.items() if type(x) in (int, float) and key != "step"}
        self.log(name, line["step"], numbers)

    def finish(self):
        """wandb may hold the last numbers in memory, so they count as sent only when it has finished. After a crash,
        they are sent again."""
        self.wandb.finish()
        if hasattr(self.wandb, "teardown"):
            self.wandb.teardown()  # finish() does not wait for wandb's own process, which writes its file
        self.write()

    def write(self):
        self.file.write_text(json.dumps(self.sent))
