"""Two ranks that publish 200 versions, each after a sleep of its own; for tests/test_crash.py."""

import random
import sys
import time

import trainer
from configs.lib.broadcast import WeightSender
from configs.lib.process import start_distributed
from configs.lib.runtime import arguments, run_directory

cfg, _ = arguments(__doc__, sys.argv[1:])
run_dir = run_directory(cfg)
rank, world, device = start_distributed(cfg)
policy = trainer.build_policy(cfg, device, world)
sender = WeightSender(cfg, run_dir, device) if rank == 0 else None
sleeps = random.Random(rank)
for version in range(200):
    time.sleep(sleeps.uniform(0, 0.03))
    trainer.publish(sender, policy, version, 1, cfg, rank, device)
