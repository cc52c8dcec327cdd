"""vLLM 0.32's build for CPUs packs experts and a tied head for its kernels when it loads them first, and not again: it
would go on with the old ones. So launch.sh takes this receiver of new weights where there is no GPU."""

import trainer


class WeightReceiver(trainer.WeightReceiver):
    def receive_weights(self, spec):
        super().receive_weights(spec)
        model = self.model_runner.model
        for module in model.modules() if not spec["adapter"] else ():
            method = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None):
                method.moe_kernel.fused_experts.process_weights_after_loading(module)
            elif module is getattr(model, "lm_head", None):
                method.process_weights_after_loading(module)
