"""Trackers: wandb, trackio and tensorboard get what watch.py reads.

Numbers are filed under versions: those of batch n under n + 1, the version that it made. Every 10th batch also gives a
table of 64 rollouts, or with trackio 64 conversations. Account and place are set as the tracker wants it:
WANDB_PROJECT, WANDB_MODE=offline, TRACKIO_DIR, ..."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from configs.runtime.directory import redacted
from tools.show import as_messages, text_of

COLUMNS = ("step", "env", "example", "rollout", "reward", "truncated", "prompt", "completion")
EVERY = 10  # steps between tables
ROWS = 64  # rollouts in a table


def group():
    """Returns the name that runs of one arm share, which tools/compare.py sets, or None."""
    return os.environ.get("ROLEMODEL_GROUP")


class Wandb:
    def __init__(self, run, config, project):
        import wandb

        self.wandb = wandb
        place = {"name": run.name, "id": config["id"], "dir": run}
        self.run = wandb.init(project=project, resume="allow", config=config, group=group(), **place)
        self.run.define_metric("*", step_metric="version")

    def log(self, version, values):
        self.run.log(values | {"version": version})

    def table(self, version, rows, lines):
        self.log(version, {"rollouts": self.wandb.Table(columns=list(COLUMNS), data=rows)})

    def flush(self):
        return False  # it has no such call, and may hold the last 32 KiB in memory

    def finish(self):
        self.run.finish()
        self.wandb.teardown()  # finish() does not wait for wandb's own process, which writes its file


class Trackio:
    def __init__(self, run, config, project):
        import trackio

        self.trackio = trackio
        place = {"name": run.name, "group": group()}
        trackio.init(project=project, config=config, resume="allow", embed=False, **place)

    def log(self, version, values):
        self.trackio.log(values, step=version)

    def table(self, version, rows, lines):
        """As conversations: its page shows messages, and tool calls with their results."""
        traces = []
        for line in lines:
            messages = as_messages(line["prompt"]) + as_messages(line["completion"])
            about = {key: line[key] for key in (*COLUMNS[:-2], "group", "metrics")}
            traces.append(self.trackio.Trace(messages, metadata=about))
        self.log(version, {"rollouts": traces})

    def flush(self):
        return True

    def finish(self):
        self.trackio.finish()


class Tensorboard:
    def __init__(self, run, config, project):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(run / "tensorboard")
        self.writer.add_text("config", f"```\n{json.dumps(config, indent=1)}\n```")

    def log(self, version, values):
        for key, value in values.items():
            self.writer.add_scalar(key, value, version)

    def table(self, version, rows, lines):
        text = ""
        for row in [COLUMNS, ["---"] * len(COLUMNS), *rows]:
            cells = [str(cell).replace("|", "\\|").replace("\n", "<br>") for cell in row]
            text += f"| {' | '.join(cells)} |\n"
        self.writer.add_text("rollouts", text, version)

    def flush(self):
        self.writer.flush()
        return True

    def finish(self):
        self.writer.close()


KINDS = {"wandb": Wandb, "trackio": Trackio, "tensorboard": Tensorboard}


def as_cell(text):
    """A prompt or a completion as one text."""
    parts = [f"{message['role']}: {text_of(message)}" for message in as_messages(text)]
    return "\n".join(parts)


class Tracker:
    """Sends each thing once. tracker.json remembers what has been sent, so a run can be sent later or in parts, and a
    step that a resumed run trains again is not sent again."""

    def __init__(self, name, run, config):
        self.file = run / "tracker.json"
        # And the last number sent, for each kind of line.
        self.sent = {"id": f"{run.name}-{os.urandom(4).hex()}", "tracker": name}
        known = json.loads(self.file.read_text()) if self.file.exists() else {}
        if known.get("tracker", name) == name:  # another tracker gets all of it
            self.sent |= known
        self.write()  # another attempt must find the id
        config = redacted(config) | {"id": self.sent["id"]}
        project = os.environ.get("WANDB_PROJECT") or "rolemodel"
        self.kind = KINDS[name](run, config, project)

    def add_metrics(self, line):
        self.log("metrics", line["version"], line)

    def add_evaluation(self, line):
        name = f"eval/{line['env']}"
        self.log(name, line["step"], {f"{name}/{key}": value for key, value in line.items()})

    def log(self, what, version, values):
        if version <= self.sent.get(what, -1):
            return
        numbers = {}
        for key, value in values.items():
            is_number = type(value) in (int, float)
            if is_number and key.split("/")[-1] not in ("time", "step", "version"):
                numbers[key] = value
        self.kind.log(version, numbers)
        self.sent[what] = version

    def add_rollouts(self, step, lines):
        """The rollouts of one batch."""
        if step % EVERY or step <= self.sent.get("rollouts", -1):
            return
        rows = []
        for line in lines[:ROWS]:
            texts = {key: as_cell(line[key]) for key in ("prompt", "completion")}
            cells = line | texts
            rows.append([cells[column] for column in COLUMNS])
        self.kind.table(step + 1, rows, lines[:ROWS])  # beside the numbers of that batch
        self.sent["rollouts"] = step

    def save(self):
        """Only what has reached the disk counts as sent; after a crash the rest is sent again, maybe in part twice."""
        if self.kind.flush():
            self.write()

    def finish(self):
        self.kind.finish()
        self.write()

    def write(self):
        tmp = self.file.with_suffix(".tmp")
        tmp.write_text(json.dumps(self.sent))
        os.replace(tmp, self.file)
