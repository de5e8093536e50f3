# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Everything of the rules and boards that a fleet may want otherwise, and the reason for each default."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from nixl_telemetry.mixin.duration import Duration

LEAST_RANGE: Final = Duration(4000)
"""A range that is scaled down still holds a few scrapes of a test's Prometheus."""


def _is_label(name: str) -> str:
    if not re.fullmatch("[a-zA-Z_][a-zA-Z0-9_]*", name):
        raise ValueError("it must be the name of a label, such as job or namespace")
    return name


def _is_prefix(prefix: str) -> str:
    if not re.fullmatch("([A-Z][a-z0-9]+)*", prefix):
        raise ValueError("it must be one or more words of a capital and small letters or digits, such as Staging")
    return prefix


def _is_url(url: str) -> str:
    if not re.fullmatch(r"https?://[^\s\"']+", url):
        raise ValueError("it must be an http or https URL")
    return url


def _has_alert(url: str) -> str:
    if "{alert}" not in url:
        raise ValueError("it must have {alert} in it, which stands for the alert's name")
    return url


Label = Annotated[str, AfterValidator(_is_label)]
Url = Annotated[str, AfterValidator(_is_url)]
Ratio = Annotated[float, Field(gt=0, lt=1)]
Count = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def lasting(text: str, description: str) -> Any:
    """A field that is a duration."""
    return Field(Duration.parse(text), description=description)


class MixinConfigError(ValueError):
    """An override that is unknown or has a bad value; the message names it, the value and what is valid."""


class BurnWindow(BaseModel):
    """A speed at which the error budget is spent, and for how long before somebody is told."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    severity: Literal["critical", "warning", "info"]
    long: Duration
    short: Duration = Field(description="The burn must still go on: one that is over wakes nobody.")
    factor: Seconds = Field(description="How many times faster than the budget allows.")
    pending: Duration


def _burn(severity: str, long: str, short: str, factor: float, pending: str) -> BurnWindow:
    return BurnWindow.model_validate(
        {"severity": severity, "long": long, "short": short, "factor": factor, "pending": pending}
    )


class MixinConfig(BaseModel):
    """What can be set; `description` says why the default is what it is."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    # Labels and links

    job_label: Label = Field(
        default="job",
        description="Label that all instances of a deployment share, P and D: they are compared with each other. Every "
        "target has `job`; where P and D have jobs of their own, name a label that they share, such as `namespace`.",
    )
    group_labels: tuple[Label, ...] = Field(
        default=(),
        description="Further labels that keep deployments apart, separated by commas, such as `cluster` where one "
        "Prometheus has several.",
    )
    alert_prefix: Annotated[str, AfterValidator(_is_prefix)] = Field(
        default="",
        description="In front of each alert's name, for a second copy of the rules. All begin with `Nixl` anyway.",
    )
    runbook_url: Annotated[Url, AfterValidator(_has_alert)] = Field(
        default="https://nixl-telemetry.example/runbooks/{alert}.html",
        description="Address of a runbook; `{alert}` stands for the alert's name, without the prefix. A reserved name: "
        "set it to where these pages are served.",
    )
    grafana_url: Url = Field(
        default="https://grafana.example",
        description="Grafana's address, for the links to dashboards. A reserved name: set it to yours.",
    )

    # Single events: one is too many

    event_window: Duration = lasting(
        "15m",
        "How long one event keeps an alert up. A router may take minutes to come back to a pair that does "
        "not fit; the alert should not come and go meanwhile.",
    )
    event_for: Duration = lasting(
        "5m",
        "A mistake in a configuration stays until somebody corrects it, so waiting costs little, and "
        "whoever is restarting things just now is not disturbed.",
    )
    history: Duration = lasting(
        "1h",
        "An instance counts from its start if it had no series in so long before `event_window`: its first "
        "event may be older than its first scrape. Longer than a gap in scraping, after which old events are not new.",
    )

    # Compatibility

    mixed_for: Duration = lasting("30m", "A rolling upgrade has two versions for a while; by then it should be over.")
    enforcement_off_for: Duration = lasting(
        "15m", "Enforcement is switched off to find something out, which takes some minutes."
    )
    bypassed_for: Duration = lasting("1m", "Every answer made of KV that does not fit may be wrong.")

    # Handshakes

    handshake_window: Duration = lasting(
        "10m", "Handshakes are rare: a pair that fits has one, and one that does not has one a request."
    )
    handshake_floor: Count = Field(
        default=10,
        description="Handshakes in the window, below which a ratio says little: a restart alone makes a few fail.",
    )
    handshake_failure_warning: Ratio = Field(
        default=0.05,
        description="In a fleet that scales up most handshakes are good ones; 1 in 20 is no start-up noise.",
    )
    handshake_failure_warning_for: Duration = lasting(
        "10m", "P and D rarely start at once; a peer that is still loading its model fails until it is up."
    )
    handshake_failure_critical: Ratio = Field(
        default=0.5, description="Most handshakes fail, and each fails at least one request."
    )
    handshake_failure_critical_for: Duration = lasting("5m", "Requests fail now; a restart would be over.")
    handshake_slow_quantile: Ratio = Field(default=0.9, description="Handshakes are too few for a 99th percentile.")
    handshake_slow_seconds: Seconds = Field(
        default=7.5,
        description="A first handshake over RDMA registers memory for about 5 s. An edge of the histogram's buckets.",
    )
    handshake_slow_for: Duration = lasting("10m", "The first handshakes of a new instance are the slow ones.")
    listener_refused: Count = Field(
        default=5,
        description="In `event_window`: more than somebody who tried a port, fewer than a probe of every 10 s.",
    )
    listener_for: Duration = lasting("15m", "Nothing fails of it at once; it can wait for working hours.")

    # Transfers

    transfer_objective: Ratio = Field(
        default=0.999,
        description="Share of transfers that succeed. Each that fails is an error for a client or a second prefill.",
    )
    burn_windows: tuple[BurnWindow, ...] = Field(
        default=(
            _burn("critical", "1h", "5m", 14.4, "2m"),
            _burn("critical", "6h", "30m", 6, "15m"),
            _burn("warning", "1d", "2h", 3, "1h"),
            _burn("warning", "3d", "6h", 1, "3h"),
        ),
        description="The usual four: 2 % of a 30-day budget in an hour, 5 % in 6 hours, 10 % in a day, 10 % in 3 days.",
    )
    burn_floor: Count = Field(
        default=5,
        description="Transfers that failed in the long window: in a small fleet a single one is more than the budget, "
        "and nobody is woken for one.",
    )
    transfer_window: Duration = lasting("10m", "Long enough for a percentile, short enough to notice an end.")
    transfer_floor: Count = Field(
        default=20, description="Transfers in the window: of 20, one that fails is not yet over 5 %."
    )
    transfer_failure_ratio: Ratio = Field(default=0.05, description="50 times what the objective allows.")
    transfer_failure_for: Duration = lasting("10m", "The burn rates page; this names the direction.")
    transfer_slow_quantile: Ratio = Field(default=0.99, description="A sick peer among many shows in the tail first.")
    transfer_slow_seconds: Seconds = Field(
        default=1.0,
        description="It is part of the time to the first token. The KV of a prompt of 8,000 tokens takes some 50 ms "
        "over RDMA, and this long over TCP. An edge of the histogram's buckets.",
    )
    transfer_slow_for: Duration = lasting("15m", "Nobody is woken for it: alerts on the time to the first token are.")
    stalled_age: Duration = lasting(
        "1m", "Twice the longest transfer that the histogram tells apart; above what clocks may differ by."
    )
    stalled_for: Duration = lasting("5m", "A handle that hangs stays; vLLM has no time limit for it.")
    decode_window: Duration = lasting("15m", "Long enough that some requests are not in D's prefix cache.")
    decode_floor: Count = Field(
        default=10, description="Requests served in the window: fewer may all be health checks."
    )
    decode_for: Duration = lasting("15m", "Requests are answered, only slower, and since the last deployment.")

    # Leases and push

    lease_window: Duration = lasting("15m", "Many times the 30 s that a lease has by default.")
    lease_floor: Count = Field(
        default=20, description="Leases that ended in the window: of 20, one expired one is not yet over 5 %."
    )
    lease_expired_ratio: Ratio = Field(
        default=0.05, description="A client that hangs up between prefill and decode lets a lease expire; few do."
    )
    lease_for: Duration = lasting("15m", "Expired leases cost blocks for seconds, and only a flood of them matters.")
    overdue_window: Duration = lasting("5m", "Within this time an engine that is at work has opened a lease.")
    overdue_for: Duration = lasting("10m", "vLLM frees with its next step; what stays for 10 min stays for good.")
    push_window: Duration = lasting("15m", "Many times the wait of one half of a push for the other.")
    push_floor: Count = Field(
        default=20, description="Registrations in the window, below which single cancelled requests count."
    )
    push_unmatched_ratio: Ratio = Field(
        default=0.1,
        description="Clients that hang up leave halves behind; 1 in 10 is more, and without shared ids it is all.",
    )
    push_for: Duration = lasting("10m", "As for single events, and the first prefills of a cold instance take long.")
    invalid_kv_for: Duration = lasting("1m", "Clients may get answers made of another request's KV.")

    # Instances

    memory: Duration = lasting(
        "6h",
        "For how long after an instance was last seen its job counts as one of NIXL's, and its model is missed. "
        "What was taken away on purpose is not told of for days.",
    )
    target_down_for: Duration = lasting("15m", "Longer than a restart that loads a model.")
    targets_down_share: Ratio = Field(
        default=0.4, description="The rest cannot carry the load of so many; and of one P and one D, one is enough."
    )
    target_memory: Duration = lasting(
        "1d",
        "For how long after it was last seen an instance counts among those that are down; one that has not been seen "
        "yet loads its model. What was taken away on purpose is no target any more.",
    )
    targets_down_for: Duration = lasting(
        "5m", "A restart of the one P of a pair may take minutes; nothing is served meanwhile."
    )
    absent_for: Duration = lasting("15m", "Longer than a restart that loads a model.")

    # Telemetry

    telemetry_window: Duration = lasting("15m", "Telemetry that fails harms no request.")
    telemetry_for: Duration = lasting("15m", "A burst that fills a queue once is over by then.")

    @field_validator("group_labels", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return [entry.strip() for entry in value.split(",") if entry.strip()] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _tiers_are_in_order(self) -> Self:
        if self.handshake_failure_warning >= self.handshake_failure_critical:
            raise ValueError(
                f"handshake_failure_warning={self.handshake_failure_warning:g}: it must be less than "
                f"handshake_failure_critical, which is {self.handshake_failure_critical:g}"
            )
        return self

    def by(self, *labels: str) -> str:
        """Labels that a query groups by: those of a deployment and its model, and ``labels``."""
        return ", ".join((*self.group_labels, self.job_label, "model_name", *labels))

    def text(self, name: str) -> str:
        """A setting as a person writes it."""
        value = getattr(self, name)
        return f"{value:g}" if isinstance(value, float) else str(value)

    def scaled(self, factor: float) -> Self:
        """The same with every duration so many times as long, ranges at least 4 s: for runs that cannot wait."""
        scaled: dict[str, Any] = {
            name: value.scaled(factor, None if name.endswith("_for") else LEAST_RANGE)
            for name in type(self).model_fields
            if isinstance(value := getattr(self, name), Duration)
        }
        windows = [
            window.model_copy(
                update={
                    "long": window.long.scaled(factor, LEAST_RANGE),
                    "short": window.short.scaled(factor, LEAST_RANGE),
                    "pending": window.pending.scaled(factor),
                }
            )
            for window in self.burn_windows
        ]
        return self.model_copy(update={**scaled, "burn_windows": tuple(windows)})

    @classmethod
    def load(cls, *overrides: Mapping[str, Any]) -> Self:
        """The defaults with overrides, of which a later one wins.

        Raises:
            MixinConfigError: A name is unknown or a value is bad.
        """
        given = {name: value for override in overrides for name, value in override.items()}
        for name, value in given.items():
            if name not in cls.model_fields:
                raise MixinConfigError(f"{name}={value!r}: there is no {name!r}; valid: {', '.join(cls.model_fields)}")
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            problem = first["msg"].removeprefix("Value error, ")
            if first["type"] == "tuple_type":
                problem = "it must be a list, in the file of --config"
            raise MixinConfigError(f"{key}={first['input']!r}: {problem}" if key else problem) from None
