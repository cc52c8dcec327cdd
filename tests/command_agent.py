"""An agent that is a command: python -c SOURCE mode marker. Standard library only, so that any Python runs it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

SLEEP = [sys.executable, "-c", "import time; time.sleep(3600)"]


def environment(marker):
    """What it was given, and what it finds before and after a turn in which others write their files."""
    places = [os.getcwd(), os.environ["HOME"], os.environ["TMPDIR"]]
    found = [os.listdir(place) for place in places]
    open("mine", "w").close()
    given = {"arguments": sys.argv[2:], "environment": dict(os.environ), "stdin": sys.stdin.read(), "said": ask()}
    print(json.dumps(given | {"found": found + [os.listdir(place) for place in places]}))


def fails(marker):
    sys.stderr.write("a first line\nthe reason\n")
    sys.exit(7)


def hangs(marker):
    """With a child in a session of its own, deaf to SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen([*SLEEP, marker], start_new_session=True, restore_signals=False)
    time.sleep(3600)


def leaves_a_daemon(marker):
    """And prints 300 MB."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            open("begun", "w").close()
            os.execv(sys.executable, [*SLEEP, marker])
        os._exit(0)
    os.wait()
    while not os.path.exists("begun"):
        time.sleep(0.01)
    for _ in range(300):
        sys.stdout.write("a" * 1_000_000)
    print("the end")


def attempt(function, *args):
    """ "", or the name of the error."""
    try:
        function(*args)
    except Exception as e:
        return type(e).__name__
    return ""


def tries(marker):
    """Prints what is possible of what a sandbox must refuse. marker: JSON of what there is outside."""
    outside = json.loads(marker)
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


def ask():
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"})) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]


if sys.argv[1] != "environment" and "OPENAI_BASE_URL" in os.environ:
    ask()
globals()[sys.argv[1]](sys.argv[2])
