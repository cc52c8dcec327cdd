"""Receivers that fail on purpose, for tests/test_vllm.py."""

import json

from trainer import WeightReceiver


class StaleHead(WeightReceiver):
    """Where the specification says so, leaves vLLM's packed copy of a tied head as reload_weights left it, or fails."""

    def receive_weights(self, spec):
        if json.loads(spec).get("fail"):
            super().receive_weights(spec)
            raise ValueError("weights that cannot be loaded")
        if not json.loads(spec).get("stale_head"):
            return super().receive_weights(spec)
        method = self.model_runner.model.lm_head.quant_method
        method.process_weights_after_loading = lambda head: None
        try:
            return super().receive_weights(spec)
        finally:
            del method.process_weights_after_loading
