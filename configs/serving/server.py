"""python -m configs.serving.server: starts vLLM's server so that no process survives it, even if it is killed at once.

Python imports this file first in every process that vLLM spawns, and so the kernel is asked there to end it with its
parent. Otherwise an engine would come to our code only by --worker-extension-cls (with tensor parallelism never), and
first wait five minutes for a word from its server."""

import os
import runpy
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from configs.runtime.role import end_with_parent

VARIABLES = {
    "VLLM_SERVER_DEV_MODE": "1",  # the routes for new weights
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
# Without these it would take half of the memory, and call g++ for minutes.
ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1"}
# vLLM 0.32's engine for CPUs ends at a part of a prompt whose request has a seed, as those of evaluations have.
FLAGS_ON_CPU = ["--enforce-eager", "--no-enable-chunked-prefill"]

if __name__ == "__main__":
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    with suppress(PackageNotFoundError):
        version("vllm-cpu")  # only the build for CPUs has this name
        for name, value in ON_CPU.items():
            os.environ.setdefault(name, value)
        sys.argv[1:1] = FLAGS_ON_CPU  # first, so that inference.args override them
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
elif __name__ == "__mp_main__":
    end_with_parent()
    if os.getsid(os.getppid()) != os.getsid(0):  # its parent had died by then: the launcher's session is another one
        raise SystemExit("the process that started this one is gone")
