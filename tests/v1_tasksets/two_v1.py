"""Several agents: a proposer and a solver with rewards of their own, and a user who is not trained."""

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
        await agents.proposer.run(task)
        await agents.solver.run(task)

    async def finalize(self, task, episode):
        for trace in episode.traces:
            if trace.agent.name != "user":
                value = 1.0 + sum(map(ord, trace.last_reply)) % 7
                trace.record_reward("game", value if trace.agent.name == "solver" else -value)


class Two(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self):
        return [vf.Task(vf.TaskData(prompt=f"t{i}"), self.config.task) for i in range(5)]
