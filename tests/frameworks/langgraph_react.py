import sys

from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.prebuilt import create_react_agent
from pages import FAULT, QUESTION, search_pages, view_page

agent = create_react_agent(ChatOpenAI(model="policy"), [search_pages, view_page])
try:
    state = agent.invoke({"messages": [("user", QUESTION)]}, {"recursion_limit": 9})
except GraphRecursionError:
    sys.exit(FAULT)
print(state["messages"][-1].content)
