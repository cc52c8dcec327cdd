"""No end of tasks, and several agents: a proposer of two turns and a solver with rewards of their own, and a user who
is not trained."""

import itertools

import verifiers.v1 as vf

__all__ = ["Two", "TwoEnv"]


class TwoConfig(vf.EnvConfig):
    proposer: vf.AgentConfig = vf.AgentConfig()
    solver: vf.AgentConfig = vf.AgentConfig()
    user: vf.AgentConfig = vf.AgentConfig()


class TwoEnv(vf.Env[TwoConfig]):
    async def setup(self, agents):
        agents.user.trainable = False

    async def run(self, task, agents):
        await agents.user.run(task)
        async with agents.proposer.interaction(task) as interaction:
            await interaction.turn()
            await interaction.turn("b")
        await agents.solver.run(task)

    async def finalize(self, task, episode):
        for trace in episode.traces:
            value = 1.0 + sum(map(ord, trace.last_reply)) % 7
            if trace.agent.name != "user":
                trace.record_reward("game", value if trace.agent.name == "solver" else -value)


class Two(vf.Taskset[vf.Task, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for i in itertools.count():
            yield vf.Task(vf.TaskData(prompt=f"t{i}"), self.config.task)
