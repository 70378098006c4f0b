"""The host extension: CPU kernels as XLA FFI handlers."""

from typing import Any

XLA_FFI_API_VERSION: tuple[int, int]

def ffi_registry() -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Returns targets and state types, each as dictionaries of capsules by stage or role."""

def host_isas() -> list[str]:
    """Returns the instruction sets that were built and that this processor has, narrowest first."""
