"""Tasksets of `verifiers` 0.4 as environments, whatever they are called:

    [env]
    id = "verifiers_v1"
    args = { taskset = "reverse-text", packages = ["./reverse_text"], num_eval = 64 }

What configs/environments/verifiers_v1.py does not name goes to the taskset's own configuration. An environment of
verifiers 0.1 has its module's name as id."""

from configs.environments.verifiers_v1 import VerifiersV1Env


def load_environment(taskset, **args):
    return VerifiersV1Env(taskset, **args)
