# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What an alert and a recording rule are made of."""

from dataclasses import dataclass
from inspect import cleandoc
from typing import Literal

from nixl_telemetry.mixin.config import MixinConfig
from nixl_telemetry.mixin.duration import Duration

Severity = Literal["critical", "warning", "info"]
"""`critical` wakes somebody, `warning` is for working hours, `info` helps to find something out."""


@dataclass(frozen=True)
class Alert:
    """An alert. The links to its runbook and board are added where rules are built."""

    name: str
    severity: Severity
    pending: Duration
    """For how long its query has to have a result: ``for``."""
    expr: str
    summary: str
    """One sentence that is the same for all instances of the alert."""
    description: str
    """With the labels and the value, as a template."""
    board: str
    """Uid of the board to look at."""
    knobs: tuple[str, ...] = ()
    """Names of the thresholds in :class:`~nixl_telemetry.mixin.config.MixinConfig`."""
    variables: tuple[str, ...] = ("job", "model")
    """Variables of the board that the alert's labels set."""
    labels: tuple[tuple[str, str], ...] = ()
    """Labels beside the severity."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "expr", cleandoc(self.expr))


COUNT = '{{ $value | printf "%.0f" }}'
"""The template of a number of events: `increase` extrapolates, and nobody has refused 1.07 handshakes."""


def model_in_job(config: MixinConfig) -> str:
    """The template of a description that says which deployment it is about."""
    return f"{{{{ $labels.model_name }}}} in {{{{ $labels.{config.job_label} }}}}"


@dataclass(frozen=True)
class Recording:
    """A recording rule, named ``level:metric:operations``."""

    name: str
    expr: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "expr", cleandoc(self.expr))
