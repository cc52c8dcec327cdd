"""What the numbers of a run mean, and which setting to change. watch.py and check.py print it."""

import statistics
import sys
import urllib.request
from collections import Counter

WINDOW = 10  # steps that warnings look at
SLOW = 0.15  # of the time: whatever takes more than this, besides training, has a remedy
SAME_KL = 0.05  # nats between two engines with the same weights, which agree far better
STALE_KL = 0.1  # nats between versions
LOST = 0.05  # of the rollouts: if more are lost to errors, the rest says little about the task
HALF = 0.5  # on the scale from 0 to 1 a lower reward counts as not solved
EQUAL = 0.05  # on that scale the rewards of a group hardly differ if they deviate less, on average over the groups


def say(text):
    """Prints a line. On a terminal it first clears the rest of the progress bar."""
    print(("\033[K" if sys.stdout.isatty() else "") + text, flush=True)


def report_check(is_ok, what, remedy=""):
    """Prints the outcome of a check, with the remedy if it failed, and returns is_ok."""
    if is_ok:
        say(f"check: PASS {what}")
    else:
        say(f"check: FAIL {what}; {remedy}" if remedy else f"check: FAIL {what}")
    return is_ok


def percent(share):
    return f"{100 * share:.0f} %"


# --- can the task be learned from? ------------------------------------------------------------------------------------


def judge(name, groups):
    """Reports whether there is anything to learn from some rollouts, and returns whether all is well.

    groups: for each row its rollouts, dicts with reward, truncated and error."""
    # A rollout with neither reward nor error had a prompt that is too long.
    rollouts = [r for group in groups for r in group if r["reward"] is not None or r["error"]]
    if not rollouts:
        what = f"{name}: every prompt is too long"
        return report_check(False, what, "raise max_seq_len, or orchestrator.max_prompt_len")
    lost = Counter(r["error"] for r in rollouts if r["reward"] is None)
    causes = ""
    if lost:
        mostly = ", mostly" if len(lost) > 1 else ""
        cause = lost.most_common(1)[0][0]
        causes = f"{lost.total()} of {len(rollouts)} rollouts were lost{mostly}: {cause}"
    if lost.total() > LOST * len(rollouts):
        return report_check(False, f"{name}: {causes}", "lost rollouts teach nothing")
    rewards = []
    for group in groups:
        rewards.append([r["reward"] for r in group if r["reward"] is not None])
    is_right = judge_difficulty(name, rewards, causes)
    is_varied = judge_variance(name, rewards)
    cut = sum(r["truncated"] for r in rollouts) / len(rollouts)
    what = f"{name}: {percent(cut)} of the rollouts are cut off (limit 50 %)"
    remedy = "raise orchestrator.sampling.max_tokens or max_seq_len, or reward brevity"
    is_whole = report_check(cut <= 0.5, what, remedy)
    return is_right and is_varied and is_whole


def judge_difficulty(name, groups, causes):
    """Is the task neither too hard nor too easy? groups: lists of rewards. causes: what lost rollouts, or ""."""
    rewards = sum(groups, [])
    solved = share_solved(rewards)
    mean = sum(rewards) / len(rewards)
    about = f"reward {mean:.3f} ({min(rewards):.3g} to {max(rewards):.3g}) of {len(rewards)} rollouts"
    about += f", {causes}" if causes else ""
    remedy = "take easier rows (env.args), a stronger model, a finer reward, or demonstrations first"
    if solved <= 0:
        return report_check(False, f"{name}: too hard: nothing is solved, {about}", remedy)
    if is_hopeless(groups):
        what = f"nothing is solved, and rewards hardly differ within groups (by {spread(groups):.3f})"
        return report_check(False, f"{name}: too hard: {what}, {about}", remedy)
    if solved >= 0.8:
        remedy = 'take harder rows (env.args), or orchestrator.order = "orders:Difficulty" and retire_after'
        return report_check(False, f"{name}: too easy: {percent(solved)} is solved (limit 80 %), {about}", remedy)
    if is_unsolved(rewards):
        return report_check(True, f"{name}: nothing is solved, but rewards differ within groups: {about}")
    return report_check(True, f"{name}: neither too hard nor too easy: {about}")


def is_unsolved(rewards):
    """Whether all rewards are between 0 and HALF: none is likely to be a solution. On another scale nobody knows."""
    return min(rewards) >= 0 and max(rewards) < HALF


def spread(groups):
    """The standard deviation of the rewards in a group, on average over the groups."""
    return statistics.mean(statistics.pstdev(group) for group in groups if group)


def is_hopeless(groups):
    """Whether nothing is solved, and rewards say next to nothing about which of a group's answers is better."""
    return is_unsolved(sum(groups, [])) and spread(groups) < EQUAL


def share_solved(rewards):
    """The mean of rewards between 0 and 1. On another scale it is the share that reaches the highest reward; if all are
    equal, 1 or more counts as solved."""
    low = min(rewards)
    high = max(rewards)
    if 0 <= low and high <= 1:
        return sum(rewards) / len(rewards)
    if low < high:
        return rewards.count(high) / len(rewards)
    return float(high >= 1)


def judge_variance(name, rewards):
    """Do rewards differ within groups? rewards: a list for each group."""
    num = len(rewards)
    varied = sum(len(set(group)) > 1 for group in rewards)
    if varied > num / 10:
        return report_check(True, f"{name}: rewards differ within {varied} of {num} groups")
    what = f"{name}: all rewards are equal in {num - varied} of {num} groups"
    remedy = "raise orchestrator.rollouts_per_example or sampling.temperature, or make the reward finer"
    return report_check(False, what, remedy)


# --- warnings ---------------------------------------------------------------------------------------------------------


def values_of(lines, key):
    return [line[key] for line in lines if line.get(key) is not None]


def mean(lines, key):
    values = values_of(lines, key)
    return sum(values) / len(values) if values else 0.0


def median(lines, key):
    """The median, or None if fewer than half of the steps have a value: one step says little and may be far off."""
    values = values_of(lines, key)
    return statistics.median(values) if 2 * len(values) >= len(lines) else None


def flat(lines):
    groups = sum(mean(lines, f"group/{name}") for name in ("kept", "flat", "failed", "long", "empty"))
    num_flat = mean(lines, "group/flat")
    spread = mean(lines, "reward/std")
    if not groups or (num_flat <= 0.8 * groups and spread >= 1e-3):
        return ""
    return (
        f"reward variance vanishes: {num_flat:.0f} of {groups:.0f} groups are flat, reward "
        f"{mean(lines, 'reward/mean'):.3f} +- {spread:.3f}; use harder rows if they are solved "
        '(orchestrator.order = "orders:Difficulty", retire_after); easier ones, a finer reward or demonstrations '
        "if they are not; larger groups, more temperature"
    )


def truncated(lines):
    share = mean(lines, "rollout/truncated")
    if share <= 0.5:
        return ""
    return (
        f"{percent(share)} of the rollouts are cut off: raise orchestrator.sampling.max_tokens or max_seq_len, "
        "reward brevity, or set orchestrator.mask_truncated_completions"
    )


def lost(lines):
    share = mean(lines, "rollout/errors") / max(mean(lines, "rollout/num"), 1)
    if share <= LOST:
        return ""
    keys = set().union(*lines)
    kinds = sorted(key.removeprefix("error/") for key in keys if key.startswith("error/"))
    return f"{percent(share)} of the rollouts are lost to errors ({', '.join(kinds)}): see error in rollouts.jsonl"


def lost_in_evaluation(what, num_lost, num, mean, as_zero=None):
    """What is wrong if an evaluation lost too many of its rollouts, or "". as_zero: the mean with lost ones as 0."""
    if num_lost <= LOST * num:
        return ""
    means = f"mean {mean:.3f}" if as_zero is None else f"mean {mean:.3f}, but {as_zero:.3f} with lost ones as 0"
    return (
        f"{what}: {percent(num_lost / num)} of the rollouts were lost and count in no mean, which looks better the "
        f"more hard rows are lost ({means}): mend the errors, or raise orchestrator.generation_timeout"
    )


def kl_by_staleness(lines):
    """{versions: median KL}, the freshest first."""
    keys = set().union(*lines)
    start = "policy/kl_staleness"
    found = {}
    for staleness in sorted(int(key.removeprefix(start)) for key in keys if key.startswith(start)):
        kl = median(lines, f"{start}{staleness}")
        if kl is not None:
            found[staleness] = kl
    return found


def engines(lines):
    same = kl_by_staleness(lines).get(0, 0.0)
    if same <= SAME_KL:
        return ""
    return (
        f"KL(sampler || policy) is {same:.2f} nats on rollouts of the very same weights: the engines disagree; "
        "look at sync/dlogp_mean and trainer.dtype"
    )


def stale(lines):
    remedy = "lower orchestrator.max_staleness or trainer.learning_rate"
    kl = median(lines, "policy/kl_sampler") or 0.0
    found = kl_by_staleness(lines)
    if engines(lines):
        return ""
    if len(found) > 1:
        (fresh, same), *_, (oldest, old) = found.items()
        if old > max(3 * same, STALE_KL):
            growth = f"{same:.1e} nats at {fresh}, {old:.1e} at {oldest} versions"
            return f"KL(sampler || policy) grows with staleness: {growth}; {remedy}"
    return f"KL(sampler || policy) is {kl:.2f} nats; {remedy}" if kl > STALE_KL else ""


def starved(lines):
    wait = mean(lines, "time/wait_batch_s") / max(mean(lines, "time/step_s"), 1e-9)
    if wait <= 0.5:
        return ""
    return (
        f"the trainer is starved: it waits {percent(wait)} of the time for rollouts; raise inference.gpus, "
        "orchestrator.max_concurrent or max_staleness, or oversampling_factor if groups are flat"
    )


# HACK HERE: each gets the last WINDOW lines of metrics.jsonl, with what watch.py adds to them, and returns what is
# wrong and which setting to change, or "".
WARNINGS = (flat, truncated, lost, engines, stale, starved)


def warnings(lines):
    """{name of the warning: its text}"""
    texts = {warn.__name__: warn(lines) for warn in WARNINGS}
    return {name: text for name, text in texts.items() if text}


# --- where the time went ----------------------------------------------------------------------------------------------


def server_pages(urls):
    """The text of each server's /metrics, or "" if it does not answer."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    pages = []
    for url in urls:
        try:
            pages.append(opener.open(f"{url}/metrics", timeout=5).read().decode())
        except OSError:
            pages.append("")
    return pages


def counted(name, pages):
    """The sum of one of vLLM's counters over all servers and engines."""
    total = 0.0
    for page in pages:
        for row in page.splitlines():
            counter, _, value = row.rpartition(" ")
            if counter.partition("{")[0] == f"vllm:{name}":
                total += float(value)
    return total


def where_time_goes(seconds, before=(), after=()):
    """Returns a sentence that ends with the setting to change. seconds: {part of a step: total}; before and after: what
    server_pages() returned."""
    whole = seconds["step"]
    train = seconds["train"] / whole
    wait = seconds["wait_batch"] / whole
    sync = seconds["sync"] / whole
    saved = seconds["checkpoint"] / whole
    servers, queue = what_servers_did(whole, before, after)
    if wait > SLOW:
        remedy = "raise inference.gpus" if queue > SLOW else "raise orchestrator.max_concurrent or max_staleness"
    elif saved > SLOW:
        remedy = "raise checkpoint.every"
    elif sync > SLOW:
        remedy = "make steps longer (orchestrator.batch_size, trainer.updates_per_batch), or train adapters in 16 bits"
    else:
        remedy = "training is the limit: raise trainer.gpus or micro_batch_size, or do without gradient_checkpointing"
    shares = f"trained {percent(train)}, waited {percent(wait)} for rollouts, synced {percent(sync)} and saved "
    return f"time: the trainer {shares}{percent(saved)} of {whole:.0f} s{servers}; {remedy}"


def what_servers_did(seconds, before, after):
    """Returns a part of a sentence, "" if nothing is known, and the share of a request's time that it was queued."""

    def since(name):
        return counted(name, after) - counted(name, before)

    latency = since("e2e_request_latency_seconds_sum")
    if latency <= 0:  # nothing is known, or the servers no longer answer
        return "", 0.0
    queue = since("request_queue_time_seconds_sum") / latency
    rate = since("generation_tokens_total") / seconds
    cached = since("prefix_cache_hits_total") / max(since("prefix_cache_queries_total"), 1)
    text = f"; servers: {rate:,.0f} tokens/s, {percent(queue)} of a request's time in their queue, "
    return f"{text}{since('num_preemptions_total'):.0f} preemptions, {percent(cached)} of prompts cached", queue
