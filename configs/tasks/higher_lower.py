"""Find a number: after each guess the model reads whether it is higher or lower."""

from configs.environments.parsers import XMLParser
from env import MultiTurnEnv, Rubric

parser = XMLParser(["guess"], answer_field="guess")


class HigherLower(MultiTurnEnv):
    def is_completed(self, messages, state):
        return parser.parse_answer(messages[-1:]) == state["answer"]

    def env_response(self, messages, state):
        guess = parser.parse_answer(messages[-1:])
        if not (guess and guess.isdecimal()):
            return [{"role": "user", "content": "Write a number: <guess>15</guess>"}]
        return [{"role": "user", "content": "Lower." if int(guess) > int(state["answer"]) else "Higher."}]


def found(completion, answer):
    return parser.parse_answer(completion) == answer


def quick(completion, answer, turn):
    return found(completion, answer) / turn


def load_environment(most=30, max_turns=6):
    question = f"Guess my number, 1 to {most}."
    game = [question, "<guess>15</guess>", "Higher.", "<guess>23</guess>", "Lower.", "<guess>19</guess>", question]
    prompt = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(game)]
    rows = [{"prompt": prompt, "answer": str(number)} for number in range(1, most + 1)]
    rubric = Rubric([found, quick, parser.get_format_reward_func()], [0.6, 0.2, 0.2])
    return HigherLower(rows, max_turns, eval_dataset=rows, rubric=rubric)
