"""A receiver for tests/test_vllm.py that fails if its specification says so."""

from rolemodel.serving.receiver import CpuWeightReceiver


class Faulty(CpuWeightReceiver):
    def receive_weights(self, spec):
        if spec.get("fail"):
            raise ValueError("this worker takes no weights")
        head = self.model_runner.model.lm_head.quant_method
        if spec.get("stale_head"):  # vLLM's packed copy of a tied head stays as it was
            head.process_weights_after_loading = lambda head: None
        try:
            return super().receive_weights(spec)
        finally:
            vars(head).pop("process_weights_after_loading", None)
