import os
import sys

from pages import FAULT, QUESTION, search_pages, view_page
from smolagents import AgentError, OpenAIModel, ToolCallingAgent, tool

model = OpenAIModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key="none")
agent = ToolCallingAgent([tool(search_pages), tool(view_page)], model, max_steps=3, verbosity_level=0)
try:
    print(agent.run(QUESTION))
except AgentError:
    sys.exit(FAULT)
