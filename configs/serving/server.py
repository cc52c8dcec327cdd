"""python -m configs.serving.server: vLLM's OpenAI server, of which nothing is left when it is killed, not even while it starts.

Python imports this file, and with it `configs`, in every process that vLLM spawns, before anything else: the kernel is
asked there to end it with its parent. An engine would else come to our code only by --worker-extension-cls (with tensor
parallelism never), and first wait five minutes for a word from its server."""

import os
import runpy

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
elif os.getsid(os.getppid()) != os.getsid(0):  # the parent had died by then: an orphan's is of another session
    raise SystemExit("the process that started this one is gone")
