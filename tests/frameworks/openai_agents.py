import sys

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError
from openai import AsyncOpenAI
from pages import FAULT, QUESTION, search_pages, view_page

set_tracing_disabled(True)
model = OpenAIChatCompletionsModel(model="policy", openai_client=AsyncOpenAI())
agent = Agent(name="wiki", model=model, tools=[function_tool(search_pages), function_tool(view_page)])
try:
    print(Runner.run_sync(agent, QUESTION, max_turns=4).final_output)
except (MaxTurnsExceeded, ModelBehaviorError):
    sys.exit(FAULT)
