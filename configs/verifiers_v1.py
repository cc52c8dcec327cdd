"""Tasksets of `verifiers` 0.4 as environments, whatever their names:

    [env]
    id = "verifiers_v1"
    args = { taskset = "reverse-text", packages = ["./reverse_text"], num_eval = 64 }

Arguments that rolemodel/environments/verifiers_v1.py does not name go to the taskset's own configuration. An
environment of verifiers 0.1 has its module's name as id."""

from rolemodel.environments.verifiers_v1 import VerifiersV1Env


def load_environment(taskset: str, **args) -> VerifiersV1Env:
    return VerifiersV1Env(taskset, **args)
