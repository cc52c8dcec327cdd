"""An agent that is a command: python -c SOURCE mode marker. Standard library only, so that any Python runs it."""

import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.request

SLEEP = [sys.executable, "-c", "import time; time.sleep(3600)"]


def ask(messages):
    body = json.dumps({"model": "m", "messages": messages}).encode()
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"})) as reply:
        return json.load(reply)["choices"][0]["message"]


def turns(prompt):
    """Like agent_tasks.turns."""
    messages = [{"role": "user", "content": prompt}]
    for i in range(3):
        messages.append(ask(messages))
        messages.append({"role": "user", "content": f"turn {i}"})
    print(messages[-2]["content"])


def files(marker):
    """What it finds in its directories, before and after a turn in which others write theirs."""
    places = [os.getcwd(), os.environ["HOME"], os.environ["TMPDIR"]]
    found = [os.listdir(place) for place in places]
    for place in places:
        open(os.path.join(place, marker), "w").close()
    ask([{"role": "user", "content": "hello"}])
    found += [os.listdir(place) for place in places]
    print(json.dumps({"places": places, "found": found}))


def environment(marker):
    ask([{"role": "user", "content": "hello"}])
    print(json.dumps({"arguments": sys.argv[1:], "environment": dict(os.environ), "stdin": sys.stdin.read()}))


def fails(marker):
    ask([{"role": "user", "content": "hello"}])
    sys.stderr.write("a first line\nthe reason\n")
    sys.exit(7)


def wavers(marker):
    if random.random() < 0.5:
        fails(marker)
    environment(marker)


def killed(marker):
    ask([{"role": "user", "content": "hello"}])
    os.kill(os.getpid(), 9)


def hangs(marker):
    """With children, in sessions of their own and deaf to SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ask([{"role": "user", "content": "hello"}])
    for _ in range(2):
        subprocess.Popen([*SLEEP, marker], start_new_session=True, restore_signals=False)
    time.sleep(3600)


def leaves_a_daemon(marker):
    """A double fork in a session of its own, which has begun when this process ends."""
    ask([{"role": "user", "content": "hello"}])
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            open("begun", "w").close()
            os.execv(sys.executable, [*SLEEP, marker])
        os._exit(0)
    os.wait()
    while not os.path.exists("begun"):
        time.sleep(0.01)
    time.sleep(0.1)
    print("left")


def floods(marker):
    ask([{"role": "user", "content": "hello"}])
    block = "a" * 1_000_000
    for _ in range(300):
        sys.stdout.write(block)
    print("the end")


def attempt(function, *args):
    """ "", or the name of the error."""
    try:
        function(*args)
    except Exception as e:
        return type(e).__name__
    return ""


def write(path):
    open(path, "w").close()


def spawn_many():
    """How many children it gets."""
    children = []
    while len(children) < 100:
        try:
            children.append(subprocess.Popen(["sleep", "100"]))
        except OSError:
            break
    for child in children:
        child.kill()
        child.wait()
    return len(children)


def tries(marker):
    """Everything that a sandbox must refuse. marker: JSON of what there is outside."""
    outside = json.loads(marker)
    ask([{"role": "user", "content": "hello"}])
    result = {path: attempt(os.listdir if path.endswith("/") else open, path) for path in outside["paths"]}
    result |= {f"write {path}": attempt(write, f"{path}/written") for path in ["/", "/usr", "/etc", *outside["shown"]]}
    result["port"] = attempt(socket.create_connection, ("127.0.0.1", outside["port"]), 2)
    result["internet"] = attempt(socket.create_connection, ("192.0.2.1", 80), 2)
    result["memory"] = attempt(bytearray, 400 << 20)
    result["chroot"] = attempt(os.chroot, "/tmp")
    allowed = {
        "shown": [os.listdir(path) for path in outside["shown"]],
        "write": attempt(write, "written"),
        "little memory": attempt(bytearray, 50 << 20),
        "namespace": subprocess.call(["unshare", "--user", "true"], stderr=subprocess.DEVNULL),
        "children": spawn_many(),
        "root": sorted(os.listdir("/")),
        "file": resource.getrlimit(resource.RLIMIT_FSIZE)[1],
    }
    print(json.dumps({"refused": result, "allowed": allowed}))


globals()[sys.argv[1]](sys.argv[2])
