"""The local environment for MODULE.bazel."""

load(":environment.bzl", "environment_repository")

def _environment_impl(_module_ctx):
    environment_repository(name = "b12x_environment")

environment = module_extension(implementation = _environment_impl)
