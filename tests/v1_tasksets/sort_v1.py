"""Several turns and no end of tasks, like alphabet_sort of verifiers' repository: the environment plays the user."""

import itertools

import verifiers.v1 as vf

__all__ = ["Sort", "SortEnv"]


class Data(vf.TaskData):
    turns: list[str]


class SortTask(vf.Task[Data]):
    @vf.reward
    async def share(self, trace: vf.Trace) -> float:
        found = [m.content or "" for m in trace.assistant_messages]
        return sum(sum(map(ord, text)) % 7 for text in found) / len(self.data.turns)


class SortEnv(vf.SingleAgentEnv):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as interaction:
            for text in task.data.turns:
                if (await interaction.turn(text)).terminated:
                    break


class Sort(vf.Taskset[SortTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for i in itertools.count():
            yield SortTask(Data(turns=[f"s{i}", "b", "c"][: 1 + i % 3]), self.config.task)
