"""Write a lune: a poem of eleven words, three in the first line, five in the second and three in the last (Jack
Collom's answer to the haiku). The model is tested on topics that it was not trained on."""

import random
import re

from env import Messages, Rubric, SingleTurnEnv
from rolemodel.environments.parsers import without_thoughts

WORDS = (3, 5, 3)  # in each line
TOPICS = """
autumn bees birds boats books bread bridges butterflies candles castles cats chess children clocks clouds coffee
cookies courage crows curiosity dancing darkness deserts dogs dolphins dragons dreams dust eagles evening family fire
fish flowers fog football forests foxes freedom friendship frogs frost gardens ghosts glass gold grass gravity
happiness history home honey hope horses ice insects islands ivy jazz jealousy joy kites kittens knights lakes laughter
learning lemons letters libraries light lightning lions loneliness love luck magic maps markets medicine memory
midnight mirrors money monsters morning mothers mountains music night noise oceans onions owls paint paper parrots
patience peace pirates planets poetry power rabbits rain rainbows rivers roads robots rockets roses sadness sailing
salt sand school seasons secrets shadows ships silence silver sisters skating sleep smoke snakes snow soup spiders
spring stars steam stones storms stories strangers sugar summer sunlight swans teachers thunder tigers time toys trains
travel trees trust truth turtles umbrellas valleys violins volcanoes walking war water whales wind windows wine winter
wolves wonder yesterday
"""


def poem(completion: Messages) -> str:
    return without_thoughts(completion[-1]["content"])


def lines_of(completion: Messages) -> list[list[str]]:
    """Returns the words of each line that has any, in lower case."""
    lines = [re.findall(r"[\w'’-]*\w", line.lower()) for line in poem(completion).split("\n")]
    return [words for words in lines if words]


def form(completion: Messages) -> float:
    """Returns how close the numbers of words in the lines are to three, five and three: their mean squared ratio, times
    the share of different words. A poem that does not end like a sentence gets 0."""
    lines = lines_of(completion)
    if not poem(completion).endswith((".", "!", "?")):
        return 0.0
    near = sum((min(len(words), num) / max(len(words), num)) ** 2 for words, num in zip(lines, WORDS))
    every = sum(lines, [])
    return near / max(len(WORDS), len(lines)) * len(set(every)) / max(1, len(every))


def topic(completion: Messages, answer: str) -> float:
    """Returns 1 if a word begins with the topic (without the s of a plural), and 0 otherwise."""
    return float(any(word.startswith(answer.removesuffix("s")) for word in sum(lines_of(completion), [])))


def lune(completion: Messages, answer: str) -> float:
    """Returns 1 if it is a lune: eleven different words in the right lines, one of them the topic; 0 otherwise."""
    return float(form(completion) == 1 and topic(completion, answer))


def load_environment(system_prompt="You are a poet.") -> SingleTurnEnv:
    topics = TOPICS.split()
    random.Random("lune").shuffle(topics)
    rows = [{"question": f"Write a poem of three lines about {x}.", "answer": x} for x in topics]
    return SingleTurnEnv(rows[64:], rows[:64], system_prompt, Rubric([lune, form, topic], [0.3, 0.5, 0.2]))
