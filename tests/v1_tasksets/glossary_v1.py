"""A tool server for each rollout, like glossary of verifiers' repository."""

import verifiers.v1 as vf

__all__ = ["Glossary"]
FACTS = {"ada": "first", "alan": "machine", "grace": "compiler"}


class Tools(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "facts"

    @vf.tool
    def lookup(self, name: str) -> str:
        """Look up a person."""
        return FACTS.get(name, "no entry")


class TaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class Data(vf.TaskData):
    answer: str


class GlossaryTask(vf.Task[Data, vf.State, TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Tools(config.tools)]

    @vf.reward
    async def looked_up(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply) + len(trace.last_reply) / 100


class GlossaryConfig(vf.TasksetConfig):
    task: TaskConfig = TaskConfig()


class Glossary(vf.Taskset[GlossaryTask, GlossaryConfig]):
    def load(self):
        return [GlossaryTask(Data(prompt=name, answer=fact), self.config.task) for name, fact in FACTS.items()]


if __name__ == "__main__":
    Tools.run()
