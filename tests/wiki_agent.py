"""wiki_search as people write an agent: a loop with the stock `openai` client, and its tools."""

import asyncio
import json

from configs.environments.agents import AgentEnv
from configs.tasks import wiki_search
from env import Rubric

PAGES = {
    str(i): (name, wiki_search.page(name, home)) for i, (name, home) in enumerate(wiki_search.people("pages", 200))
}
INDEX = wiki_search.Corpus(PAGES)
TOOLS = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": {"type": "object"}}}
    for name in ("search_pages", "view_page")
]

TOKENS = wiki_search.TOKENS  # the toy model's maker asks for both
demonstrations = wiki_search.demonstrations


async def run(client, prompt):
    messages = list(prompt)
    for _ in range(4):
        reply = await client.chat.completions.create(model="gpt-5", messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            try:
                tool = getattr(INDEX, call.function.name)
                text = await asyncio.to_thread(tool, **json.loads(call.function.arguments))
            except Exception as e:
                text = f"error: {e}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})


def correct(result, answer):
    return float(wiki_search.normal(result or "") == wiki_search.normal(answer))


def right_page(completion, info):
    texts = [message["content"] for message in completion if message["role"] == "tool"]
    return float(any(info["title"] in text for text in texts))


def load_environment(max_turns=4, num_eval=100):
    env = wiki_search.load_environment(num_eval=num_eval)
    return AgentEnv(
        run, env.dataset, env.eval_dataset, rubric=Rubric([correct, right_page], [0.6, 0.4]), max_requests=4
    )
