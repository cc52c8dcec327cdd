"""A stand-in for vLLM's server that starts in seconds: the same routes, a Hugging Face model, true log-probabilities,
adapters, and a WeightReceiver that really joins the broadcast. An answer is a function of the prompt, the weights and
the request's seed, so runs repeat exactly. FAKE in the environment, or a POST to /fake, holds JSON:

    {"template": "path",             a chat template
     "uniform": true,                tokens are drawn from all alike, without the network, in no time
     "generate_s": 1.0,              seconds before every answer
     "slow": [50, 10.0],             every 50th takes 10 s more
     "generate 3": "500",            the third request fails; "400": by a validation error of the server's own;
                                     "close": without an answer; "hang": never answers;
                                     "logprobs": one is missing
     "log": "path",                  the requests go there, one a line
     "stop": true,                   no answer counts as cut off
     "teacher": "short",             the last token of a prompt is not scored
     "max_model_len": 256,           in place of the command line's
     "discard": true,                weights are received and thrown away
     "orphan": true}                 its engine outlives it, as vLLM's does with tensor parallelism

The POST also brings back the model's own weights, which an earlier test's run may have replaced.

Like vLLM's server it has an engine process, without which it answers /health and nothing else."""

import argparse
import asyncio
import ctypes
import json
import math
import os
import random
import signal
import sys
import time
import zlib
from itertools import chain, count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import setproctitle
import torch
from aiohttp import web
from jinja2 import TemplateError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import rolemodel.lookup  # noqa: F401  which knows what `trainer` is
from trainer import LoRALinear, WeightReceiver

FAKE = json.loads(os.environ.get("FAKE", "{}"))
EXCEEDED = "This model's maximum context length is exceeded"


class Refused(Exception):
    """Its arguments are the status and the text of the answer."""


def start_engine():
    """Returns the pid of a process that has nothing to do but to be there."""
    if pid := os.fork():
        return pid
    if not FAKE.get("orphan"):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # a fork does not inherit it
    setproctitle.setproctitle("VLLM::EngineCore")  # as vLLM does
    while True:
        time.sleep(3600)


class Network(WeightReceiver):
    """What is in vLLM's worker: the model, its adapters, and the receiver of new weights."""

    def __init__(self, args):
        self.rank = 0
        self.device = torch.device("cpu")
        self.model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
        self.first = {name: w.clone() for name, w in self.model.state_dict().items()}
        self.adapters = {}  # name: scale, layers' tensors

    @torch.no_grad()
    def reload_weights(self, weights_iterator):
        params = dict(self.model.named_parameters())
        for name, tensor in weights_iterator:
            if not FAKE.get("discard"):
                params[name].copy_(tensor)

    def load_adapter(self, name, path):
        about = json.loads(Path(path, "adapter_config.json").read_text())
        layers = {}
        for key, tensor in load_file(Path(path, "adapter_model.safetensors")).items():
            layer, _, factor = key.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
            layers.setdefault(layer, {})[factor] = tensor.to(self.model.dtype)
        self.adapters[name] = about["lora_alpha"] / about["r"], layers

    def log_p(self, name, ids, temperature, keep=0):
        """For each of the ids, the log-probabilities of the token that follows it. keep: only for the last so many ids;
        0: for all. They come from the model with the adapter of this name, or from the base model if there is none."""
        scale, layers = self.adapters.get(name, (0.0, {}))
        for layer, module in self.model.named_modules():
            if layer in layers:
                module.__class__ = LoRALinear
                vars(module).update(layers[layer] | {"scale": scale, "dropout": 0.0})
            elif isinstance(module, LoRALinear):
                module.__class__ = torch.nn.Linear
        logits = self.model(torch.tensor([ids]), logits_to_keep=keep).logits[0].float()
        return (logits / max(temperature, 1e-5)).log_softmax(-1)  # 0: the likeliest

    @torch.no_grad()
    def sample(self, name, ids, seed, max_tokens, body, eos):
        """Token ids, and the `logprobs` of a chat completion with them."""
        if FAKE.get("uniform"):
            drawn = random.Random(seed).choices(range(self.model.config.vocab_size), k=max_tokens)
            tokens = drawn[: drawn.index(eos) + 1 if eos in drawn else None]
            return tokens, [{"logprob": -math.log(self.model.config.vocab_size)} for _ in tokens]
        draw = torch.Generator().manual_seed(seed)
        tokens = []
        content = []
        while len(tokens) < max_tokens and eos not in tokens:
            log_p_V = cut_off(self.log_p(name, ids + tokens, body.get("temperature", 1.0), 1)[0], body)
            tokens.append(torch.multinomial(log_p_V.exp(), 1, generator=draw).item())
            num = body.get("top_logprobs", 0)
            # As vLLM: the sampled token stands first, then the likeliest, and as many as were asked for.
            head = dict.fromkeys([tokens[-1], *log_p_V.topk(num).indices.tolist()])
            found = [{"token": f"token_id:{i}", "logprob": max(log_p_V[i].item(), -9999.0)} for i in head]
            content.append(found[0] | {"top_logprobs": found[:num]})
        return tokens, content

    @torch.no_grad()
    def score(self, name, ids):
        """prompt_logprobs, as vLLM gives them."""
        log_p = self.log_p(name, ids, 1.0)
        found = [{str(token): {"logprob": log_p[i, token].item()}} for i, token in enumerate(ids[1:])]
        return [None, *(found[:-1] if FAKE.get("teacher") == "short" else found)]


def cut_off(log_p_V, body):
    """As vLLM does it: min_p, then top_k, where equal ones stay, then top_p. Normalized again."""
    log_p_V = log_p_V.masked_fill(log_p_V < log_p_V.max() + math.log(body.get("min_p") or 1e-30), -math.inf)
    if k := body.get("top_k"):
        log_p_V = log_p_V.masked_fill(log_p_V < log_p_V.topk(k).values[-1], -math.inf)
    p_V, order = log_p_V.softmax(-1).sort()
    is_out_V = p_V.cumsum(0) <= 1 - body.get("top_p", 1.0)
    is_out_V[-1] = False
    return log_p_V.index_fill(0, order[is_out_V], -math.inf).log_softmax(-1)


class Server:
    def __init__(self, args, engine):
        self.args = args
        self.engine = engine
        self.network = Network(args)
        self.tokenizer = AutoTokenizer.from_pretrained(args.model)
        self.template = self.tokenizer.chat_template
        self.lock = asyncio.Lock()
        self.num = 0  # requests
        self.longest = args.max_model_len
        self.unseeded = count()
        self.running = asyncio.Event()
        self.running.set()

    async def fake(self, request):
        FAKE.clear()
        FAKE.update(await request.json())
        self.args.max_model_len = FAKE.get("max_model_len", self.longest)
        self.network.model.load_state_dict(self.network.first)
        self.num = 0

    async def health(self, request):
        return {}

    async def models(self, request):
        names = [self.args.served_model_name, *self.network.adapters]
        return {"data": [{"id": name, "max_model_len": self.args.max_model_len} for name in names]}

    async def load_adapter(self, request):
        body = await request.json()
        self.network.load_adapter(body["lora_name"], body["lora_path"])

    async def unload_adapter(self, request):
        if not self.network.adapters.pop((await request.json())["lora_name"], None):
            raise Refused(404, "no such adapter")

    async def pause(self, request):
        self.running.clear()

    async def resume(self, request):
        self.running.set()

    async def engine_answers(self):
        state = Path(f"/proc/{self.engine}/stat").read_text().rpartition(")")[2].split()[0]
        await asyncio.sleep(3600 if state == "Z" else 0)

    async def rpc(self, request):
        body = await request.json()
        await self.engine_answers()
        try:
            await asyncio.to_thread(getattr(self.network, body["method"]), *body["args"])
        except Exception as e:
            raise Refused(500, str(e)) from e
        return {"results": [None]}

    def ids_of(self, body):
        if "messages" not in body:
            return self.tokenizer.encode(body["prompt"])
        path = FAKE.get("template")
        self.tokenizer.chat_template = Path(path).read_text() if path else self.template
        more = body.get("chat_template_kwargs") or {}
        messages = body["messages"]
        for call in chain(*(message.get("tool_calls") or () for message in messages)):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        try:
            return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **more)
        except TemplateError as e:
            raise Refused(400, str(e)) from e

    async def tokenize(self, request):
        return {"tokens": self.ids_of(await request.json())}

    async def generate(self, request):
        body = await request.json()
        await self.engine_answers()
        name = body.get("model") or self.args.served_model_name
        if name not in (self.args.served_model_name, *self.network.adapters) and not FAKE.get("uniform"):
            raise Refused(404, f"The model {name} does not exist.")
        if "prompt_logprobs" in body:
            return await self.teach(name, body)
        if body.get("ignore_eos"):  # the canary's
            return await self.extend(name, body)
        self.num += 1
        if log := FAKE.get("log"):
            with open(log, "a") as f:
                f.write(json.dumps(body) + "\n")
        fault = FAKE.get(f"generate {self.num}")
        every, seconds = FAKE.get("slow", (10**9, 0))
        wait = FAKE.get("generate_s", 0) + (seconds if self.num % every == 0 else 0)
        if fault in ("400", "500"):
            raise Refused(int(fault), "1 validation error")
        if fault == "close":
            request.transport.abort()
        await asyncio.sleep(3600 if fault == "hang" else wait)
        await self.running.wait()
        return await self.answer(name, body, fault)

    async def teach(self, name, body):
        if len(body["prompt"]) + body["max_tokens"] > self.args.max_model_len:
            raise Refused(400, EXCEEDED)
        async with self.lock:
            found = await asyncio.to_thread(self.network.score, name, body["prompt"])
        return {"choices": [{"index": 0, "prompt_logprobs": found}]}

    async def extend(self, name, body):
        choices = []
        async with self.lock:
            for ids in body["prompt"]:
                given = (name, ids, 0, body["max_tokens"], body, None)
                tokens, content = await asyncio.to_thread(self.network.sample, *given)
                logps = [token["logprob"] for token in content]
                choices.append({"token_ids": tokens, "logprobs": {"token_logprobs": logps}})
        return {"choices": choices}

    async def answer(self, name, body, fault):
        ids = self.ids_of(body)
        asked = body.get("max_tokens") or body.get("max_completion_tokens") or 16
        room = self.args.max_model_len - len(ids)
        if room < 0 or asked > self.args.max_model_len:
            raise Refused(400, EXCEEDED)
        if room == 0:
            raise Refused(400, "max_tokens must be at least 1, got 0.")  # as vLLM 0.32 says it
        seed = zlib.crc32(f"{ids} {body['seed'] if 'seed' in body else next(self.unseeded)}".encode())
        eos = self.tokenizer.eos_token_id
        if body.get("top_logprobs", 0) > self.args.max_logprobs:
            raise Refused(400, f"Requested sample logprobs of {body['top_logprobs']}, greater than max allowed")
        given = (name, ids, seed, min(asked, room), body, eos)
        async with self.lock:
            tokens, content = await asyncio.to_thread(self.network.sample, *given)
        if fault == "logprobs":
            content = content[:-1]
        text = self.tokenizer.decode([token for token in tokens if token != eos])
        is_stop = tokens[-1] == eos or FAKE.get("stop")
        choice = {"index": 0, "finish_reason": "stop" if is_stop else "length", "token_ids": tokens}
        choice["message"] = {"role": "assistant", "content": text}
        choice["logprobs"] = {"content": content}
        head = {"id": f"chat-{seed}", "object": "chat.completion", "created": int(time.time()), "model": name}
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(tokens), "total_tokens": len(ids) + len(tokens)}
        return head | {"choices": [choice], "usage": usage, "prompt_token_ids": ids}


@web.middleware
async def as_json(request, handler):
    try:
        return web.json_response(await handler(request) or {})
    except Refused as e:
        status, text = e.args
        return web.json_response({"error": {"message": text}}, status=status)


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("--model", "--served-model-name", "--dtype"):
        parser.add_argument(name, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--max-logprobs", type=int, default=20)
    args, _ = parser.parse_known_args()
    engine = start_engine()
    torch.set_num_threads(1)
    server = Server(args, engine)
    app = web.Application(middlewares=[as_json])
    app.add_routes([web.get("/v1/models", server.models), web.get("/health", server.health)])
    posts = {"/pause": server.pause, "/resume": server.resume, "/collective_rpc": server.rpc, "/fake": server.fake}
    posts |= {"/v1/chat/completions": server.generate, "/v1/completions": server.generate}
    posts |= {"/v1/load_lora_adapter": server.load_adapter, "/v1/unload_lora_adapter": server.unload_adapter}
    app.add_routes([web.post(path, handler) for path, handler in (posts | {"/tokenize": server.tokenize}).items()])
    web.run_app(app, host="127.0.0.1", port=args.port, print=None, access_log=None, shutdown_timeout=0.5)


if __name__ == "__main__":
    main()
