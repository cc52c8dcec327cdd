"""Receivers that fail on purpose, for tests/test_vllm.py."""

from configs.serving.cpu_receiver import WeightReceiver


class StaleHead(WeightReceiver):
    """If the specification says so, it fails, or leaves vLLM's packed copy of a tied head as reload_weights left it."""

    def receive_weights(self, spec):
        if spec.get("fail"):
            self.reload_weights = self.load_one_and_fail
            try:
                return super().receive_weights(spec)
            finally:
                del self.reload_weights
        if not spec.get("stale_head"):
            return super().receive_weights(spec)
        method = self.model_runner.model.lm_head.quant_method
        method.process_weights_after_loading = lambda head: None
        try:
            return super().receive_weights(spec)
        finally:
            del method.process_weights_after_loading

    def load_one_and_fail(self, weights_iterator):
        name, _ = next(weights_iterator)
        raise ValueError(f"{name} cannot be loaded")
