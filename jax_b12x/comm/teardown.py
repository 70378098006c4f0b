"""Taking shared memory down: one protocol, for every pool there is.

Memory that peers have mapped may be freed only when every peer has let go of it, and a rank whose
own cleanup fails must not leave its peers waiting. So every rank goes through the same three
barriers, whatever happens to it on the way::

    barrier "ready"       every rank agrees, or one of them refuses
    quiesce               each rank waits for its own calls that are in flight
    close imports         each rank unmaps what it has of its peers
    barrier "unmapped"    nobody has a mapping of anybody's memory any more
    free exports          each rank frees what it offered to its peers
    barrier "freed"       the failures of all ranks are known to all

A refusal at the first barrier ends it there, on every rank, with nothing changed. After it every
close and every free is attempted, each on its own. The one exception: when the barrier "unmapped"
itself fails, a peer may still have mappings, so that exports are withheld (leaked until the process
ends) rather than pulled from under it. Errors are raised after the last barrier.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal, Protocol


class Resource(Protocol):
    """Memory of one rank that peers may have mapped, and its mappings of theirs."""

    @property
    def name(self) -> str:
        """What error messages call it."""

    def quiesce(self) -> None:
        """Returns when nothing of this rank uses it any more."""

    def close_imports(self) -> None:
        """Unmaps what this rank has of its peers."""

    def free_exports(self) -> None:
        """Frees what this rank offered to its peers."""


class Group(Protocol):
    """The participants: one for each process."""

    def barrier(self, name: str, note: str) -> list[str]:
        """Waits for all participants and returns their notes that are not empty.

        Raises:
          Exception: not all came in time.
        """


class LocalGroup:
    """The group of a process that has all ranks: nobody to wait for."""

    def barrier(self, name: str, note: str) -> list[str]:
        """Returns the note."""
        del name
        return [note] if note else []


Outcome = Literal["done", "failed", "withheld"]


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of a teardown, as it went on this rank."""

    action: str
    resource: str
    outcome: Outcome
    error: Exception | None = None


class TeardownRefusedError(RuntimeError):
    """A rank cannot give the resources up now; nothing was changed on any rank."""


class TeardownError(ExceptionGroup[Exception]):
    """Steps failed; all others were attempted, and the resources are given up on every rank."""


class PeerError(RuntimeError):
    """Another rank's part failed."""


def teardown(
    what: str,
    resources: Sequence[Resource],
    group: Group,
    *,
    refusal: Callable[[], str] = lambda: "",
    commit: Callable[[], None] = lambda: None,
) -> list[Step]:
    """Takes ``resources`` down together with all other participants.

    Args:
      what: what is taken down, for messages.
      resources: this participant's resources.
      group: the participants.
      refusal: says why this participant refuses; empty when it does not.
      commit: called once it is certain that nobody refuses, before anything is closed; what must be
        recorded in any case is recorded here.

    Returns:
      The steps, in order.

    Raises:
      TeardownRefusedError: a participant refused; nothing was changed.
      TeardownError: steps failed, on this rank or on another.
    """
    notes, ready = _barrier(group, "ready", refusal())
    if notes:
        raise TeardownRefusedError(f"{what}: {'; '.join(dict.fromkeys(notes))}")
    steps = [ready, _run("commit", what, commit)]
    steps += [_attempt("quiesce", resource) for resource in resources]
    steps += [_attempt("close_imports", resource) for resource in resources]
    _, unmapped = _barrier(group, "unmapped", "")
    steps.append(unmapped)
    if unmapped.outcome == "done":
        steps += [_attempt("free_exports", resource) for resource in resources]
    else:
        steps += [Step("free_exports", resource.name, "withheld") for resource in resources]
    mine = "; ".join(_describe(step) for step in steps if step.outcome != "done")
    notes, freed = _barrier(group, "freed", mine)
    steps.append(freed)
    errors = [step.error for step in steps if step.error is not None]
    errors += [PeerError(note) for note in notes if note != mine]
    if errors:
        raise TeardownError(f"{what}: taken down, with failures", errors)
    return steps


def _attempt(
    action: Literal["quiesce", "close_imports", "free_exports"], resource: Resource
) -> Step:
    return _run(action, resource.name, getattr(resource, action))


def _run(action: str, resource: str, call: Callable[[], None]) -> Step:
    try:
        call()
    except Exception as error:  # whatever it is, the other steps go on
        error.add_note(f"while {action} of {resource}")
        return Step(action, resource, "failed", error)
    return Step(action, resource, "done")


def _barrier(group: Group, name: str, note: str) -> tuple[list[str], Step]:
    try:
        return group.barrier(name, note), Step("barrier", name, "done")
    except Exception as error:  # a peer is gone: go on, so that our own part is done
        error.add_note(f"at the barrier {name!r}")
        return [note] if note else [], Step("barrier", name, "failed", error)


def _describe(step: Step) -> str:
    return f"{step.action} of {step.resource} {step.outcome}: {step.error}"
