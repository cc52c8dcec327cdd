"""A stand-in for vLLM's server that starts in seconds: the same routes, a Hugging Face model, true logprobs, adapters,
and a WeightReceiver that really joins the broadcast. Sampling is a function of prompt and weights: runs repeat exactly.

FAKE in the environment, or a POST to /fake, holds JSON:
    {"generate_s": 1.0,              seconds before every generation; "total_s": of request and generation together
     "slow": [50, 10.0],             every 50th takes 10 s more
     "generate 3": "500",            the third request fails; "hang": never answers; "logprobs": one is missing;
                                     "exit": the server exits with 0; "silent": it answers none any more, but /health
     "log": "path",                  the requests go there, one a line
     "control": "path",              the control routes go there, one a line
     "stop": true,                   no answer counts as cut off
     "discard": true,                weights are received and thrown away, whatever their names
     "bias": 5.0,                    the logprobs of what was sampled are too low by this
     "sync 2": "raise",              the second broadcast fails after its first tensor; "hang": never begins;
                                     "500": an answer, and no more
     "orphan": true}                 its engine outlives it, as vLLM's does with tensor parallelism
Like vLLM's server it has an engine process, without which it answers /health and nothing else. The kernel ends the
engine with the server, since vLLM's imports trainer.py, and so configs.
"""

import argparse
import asyncio
import ctypes
import json
import os
import re
import signal
import sys
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent.parent))
import setproctitle
import torch
from aiohttp import web
from safetensors.torch import load_file

from configs.models.toy import as_template_sees
from trainer import LoRALinear, WeightReceiver

FAKE = json.loads(os.environ.get("FAKE", "{}"))


class Runner:
    """What WeightReceiver expects of vLLM's model runner."""

    def __init__(self, path, dtype, template):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.network = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        self.tokenizer, self.model, self.num_syncs = AutoTokenizer.from_pretrained(path), torch.nn.Module(), 0
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
        file, layers = Path(path, "adapter_model.safetensors"), {}
        for key, tensor in load_file(file).items():
            layer, _, factor = key.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
            layers.setdefault(layer, {})[factor] = tensor
        self.adapters[name] = zlib.crc32(file.read_bytes()), about["lora_alpha"] / about["r"], layers

    def use(self, name):
        """Computes with this adapter, or with the base alone -> a seed that these weights alone have."""
        seed, scale, layers = self.adapters.get(name, (0, 0.0, {}))
        for layer, module in self.network.named_modules():
            if layer in layers:
                module.__class__, module.scale, module.dropout = LoRALinear, scale, 0.0
                vars(module).update(layers[layer])
            elif isinstance(module, LoRALinear):
                module.__class__ = torch.nn.Linear
        weights = next(self.network.parameters()).detach().view(torch.uint8).numpy().tobytes()
        return zlib.crc32(weights, seed)

    @torch.no_grad()
    def sample(self, name, ids, n, max_tokens, temperature, ignore_eos=False):
        """-> n lists of (token, logprob), ended by the end-of-sequence token if it comes."""
        draw = torch.Generator().manual_seed(zlib.crc32(str(ids).encode(), self.use(name)))
        rows, logps = torch.tensor([ids] * n), []
        for _ in range(max_tokens):
            log_p = (self.network(rows).logits[:, -1].float() / temperature).log_softmax(-1)
            token = torch.multinomial(log_p.exp(), 1, generator=draw)
            rows, logps = torch.cat([rows, token], 1), [*logps, log_p.gather(1, token)]
            if not ignore_eos and (rows[:, len(ids) :] == self.tokenizer.eos_token_id).any(1).all():
                break
        out, eos = [], self.tokenizer.eos_token_id
        for tokens, row in zip(rows[:, len(ids) :].tolist(), torch.cat(logps, 1).tolist()):
            end = len(tokens) if ignore_eos or eos not in tokens else tokens.index(eos) + 1
            out.append((tokens[:end], row[:end]))
        return out


def start_engine():
    """-> its pid. It has nothing to do but to be there."""
    if pid := os.fork():
        return pid
    if not FAKE.get("orphan"):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # as configs/__init__.py; a fork does not inherit it
    setproctitle.setproctitle("VLLM::EngineCore")  # as vLLM does; it overwrites /proc/self/environ
    while True:
        time.sleep(3600)


class Server(WeightReceiver):
    def __init__(self, args, engine):
        self.engine = engine
        dtype = getattr(torch, args.dtype)
        self.args, self.rank, self.device = args, 0, torch.device("cpu")
        self.model_runner = Runner(args.model, dtype, args.chat_template)
        lora = object() if args.enable_lora else None
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(dtype=dtype), lora_config=lora)
        self.lock, self.running, self.is_asleep = asyncio.Lock(), asyncio.Event(), False
        self.num_requests = self.most = self.now = 0
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
        found = {"requests": self.num_requests, "most": self.most, "paused": not self.running.is_set()}
        return web.json_response(found | {"syncs": self.model_runner.num_syncs})

    async def fake(self, request):
        FAKE.clear()
        FAKE.update(await request.json())
        self.num_requests = self.most = self.now = 0
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
            assert self.args.enable_sleep_mode and not self.is_asleep and request.query["mode"] == "keep"
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
        messages = [as_template_sees(message) for message in body["messages"]]
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **more)

    def canary(self, name, body):
        """What the policy says after rows of token ids."""
        choices = []
        for i, ids in enumerate(body["prompt"]):
            ((said, logps),) = self.model_runner.sample(name, ids, 1, body["max_tokens"], 1.0, True)
            choices.append({"index": i, "token_ids": said, "logprobs": {"token_logprobs": logps}})
        return choices

    async def generate(self, request):
        begun, body, is_chat = time.monotonic(), await request.json(), request.path.endswith("/chat/completions")
        await self.answers()
        if (name := body.get("model") or self.args.served_model_name) not in self.names():
            return web.json_response({"error": f"The model {name} does not exist."}, status=404)
        if "ignore_eos" in body:
            async with self.lock:
                assert not self.is_asleep
                return web.json_response({"choices": self.canary(name, body)})
        if log := FAKE.get("log"):
            with open(log, "a") as f:
                f.write(json.dumps(body) + "\n")
        self.num_requests += 1
        self.now += 1
        self.most = max(self.most, self.now)
        fault = FAKE.get(f"generate {self.num_requests}")
        if fault == "500":
            return web.json_response({"error": "fault asked for"}, status=500)
        if fault == "exit":
            os._exit(0)
        if fault == "silent":
            FAKE["silent"] = True
            await self.answers()
        every, seconds = FAKE.get("slow", (10**9, 0))
        slow = seconds if self.num_requests % every == 0 else 0
        await asyncio.sleep(3600 if fault == "hang" else FAKE.get("generate_s", 0) + slow * ("total_s" not in FAKE))
        await self.running.wait()
        tokenizer = self.model_runner.tokenizer
        ids = self.ids_of(body)
        room, asked = self.args.max_model_len - len(ids), body.get("max_tokens") or 16
        if room <= 0 or asked > self.args.max_model_len:
            text = f"This model's maximum context length is {self.args.max_model_len} tokens, not {len(ids)} + {asked}"
            text = "max_tokens must be at least 1, got 0." if room == 0 else text  # as vLLM 0.32 says it
            return web.json_response({"error": {"message": text}}, status=400)
        if "tools" in body and (FAKE.get("no_parser") or not self.args.enable_auto_tool_choice):
            text = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'  # its words
            return web.json_response({"error": {"message": text}}, status=400)
        async with self.lock:
            assert not self.is_asleep
            outs = await asyncio.to_thread(
                self.model_runner.sample, name, ids, body.get("n") or 1, min(asked, room), body.get("temperature", 1.0)
            )
        if total := FAKE.get("total_s"):  # this long in all, sampling included
            await asyncio.sleep(begun + total + slow - time.monotonic())
        choices = []
        for i, (tokens, logps) in enumerate(outs):
            text = tokenizer.decode([t for t in tokens if t != tokenizer.eos_token_id])
            done = "stop" if tokens[-1] == tokenizer.eos_token_id or FAKE.get("stop") else "length"
            logps = [x - FAKE.get("bias", 0) for x in logps]
            if fault == "logprobs":
                logps = logps[:-1]
            choice = {"index": i, "finish_reason": done, "token_ids": tokens}
            if is_chat:
                choice |= {"message": {"role": "assistant", "content": text}}
                if "tools" in body:
                    choice["message"] |= hermes(text)
                choice |= {"logprobs": {"content": [{"logprob": x} for x in logps]}}
            else:
                choice |= {"text": text, "logprobs": {"token_logprobs": logps}, "prompt_token_ids": ids}
            choices.append(choice)
        self.now -= 1
        return web.json_response({"choices": choices, "prompt_token_ids": ids})


def hermes(text):
    """What vLLM's parser of that name makes of a text: content, and tool calls where they are well-formed."""
    try:
        found = [json.loads(part) for part in re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL)]
        calls = [{"name": f["name"] + "", "arguments": json.dumps(f["arguments"])} for f in found]
    except (ValueError, KeyError, TypeError):
        return {}
    calls = [{"id": f"call-{i}", "type": "function", "function": f} for i, f in enumerate(calls)]
    return {"content": text.partition("<tool_call>")[0] or None, "tool_calls": calls} if calls else {}


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--chat-template")
    for name in ("--model", "--served-model-name", "--dtype"):
        parser.add_argument(name, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--enable-auto-tool-choice", action="store_true")
    parser.add_argument("--enable-sleep-mode", action="store_true")
    args, _ = parser.parse_known_args()
    engine = start_engine()
    torch.set_num_threads(1)
    server = Server(args, engine)
    app = web.Application()
    app.on_shutdown.append(server.stop)
    app.add_routes([web.get("/v1/models", server.models), web.get("/health", server.health)])
    posts = {"/pause": server.pause, "/resume": server.resume, "/collective_rpc": server.rpc, "/fake": server.fake}
    posts |= {"/sleep": server.sleep, "/wake_up": server.wake_up}
    posts |= {"/v1/chat/completions": server.generate, "/v1/completions": server.generate}
    posts |= {"/v1/load_lora_adapter": server.load_adapter, "/v1/unload_lora_adapter": server.unload_adapter}
    app.add_routes([web.post(path, handler) for path, handler in posts.items()])
    web.run_app(app, host="127.0.0.1", port=args.port, print=None, access_log=None, shutdown_timeout=0.5)


if __name__ == "__main__":
    main()
