"""vLLM's workers import this file because of --worker-extension-cls. It gives them the WeightReceiver of trainer.py, or
of the copy that the run trains with; the launcher names the file in ROLEMODEL_TRAINER.

vLLM 0.32 for CPUs, which launch.sh uses on machines without a GPU, packs experts and a tied head for its kernels when
it first loads them. Unless it is told to repack them after new weights have arrived, it goes on with the old ones."""

import rolemodel.lookup  # noqa: F401  it knows which file `trainer` is
from trainer import WeightReceiver


class CpuWeightReceiver(WeightReceiver):
    def receive_weights(self, spec):
        super().receive_weights(spec)
        if spec["adapter"]:  # an adapter leaves the model's own weights alone
            return
        model = self.model_runner.model
        for module in model.modules():
            method = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None):
                method.moe_kernel.fused_experts.process_weights_after_loading(module)
            elif module is getattr(model, "lm_head", None):
                method.process_weights_after_loading(module)
