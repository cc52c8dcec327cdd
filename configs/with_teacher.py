r"""Adds a teacher (rolemodel/teacher.py) to the rewards of any task.

    [env]
    id = "with_teacher"
    args = { id = "reverse_text", weight = 1.0, base_url = "http://127.0.0.1:9000" }
    [trainer]
    loss = "losses:distill"

prompt = "module:function" names a function that returns what the teacher reads in place of the prompt. args = { ... }
are the arguments of the task itself.

For the number in docs/algorithms.md, the teacher is the model that reverse_text.toml trains, and the student is a toy
that was made with reverse_text.WARM_UP_STEPS = 80:

    python -m rolemodel.serving.server --model outputs/reverse_text/final --host 127.0.0.1 --port 9000 --dtype float32 \
        --max-model-len 64
    bash launch.sh configs/reverse_text.toml model=STUDENT max_steps=60 eval.every=20 env.id=with_teacher \
        'env.args={ id = "reverse_text", weight = 1.0, base_url = "http://127.0.0.1:9000" }' \
        orchestrator.advantage=advantages:zero trainer.loss=losses:distill"""

import env
from rolemodel.lookup import find_function
from rolemodel.teacher import taught


def load_environment(id: str, weight: float, args: dict | None = None, prompt="", **how) -> env.SingleTurnEnv:
    return taught(env.load_environment(id, args or {}), weight, prompt=find_function(prompt) if prompt else None, **how)
