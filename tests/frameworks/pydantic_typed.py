import sys

from pages import FAULT, QUESTION, search_pages, view_page
from pydantic import BaseModel
from pydantic_ai import Agent, UnexpectedModelBehavior, UsageLimitExceeded, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel


class Answer(BaseModel):
    home: str


agent = Agent(OpenAIChatModel("policy"), output_type=Answer, tools=[search_pages, view_page])
try:
    print(agent.run_sync(QUESTION, usage_limits=UsageLimits(request_limit=4)).output.home)
except (UnexpectedModelBehavior, UsageLimitExceeded):
    sys.exit(FAULT)
