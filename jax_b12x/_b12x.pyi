"""The host extension: CPU kernels as XLA FFI handlers."""

from collections.abc import Callable, Sequence
from typing import Any

XLA_FFI_API_VERSION: tuple[int, int]

def ffi_registry() -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Returns targets and state types, each as dictionaries of capsules by stage or role."""

def host_isas() -> list[str]:
    """Returns the instruction sets that were built and that this processor has, narrowest first."""

class ChannelError(RuntimeError):
    """A channel cannot be had: too many bytes, or its pool is closed."""

class NativePool:
    """The registry of one pool's channels; ``jax_b12x.comm.ChannelPool`` is its face."""

    def bytes(self) -> int:
        """Returns the bytes that the channels take on a rank."""

    def next_id(self) -> int:
        """Returns the number that the next channel gets."""

    def records(self) -> list[dict[str, Any]]:
        """Returns what is known of each channel; ``ChannelRecord.of`` reads it."""

    def retire(self, first: int, reason: str, forever: bool, require_idle: bool) -> None:
        """Refuses further leases of the channels from ``first`` on."""

    def quiesce(self, channel: int, rank: int) -> None:
        """Waits until nothing runs on a rank's side of a channel."""

    def close_imports(self, channel: int, rank: int) -> None:
        """Unmaps what a rank mapped of its peers."""

    def free_exports(self, channel: int, rank: int) -> None:
        """Frees what a rank let its peers map."""

    def forget(self, channel: int) -> None:
        """Drops the record of a channel whose teardown is over."""

    def unregister(self) -> None:
        """Frees the pool's name."""

def channel_bytes(message_bytes: int, world_size: int) -> int:
    """Returns the bytes that a channel for messages of this size takes on a rank."""

def dcp_places(
    outer: int,
    inner: int,
    world_size: int,
    head_dim: int,
    element_bytes: int,
    row: int,
    rank: int,
) -> tuple[int, int, int]:
    """Returns a combine's places: of a row in the whole and in a slot, and the slot's bytes."""

def open_pool(
    name: str,
    axis: str,
    layout: str,
    isolation: str,
    world_size: int,
    num_groups: int,
    places: Sequence[tuple[int, int, int]],
    timeout_ms: int,
    max_bytes: int,
    publish: Callable[..., None] | None = None,
    connect: Callable[[int], list[tuple[int, int, int]]] | None = None,
) -> NativePool:
    """Makes and registers a pool; its processes exchange addresses with ``publish, connect``."""

class WorkspaceError(RuntimeError):
    """A workspace cannot be had, or a run on it failed."""

class NativeWorkspacePool:
    """The registry of one pool's workspaces; ``jax_b12x.workspace.WorkspacePool`` is its face."""

    def bytes(self) -> int:
        """Returns the bytes that the workspaces take on a device."""

    def next_id(self) -> int:
        """Returns the number that the next workspace gets."""

    def lock(self, locked: bool) -> None:
        """Refuses growth, or allows it again."""

    def locked(self) -> bool:
        """Returns whether growth is refused."""

    def records(self) -> list[dict[str, Any]]:
        """Returns what is known of each workspace."""

    def take_faults(self) -> list[str]:
        """Returns each failed run that nobody was told of, once."""

    def retire(self, first: int, reason: str, forever: bool, require_idle: bool) -> None:
        """Refuses further use of the workspaces from ``first`` on."""

    def quiesce(self, workspace: int) -> None:
        """Waits until nothing runs on a workspace."""

    def free(self, workspace: int) -> None:
        """Frees a retired workspace."""

    def unregister(self) -> None:
        """Frees the pool's name."""

def open_workspace_pool(
    name: str, isolation: str, lanes: Sequence[str], max_bytes: int, timeout_ms: int
) -> NativeWorkspacePool:
    """Makes and registers a pool of workspaces."""

def find_workspace_pool(name: str) -> NativeWorkspacePool:
    """Returns the pool of a name."""

def record_launches(on: bool) -> None:
    """Turns the record of submitted work on or off."""

def take_launches() -> list[dict[str, Any]]:
    """Returns the record so far and begins a new one."""
