"""An agent that is a command: python -c SOURCE mode marker. Standard library only, so that any Python runs it."""

import json
import os
import socket
import subprocess
import sys
import urllib.request


def ask():
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()
    with urllib.request.urlopen(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]


def environment():
    """What it was given, and what it finds before and after a turn in which others write their files."""
    places = [os.getcwd(), os.environ["HOME"], os.environ["TMPDIR"]]
    found = [os.listdir(place) for place in places]
    open("mine", "w").close()
    given = {"arguments": sys.argv[2:], "environment": dict(os.environ), "stdin": sys.stdin.read(), "said": ask()}
    print(json.dumps(given | {"found": found + [os.listdir(place) for place in places]}))


def attempt(function, *args):
    """ "", or the name of the error."""
    try:
        function(*args)
    except Exception as e:
        return type(e).__name__
    return ""


def tries():
    """Prints what is possible of what a sandbox must refuse. Its argument is JSON of what there is outside."""
    outside = json.loads(sys.argv[2])
    refused = {path: attempt(os.listdir if path.endswith("/") else open, path) for path in outside["read"]}
    for path in outside["write"]:
        refused[f"write {path}"] = attempt(open, f"{path}/written", "w")
    for address in [("127.0.0.1", outside["port"]), ("192.0.2.1", 80), ("169.254.169.254", 80)]:
        refused[address[0]] = attempt(socket.create_connection, address, 2)
    refused["kill"] = attempt(os.kill, outside["pid"], 0)
    refused["chroot"] = attempt(os.chroot, "/tmp")
    refused["memory"] = attempt(bytearray, 2 << 30)
    refused["namespace"] = attempt(subprocess.check_call, ["unshare", "--user", "true"])
    refused["children"] = attempt(lambda: [subprocess.Popen(["sleep", "100"]) for _ in range(100)])
    open("written", "w").close()
    print(json.dumps([[what for what in refused if not refused[what]], sorted(os.listdir("/"))]))


if sys.argv[1] != "environment" and "OPENAI_BASE_URL" in os.environ:
    ask()
if sys.argv[1] != "ask":
    globals()[sys.argv[1]]()
