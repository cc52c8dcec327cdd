"""Makes any taskset of `verifiers` 0.4 an environment:

    [env]
    id = "verifiers_v1"
    args = { taskset = "reverse-text", packages = ["./reverse_text"], num_eval = 64 }

Arguments that rolemodel/environments/verifiers_v1.py does not name go to the taskset's own configuration. Environments
of verifiers 0.1 do not need this: their id is the name of their module."""

from rolemodel.environments.verifiers_v1 import VerifiersV1Env


def load_environment(taskset: str, **args) -> VerifiersV1Env:
    return VerifiersV1Env(taskset, **args)
