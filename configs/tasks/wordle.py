"""Find a five-letter word in six guesses. Rules and words are our own; any five letters count as a guess."""

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
TOKENS = ["<guess>", "</guess>"]  # of the toy model's vocabulary; the rest is spelled out


def words(split):
    """One fixed shuffle; the first NUM_EVAL words are the eval split's."""
    found = random.Random("wordle").sample(WORDS.split(), len(WORDS.split()))
    return found[:NUM_EVAL] if split == "eval" else found[NUM_EVAL:]


def rows(split, num, max_turns):
    secrets = words(split)
    if not 0 < num <= len(secrets):
        raise ValueError(f"wordle: num_{split} = {num}, but there are {len(secrets)} words")
    return [{"question": f"{max_turns} left", "answer": secret} for secret in secrets[:num]]


@functools.lru_cache(2**17)  # demonstrations compare all words with all
def marks(guess, secret):
    """G: right place, Y: elsewhere, X: absent. A letter gets no more G and Y than the secret has of it."""
    spare, found = Counter(s for g, s in zip(guess, secret) if g != s), ""
    for g, s in zip(guess, secret):
        if g != s and spare[g]:
            spare[g] -= 1
            found += "Y"
        else:
            found += "G" if g == s else "X"
    return found


def read_guess(text, parser):
    """The message's last guess, or None if it has none of five letters."""
    guess = (parser.parse(text or "", last=True).guess or "").lower()
    return guess if len(guess) == 5 and guess.isascii() and guess.isalpha() else None


def read_guesses(completion, parser):
    """One per turn."""
    return [read_guess(m["content"], parser) for m in completion if m["role"] == "assistant"]


def feedback(guess, secret, left):
    """Short: to the toy model each character is a token."""
    return f"{marks(guess, secret) if guess else 'bad guess'} {left} left"


class Wordle(MultiTurnEnv):
    def is_completed(self, messages, state):
        return read_guess(messages[-1]["content"], self.parser) == state["answer"]

    def env_response(self, messages, state):
        guess = read_guess(messages[-1]["content"], self.parser)
        return [{"role": "user", "content": feedback(guess, state["answer"], self.max_turns - state["turn"])}]


def solved(completion, answer, parser):
    return float(answer in read_guesses(completion, parser))


def best_greens(completion, answer, parser):
    """The largest share of letters in the right place."""
    guesses = [guess for guess in read_guesses(completion, parser) if guess]
    return max((marks(guess, answer).count("G") / 5 for guess in guesses), default=0.0)


def turns_left(completion, answer, parser, max_turns):
    """1 for the first guess, 0 for the last one or none."""
    guesses = read_guesses(completion, parser)
    return (max_turns - 1 - guesses.index(answer)) / max(max_turns - 1, 1) if answer in guesses else 0.0


def rules(parser):
    example = parser.format(think="...", guess="crane").replace("\n", "")
    return f"Guess the five-letter word. Write {example}. I mark each letter: G right place, Y elsewhere, X absent."


def demonstrations(num, max_turns=6):
    """For the supervised warm-up of the toy model: games with words of the train split. Any word comes first, then one
    in line with all marks so far."""
    rng, parser, pool, talks = random.Random(0), make_parser(False), words("train"), []
    for _ in range(num):
        secret, possible = rng.choice(pool), pool
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
    """use_think: the policy writes its thoughts before each guess; give it the max_tokens for that."""
    parser = make_parser(use_think)
    funcs = [solved, best_greens, turns_left, parser.get_format_reward_func()]
    rubric = Rubric(funcs, [1.0, 0.2, 0.2, 0.2], parser=parser, max_turns=max_turns)
    train, held_out = rows("train", num_train, max_turns), rows("eval", num_eval, max_turns)
    return Wordle(train, max_turns, eval_dataset=held_out, system_prompt=rules(parser), rubric=rubric, parser=parser)
