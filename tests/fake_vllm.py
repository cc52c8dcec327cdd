"""A stand-in for vLLM's server that starts in seconds: the same routes, a Hugging Face model, true logprobs, adapters,
and a WeightReceiver that really joins the broadcast. An answer is a function of the prompt, its turns, the weights,
the request's seed and `user`, which numbers the rollouts of a group: they differ, and runs repeat exactly.

FAKE in the environment, or a POST to /fake, holds JSON:
    {"generate_s": 1.0,              seconds before every generation; "total_s": of request and generation together
     "slow": [50, 10.0],             every 50th takes 10 s more
     "generate 3": "500",            the third request fails; "hang": never answers; "logprobs": one is missing;
                                     "exit": the server exits with 0; "silent": it answers none any more, but /health
     "log": "path",                  the requests go there, one a line
     "control": "path",              the control routes go there, one a line
     "teacher": "short",             the last token of a prompt is not scored; "404", "hang"
     "stop": true,                   no answer counts as cut off
     "discard": true,                weights are received and thrown away, whatever their names
     "bias": 5.0,                    the logprobs of what was sampled are too low by this
     "sync 2": "raise",              the second broadcast fails after its first tensor; "hang": never begins;
                                     "500": an answer, and no more; "stop": the server is stopped by SIGSTOP
     "orphan": true}                 its engine outlives it, as vLLM's does with tensor parallelism
Like vLLM's server it has an engine process, without which it answers /health and nothing else. The kernel ends the
engine with the server, as configs/serving does with vLLM's.
"""

import argparse
import asyncio
import base64
import ctypes
import io
import json
import os
import re
import signal
import sys
import time
import zlib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent.parent))
import numpy as np
import setproctitle
import torch
from aiohttp import web
from safetensors.torch import load_file

from configs.models.demonstrations import as_template_sees
from trainer import LoRALinear, WeightReceiver

FAKE = json.loads(os.environ.get("FAKE", "{}"))


class Runner:
    """What WeightReceiver expects of vLLM's model runner."""

    def __init__(self, path, dtype, template):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.network = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model = torch.nn.Module()
        self.num_syncs = 0
        self.adapters = {}  # name: the seed of its samples, its layers' scale and tensors
        if template:
            self.tokenizer.chat_template = Path(template).read_text()

    @torch.no_grad()
    def reload_weights(self, weights_iterator):
        self.num_syncs += 1
        if FAKE.get(f"sync {self.num_syncs}") == "raise":
            next(iter(weights_iterator))
            raise RuntimeError("fault asked for: sync raises after its first tensor")
        params = dict(self.network.named_parameters())
        for name, tensor in weights_iterator:
            if not FAKE.get("discard"):
                params[name].copy_(tensor)

    def load_adapter(self, name, path):
        about = json.loads(Path(path, "adapter_config.json").read_text())
        file = Path(path, "adapter_model.safetensors")
        layers = {}
        for key, tensor in load_file(file).items():
            layer, _, factor = key.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
            layers.setdefault(layer, {})[factor] = tensor
        self.adapters[name] = zlib.crc32(file.read_bytes()), about["lora_alpha"] / about["r"], layers

    def use(self, name):
        """Computes with this adapter, or with the base alone. Returns a seed that these weights alone have."""
        seed, scale, layers = self.adapters.get(name, (0, 0.0, {}))
        for layer, module in self.network.named_modules():
            if layer in layers:
                module.__class__ = LoRALinear
                vars(module).update(layers[layer] | {"scale": scale, "dropout": 0.0})
            elif isinstance(module, LoRALinear):
                module.__class__ = torch.nn.Linear
        weights = next(self.network.parameters()).detach().view(torch.uint8).numpy().tobytes()
        return zlib.crc32(weights, seed)

    @torch.no_grad()
    def routes(self, ids):
        """The experts of each token and layer, as vLLM encodes them."""
        chosen = []
        hooks = []
        for module in self.network.modules():
            if type(module).__name__.endswith("TopKRouter"):
                hooks.append(module.register_forward_hook(lambda router, args, output: chosen.append(output[2])))
        self.network(torch.tensor([ids]))
        for hook in hooks:
            hook.remove()
        file = io.BytesIO()
        np.save(file, torch.stack(chosen, 1).to(torch.uint8).numpy())
        return base64.b64encode(file.getvalue()).decode()

    @torch.no_grad()
    def sample(self, name, ids, user, max_tokens, temperature, ignore_eos=False):
        """Returns tokens, which the end-of-sequence token ends if it comes, their logprobs, and the seed of both."""
        seed = zlib.crc32(f"{ids} {user}".encode(), self.use(name))
        draw = torch.Generator().manual_seed(seed)
        tokens, logps = [], []
        while len(tokens) < max_tokens and (ignore_eos or self.tokenizer.eos_token_id not in tokens):
            logits_V = self.network(torch.tensor([ids + tokens])).logits[0, -1].float()
            logp_V = (logits_V / max(temperature, 1e-5)).log_softmax(-1)  # 0: the likeliest
            tokens.append(torch.multinomial(logp_V.exp(), 1, generator=draw).item())
            logps.append(logp_V[tokens[-1]].item())
        return tokens, logps, seed


def start_engine():
    """Returns the pid of a process that has nothing to do but to be there."""
    if pid := os.fork():
        return pid
    if not FAKE.get("orphan"):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # a fork does not inherit it
    setproctitle.setproctitle("VLLM::EngineCore")  # as vLLM does; it overwrites /proc/self/environ
    while True:
        time.sleep(3600)


class Server(WeightReceiver):
    def __init__(self, args, engine):
        self.engine = engine
        dtype = getattr(torch, args.dtype)
        self.args = args
        self.rank = 0
        self.device = torch.device("cpu")
        self.model_runner = Runner(args.model, dtype, args.chat_template)
        lora = object() if args.enable_lora else None
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(dtype=dtype), lora_config=lora)
        self.lock = asyncio.Lock()
        self.is_asleep = False
        self.counts = Counter()  # requests; `most` and `now` are under way at once
        self.running = asyncio.Event()
        self.running.set()

    def reload_weights(self, **kwargs):  # as vLLM's worker has it
        self.model_runner.reload_weights(**kwargs)

    def names(self):
        return [self.args.served_model_name, *self.model_runner.adapters]

    async def models(self, request):
        about = {"max_model_len": self.args.max_model_len}
        return web.json_response({"data": [{"id": name} | about for name in self.names()]})

    async def load_adapter(self, request):
        body = await request.json()
        if body["lora_name"] in self.model_runner.adapters:
            return web.json_response({"error": "has already been loaded"}, status=400)
        self.model_runner.load_adapter(body["lora_name"], body["lora_path"])
        return web.Response(text="Success")

    async def unload_adapter(self, request):
        found = self.model_runner.adapters.pop((await request.json())["lora_name"], None)
        return web.Response(status=200 if found else 404)

    async def health(self, request):
        found = {"requests": self.counts["all"], "most": self.counts["most"], "paused": not self.running.is_set()}
        return web.json_response(found | {"syncs": self.model_runner.num_syncs})

    async def fake(self, request):
        FAKE.clear()
        FAKE.update(await request.json())
        self.counts = Counter()  # requests of a test before this one still count down the old one
        return web.json_response({})

    async def pause(self, request):
        self.running.clear()
        return web.json_response({})

    async def resume(self, request):
        self.running.set()
        return web.json_response({})

    async def sleep(self, request):
        """As vLLM with --enable-sleep-mode: no weights, no keys and values; with mode=keep the requests wait."""
        self.note("/sleep")
        async with self.lock:  # what is being sampled
            assert self.args.enable_sleep_mode and not self.is_asleep
            assert dict(request.query) == {"level": "1", "mode": "keep"}
            self.is_asleep = True
            self.running.clear()
        return web.json_response({})

    async def wake_up(self, request):
        self.note("/wake_up")
        assert self.is_asleep
        self.is_asleep = False
        self.running.set()
        return web.json_response({})

    def note(self, what):
        if path := FAKE.get("control"):
            with open(path, "a") as f:
                f.write(what + "\n")

    async def stop(self, app):
        os.kill(self.engine, signal.SIGKILL)

    async def answers(self):
        """Never returns without the engine."""
        state = Path(f"/proc/{self.engine}/stat").read_text().rpartition(")")[2].split()[0]
        await asyncio.sleep(3600 if state == "Z" or FAKE.get("silent") else 0)

    async def rpc(self, request):
        body = await request.json()
        await self.answers()
        self.note(body["method"])
        assert not self.is_asleep, "its memory is another's"
        if body["method"] == "join_weight_group" and FAKE.get("join"):
            return web.json_response({"error": "fault asked for: no such route"}, status=404)
        if body["method"] == "receive_weights":
            fault = FAKE.get(f"sync {self.model_runner.num_syncs + 1}")
            await asyncio.sleep(3600 if fault == "hang" else 0)
            if fault == "stop":
                print("[fault] stopped in a sync", flush=True)
                os.kill(os.getpid(), signal.SIGSTOP)
            if fault == "500":
                return web.json_response({"error": "fault asked for: no weights today"}, status=500)
        try:
            result = await asyncio.to_thread(getattr(self, body["method"]), *body["args"])
        except Exception as e:  # as vLLM does
            return web.json_response({"error": {"message": str(e)}}, status=500)
        return web.json_response({"results": [result]})

    def ids_of(self, body):
        tokenizer = self.model_runner.tokenizer
        if "messages" not in body:
            return tokenizer.encode(body["prompt"])
        more = body.get("chat_template_kwargs") or {}
        messages = [as_template_sees(plain(message)) for message in body["messages"]]
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **more)

    async def tokenize(self, request):
        return web.json_response({"tokens": self.ids_of(await request.json())})

    @torch.no_grad()
    def score(self, name, ids):
        """prompt_logprobs as vLLM gives them; the seed of `use` is of no use here."""
        self.model_runner.use(name)
        logits = self.model_runner.network(torch.tensor([ids])).logits[0, :-1].float()
        logps = logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        found = [None, *({str(token): {"logprob": logp, "rank": 1}} for token, logp in zip(ids[1:], logps))]
        found = found[:-1] if FAKE.get("teacher") == "short" else found
        return {"choices": [{"index": 0, "prompt_logprobs": found}]}

    def canary(self, name, body):
        """What the policy says after rows of token ids."""
        choices = []
        for i, ids in enumerate(body["prompt"]):
            tokens, logps, _ = self.model_runner.sample(name, ids, "", body["max_tokens"], 1.0, True)
            choices.append({"index": i, "token_ids": tokens, "logprobs": {"token_logprobs": logps}})
        return choices

    async def generate(self, request):
        begun = time.monotonic()
        body = await request.json()
        await self.answers()
        name = body.get("model") or self.args.served_model_name
        if name not in self.names():
            return web.json_response({"error": f"The model {name} does not exist."}, status=404)
        if "prompt_logprobs" in body:
            if FAKE.get("teacher") == "404":
                return web.json_response({"error": "fault asked for"}, status=404)
            await asyncio.sleep(3600 if FAKE.get("teacher") == "hang" else 0)
            if len(body["prompt"]) + body["max_tokens"] > self.args.max_model_len:
                return web.json_response({"error": "This model's maximum context length is exceeded"}, status=400)
            async with self.lock:
                return web.json_response(await asyncio.to_thread(self.score, name, body["prompt"]))
        if "ignore_eos" in body:
            async with self.lock:
                assert not self.is_asleep
                return web.json_response({"choices": self.canary(name, body)})
        if log := FAKE.get("log"):
            with open(log, "a") as f:
                f.write(json.dumps(body) + "\n")
        counts = self.counts
        counts["all"] += 1
        counts["now"] += 1
        counts["most"] = max(counts["most"], counts["now"])
        try:
            fault = FAKE.get(f"generate {counts['all']}")
            every, seconds = FAKE.get("slow", (10**9, 0))
            slow = seconds if counts["all"] % every == 0 else 0
            if fault == "500":
                return web.json_response({"error": "fault asked for"}, status=500)
            if fault == "exit":
                os._exit(0)
            if fault == "silent":
                FAKE["silent"] = True
                await self.answers()
            before = 0 if "total_s" in FAKE else FAKE.get("generate_s", 0) + slow
            await asyncio.sleep(3600 if fault == "hang" else before)
            await self.running.wait()
            reply = self.refusal(body) or await self.answer(name, body, fault)
            if "total_s" in FAKE:  # this long in all, sampling included
                await asyncio.sleep(begun + FAKE["total_s"] + slow - time.monotonic())
            return reply
        finally:
            counts["now"] -= 1

    def refusal(self, body):
        """What vLLM says to a prompt that is too long, and to tools if it has no parser; otherwise None."""
        length = len(self.ids_of(body))
        room = self.args.max_model_len - length
        asked = body.get("max_tokens") or body.get("max_completion_tokens") or 16
        text = ""
        if room < 0 or asked > self.args.max_model_len:
            text = f"This model's maximum context length is {self.args.max_model_len} tokens, not {length} + {asked}"
        elif room == 0:
            text = "max_tokens must be at least 1, got 0."  # as vLLM 0.32 says it
        elif body.get("tools") and (FAKE.get("no_parser") or not self.args.enable_auto_tool_choice):
            text = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
        return web.json_response({"error": {"message": text}}, status=400) if text else None

    async def answer(self, name, body, fault):
        tokenizer = self.model_runner.tokenizer
        ids = self.ids_of(body)
        turns = sum(message["role"] == "assistant" for message in body.get("messages", []))
        user = f"{body.get('user', '')} {turns} {body.get('seed', '')}"
        most = min(
            body.get("max_tokens") or body.get("max_completion_tokens") or 16, self.args.max_model_len - len(ids)
        )
        async with self.lock:
            assert not self.is_asleep
            sample = self.model_runner.sample
            tokens, logps, seed = await asyncio.to_thread(sample, name, ids, user, most, body.get("temperature", 1.0))
        text = tokenizer.decode([t for t in tokens if t != tokenizer.eos_token_id])
        logps = [x - FAKE.get("bias", 0) for x in logps]
        if fault == "logprobs":
            logps = logps[:-1]
        is_stop = tokens[-1] == tokenizer.eos_token_id or FAKE.get("stop")
        choice = {"index": 0, "finish_reason": "stop" if is_stop else "length", "token_ids": tokens}
        if self.args.enable_return_routed_experts:
            choice["routed_experts"] = self.model_runner.routes((ids + tokens)[:-1])
        if "messages" in body:
            message = {"role": "assistant", "content": text} | (hermes(text, seed) if body.get("tools") else {})
            choice |= {"message": message, "logprobs": {"content": [{"logprob": x} for x in logps]}}
        else:
            choice |= {"text": text, "logprobs": {"token_logprobs": logps}, "prompt_token_ids": ids}
        kind = "chat.completion" if "messages" in body else "text_completion"
        head = {"id": f"{kind}-{seed}", "object": kind, "created": int(time.time()), "model": name}
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(tokens), "total_tokens": len(ids) + len(tokens)}
        return web.json_response(head | {"choices": [choice], "usage": usage, "prompt_token_ids": ids})


def plain(message):
    """A message as vLLM hands it to a template that wants text: its parts are joined, a developer is the system."""
    message = dict(message)
    if isinstance(message.get("content"), list):
        message["content"] = "\n".join(part["text"] for part in message["content"])
    if message["role"] == "developer":
        message["role"] = "system"
    return message


def hermes(text, seed):
    """What vLLM's parser of that name makes of a text: content, and tool calls if they are well-formed. Each call has
    an id of its own, by the seed of the answer."""
    try:
        found = [json.loads(part) for part in re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL)]
        functions = [{"name": f["name"] + "", "arguments": json.dumps(f["arguments"])} for f in found]
    except (ValueError, KeyError, TypeError):
        return {}
    calls = []
    for i, function in enumerate(functions):
        calls.append({"id": f"chatcmpl-tool-{seed:08x}-{i}", "type": "function", "function": function})
    return {"content": text.partition("<tool_call>")[0] or None, "tool_calls": calls} if calls else {}


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--chat-template")
    for name in ("--model", "--served-model-name", "--dtype"):
        parser.add_argument(name, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    for name in ("lora", "auto-tool-choice", "sleep-mode", "return-routed-experts"):
        parser.add_argument(f"--enable-{name}", action="store_true")
    args, _ = parser.parse_known_args()
    engine = start_engine()
    torch.set_num_threads(1)
    server = Server(args, engine)
    app = web.Application()
    app.on_shutdown.append(server.stop)
    app.add_routes([web.get("/v1/models", server.models), web.get("/health", server.health)])
    posts = {"/pause": server.pause, "/resume": server.resume, "/collective_rpc": server.rpc, "/fake": server.fake}
    posts |= {"/tokenize": server.tokenize, "/sleep": server.sleep, "/wake_up": server.wake_up}
    posts |= {"/v1/chat/completions": server.generate, "/v1/completions": server.generate}
    posts |= {"/v1/load_lora_adapter": server.load_adapter, "/v1/unload_lora_adapter": server.unload_adapter}
    app.add_routes([web.post(path, handler) for path, handler in posts.items()])
    web.run_app(app, host="127.0.0.1", port=args.port, print=None, access_log=None, shutdown_timeout=0.5)


if __name__ == "__main__":
    main()
