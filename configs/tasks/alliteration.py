"""Write a sentence whose words all begin with the same letter. The model is tested on letters that it was not trained
on, so a sentence learned by heart is worth nothing there."""

import random
import re

from env import Messages, Rubric, SingleTurnEnv

TRAINED = "acdefghilnoprtuw"
HELD_OUT = "bmsk"
MOODS = "short funny sad silly wise strange happy simple bold quiet wild kind proud odd nice new".split()
FEWEST, MOST = 5, 10  # words


def rows(letters: str) -> list[dict]:
    """A row for each letter and mood, always in the same shuffled order."""
    found = []
    for letter in letters:
        for mood in MOODS:
            question = f"Write a {mood} sentence in which every word starts with {letter.upper()}."
            found.append({"question": question, "info": {"letter": letter}})
    random.Random("alliteration").shuffle(found)
    return found


def words_of(completion: Messages) -> list[str]:
    return re.findall(r"[a-z']+", completion[-1]["content"].lower())


def alliteration(completion: Messages, info: dict) -> float:
    """The share of words that begin with the letter, of five words or more. A word counts once, so repeating one does
    not help, and a letter is no word."""
    words = words_of(completion)
    right = {word for word in words if word[0] == info["letter"] and len(word) > 1}
    return len(right) / max(FEWEST, len(words))


def sentence(completion: Messages) -> float:
    """Whether it is one sentence of five to ten words: letters, commas and spaces, and one mark at its end."""
    is_one = re.fullmatch(r"[A-Z][A-Za-z', ]+[.!?]", completion[-1]["content"].strip())
    return float(bool(is_one) and FEWEST <= len(words_of(completion)) <= MOST)


def perfect(completion: Messages, info: dict) -> float:
    return float(alliteration(completion, info) == 1.0 and sentence(completion) == 1.0)


def load_environment(system_prompt="Answer with one sentence.") -> SingleTurnEnv:
    rubric = Rubric([alliteration, sentence, perfect], [1.0, 0.25, 0.0])
    return SingleTurnEnv(rows(TRAINED), rows(HELD_OUT), system_prompt, rubric)
