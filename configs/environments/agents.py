"""Any agent is an environment: a program that asks an OpenAI endpoint is trained on what it was answered there.

    async def run(client, prompt):                            # a rollout; it names what it wants, as rewards do
        reply = await client.chat.completions.create(model="policy", messages=prompt)
        return reply.choices[0].message.content               # rewards get it as `result`

    AgentEnv(run, rows, rubric=Rubric([correct]))
    AgentEnv(["my-agent", "{question}"], rows, allow_code=True)    # a command: commands.py

Each rollout has an address of its own (endpoint.py), by which its requests are told from those of all others.

A rollout is scored if it is the policy's fault that the agent did not finish: the context is full, there were more than
max_requests, time_limit is over, or the agent raised one of the exceptions in `forgive`. It is lost if the agent or the
server fails."""

import asyncio
import secrets

from configs.environments.endpoint import SESSIONS, Client, Refused, as_chat, endpoint, key_of, settings
from configs.environments.rubrics import TurnRubric
from env import DataError, Rubric, SingleTurnEnv, Truncated, call, copied, ensure, pick

COUNTED = ("requests", "dropped", "restored", "forgiven")


class AgentFailed(Exception):
    """The rollout is lost: a server failed, even if the agent hid it."""


class Session:
    """What the agent of one rollout has asked, and what it was answered."""

    def __init__(self, env, generate):
        self.env = env
        self.generate = generate
        self.counts = dict.fromkeys(COUNTED, 0)
        self.tasks = set()  # requests under way
        self.said = {}  # agent, what it keeps of a message: [(messages before it, the message as sampled), ...]
        self.conversations = []  # [messages of the first request, all messages with the last answer]
        self.fault = ""  # why the policy gets no more requests
        self.is_truncated = False
        self.lost = ""  # a server's error, which the agent may hide

    async def complete(self, body, agent, trainable):
        """Answers a chat request with what the server replied. Raises Refused."""
        own, dropped = settings(body)
        self.counts["dropped"] += dropped
        self.counts["requests"] += 1
        messages = self.restored(as_chat(body), agent)
        if self.counts["requests"] > self.env.max_requests:
            self.fault = f"the rollout has had its {self.env.max_requests} requests (max_requests)"
        if self.fault:
            raise Refused(400, "rollout_over", self.fault)
        is_trained = trainable and agent not in self.env.untrained
        try:
            reply = await self.generate(messages, body.get("tools"), agent, is_trained, whole=True, **own)
        except Truncated:
            self.is_truncated = True
            self.fault = "this model's maximum context length is reached"
            raise Refused(400, "context_length_exceeded", self.fault) from None
        except Exception as e:
            if 400 <= getattr(e, "status", 500) < 429:  # vLLM says what is wrong with the request
                raise Refused(400, "invalid_request_error", str(e)) from e
            self.lost = f"{type(e).__name__}: {e}"
            raise Refused(503, "server_error", self.lost) from e
        choice = reply["choices"][0]
        said = {key: value for key, value in choice["message"].items() if value}
        said.setdefault("content", "")
        if is_trained:
            self.add_turn(messages, said)
        # OpenAI's servers take away the stop string that ended an answer. Its tokens were sampled, and `said` has it.
        shown = said
        stop = choice.get("stop_reason")
        if stop in own.get("stop", []):
            shown = said | {"content": said["content"].removesuffix(stop)}
        self.said.setdefault((agent, key_of(shown)), []).append((messages, said))
        return reply | {"model": "policy", "choices": [choice | {"message": shown}]}

    def restored(self, messages, agent):
        """The messages, the policy's own as they were sampled. Agents leave out reasoning and rewrite the arguments of
        tool calls; then a prompt no longer begins with the ids that were sampled, and the rollout forks."""
        result = []
        for message in messages:
            found = []
            if self.env.restore and message["role"] == "assistant":
                found = self.said.get((agent, key_of(message)), [])
            if found:
                # The same text may have been said elsewhere: best after the same messages, or after as many.
                _, said = max(reversed(found), key=lambda pair: (pair[0] == result, len(pair[0]) == len(result)))
                self.counts["restored"] += bool(said != message)
                message = said
            result.append(message)
        return result

    def add_turn(self, messages, said):
        """Adds a turn to the conversation that it continues. A request for a title, or a compacted history, begins a
        new one."""
        for conversation in self.conversations:
            before = conversation[1]
            same = [(message["role"], key_of(message)) for message in messages[: len(before)]]
            if same == [(message["role"], key_of(message)) for message in before]:  # agents leave out reasoning
                break
        else:
            conversation = [len(messages), []]
            self.conversations.append(conversation)
        conversation[1] = [*messages, said]

    def close(self, state):
        """Ends the requests under way. Puts into the state what rewards see: the longest conversation, and counts."""
        for task in self.tasks:
            task.cancel()
        state["agent"] = self.counts
        state["turn"] = len(state["replies"])
        if self.conversations:
            num_before, messages = max(self.conversations, key=lambda found: len(found[1]))
            state["prompt"] = messages[:num_before]
            state["completion"] = messages[num_before:]


class AgentEnv(SingleTurnEnv):
    """Rollouts by an agent. Rows: see env.load_rows.

    run: an async or plain function of what it names: client (a ready openai.AsyncOpenAI), base_url, prompt, answer,
    info, task (the row's column of that name, otherwise the row), step, state. A plain one runs in a thread, which
    nobody can end: if it may hang, make it a command, a list of words.
    forgive: exceptions, or exit codes of a command, by which the agent says that the policy failed.
    max_requests, time_limit (s, below orchestrator.generation_timeout; 0: none): at their end the rollout is scored.
    untrained: names of agents that the policy plays without being trained, e.g. a simulated user.
    restore: False leaves the policy's own messages as the agent sends them back. When it is deployed nobody brings back
    the reasoning that the agent leaves out.
    allow_code, sandbox: of a command, see commands.Command."""

    def __init__(
        self, run, dataset, eval_dataset=None, forgive=(), max_requests=64, time_limit=0.0, untrained=(), restore=True,
        allow_code=False, sandbox=False, **kwargs
    ):  # fmt: skip
        super().__init__(dataset, eval_dataset, **kwargs)
        if isinstance(run, list | tuple):
            from configs.environments.commands import Command

            run = Command(run, allow_code, sandbox)
        self.run = run
        self.forgive = forgive
        self.max_requests = max_requests
        self.time_limit = time_limit
        self.untrained = set(untrained)
        self.restore = restore
        what = "a TurnRubric rewards the turns of one conversation, and an agent may have several: use Rubric"
        ensure(not isinstance(self.rubric, TurnRubric), what)
        # What the agent or a reward function lacks is found now.
        state = self.start(self.dataset[0])
        pick(run, state | {"state": state, "base_url": "", "client": None})
        if type(self.rubric) is Rubric:
            for func, _, objects in self.rubric.parts:
                pick(func, state | objects | {"state": state, "result": None, "agent": {}, "replies": []})
        self.rubric.score = with_counts(self.rubric.score)

    def start(self, row):
        return super().start(row) | {"row": copied(row)}

    async def rollout(self, state, generate):
        secret = secrets.token_urlsafe(16)
        base_url = f"{await endpoint()}/{secret}/v1"
        client = Client(base_url=base_url, api_key=secret)
        session = Session(self, generate)
        state["result"] = None
        error = None
        SESSIONS[secret] = session
        try:
            async with asyncio.timeout(self.time_limit or None) as limit:
                have = state | {"state": state, "base_url": base_url, "client": client}
                state["result"] = await call(self.run, **have)
        except Exception as e:
            error = e
        finally:
            del SESSIONS[secret]
            session.close(state)
        if session.lost:
            raise AgentFailed(session.lost) from error
        is_the_policys = session.fault or limit.expired()
        if error and not is_the_policys:
            if isinstance(error, DataError) or not is_forgiven(error, self.forgive):
                raise error
            session.counts["forgiven"] = 1
        ensure(session.counts["requests"], "the agent asked for nothing")
        if session.is_truncated:
            raise Truncated


def is_forgiven(error, forgive):
    """Whether an error is one of these types, or has one of these exit codes; all of a group must be."""
    if isinstance(error, BaseExceptionGroup):
        return all(is_forgiven(e, forgive) for e in error.exceptions)
    types = tuple(kind for kind in forgive if isinstance(kind, type))
    return isinstance(error, types) or getattr(error, "exit_code", None) in forgive


def with_counts(score):
    """A rubric's score() that also logs what a session counts, as metrics agent_requests, ..."""

    async def scored(state):
        reward, metrics = await score(state)
        return reward, metrics | {f"agent_{name}": num for name, num in state.get("agent", {}).items()}

    return scored
