"""Two ranks that make 200 versions live, each after a random sleep; for tests/test_crash.py."""

import random
import sys
import time

import torch.distributed as dist

import trainer
from configs import arguments
from configs.runtime.directory import run_directory

cfg = arguments(__doc__, sys.argv[1:])
run_dir = run_directory(cfg)
trainer.start_distributed(cfg)
policy = trainer.build_policy(cfg)
sender = None
if dist.get_rank() == 0:
    sender = trainer.WeightSender(cfg, run_dir, policy.device)
    sender.connect()
sleeps = random.Random(dist.get_rank())
for version in range(200):
    time.sleep(sleeps.uniform(0, 0.03))
    trainer.sync_weights(sender, policy, version, cfg)
