"""What benchmarks record: measurements, where and when they were made, and both as JSON."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any

import jax

from jax_b12x import __version__, capability

Value = int | float | str | bool


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One timed thing.

    Attributes:
      what: what ran, for example ``"fused"`` or ``"oracle"``; a column of the table.
      case: what it ran on, for example ``{"hidden": 2048, "num_tokens": 8}``; a row of the table.
      seconds: the median time of one call.
      low: the 10th percentile.
      high: the 90th percentile.
      samples: how many times were taken.
      figures: further figures by name, for example ``{"bytes": 1.0e6}``.
    """

    what: str
    case: Mapping[str, Value]
    seconds: float
    low: float
    high: float
    samples: int
    figures: Mapping[str, Value] = dataclasses.field(default_factory=dict)

    @property
    def microseconds(self) -> float:
        """The median in µs."""
        return self.seconds * 1e6


@dataclasses.dataclass(frozen=True)
class Environment:
    """Where and when a report was made.

    Attributes:
      date: the time in UTC, ISO 8601.
      devices: a line for each device that JAX uses, then the processor.
      versions: version of each part by name.
    """

    date: str
    devices: tuple[str, ...]
    versions: Mapping[str, str]

    @classmethod
    def current(cls) -> Environment:
        """Returns this process's environment."""
        now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
        devices = [str(capability.detect(device)) for device in jax.devices()]
        host = f"{capability.processor_name()}, {len(os.sched_getaffinity(0))} cores"
        if jax.devices()[0].platform == "cpu":
            devices = []
        return cls(
            date=now.isoformat(),
            devices=(*devices, host),
            versions={
                "jax_b12x": __version__,
                "jax": jax.__version__,
                "jaxlib": metadata.version("jaxlib"),
                "python": platform.python_version(),
                "backend": jax.devices()[0].client.platform_version.replace("\n", " "),
            },
        )

    def __str__(self) -> str:
        """Returns date, devices and the main versions in one line."""
        versions = ", ".join(f"{name} {self.versions[name]}" for name in ("jax_b12x", "jax"))
        return f"{self.date[:10]}; {'; '.join(dict.fromkeys(self.devices))}; {versions}"


@dataclasses.dataclass(frozen=True)
class Report:
    """All measurements of one run.

    Attributes:
      benchmark: the benchmark's name.
      arguments: the options that it ran with.
      environment: where and when.
      measurements: in the order in which they were made.
    """

    benchmark: str
    arguments: Mapping[str, Any]
    environment: Environment
    measurements: tuple[Measurement, ...]

    def rows(self) -> Iterable[tuple[Mapping[str, Value], dict[str, Measurement]]]:
        """Yields each case with its measurements by ``what``, in order."""
        rows: dict[str, tuple[Mapping[str, Value], dict[str, Measurement]]] = {}
        for measurement in self.measurements:
            key = json.dumps(measurement.case, sort_keys=True)
            rows.setdefault(key, (measurement.case, {}))[1][measurement.what] = measurement
        return rows.values()

    def to_json(self) -> str:
        """Returns the report as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Returns the report that :meth:`to_json` wrote."""
        data = json.loads(text)
        environment = data["environment"]
        environment["devices"] = tuple(environment["devices"])
        return cls(
            benchmark=data["benchmark"],
            arguments=data["arguments"],
            environment=Environment(**environment),
            measurements=tuple(Measurement(**one) for one in data["measurements"]),
        )
