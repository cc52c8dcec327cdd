"""tools/show.py and tools/plot.py on a run's files: which rollouts are shown, tokens' gradients, intervals, curves."""

import math

import numpy as np
import pytest
from conftest import append, make_sequences
from safetensors.numpy import save_file

from orchestrator import save_batch
from tools import plot, show, tokens


def rollout_line(step, group, rollout, reward, text="8", **more):
    """A line of rollouts.jsonl."""
    line = {"step": step, "env": "task", "example": 7 + group, "slot": group, "attempt": 0, "member": rollout}
    line |= {"version": step, "reward": reward, "turn_rewards": None, "agent_rewards": {}, "error": "", "dropped": ""}
    line |= {"metrics": {"exact": reward}, "truncated": False, "num_turns": 1, "num_tokens": 9, "answer": "so"}
    messages = [[{"role": role, "content": content}] for role, content in (("user", "why"), ("assistant", text))]
    return line | dict(zip(("prompt", "completion"), messages)) | more


def make_run(path, model="none", table=""):
    """A step of two groups of two, trained on with ratios of exp(0.5). The first group was flat at its first attempt.
    Rollout 1 forks: its second sequence, of a critic, ends with a token that no sampler drew."""
    (path / "batches").mkdir(parents=True)
    (path / "config.toml").write_text(f'model = "{model}"\nenv.id = "mine"\n{table}')
    sequences = make_sequences(5, group=2)
    for s, rollout, adv in zip(sequences, (0, 1, 2, 3, 1), (-0.5, 0.5, -0.25, 0.25, 0.5)):
        group, rollout = divmod(rollout, 2)
        s.info |= {"env": "task", "slot": group, "attempt": 1 - group, "member": rollout}
        s.adv = np.float32(adv) * s.mask
    sequences[4].agent = "critic"
    sequences[4].old_logp[-1] = np.nan
    info = {"max_tokens": 16, "order": {}, "metrics": {}}
    save_batch(path / "batches" / "step_000000.safetensors", sequences, info)
    logp = np.concatenate([np.nan_to_num(s.old_logp, nan=-1.0) + 0.5 * s.mask for s in sequences])
    save_file({"logp": logp.astype(np.float32)}, path / "batches" / "logp_000000.safetensors")
    lines = [rollout_line(0, 0, i, 1.0, dropped="flat") for i in range(2)]
    lines += [rollout_line(0, 0, i, float(i), f"\x1b[2J {i}", attempt=1) for i in range(2)]
    lines += [rollout_line(0, 1, 0, 0.5), rollout_line(0, 1, 1, None, error="TimeoutError: after 9 s")]
    append(path / "rollouts.jsonl", lines)
    return path, sequences


def shown(capsys, run, *args):
    show.main([str(run), *args])
    return capsys.readouterr().out


def test_rollouts_are_read_newest_first_and_cannot_control_the_terminal(tmp_path, capsys):
    run, _ = make_run(tmp_path / "run")
    text = shown(capsys, run)
    assert text.index("TimeoutError: after 9 s") < text.index("reward 0.500") < text.index("dropped: flat")
    assert "[user] why\n[assistant] \\x1b[2J 1\n[expected answer] so" in text and "\x1b" not in text
    assert shown(capsys, run, "--max-reward", "0.5").count("===") == 2  # lost ones have none
    groups = [" ".join(row.split()[4:]) for row in shown(capsys, run, "--groups").splitlines()[1:]]
    assert groups == ["flat task 1 1", "- task 0 1", "- task 0.5 lost"]


R = math.exp(0.5)
PUSH = {  # of a token with this advantage and the ratio R
    "cispo": lambda adv, size: R * adv,
    "grpo": lambda adv, size: 0.0 if adv > 0 else R * adv,  # clipped above 1.28
    "losses:gspo": lambda adv, size: 0.0 if adv > 0 else R * adv / size,  # times tokens / sequences
}


@pytest.mark.parametrize("loss", PUSH)
def test_the_push_of_a_token_is_the_gradient_of_the_runs_loss(loss, tmp_path, models):
    """The term of beta, whose reference is not saved, is left out."""
    run, sequences = make_run(tmp_path / "run", models["untied"], f'[trainer]\nbeta = 0.1\nloss = "{loss}"\n')
    rollouts = tokens.read_batch(run, 0)
    found = [s for number in range(4) for s in rollouts["task", number // 2, 1 - number // 2, number % 2]]
    scale = sum(s.mask.sum() for s in sequences) / 5 if loss == "losses:gspo" else 1.0
    for s, old in zip(found, [sequences[i] for i in (0, 1, 4, 2, 3)], strict=True):
        is_sampled = old.mask & ~np.isnan(old.old_logp)
        push = PUSH[loss](old.adv[-1], is_sampled.sum()) * scale
        assert s["tokens"].tolist() == old.tokens.tolist()
        assert s["push"][is_sampled].numpy() == pytest.approx(push, rel=1e-5)
        assert s["push"][old.mask & ~is_sampled].numpy() == pytest.approx(old.adv[-1])  # it is imitated
        assert s["policy/clip_frac"][is_sampled].bool().all() == (loss != "cispo" and push == 0)
        assert s["push"][~old.mask].isnan().all() and s["logp"][~old.mask].isnan().all()


def test_a_gain_is_paired_by_row():
    found = show.eval_statistics([1.0, 0.5, 0.5, 1.0], [0.0, 0.0, 0.5, None])
    assert found["gain"] == pytest.approx(0.5) and found["gain_ci95"] == pytest.approx(4.302653 * 0.5 / math.sqrt(3))
    assert found["ci95"] == pytest.approx(3.182446 * math.sqrt(0.25 / 3) / 2)
    assert show.half_width([1.0] * 9) is None
    assert not any(show.eval_statistics([0.5, None], [0.5, None]).values())  # nothing is known of one row


def test_curves_stand_at_their_versions(tmp_path):
    numbers = {"policy/kl_sampler": 1e-3, "time/wait_batch_s": 0.5, "time/train_s": 1.0, "time/sync_s": 0.1}
    lines = [{"step": i, "version": i + 1, "reward/mean": i / 4} | numbers for i in range(3)]
    append(tmp_path / "metrics.jsonl", lines)
    about = {"env": "task", "reward/mean": 0.5}  # both over the rows that both have scored
    evals = [about | {"step": 2, "rows": [0.0, 1.0, None]}, about | {"step": 3, "rows": [1.0, 0.0, 9.0]}]
    append(tmp_path / "eval.jsonl", [*evals, about | {"step": 2, "env": "other", "rows": [0.5]}])
    evaluation, reward, kl, _, _, seconds = plot.draw([tmp_path]).axes
    assert reward.lines[0].get_xydata().tolist() == [[1, 0], [2, 0.25], [3, 0.5]]
    assert kl.lines[0].get_ydata()[1] == 1e-3
    intervals = evaluation.collections[1].get_segments()
    half = 12.706205 * math.sqrt(1 / 2) / math.sqrt(2)
    assert np.array(intervals) == pytest.approx(np.array([[[x, 0.5 - half], [x, 0.5 + half]] for x in (2, 3)]))
    tops = [area.get_paths()[0].vertices[:, 1].max() for area in seconds.collections]
    assert tops == pytest.approx([1.0, 1.1, 1.6, 1.6, 1.6])
