"""python final_in_vllm.py DIR: prints the largest |dlogp| of vLLM and Transformers, which both load DIR in fp32."""

import os
import sys

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1"}

import torch
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams

path, prompt = sys.argv[1], list(range(10, 40))
llm = LLM(path, dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=4)
how = SamplingParams(max_tokens=16, logprobs=0, ignore_eos=True, seed=1)
said = llm.generate([{"prompt_token_ids": prompt}], how)[0].outputs[0]
ids = torch.tensor([prompt + list(said.token_ids)])
model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
with torch.no_grad():
    log_p = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
ours = log_p.gather(-1, ids[0, len(prompt) :, None])[:, 0]
theirs = torch.tensor([step[token].logprob for step, token in zip(said.logprobs, said.token_ids)])
print("largest |dlogp|", (ours - theirs).abs().max().item())
