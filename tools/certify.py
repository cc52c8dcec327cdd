"""Checks the properties of a loss or an advantage in seconds, on random numbers in float64: no model, no run.

    python tools/certify.py losses:gspo epsilon=0.001                    # as trainer.loss and trainer.loss_args
    python tools/certify.py advantages:maxrl                             # as orchestrator.advantage
    python tools/certify.py cispo grpo losses:sapo --picture losses.png  # how far a token is pushed, over its ratio

A line per property: PASS, FAIL, or a number where more than one is right. The loss is called by trainer.compute_loss,
on micro-batches by trainer.collate, and log-probabilities take the place of parameters.

A token's weight is -d loss / d logp x num_tokens / A. Averaged over tokens, REINFORCE has weight 1. Exit codes: 2 if it
cannot be called, 4 if a line says FAIL."""

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
import configs
import orchestrator
import trainer
from configs.runtime.role import ConfigError, run_role
from tools.plot import STYLES

RATIOS = np.exp(np.linspace(-3, 3, 241))
MAX_TOKENS = 16  # of an answer


class Report(list):
    """Lines: (PASS, FAIL or "", the property, details)."""

    def add(self, verdict: bool | None, what: str, details: str):
        self.append(({True: "PASS", False: "FAIL"}.get(verdict, ""), what, details))


def change(new: Tensor, old: Tensor) -> float:
    """The largest difference, relative to the largest value; inf if anything is nan."""
    difference = ((new - old).abs().max() / old.abs().max().clamp(min=1e-300)).item()
    return math.inf if math.isnan(difference) else difference


# --- a loss -----------------------------------------------------------------------------------------------------------


class Loss(NamedTuple):
    """What trainer.compute_loss reads of [trainer]."""

    loss: str
    loss_args: dict
    beta: float = 0.0
    updates_per_batch: int = 2  # with one, compute_loss would put logp_N in the place of prox_logp_N
    minibatches: int = 1


def make_batch(sizes: list[int], adv: list[float], **more: list) -> dict:
    """The fields of a batch, and its `lens`. Each sequence has a prompt of two tokens, `sizes` loss tokens, and between
    these one that the environment said. more: further values by sequence."""
    draw = torch.Generator().manual_seed(0)
    lens = [size + 3 for size in sizes]
    masks = [torch.tensor([0, 0] + [1] * (size // 2) + [0] + [1] * (size - size // 2)) for size in sizes]
    old_T = -3 * torch.rand(sum(lens), generator=draw, dtype=torch.float64) - 0.1
    batch = {"lens": lens, "tokens": torch.arange(sum(lens)), "mask": torch.cat(masks).bool()}
    batch |= {"old_logp": old_T, "prox_logp": old_T}
    values = {"turn": 0, "temperature": 1, "reward": 1, "staleness": 0, "version": 0, "num_turns": 1, "truncated": 0}
    values |= {"num_tokens": 8, "rollout": 0, "group": 0, "attempt": 0, "example": 0, "share": 1}
    values = {name: [float(value)] * len(lens) for name, value in values.items()} | {"adv": adv} | more
    for name, value_S in values.items():
        batch[name] = torch.tensor(value_S, dtype=torch.float64).repeat_interleave(torch.tensor(lens))
    return batch


def step(loss: Loss, batch: dict, logp_T: Tensor, parts=None, wider=0) -> tuple[float, Tensor, Tensor]:
    """The loss of an optimizer step and its gradients by logp and by entropy, accumulated over micro-batches: `parts`,
    the rows of each, padded by `wider` tokens more than needed. [] is that of a rank which has no rows in this pass."""
    lens = batch["lens"]
    fields = {name: x_T for name, x_T in batch.items() if name != "lens"}
    fields["is_sampled"] = fields["mask"] & ~fields["old_logp"].isnan()
    starts = np.cumsum([0, *lens[:-1]])
    counts = {"num_tokens": int(fields["mask"].sum()), "max_tokens": MAX_TOKENS}
    counts["num_sequences"] = fields["share"][starts].sum().item()
    logp_T = logp_T.clone().requires_grad_()
    entropy_T = torch.linspace(1, 2, len(logp_T), dtype=torch.float64).requires_grad_()
    total = 0.0 * (logp_T.sum() + entropy_T.sum())  # a loss may use but one of them
    for rows in parts or [[*range(len(lens))]]:
        given = fields if rows else fields | {"mask": torch.zeros_like(fields["mask"])}  # as trainer.make_micros does
        rows = rows or [0]
        micro = (
            trainer.collate(given, lens, [[row] for row in rows], max(lens[row] for row in rows) + wider, "cpu")
            | counts
        )
        at_N = micro["at_N"]
        loss_N, _ = trainer.compute_loss(micro, logp_T[at_N], entropy_T[at_N], loss)
        total = total + loss_N.sum() / counts["num_tokens"]
    return total.item(), *torch.autograd.grad(total, [logp_T, entropy_T])


def push_curves(loss: Loss) -> dict[float, np.ndarray]:
    """{1 and -1, the advantage: the weight at each of RATIOS, relative to that at 1}, without what the loss does at an
    advantage of 0. Each ratio has a sequence of one token, to which the sampler gave a probability of 0.3."""
    curves = {}
    for adv in (1.0, -1.0):
        batch = make_batch([1] * len(RATIOS), [adv] * len(RATIOS))
        batch["old_logp"] = batch["prox_logp"] = torch.full_like(batch["adv"], math.log(0.3))
        logp_T = batch["old_logp"] + torch.tensor(np.log(RATIOS)).repeat_interleave(torch.tensor(batch["lens"]))
        gradients = [step(loss, batch | {"adv": scale * batch["adv"]}, logp_T)[1] for scale in (1, 0)]
        curve = ((gradients[1] - gradients[0]) / adv)[batch["mask"]].numpy()
        curves[adv] = curve / (abs(curve[len(RATIOS) // 2]) or 1.0)
    return curves


def spans(is_true: np.ndarray) -> str:
    """The ratios at which it is true."""
    edges = np.flatnonzero(np.diff([0, *is_true.astype(int), 0]))
    found = [(RATIOS[first], RATIOS[end - 1]) for first, end in zip(edges[::2], edges[1::2])]
    return ", ".join(f"{low:.2g} to {high:.2g}" for low, high in found) or "none"


def certify_loss(loss: Loss) -> Report:
    report = Report()
    sizes = [6, 9, 4, 12, 5, 8]
    batch = make_batch(sizes, [1.0, -0.5, 0.0, 2.0, -1.5, 0.7])
    old_T, adv_T, mask_T = batch["old_logp"], batch["adv"], batch["mask"]
    logp_T = old_T + 0.3 * torch.randn(len(old_T), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    _, gradient_T, entropy_T = step(loss, batch, logp_T)
    # 1. What must not matter.
    ways = {
        "micro-batches, ranks, accumulation": {"parts": [[0], [1, 4], [2, 3, 5]]},
        "a rank without rows": {"parts": [[*range(6)], []]},
        "the order of sequences": {"parts": [[3, 1, 5, 0, 4, 2]]},
        "padding": {"wider": 9},
    }
    for what, how in ways.items():
        moved = change(step(loss, batch, logp_T, **how)[1], gradient_T)
        details = f"the gradient changes by {moved:.1e} of its largest value"
        details += ": does it divide by something that a micro-batch has?" if moved > 1e-9 else ""
        report.add(moved < 1e-9, f"does not depend on {what}", details)
    # 2. The gradient where the policy is still the sampler.
    trained_T = mask_T & (adv_T != 0)

    def weight(old_T, adv_T):
        given = batch | {"adv": adv_T, "old_logp": old_T, "prox_logp": old_T}
        return (-step(loss, given, old_T)[1] * mask_T.sum() / adv_T)[trained_T]

    weight_N = weight(old_T, adv_T)
    others = {
        "logp": weight(old_T.flip(0), adv_T),
        "the size of A": weight(old_T, 2 * adv_T),
        "the sign of A": weight(old_T, -adv_T),
    }
    depends = [what for what, other_N in others.items() if change(other_N, weight_N) > 1e-6]
    size_N = torch.tensor(sizes).repeat_interleave(torch.tensor(batch["lens"]))[trained_T].double()
    per_sequence = sum(sizes) / len(sizes)
    means = {
        "a mean over tokens": torch.ones_like(weight_N),
        "a mean over sequences: tokens of long answers weigh less": per_sequence / size_N,
        "over num_sequences x max_tokens": torch.full_like(weight_N, per_sequence / MAX_TOKENS),
    }
    kind = [what for what, mean_N in means.items() if change(weight_N, mean_N) < 1e-6]
    details = f"weight {weight_N.min():.3g} to {weight_N.max():.3g}, {(kind or ['no mean that is known'])[0]}"
    details += f", depends on {' and '.join(depends)}" if depends else ""
    details += ": is the ratio not detached?" if "logp" in depends else ""
    report.add(bool(kind) and not depends, "where logp = old_logp it is REINFORCE", details)
    still_T = mask_T & (adv_T == 0)
    moved = step(loss, batch, old_T)[1][still_T].abs().max().item()
    report.add(moved == 0, "no gradient where A = 0 and logp = old_logp", f"{moved:.1e}")
    moved = gradient_T[still_T].abs().max().item()
    report.add(None, "gradient where A = 0 and logp is another", f"{moved:.1e}")
    report.add(None, "gradient through the entropy", f"{entropy_T.abs().max().item():.1e}")
    # 3. Its derivative.
    at = mask_T.nonzero()[::4, 0].tolist()
    found = []
    for i in at:
        shift_T = torch.zeros_like(old_T).index_fill(0, torch.tensor(i), 1e-6)
        found.append((step(loss, batch, logp_T + shift_T)[0] - step(loss, batch, logp_T - shift_T)[0]) / 2e-6)
    moved = change(torch.tensor(found, dtype=torch.float64), gradient_T[at])
    details = "yes" if moved < 1e-4 else f"no, by {moved:.2g}: something is detached, as in REINFORCE"
    report.add(None, "the gradient is the derivative of the loss", details)
    # 4. Rollouts, of which nothing can be said if their tokens' weights depend on what they are.
    if not depends:
        small, large = (make_batch(sizes, [1.0] * len(sizes)) for sizes in ([4, 16], [4, 16] * 2))
        ratio = (step(loss, large, large["old_logp"])[1].sum() / step(loss, small, small["old_logp"])[1].sum()).item()
        report.add(abs(ratio - 1) < 1e-9, "a step does not grow with the rollouts", f"twice as many: {ratio:.3g} times")
        forked = make_batch([8, 4, 4], [1.0] * 3, share=[1.0, 0.5, 0.5])
        one, *two = (x_L.sum().item() for x_L in step(loss, forked, forked["old_logp"])[1].split(forked["lens"]))
        ratio = sum(two) / one if one else math.nan
        report.add(abs(ratio - 1) < 1e-9, "a rollout that forked weighs as much as another", f"{ratio:.3g} times")
    # 5. Tokens that none of our samplers drew, and extremes.
    mixed = batch | {"old_logp": torch.where(torch.arange(len(old_T)) % 5 == 0, math.nan, old_T)}
    drawn_T = mask_T & ~mixed["old_logp"].isnan()
    both = [step(loss, given, logp_T)[1][drawn_T] for given in (mixed, batch | {"mask": drawn_T})]
    moved = change(*(x_N / x_N.norm() for x_N in both))
    report.add(moved < 1e-9, "imitated tokens (old_logp is nan) leave the others alone", f"changes by {moved:.1e}")
    worst = "at log-ratios of 10,000 and advantages of 10,000"
    is_finite = True
    for shift, size in product((-1e4, -50.0, 50.0, 1e4), (0.0, 1e4, -1e4)):
        value, far_T, _ = step(loss, batch | {"adv": torch.full_like(adv_T, size)}, old_T + shift)
        if is_finite and not (math.isfinite(value) and far_T.isfinite().all()):
            is_finite, worst = False, f"not at logp - old_logp = {shift:g}, A = {size:g}"
    report.add(is_finite, "finite", worst)
    # 6. Over the ratio.
    for adv, curve in push_curves(loss).items():
        sign = "A > 0" if adv > 0 else "A < 0"
        wrong = spans(curve < -1e-9)
        report.add(wrong == "none", f"{sign}: ratios that push the wrong way", wrong)
        is_zero = curve == 0
        low, high = is_zero[[0, -1]]  # of the ratios
        is_clipped_too_late = high and not low if adv < 0 else low and not high
        some = ", ".join(f"{np.interp(r, RATIOS, curve):.3g} at {r}" for r in (0.2, 0.9, 1, 1.1, 2, 10))
        details = f"at {spans(is_zero)}; weight, relative to that at 1: {some}"
        details += ": max in place of min?" if is_clipped_too_late else ""
        report.add(not is_clipped_too_late, f"{sign}: clipped, if at all, where the ratio has gone with A", details)
    return report


# --- an advantage -----------------------------------------------------------------------------------------------------


def make_group(rewards_G: np.ndarray, **more: list) -> list[orchestrator.Rollout]:
    """Rollouts with these rewards and, for each, what `more` says of it."""
    group = []
    for i, reward in enumerate(rewards_G.tolist()):
        r = orchestrator.Rollout("env", 0, 0, 0, i, version=0, num_turns=1, num_tokens=8, reward=reward)
        r.metrics = {"reward": reward}
        r.state = {"reward_weights": {"reward": 1.0}, "completion": [{"role": "assistant", "content": ""}]}
        r.sequences = [orchestrator.Sequence()]
        for name, values in more.items():
            setattr(r, name, values[i])
        group.append(r)
    return group


def certify_advantage(advantage: Callable) -> Report:
    report = Report()

    def of(rewards, order=None, **more) -> np.ndarray:
        rewards_G = np.array(rewards, float)
        group = make_group(rewards_G, **more)
        order = range(len(group)) if order is None else order
        found = advantage(rewards_G[order], [group[i] for i in order])
        if len(found) != len(group):
            raise ConfigError(f"it returned {len(found)} advantages for {len(group)} rollouts")
        return np.array([np.mean(adv) for adv in found])  # by turn: of the only one

    rng = np.random.default_rng(0)
    rewards_G = rng.random(8)
    first = of(rewards_G)
    # 1. How much a success counts.
    counts = {}
    for num, share in product((4, 16), (0.1, 0.5, 0.9)):
        draws = (rng.random((500, num)) < share).astype(float)
        found = np.array([of(r_G) for r_G in draws])
        counts[num, share] = found[draws == 1].mean() - found[draws == 0].mean()
    learns = max(map(abs, counts.values())) > 0.1
    for num in (4, 16):
        details = ", ".join(f"{counts[num, share]:.2f} where {share:.0%} succeed" for share in (0.1, 0.5, 0.9))
        report.add(min(counts.values()) > 0 if learns else None, f"success less failure, groups of {num}", details)
    if not learns:
        report.add(None, "a control, or a teacher's", "rewards do not reach the gradient; nothing else is asked of it")
        return report
    # 2. What must not matter.
    remembers = np.abs(of(rewards_G) - first).max() > 1e-9
    report.add(None, "it remembers other groups", "yes, so how it depends on one is not asked" if remembers else "no")
    if remembers:
        return report
    order = rng.permutation(8)
    moved = np.abs(of(rewards_G, order) - first[order]).max()
    report.add(moved < 1e-9, "does not depend on the order of rollouts", f"changes by {moved:.1e}")
    sequences = [[orchestrator.Sequence()] * num for num in (1, 1, 3, 1, 2, 1, 1, 5)]
    moved = np.abs(of(rewards_G, sequences=sequences) - first).max()
    report.add(moved < 1e-9, "does not depend on how often a rollout forked", f"changes by {moved:.1e}")
    if np.ndim(advantage(rewards_G, make_group(rewards_G))[0]) == 0:
        moved = np.abs(of(rewards_G, num_turns=[*range(1, 9)]) - first).max()
        report.add(moved < 1e-9, "does not depend on the numbers of turns", f"changes by {moved:.1e}")
    moved = np.abs(of(rewards_G, num_tokens=[*range(1, 9)]) - first).max()
    report.add(None, "answers of 1 to 8 tokens instead of 8", f"change it by {moved:.2g}")
    # 3. The function of the rewards.
    rises = [of(r_G + 0.5 * np.eye(8)[0])[0] - of(r_G)[0] for r_G in rng.random((100, 8))]
    report.add(min(rises) >= 0, "a higher reward has no lower advantage", f"0.5 more: {np.mean(rises):.2f} more")
    report.add(None, "sum of a group's advantages", f"{first.sum():.2g}")
    rest = np.abs(of([0.7] * 8)).max()
    details = f"{rest:.2g}" + (": the baseline does not cancel a constant" if rest > 1e-9 else "")
    report.add(None, "largest where all 8 rewards are 0.7", details)
    report.add(None, "all rewards 10 higher", f"changes it by {np.abs(of(rewards_G + 10) - first).max():.2g}")
    ratio = np.abs(of(2 * rewards_G)).sum() / np.abs(first).sum()
    report.add(None, "all rewards twice as large", f"{ratio:.2g} times as large")
    zeros = [0.0] * 7
    cases = ([*zeros, 0.0], [0.0, 1.0], [*zeros, 1.0], [*zeros, 1e-9], [*zeros, 1e12])
    worst = [r_G for r_G in cases if not np.isfinite(of(r_G)).all()]
    report.add(not worst, "finite", f"not for {worst[0]}" if worst else "for equal, tiny and huge rewards")
    return report


# --- the command ------------------------------------------------------------------------------------------------------


def certify(name: str, args: dict) -> Report:
    """The report on a loss or an advantage. Raises ConfigError if it cannot be called as one."""
    torch.set_default_dtype(torch.float64)  # also of what it makes
    try:
        function = configs.find(name, trainer.LOSSES | orchestrator.ADVANTAGES)
        parameters = inspect.signature(function).parameters.values()
        given = [p for p in parameters if p.default is p.empty and p.kind in (0, 1) and p.name not in args]
        if len(given) == 3:
            return certify_loss(Loss(name, args))
        if len(given) == 2 and not args:
            return certify_advantage(function)
    except Exception as e:  # of the function, or there is none
        raise ConfigError(f"{name}: {type(e).__name__}: {e}") from e
    finally:
        torch.set_default_dtype(torch.float32)
    raise ConfigError(f"{name}: a loss has micro, logp_N, entropy_N, loss_args; an advantage rewards_G and rollouts")


def draw(names: list[str], args: dict, out: Path):
    """A picture of push_curves."""
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
    sys.path.append(".")  # the user's modules
    args = {}
    for word in given.words:
        args |= configs.parse_override(word) if "=" in word else {}
    names = [word for word in given.words if "=" not in word]
    if given.picture:
        return draw(names, args, given.picture)
    reports = {name: certify(name, args) for name in names}
    for name, report in reports.items():
        print(f"{name}\n" + "\n".join(f"{verdict:4}  {what}: {details}" for verdict, what, details in report))
    if "FAIL" in {verdict for report in reports.values() for verdict, *_ in report}:
        sys.exit(4)


if __name__ == "__main__":
    run_role("certify", "tools.certify")
