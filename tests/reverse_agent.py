"""reverse_text through the endpoint: the same rows and rewards, asked by an agent of one turn."""

from configs.environments.agents import AgentEnv
from configs.tasks import reverse_text

demonstrations = reverse_text.demonstrations


async def run(client, prompt):
    await client.chat.completions.create(model="policy", messages=prompt)


def load_environment(**args):
    env = reverse_text.load_environment(**args)
    return AgentEnv(run, env.dataset, env.eval_dataset, rubric=env.rubric)
