"""A tool server for each rollout, like glossary of verifiers' repository. kind: what goes wrong in its reward."""

import asyncio

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
    kind: str


class GlossaryTask(vf.Task[Data, vf.State, TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Tools(config.tools)]

    @vf.reward(weight=2.0)
    async def tokens(self, trace: vf.Trace) -> float:
        print("what must not be taken for an answer")
        if self.data.kind == "raises":
            raise ValueError("the reward function fails")
        await asyncio.sleep(60 if self.data.kind == "hangs" else 0)
        return float(FACTS[self.data.prompt] in trace.last_reply)


class GlossaryConfig(vf.TasksetConfig):
    task: TaskConfig = TaskConfig()
    kind: str = ""


class Glossary(vf.Taskset[GlossaryTask, GlossaryConfig]):
    def load(self):
        for name in FACTS:
            data = Data(prompt=name, system_prompt="S", kind=self.config.kind, timeout=vf.TaskTimeout(scoring=1.0))
            yield GlossaryTask(data, self.config.task)


if __name__ == "__main__":
    Tools.run()
