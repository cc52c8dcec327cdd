"""The weight broadcast, both ends: WeightSender on the trainer's rank 0, WeightReceiver in every vLLM worker.

The group is torch.distributed's (NCCL or gloo), beside the default groups of trainer and vLLM. vLLM's own routes carry
the control: /pause, /collective_rpc -> WeightReceiver, /resume, then a canary that both sides score."""

import json
import math
import os
import shutil
import socket
import time
import traceback
import zlib
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from threading import Timer

import httpx
import torch
import torch.distributed as dist

from configs.lib.checkpoint import refuse_non_finite, write_adapter
from configs.lib.process import fault
from configs.lib.runtime import RunError

DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}


def make_group(store, rank, spec):
    """A process group beside torch's default one, which vLLM has for itself."""
    store, timeout = dist.PrefixStore("weights", store), timedelta(seconds=spec["timeout_s"])
    if spec["backend"] == "gloo":
        return dist.ProcessGroupGloo(store, rank, spec["size"], timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, spec["size"], options)


def checksum(tensor):
    """Of a contiguous tensor's bytes and their order: CRC-32 on the host, and on a GPU, where both ends are with NCCL,
    the sum of bytes times places."""
    data = tensor.reshape(-1).view(torch.uint8)
    if data.device.type == "cpu":
        return zlib.crc32(data.numpy())
    place = torch.arange(1, min(len(data), 1 << 22) + 1, device=data.device)  # parts of 4M bound the int64 copies
    sums = [(part * place[: len(part)]).sum() for part in data.split(1 << 22)]
    return sum((i + 1) * int(x) for i, x in enumerate(sums)) % (1 << 61)


def buckets(sizes, backend):
    """{name: bytes} -> lists of names that go in one broadcast; both ends cut alike. Hundreds of MiB for NCCL; for gloo
    what malloc reuses (below 32 MiB), as the page faults of fresh memory cost more than the copy."""
    groups, room, limit = [], 0, {"nccl": 256 << 20, "gloo": 24 << 20}[backend]
    for name, size in sizes.items():
        if size > room:
            groups, room = [*groups, []], limit
        groups[-1].append(name)
        room -= size
    return groups


def refuse_other(got, sums, version):
    """RunError 3 where what a worker got is not what was sent; sums: {name: checksum}."""
    differ = [k for k in sums if sums[k] != got["sums"].get(k)]
    wrong = [f"{k} not as sent" if k in got["sums"] else f"{k} missing" for k in differ]
    if wrong or got["version"] != version:
        raise RunError(3, f"sync of version {version}: a worker has version {got['version']}, {wrong[:3]}")


class WeightSender:
    """On rank 0: makes a version live on all servers. Every wait ends after sync_timeout_s."""

    def __init__(self, cfg, run_dir, device):
        t, self.cfg, self.run_dir, self.loaded, self.servers = cfg.trainer, cfg, run_dir, [], Servers(cfg)
        self.servers.wait_ready()
        self.names = set()  # sent by the last version; none may fall out
        native = "nccl" if device.type == "cuda" else "gloo"
        self.backend = backend = native if t.sync_backend == "auto" else t.sync_backend
        self.device = device if backend == "nccl" else torch.device("cpu")
        timeout = timedelta(seconds=t.sync_timeout_s)
        listener = socket.create_server((t.sync_host, 0))  # a TCPStore's own would listen on every address
        host, port = listener.getsockname()
        self.store = dist.TCPStore(host, port, None, True, timeout, False, False, listener.detach())
        workers = math.prod(cfg.inference.args.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline"))
        spec = {"host": host, "port": port, "backend": backend, "timeout_s": t.sync_timeout_s}
        spec["size"] = 1 + workers * len(self.servers.urls)
        joining = self.servers.rpc("join_weight_group", [spec | {"first": i} for i in range(1, spec["size"], workers)])
        made = self.servers.pool.submit(make_group, self.store, 0, spec)
        for call in wait([made, *joining], timeout=2 * t.sync_timeout_s, return_when=FIRST_EXCEPTION).done:
            call.result()  # what a server answered, before the group's own time is up
        self.group = made.result(timeout=0)
        self.pages = self.servers.metrics()  # counters of a server that was there before begin somewhere
        for about in (worker for reply in joining for worker in reply.result()):
            if about != (mine := {"dtype": DTYPES[t.dtype], "lora": cfg.sends_adapters}):
                raise RunError(2, f"a server runs {about}, but trainer.dtype and use_lora need {mine}")

    def send(self, version, tensors, rows, logp_N, staleness):
        """Broadcast, verify, resume, compare the canary's logprobs, write the version file -> metrics.

        tensors: {checkpoint name: contiguous tensor}; rows: token ids; logp_N: floats, the trainer's own for the rows;
        staleness: adapters of this many versions before stay loaded. Any failure raises; a server that got a byte by
        then dies or stays paused, it never samples from a mixture."""
        servers, adapter = self.servers, self.cfg.sends_adapters
        name = f"{servers.run_id}-v{version}" if adapter else servers.run_id
        path = self.run_dir.absolute() / "adapters" / name
        spec = {"version": version, "backend": self.backend}
        spec["tensors"] = [(k, list(v.shape), str(v.dtype)[6:]) for k, v in tensors.items()]
        spec["adapter"] = [str(path), self.cfg.trainer._asdict(), self.cfg.run.model] if adapter else None
        if missing := sorted(self.names - set(tensors)):
            raise RunError(3, f"sync of version {version}: the trainer gathered no {missing[:3]}")
        refuse_non_finite(tensors, f"sync of version {version}")
        while not adapter and time.time() < self.held_until():
            time.sleep(0.02)
        if not adapter:
            servers.post_all("/pause?mode=keep")
        replies = servers.rpc("receive_weights", [spec] * len(servers.urls))
        sums = self.broadcast(version, tensors, replies)
        for got in (worker for reply in replies for worker in reply.result()):
            refuse_other(got, sums, version)
        self.names = set(tensors)
        if adapter:
            self.load_adapter(version, name, path, staleness)
        else:
            servers.post_all("/resume")
        metrics = self.compare(version, name, rows, logp_N)
        if version >= 0:  # the pre-flight's -1 is not for use
            (tmp := self.run_dir / "version.tmp").write_text(str(version))
            os.replace(tmp, self.run_dir / "version")
        return metrics

    def held_until(self):
        """Until when an evaluation wants the present weights; 0: none is under way."""
        hold = self.run_dir / "eval_hold"
        return float(hold.read_text() or 0) if hold.exists() else 0.0

    def broadcast(self, version, tensors, replies):
        """-> {name: checksum}. A bucket travels while its sums are taken and the next one is put together."""
        sums, limit, before = {}, timedelta(seconds=self.cfg.trainer.sync_timeout_s), None
        try:
            fault("bcast", version)
            for names in buckets({k: v.nbytes for k, v in tensors.items()}, self.backend):
                parts = [tensors[k].reshape(-1).view(torch.uint8).to(self.device) for k in names]
                flat = torch.cat(parts) if len(parts) > 1 else parts[0]
                if before:
                    before[0].wait(limit)
                before = self.group.broadcast(flat, 0), flat  # flat lives until it is through
                sums |= dict(zip(names, map(checksum, flat.split([tensors[k].nbytes for k in names]))))
            before[0].wait(limit)
        except RuntimeError as e:  # a peer is gone or silent; if it said why, that is told
            said = "; ".join([str(e), *(str(error) for reply in replies if (error := reply.exception()))])
            what = f"{'' if self.names else 'first '}broadcast over {self.backend}, of version {version}"
            raise RunError(3, f"{what}: {said}") from e
        return sums

    def load_adapter(self, version, name, path, staleness):
        """Makes the servers load what a worker has written; unloads what no request can name any more."""
        about = {"lora_name": name, "lora_path": str(path), "load_inplace": True}
        self.servers.post_all("/v1/load_lora_adapter", about)
        self.loaded.append((version, name))
        while self.loaded[0][0] < max(version - staleness - 1, 0) and not self.held_until():
            old = self.loaded.pop(0)[1]
            self.servers.post_all("/v1/unload_lora_adapter", {"lora_name": old})
            shutil.rmtree(path.with_name(old))

    def compare(self, version, name, rows, logp_N):
        """The canary's logprobs, the servers' and the trainer's -> metrics, in nats. RunError 3 if they differ."""
        t, scores = self.cfg.trainer, self.servers.score(name, rows)
        diffs = [abs(a - b) for theirs in scores for a, b in zip(theirs, logp_N, strict=True)]
        metrics = {"sync/dlogp_max": max(diffs), "sync/dlogp_mean": sum(diffs) / len(diffs)}
        value, limit = (max(diffs), 1e-3) if t.dtype == "fp32" else (metrics["sync/dlogp_mean"], 0.05)
        if not value <= (t.max_sync_dlogp or limit):
            raise RunError(3, f"canary after sync of version {version}: trainer and server differ, {metrics}")
        return metrics


class WeightReceiver:
    """In every vLLM worker by --worker-extension-cls configs.lib.broadcast.WeightReceiver; called with one JSON."""

    def join_weight_group(self, spec):
        spec, config = json.loads(spec), self.vllm_config
        timeout = timedelta(seconds=spec["timeout_s"])
        self.sync_store = dist.TCPStore(spec["host"], spec["port"], None, False, timeout, False)
        self.sync_group = make_group(self.sync_store, spec["first"] + self.rank, spec)
        self.sync_device, self.sync_timeout = self.device if spec["backend"] == "nccl" else "cpu", timeout
        return {"dtype": str(config.model_config.dtype), "lora": config.lora_config is not None}

    def receive_weights(self, spec):
        spec, sums = json.loads(spec), {}

        def stream():
            info = {name: (shape, getattr(torch, dtype)) for name, shape, dtype in spec["tensors"]}
            sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in info.items()}

            def fetch(names):
                flat = torch.empty(sum(sizes[k] for k in names), dtype=torch.uint8, device=self.sync_device)
                return names, flat, self.sync_group.broadcast(flat, 0)

            todo = buckets(sizes, spec["backend"])
            ahead = fetch(todo[0])
            for following in [*todo[1:], None]:
                names, flat, work = ahead
                work.wait(self.sync_timeout)
                ahead = following and fetch(following)  # travels while this one is loaded
                for name, part in zip(names, flat.split([sizes[k] for k in names])):
                    shape, dtype = info[name]
                    is_aligned = part.storage_offset() % dtype.itemsize == 0
                    tensor = (part if is_aligned else part.clone()).view(dtype).view(shape)
                    sums[name] = checksum(tensor)
                    yield name, tensor

        try:
            if spec["adapter"]:
                tensors, (path, *about) = dict(stream()), spec["adapter"]
                if self.rank == 0:
                    write_adapter(Path(path), tensors, *about)
            else:
                self.model_runner.reload_weights(weights_iterator=stream())
                head = getattr(self.model_runner.model, "lm_head", None)
                if self.device.type == "cpu" and head is not None:  # vLLM 0.32 leaves a tied head's packed copy stale
                    head.quant_method.process_weights_after_loading(head)
        except Exception:  # half-loaded: the text goes to the trainer, then this server dies
            Timer(2, os._exit, [3]).start()
            return {"error": traceback.format_exc()[-1500:]}
        return {"version": spec["version"], "sums": sums}


class Servers:
    def __init__(self, cfg):
        self.urls, self.startup_timeout = list(cfg.inference.urls), cfg.inference.startup_timeout
        self.http = httpx.Client(timeout=cfg.trainer.sync_timeout_s, trust_env=False)  # no proxy between the roles
        self.pool, self.run_id = ThreadPoolExecutor(64), os.environ.get("ROLEMODEL_RUN_ID", cfg.run.run_name)

    def wait_ready(self):
        """Until every server answers under this run's id: a foreign or stale one is never trained against."""
        deadline, names = time.monotonic() + self.startup_timeout, {}
        while len(names) < len(self.urls):
            for url in self.urls:
                try:
                    names[url] = self.http.get(f"{url}/v1/models").json()["data"][0]["id"]
                except httpx.TransportError as e:
                    if time.monotonic() > deadline:
                        limit = f"{self.startup_timeout:.0f} s (inference.startup_timeout)"
                        raise RunError(3, f"{url} is not up after {limit}: {e}") from e
                    time.sleep(0.2)
        if foreign := {url: name for url, name in names.items() if name != self.run_id}:
            raise RunError(2, f"a server of another run answers: {foreign}; this run is {self.run_id!r}")

    def post(self, url, path, body=None):
        try:
            reply = self.http.post(url + path, json=body)
        except httpx.TransportError as e:
            limit = f"trainer.sync_timeout_s = {self.http.timeout.read:g}"
            raise RunError(3, f"{url}{path}: {type(e).__name__}: {e} ({limit})") from e
        if reply.status_code != 200:
            raise RunError(3, f"{url}{path} answered {reply.status_code}: {reply.text[-2000:]}")
        return reply.json() if reply.text.startswith("{") else {}

    def post_all(self, path, body=None):
        return [call.result() for call in [self.pool.submit(self.post, url, path, body) for url in self.urls]]

    def metrics(self):
        """The text of each server's /metrics, "" where it has none."""
        pages = []
        for url in self.urls:
            try:
                reply = self.http.get(f"{url}/metrics")
                pages.append(reply.text if reply.status_code == 200 else "")
            except httpx.HTTPError:
                pages.append("")
        return pages

    def rpc(self, method, specs):
        """Starts method(spec) in every worker of every server, one spec each -> futures of the workers' replies."""

        def call(url, spec):
            replies = self.post(url, "/collective_rpc", {"method": method, "args": [json.dumps(spec)]})["results"]
            if errors := [reply["error"] for reply in replies if "error" in reply]:
                raise RunError(3, f"{url}: {method} failed in a worker: {errors[0]}")
            return replies

        return [self.pool.submit(call, url, spec) for url, spec in zip(self.urls, specs)]

    def score(self, model, rows):
        """Each server's logprobs of rows of token ids, from the second id of each row on -> [[float]]."""
        body = {"model": model, "prompt": rows, "prompt_logprobs": 0, "max_tokens": 1, "cache_salt": str(time.time())}
        body["priority"] = -1  # before all rollouts that wait
        scores = []
        for reply in self.post_all("/v1/completions", body):
            found = [choice["prompt_logprobs"] for choice in sorted(reply["choices"], key=lambda c: c["index"])]
            pairs = [(token, at) for row, places in zip(rows, found) for token, at in zip(row, places)]
            scores.append([at[str(token)]["logprob"] for token, at in pairs if at])
        return scores
