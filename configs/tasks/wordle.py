"""Find a five-letter word in six guesses. Rules and words are our own; any five letters may be guessed."""

import functools
import random
from collections import Counter

from configs.environments.parsers import XMLParser
from env import MultiTurnEnv, Rubric

WORDS = """
about above actor admit adult after again agent agree ahead alarm album alert alike alive allow alone along alter among
anger angle ankle apart apple apply arena argue arise aside asset audio avoid awake award aware bacon badge basic beach
beard begin being below bench birth black blade blame blank blend blind block blood board boost brain brand brave bread
break brick bring broad brown brush build bunch cabin cable candy cargo carry catch cause chain chair chalk charm chart
cheap check chess chest chief child claim class clean clear clerk climb clock close cloth cloud coach coast count court
cover crack craft crash crazy cream crime crowd crown curve cycle daily dance delay depth dirty doubt dozen draft drain
drama dream dress drink drive eager eagle early earth eight elbow empty enemy enjoy enter entry equal error event every
exact exist extra faith false fancy fault favor fence fever field fifty fight final first flame flash fleet floor flour
fluid focus force forty found frame fresh front fruit funny ghost giant given glass globe glove grace grade grain grand
grant grass great green greet group guard guess guest guide habit happy harsh heart heavy hello hobby honey horse hotel
house human humor ideal image index inner input issue jelly joint judge juice knife knock known label large later laugh
layer learn least leave lemon level light limit local lucky lunch magic major maple march match maybe metal might minor
model money month motor mount mouse mouth movie music nerve never night noise north novel nurse ocean offer often onion
order other outer owner paint panel paper party patch peace phone photo piano piece pilot place plain plane plant plate
point pound power press price pride prize proud queen quick quiet radio raise range rapid reach ready right river robot
rough round royal salad scale scene score sense serve seven shade shape share sharp sheep shelf shell shirt shock short
"""
NUM_EVAL = 50
TOKENS = ["<guess>", "</guess>"]  # tokens of the toy model; it spells out everything else


def words(split):
    """The words of a split, always in the same shuffled order."""
    found = WORDS.split()
    found = random.Random("wordle").sample(found, len(found))
    return found[:NUM_EVAL] if split == "eval" else found[NUM_EVAL:]


def rows(split, num, max_turns):
    secrets = words(split)
    if not 0 < num <= len(secrets):
        raise ValueError(f"wordle: num_{split} = {num}, but there are {len(secrets)} words")
    return [{"question": f"{max_turns} left", "answer": secret} for secret in secrets[:num]]


@functools.lru_cache(2**17)  # the demonstrations compare every word with every other
def marks(guess, secret):
    """Marks each letter of a guess. G: right place, Y: elsewhere in the word, X: absent. A letter gets at most as many
    G and Y as the secret has of it."""
    pairs = list(zip(guess, secret))
    spare = Counter(wanted for letter, wanted in pairs if letter != wanted)
    found = ""
    for letter, wanted in pairs:
        if letter == wanted:
            found += "G"
        elif spare[letter]:
            spare[letter] -= 1
            found += "Y"
        else:
            found += "X"
    return found


def read_guess(text, parser):
    """The message's last guess, or None if that does not have five letters."""
    guess = (parser.parse(text or "", last=True).guess or "").lower()
    is_word = len(guess) == 5 and guess.isascii() and guess.isalpha()
    return guess if is_word else None


def read_guesses(completion, parser):
    """A guess, or None, per turn."""
    return [read_guess(message["content"], parser) for message in completion if message["role"] == "assistant"]


def feedback(guess, secret, left):
    """A short text, since each character is a token of the toy model."""
    verdict = marks(guess, secret) if guess else "bad guess"
    return f"{verdict} {left} left"


class Wordle(MultiTurnEnv):
    def is_completed(self, messages, state):
        return read_guess(messages[-1]["content"], self.parser) == state["answer"]

    def env_response(self, messages, state):
        guess = read_guess(messages[-1]["content"], self.parser)
        left = self.max_turns - state["turn"]
        return [{"role": "user", "content": feedback(guess, state["answer"], left)}]


def solved(completion, answer, parser):
    return float(answer in read_guesses(completion, parser))


def best_greens(completion, answer, parser):
    """The largest share of letters in the right place."""
    guesses = [guess for guess in read_guesses(completion, parser) if guess]
    greens = [marks(guess, answer).count("G") for guess in guesses]
    return max(greens, default=0) / 5


def turns_left(completion, answer, parser, max_turns):
    """1 if the first guess is right, 0 if only the last one is, or none."""
    guesses = read_guesses(completion, parser)
    if answer not in guesses:
        return 0.0
    left = max_turns - 1 - guesses.index(answer)
    return left / max(max_turns - 1, 1)


def rules(parser):
    example = parser.format(think="...", guess="crane").replace("\n", "")
    return f"Guess the five-letter word. Write {example}. I mark each letter: G right place, Y elsewhere, X absent."


def demonstrations(num, max_turns=6):
    """Conversations for the toy model's supervised warm-up: games with words of the train split. The first guess is any
    word, and each later one agrees with all marks so far."""
    rng = random.Random(0)
    parser = make_parser(False)
    pool = words("train")
    talks = []
    for _ in range(num):
        secret = rng.choice(pool)
        possible = pool
        talk = [{"role": "system", "content": rules(parser)}, {"role": "user", "content": f"{max_turns} left"}]
        for left in range(max_turns - 1, -1, -1):
            guess = rng.choice(possible)
            seen = marks(guess, secret)
            possible = [word for word in possible if marks(guess, word) == seen]
            talk.append({"role": "assistant", "content": f"<guess>{guess}</guess>"})
            if guess == secret or not left:
                break
            talk.append({"role": "user", "content": feedback(guess, secret, left)})
        talks.append(talk)
    return talks


def make_parser(use_think):
    return XMLParser(["think", "guess"] if use_think else ["guess"], answer_field="guess")


def load_environment(num_train=250, num_eval=NUM_EVAL, max_turns=6, use_think=False):
    """use_think: the policy writes its thoughts before each guess, which needs a larger max_tokens."""
    parser = make_parser(use_think)
    funcs = [solved, best_greens, turns_left, parser.get_format_reward_func()]
    rubric = Rubric(funcs, [1.0, 0.2, 0.2, 0.2], parser=parser, max_turns=max_turns)
    return Wordle(
        rows("train", num_train, max_turns),
        max_turns,
        eval_dataset=rows("eval", num_eval, max_turns),
        system_prompt=rules(parser),
        rubric=rubric,
        parser=parser,
    )
