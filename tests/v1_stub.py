"""A worker without verifiers, for the protocol: what it does depends on the taskset's id."""

import json
import os
import sys
import threading
import urllib.request


def say(answer):
    with LOCK:
        print(json.dumps(answer), flush=True)


def play(number, task, base_url):
    messages = [{"role": "user", "content": f"stub {task}"}]
    request = urllib.request.Request(f"{base_url}/chat/completions", json.dumps({"messages": messages}).encode())
    request.add_header("X-Agent", "agent")
    with urllib.request.urlopen(request) as reply:
        said = json.load(reply)["choices"][0]["message"]["content"]
    if KIND == "dies":
        os._exit(7)
    if KIND == "half":
        print('{"id": 1, "tra', end="", flush=True)
        os._exit(7)
    if KIND == "waits":
        return
    if KIND == "fails" and task % 3 == 0:
        return say({"id": number, "error": "ValueError: user code"})
    trace = {"agent": "agent", "trainable": True, "reward": float(len(said)), "metrics": {"tokens": 3.0}}
    trace["rewards"] = {"length": None if KIND == "unscored" and task % 3 == 0 else len(said)}
    say({"id": number, "traces": [trace]})


LOCK = threading.Lock()
for line in sys.stdin:
    question = json.loads(line)
    if "configs" in question:
        KIND = question["configs"][0]["taskset"]["id"]
        rows = [{"question": f"stub {i}", "info": {"task": i}} for i in range(12)]
        error = {"error": "ModuleNotFoundError: taskset 'missing' not found"}
        say({"id": 0} | (error if KIND == "missing" else {"rows": [rows] * len(question["configs"])}))
    elif "task" in question:
        thread = threading.Thread(
            target=play, args=(question["id"], question["task"], question["base_url"]), daemon=True
        )
        thread.start()
    else:
        say({"id": question["id"], "error": "too late"})
        print("cancelled", question["id"], file=sys.stderr, flush=True)
