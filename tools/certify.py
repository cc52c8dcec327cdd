"""Checks the properties of a loss or an advantage on random numbers in float64. This takes seconds, and needs no model.

    python tools/certify.py losses:gspo epsilon=0.001                    # as trainer.loss and trainer.loss_args
    python tools/certify.py advantages:maxrl                             # as orchestrator.advantage
    python tools/certify.py cispo grpo losses:sapo --picture losses.png  # how far a token is pushed, against its ratio

It prints a line for each property: PASS or FAIL, or, where there is more than one right way, which one this is. A loss
is called through trainer.compute_loss, on micro-batches that trainer.collate makes, with log-probabilities in place of
parameters. An advantage is called through orchestrator.add_advantages. A loss in a changed copy of trainer.py is
my_trainer:NAME.

A token's weight is -d loss / d logp x num_tokens / A. For REINFORCE, averaged over tokens, it is 1. Exit codes: 2 if
the function cannot be called, 4 if a line says FAIL."""

import inspect
import math
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from itertools import cycle, product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import orchestrator
import trainer
from rolemodel.config import parse_override
from rolemodel.lookup import TASKS, find_function
from rolemodel.role import ConfigError, run_main
from tools.plot import STYLES

RATIOS = np.exp(np.linspace(-3, 3, 241))
MAX_TOKENS = 16  # of an answer
# What a batch says about a sequence: a value, and another one, at which a mask or a weight would show.
FIELDS = {"turn": (0, 3), "num_turns": (4, 1), "truncated": (0, 1), "staleness": (0, 20), "temperature": (1, 0.5)}
FIELDS |= {"top_k": (0, 9), "reward": (1, 0), "num_tokens": (8, 100), "version": (20, 0), "taught": (0, 1)}
FIELDS |= {name: (0, 1) for name in ("example", "slot", "member", "attempt")}


class Report(list):
    """Lines: (PASS, FAIL or "", the property, details)."""

    def add(self, verdict: bool | None, what: str, details: str, hint=""):
        """hint: a possible cause of a FAIL."""
        details += f": {hint}" if hint and verdict is False else ""
        self.append(({True: "PASS", False: "FAIL"}.get(verdict, ""), what, details))


def change(new: Tensor, old: Tensor) -> float:
    """The largest difference, relative to the largest value; inf if anything is nan."""
    difference = ((new - old).abs().max() / old.abs().max().clamp(min=1e-300)).item()
    return math.inf if math.isnan(difference) else difference


# --- a loss -----------------------------------------------------------------------------------------------------------


class Loss(NamedTuple):
    """The keys of [trainer] that trainer.compute_loss reads."""

    loss: str
    loss_args: dict
    beta: float = 0.0
    updates_per_batch: int = 2  # with one, compute_loss would put logp_N in the place of prox_logp_N
    minibatches: int = 1


def make_batch(sizes: list[int], adv: list[float], **more: list) -> dict:
    """The fields of a batch, and its `lens`. Each sequence has a prompt of two tokens, `sizes` loss tokens, and in the
    middle of these one token of the environment. more: further values for each sequence."""
    draw = torch.Generator().manual_seed(0)
    lens = [size + 3 for size in sizes]
    masks = [torch.tensor([0, 0] + [1] * (size // 2) + [0] + [1] * (size - size // 2)) for size in sizes]
    old_T = -3 * torch.rand(sum(lens), generator=draw, dtype=torch.float64) - 0.1
    batch = {"lens": lens, "tokens": torch.arange(sum(lens)), "mask": torch.cat(masks).bool()}
    batch |= {"old_logp": old_T, "prox_logp": old_T, "ref_logp": old_T}
    batch["entropy"] = torch.linspace(1, 2, len(old_T), dtype=torch.float64)
    # A head with one other token, on which policy and sampler agree, so that score centering can be called and is 0.
    batch |= {"head_ids": torch.zeros(len(old_T), 1, dtype=torch.long)}
    batch["head_logp"] = batch["old_head_logp"] = torch.full((len(old_T), 1), -3.0, dtype=torch.float64)
    values = {name: [value] * len(lens) for name, (value, _) in FIELDS.items()}
    values |= {"share": [1] * len(lens), "adv": adv} | more
    for name, value_S in values.items():
        batch[name] = torch.tensor(value_S, dtype=torch.float64).repeat_interleave(torch.tensor(lens))
    return batch


def step(loss: Loss, batch: dict, logp_T: Tensor, parts=None, wider=0) -> tuple[float, Tensor]:
    """The loss of an optimizer step and its gradients with respect to logp and entropy, accumulated over micro-batches.
    parts: the sequences of each micro-batch; [] stands for a rank that has none in this pass. wider: how many more
    tokens of padding than needed."""
    lens = batch["lens"]
    fields = {name: x_T for name, x_T in batch.items() if name not in ("lens", "entropy")}
    fields["is_sampled"] = fields["mask"] & ~fields["old_logp"].isnan()
    starts = np.cumsum([0, *lens[:-1]])
    counts = {"num_tokens": int(fields["mask"].sum()), "max_tokens": MAX_TOKENS}
    counts["num_sequences"] = fields["share"][starts].sum().item()
    logp_T = logp_T.clone().requires_grad_()
    entropy_T = batch["entropy"].clone().requires_grad_()
    total = 0.0 * (logp_T.sum() + entropy_T.sum())  # a loss may use only one of them
    for rows in parts or [[*range(len(lens))]]:
        given = fields if rows else fields | {"mask": torch.zeros_like(fields["mask"])}  # as trainer.make_micros does
        rows = rows or [0]
        width = max(lens[row] for row in rows) + wider
        micro = trainer.collate(given, lens, [[row] for row in rows], width, "cpu") | counts
        at_N = micro["at_N"]
        loss_N, _ = trainer.compute_loss(micro, logp_T[at_N], entropy_T[at_N], loss)
        total = total + loss_N.sum() / counts["num_tokens"]
    return total.item(), torch.stack(torch.autograd.grad(total, [logp_T, entropy_T]))


def push_curves(loss: Loss) -> dict[float, np.ndarray]:
    """{advantage (1 or -1): the weight at each of RATIOS, relative to the weight at a ratio of 1}, without what the
    loss does at an advantage of 0. For each ratio there is a sequence of one token, to which the sampler gave a
    probability of 0.3."""
    curves = {}
    for adv in (1.0, -1.0):
        batch = make_batch([1] * len(RATIOS), [adv] * len(RATIOS))
        batch["old_logp"] = batch["prox_logp"] = torch.full_like(batch["adv"], math.log(0.3))
        logp_T = batch["old_logp"] + torch.tensor(np.log(RATIOS)).repeat_interleave(torch.tensor(batch["lens"]))
        gradients = [step(loss, batch | {"adv": scale * batch["adv"]}, logp_T)[1][0] for scale in (1, 0)]
        curve = ((gradients[1] - gradients[0]) / adv)[batch["mask"]].numpy()
        curves[adv] = curve / (abs(curve[len(RATIOS) // 2]) or 1.0)
    return curves


def spans(is_true: np.ndarray) -> str:
    """The ranges of ratios at which it is true."""
    edges = np.flatnonzero(np.diff([0, *is_true.astype(int), 0]))
    found = [(RATIOS[first], RATIOS[end - 1]) for first, end in zip(edges[::2], edges[1::2])]
    return ", ".join(f"{low:.2g} to {high:.2g}" for low, high in found) or "none"


def directions(x_N: Tensor, up: str, down: str) -> str:
    """The signs of numbers, in words."""
    return " and ".join(word for word, is_so in ((up, (x_N > 0).any()), (down, (x_N < 0).any())) if is_so) or "none"


def certify_loss(loss: Loss) -> Report:
    report = Report()
    sizes = [6, 9, 4, 12, 5, 8]
    batch = make_batch(sizes, [1.0, -0.5, 0.0, 2.0, -1.5, 0.7])
    old_T, adv_T, mask_T = batch["old_logp"], batch["adv"], batch["mask"]
    row_T = torch.arange(len(sizes)).repeat_interleave(torch.tensor(batch["lens"]))
    # 1. Extremes. If anything is not finite, nothing else is checked.
    for shift, size in product((0.0, -50.0, 50.0, -1e4, 1e4), (0.0, 1e4, -1e4)):
        value, gradient_2T = step(loss, batch | {"adv": torch.full_like(adv_T, size)}, old_T + shift)
        if not (math.isfinite(value) and gradient_2T.isfinite().all()):
            report.add(False, "finite", f"not at logp - old_logp = {shift:g}, A = {size:g}")
            return report
    report.add(True, "finite", "at log-ratios of 10,000 and advantages of 10,000")
    # 2. What must not matter. This is checked near the sampler, where no narrow clip hides it, and far from it.
    noise_T = torch.randn(len(old_T), generator=torch.Generator().manual_seed(1))
    near_T, far_T = old_T + 1e-4 * noise_T, old_T + 0.3 * noise_T
    others = {name: torch.where(row_T % 2 == 1, *map(float, FIELDS[name][::-1])) for name in FIELDS}
    others |= {name: torch.where(row_T % 2 == 1, old_T - 1, old_T) for name in ("prox_logp", "ref_logp")}
    mixed = batch | others
    ways = {
        "micro-batches, ranks, accumulation": {"parts": [[0], [1, 4], [2, 3, 5]]},
        "a rank without sequences": {"parts": [[*range(6)], []]},
        "the order of sequences": {"parts": [[3, 5, 1, 0, 2, 4]]},
        "padding": {"wider": 9},
    }
    for what, how in ways.items():
        both = [(step(loss, mixed, x_T, **how)[1], step(loss, mixed, x_T)[1]) for x_T in (near_T, far_T)]
        moved = max(change(*pair) for pair in both)
        details = f"the gradient changes by {moved:.1e} of its largest value"
        report.add(moved < 1e-9, f"does not depend on {what}", details, "does it divide by a micro-batch's number?")
    # 3. The gradient where the policy is still the sampler.
    trained_T = mask_T & (adv_T != 0)

    def weight(**changed: Tensor) -> Tensor:
        given = batch | changed
        return (-step(loss, given, given["old_logp"])[1][0] * mask_T.sum() / given["adv"])[trained_T]

    weight_N = weight()
    flipped = {"entropy": batch["entropy"].flip(0)}
    changed = {
        "logp": weight(**{name: old_T.flip(0) for name in ("old_logp", "prox_logp", "ref_logp")}),
        "the size of A": weight(adv=2 * adv_T),
        "the sign of A": weight(adv=-adv_T),
        "the entropy": weight(**flipped),
    }
    depends = [what for what, other_N in changed.items() if change(other_N, weight_N) > 1e-6]
    per_sequence = sum(sizes) / len(sizes)
    size_N = torch.tensor(sizes)[row_T[trained_T]]
    means = {
        "a mean over tokens": torch.ones_like(weight_N),
        "a mean over sequences: tokens of long answers weigh less": per_sequence / size_N,
        "over num_sequences x max_tokens": torch.full_like(weight_N, per_sequence / MAX_TOKENS),
        "RAFT++: all tokens with A > 0 weigh the same": (adv_T > 0)[trained_T] / adv_T[trained_T],
    }
    kind = [what for what, mean_N in means.items() if change(weight_N, mean_N) < 1e-6]
    details = f"weight {weight_N.min():.3g} to {weight_N.max():.3g}, {(kind or ['none of the known means'])[0]}"
    details += f", depends on {' and '.join(depends)}" if depends else ""
    # Some methods weight tokens by their entropy.
    is_right = None if "the entropy" in depends else bool(kind) and ("RAFT" in kind[0] or not depends)
    hint = "is the ratio not detached?" if "logp" in depends else ""
    report.add(is_right, "where logp = old_logp it is REINFORCE", details, hint)
    for name, other_T in others.items():
        other_N = weight(**{name: other_T})
        if change(other_N, weight_N) > 1e-6:
            value = "old_logp - 1" if name.endswith("logp") else f"{other_T[-1]:.3g}"
            details = f"{other_N[row_T[trained_T] % 2 == 1].mean():.3g} on average where it is {value}"
            report.add(None, f"the weight depends on {name}", details)
    # 4. Where A = 0, only a KL and an entropy bonus are left.
    still = batch | {"adv": 0 * adv_T}
    pulls = [step(loss, still, old_T + shift)[1][0].abs().sum().item() for shift in (0, 1e-3, 1)]
    report.add(pulls[0] == 0, "no gradient where A = 0 and logp = old_logp", f"{pulls[0]:.1e}")
    logp_T, entropy_T = step(loss, still, far_T)[1]
    toward = f"toward old_logp, at a log-ratio of 1 by {pulls[2] / (1e3 * pulls[1] or 1):.2f} of a square's (k3: 0.63)"
    details = directions(logp_T * noise_T, toward, "away from old_logp")
    report.add(False if "away" in details else None, "gradient where A = 0 and logp is not old_logp", details)
    report.add(None, "gradient through the entropy, where A = 0", directions(-entropy_T, "raises it", "lowers it"))
    # 5. Whole rollouts. If the weight depends on the token, these checks would prove nothing.
    if weight_N.any() and not depends:
        small, large = (make_batch(sizes, [1.0] * len(sizes)) for sizes in ([4, 16], [4, 16] * 2))
        ratio = (step(loss, large, large["old_logp"])[1].sum() / step(loss, small, small["old_logp"])[1].sum()).item()
        report.add(abs(ratio - 1) < 1e-9, "a step does not grow with the rollouts", f"twice as many: {ratio:.3g} times")
        forked = make_batch([8, 4, 4], [1.0] * 3, share=[1.0, 0.5, 0.5])
        one, *two = (x_L.sum().item() for x_L in step(loss, forked, forked["old_logp"])[1][0].split(forked["lens"]))
        ratio = sum(two) / one if one else math.nan
        report.add(abs(ratio - 1) < 1e-9, "a rollout that forked weighs as much as another", f"{ratio:.3g} times")
    # 6. Tokens that none of our samplers drew.
    unknown = {"old_logp": torch.where(torch.arange(len(old_T)) % 5 == 0, math.nan, old_T)}
    drawn_T = mask_T & ~unknown["old_logp"].isnan()
    both = [step(loss, mixed | given, near_T)[1][0][drawn_T] for given in (unknown, {"mask": drawn_T})]
    moved = change(*(x_N / x_N.norm().clamp(min=1e-300) for x_N in both))
    report.add(moved < 1e-9, "imitated tokens (old_logp is nan) leave the others alone", f"changes by {moved:.1e}")
    # 7. The weight against the ratio.
    curves = push_curves(loss)
    # Is the weight 0 where the ratio has gone furthest against A, and where it has gone furthest with A?
    ends = [curve[[0, -1]][:: int(adv)] == 0 for adv, curve in curves.items()]
    is_max = all(against and not along for against, along in ends)
    for (adv, curve), (is_masked, _) in zip(curves.items(), ends):
        sign = "A > 0" if adv > 0 else "A < 0"
        wrong = spans(curve < -1e-9)
        report.add(wrong == "none", f"{sign}: ratios that push the wrong way", wrong)
        some = ", ".join(f"{np.interp(r, RATIOS, curve):.3g} at {r}" for r in (0.2, 0.5, 0.9, 1, 1.1, 2, 10))
        details = f"at {spans(curve == 0)}; weight, relative to that at 1: {some}"
        details += "; masked where it has gone against A" if is_masked else ""
        what = f"{sign}: clipped, if at all, where the ratio has gone with A"
        report.add(not is_max, what, details, "max in place of min?")
    least = min(np.interp(0.5, RATIOS, curve) for curve in curves.values())
    what = "the weight at a ratio of 0.5 is at most that at 1"
    report.add(least < 1.01, what, f"{least:.3g} of it", "is the ratio upside down?")
    return report


# --- an advantage -----------------------------------------------------------------------------------------------------


def make_group(rewards_G: np.ndarray, forks=(1,), **more: list) -> list[orchestrator.Rollout]:
    """Rollouts of three turns with these rewards and, for each, what `more` says about it. forks: how many sequences
    each has; the list is repeated if it is too short."""
    group = []
    for i, (reward, num) in enumerate(zip(rewards_G.tolist(), cycle(forks))):
        r = orchestrator.Rollout("env", 0, 0, 0, i, version=20, num_turns=3, num_tokens=8, reward=reward)
        r.metrics = {"reward": reward}
        r.state = {"reward_weights": {"reward": 1.0}, "completion": [{"role": "assistant", "content": ""}]}
        for _ in range(num):
            r.sequences.append(orchestrator.Sequence(mask=np.ones(3, bool), turn=np.arange(3), adv=np.zeros(3)))
        for name, values in more.items():
            setattr(r, name, values[i])
        group.append(r)
    return group


def certify_advantage(advantage: Callable) -> Report:
    report = Report()

    def of(rewards, **more) -> np.ndarray:
        """The advantages [rollouts, turns]."""
        group = make_group(np.array(rewards, float), **more)
        orchestrator.add_advantages(group, advantage)
        return np.array([r.sequences[0].adv for r in group])

    rng = np.random.default_rng(0)
    rewards_G = rng.random(8)
    first = of(rewards_G)
    # 1. Extremes. If anything is not finite, nothing else is checked.
    zeros = [0.0] * 7
    cases = ([*zeros, 0.0], [1.0, 1.0], [0.0, 1.0], [*zeros, 1.0], [*zeros, 1e-9], [*zeros, 1e12], rewards_G)
    worst = [r_G for r_G in cases if not np.isfinite(of(r_G)).all()]
    report.add(not worst, "finite", f"not for {worst[0]}" if worst else "for equal, tiny and huge rewards")
    if worst:
        return report
    # 2. How much a success counts.
    counts = {}
    for num, share in product((4, 16), (0.1, 0.5, 0.9)):
        draws = (rng.random((200, num)) < share).astype(float)
        found = np.array([of(r_G) for r_G in draws])
        counts[num, share] = found[draws == 1].mean() - found[draws == 0].mean()
    learns = max(map(abs, counts.values())) > 0.1
    for num in (4, 16):
        details = ", ".join(f"{counts[num, share]:.2f} where {share:.0%} succeed" for share in (0.1, 0.5, 0.9))
        details += ": more where it is common" if learns and counts[num, 0.9] > 2 * abs(counts[num, 0.1]) else ""
        report.add(min(counts.values()) > 0 if learns else None, f"success less failure, groups of {num}", details)
    # 3. What must not matter.
    remembers = np.abs(of(rewards_G) - first).max() > 1e-9
    details = "yes, or it draws at random, so how it depends on one group is not checked" if remembers else "no"
    report.add(None, "it remembers other groups", details)
    if remembers:
        return report
    for name in ("truncated", "num_tokens", "version"):
        moved = of(rewards_G, **{name: FIELDS[name] * 4}) - first
        if np.abs(moved).max() > 1e-9:
            report.add(None, f"depends on {name}", f"{moved[1::2].mean():.2g} more where it is {FIELDS[name][1]}")
    if not learns:
        details = f"advantages up to {np.abs(first).max():.2g}; nothing else is checked"
        report.add(None, "it learns nothing from success: a control, or for use with a teacher", details)
        return report
    orders = [rng.permutation(8) for _ in range(9)]
    moved = max(np.abs(of(rewards_G[order]) - first[order]).max() for order in orders)
    report.add(moved < 1e-9, "does not depend on the order of rollouts", f"changes by {moved:.1e}")
    moved = np.abs(of(rewards_G, forks=(1, 1, 3, 1, 2)) - first).max()
    report.add(moved < 1e-9, "does not depend on how often a rollout forked", f"changes by {moved:.1e}")
    if np.ndim(advantage(rewards_G, make_group(rewards_G))[0]) == 0:
        moved = np.abs(of(rewards_G, num_turns=[*range(3, 11)]) - first).max()
        report.add(moved < 1e-9, "does not depend on the numbers of turns", f"changes by {moved:.1e}")
    else:
        earned = np.eye(8, 3)
        adv_K = of(earned.sum(1), state=[{"turn_rewards": own} for own in earned.tolist()])[1]
        what = "what the second turn earns is credited to the first two, not the third"
        is_right = None if np.ptp(adv_K) < 1e-9 else (adv_K > 0).tolist() == [True, True, False]
        report.add(is_right, what, ", ".join(f"{adv:.2g}" for adv in adv_K))
    # 4. How it depends on the rewards.
    draws = rng.random((100, 8))
    rises, slight = ([of(r_G + x * np.eye(8)[0])[0, 0] - of(r_G)[0, 0] for r_G in draws] for x in (0.5, 0.001))
    details = f"0.5 more: {np.mean(rises):.2f} more; 0.001 more changes it in {np.count_nonzero(slight)}%"
    report.add(min(rises) >= 0, "a higher reward has no lower advantage", details)
    return report


# --- the command ------------------------------------------------------------------------------------------------------


def certify(name: str, args: dict) -> Report:
    """The report on a loss or an advantage. Raises ConfigError if it cannot be called as one."""
    torch.set_default_dtype(torch.float64)  # for what the function makes, too
    try:
        function = find_function(name, trainer.LOSSES | orchestrator.ADVANTAGES)
        parameters = inspect.signature(function).parameters.values()
        given = [p for p in parameters if p.default is p.empty and p.kind in (0, 1) and p.name not in args]
        if len(given) == 3:
            return certify_loss(Loss(name, args))
        if len(given) == 2 and not args:
            return certify_advantage(function)
    except Exception as e:  # from the function, or because there is none
        raise ConfigError(f"{name}: {type(e).__name__}: {e}") from e
    finally:
        torch.set_default_dtype(torch.float32)
    raise ConfigError(f"{name}: a loss has micro, logp_N, entropy_N, loss_args; an advantage rewards_G and rollouts")


def draw(names: list[str], args: dict, out: Path):
    """Draws push_curves."""
    from matplotlib.figure import Figure

    fig = Figure(figsize=(13, 4.5), layout="constrained")
    axes = fig.subplots(1, 2, sharey=True)
    for name, style in zip(names, cycle(STYLES)):
        for axis, curve in zip(axes, push_curves(Loss(name, args)).values()):
            axis.plot(RATIOS, curve, **style, markevery=20, markersize=4, label=name)
    for axis, title in zip(axes, ("A > 0: toward the token", "A < 0: away from it")):
        axis.set(xscale="log", ylim=(-0.2, 6), title=title, xlabel="policy / sampler", ylabel="weight")
        axis.grid(alpha=0.3)
    axes[0].legend(framealpha=0.5)
    fig.savefig(out, dpi=90)


def main(argv: list[str]):
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="+", metavar="name, or key=value")
    parser.add_argument("--picture", type=Path, metavar="FILE.png")
    given = parser.parse_args(argv)
    sys.path += [".", str(TASKS)]  # the user's modules may be in this directory, or next to our TOMLs
    args = {}
    for word in given.words:
        args |= parse_override(word) if "=" in word else {}
    names = [word for word in given.words if "=" not in word]
    if given.picture:
        return draw(names, args, given.picture)
    verdicts = set()
    for name in names:
        report = certify(name, args)
        print(f"{name}\n" + "\n".join(f"{verdict:4}  {what}: {details}" for verdict, what, details in report))
        verdicts |= {verdict for verdict, *_ in report}
    print("Not checked: what depends on token ids, texts, agents or your own fields; whether numbers have a good size")
    if "FAIL" in verdicts:
        sys.exit(4)


if __name__ == "__main__":
    run_main("certify", main)
