"""One turn, like reverse_text of verifiers' repository. kind: what goes wrong in a reward function."""

import asyncio
from difflib import SequenceMatcher

import verifiers.v1 as vf

__all__ = ["Reverse"]


class Data(vf.TaskData):
    answer: str
    kind: str


class ReverseTask(vf.Task[Data]):
    @vf.stop
    async def after_one_turn(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 1

    @vf.reward(weight=2.0)
    async def similarity(self, trace: vf.Trace) -> float:
        print("an answer that is none")
        if self.data.kind == "raises" and self.data.idx % 3 == 0:
            raise ValueError("the reward function fails")
        if self.data.kind == "hangs":
            await asyncio.sleep(60)
        return SequenceMatcher(None, trace.last_reply, self.data.answer).ratio()

    @vf.metric
    async def tokens(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class ReverseConfig(vf.TasksetConfig):
    kind: str = ""
    split: str = "train"


class Reverse(vf.Taskset[ReverseTask, ReverseConfig]):
    def load(self):
        if self.config.kind == "empty":
            return
        for i in range(13 if self.config.split == "train" else 2):
            text = f"{self.config.split} {i}"
            timeout = vf.TaskTimeout(scoring=0.2 if self.config.kind == "hangs" else None)
            data = Data(prompt=text, system_prompt="S", answer=text[::-1], kind=self.config.kind, timeout=timeout)
            yield ReverseTask(data, self.config.task)
