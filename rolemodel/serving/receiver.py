"""What vLLM's workers import, by --worker-extension-cls: the WeightReceiver of trainer.py, or of the copy of it with
which the run trains. The launcher names that file in ROLEMODEL_TRAINER.

vLLM 0.32 for CPUs, which launch.sh uses on machines without a GPU, packs experts and a tied head for its kernels when
it first loads them. Unless it is told to repack them after new weights have arrived, it goes on with the old ones."""

import rolemodel.lookup  # noqa: F401  which knows what `trainer` is
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
