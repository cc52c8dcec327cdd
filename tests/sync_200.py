"""Two ranks that publish 200 versions, each after a sleep of its own; for tests/test_crash.py."""

import random
import sys
import time

import torch.distributed as dist

import trainer
from configs import arguments, run_directory

cfg = arguments(__doc__, sys.argv[1:])
run_dir = run_directory(cfg)
trainer.start_distributed(cfg)
policy = trainer.build_policy(cfg)
sender = trainer.WeightSender(cfg, run_dir, policy.device) if dist.get_rank() == 0 else None
sleeps = random.Random(dist.get_rank())
for version in range(200):
    time.sleep(sleeps.uniform(0, 0.03))
    trainer.publish(sender, policy, version, cfg)
