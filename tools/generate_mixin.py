# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Writes what comes from the alerts: `alerts/*.yaml` with the defaults, and the page `docs/alerts.md`.

Run as `python -m tools.generate_mixin`, by `make generate`. The output depends on the code only, so that `make
check-generated` can compare it with what is committed.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Final

from nixl_telemetry.mixin.alert import Alert
from nixl_telemetry.mixin.config import MixinConfig
from nixl_telemetry.mixin.rules import build_alerts, prometheus_rule, rules_file
from tools.generate_docs import table

ROOT: Final = Path(__file__).resolve().parents[1]

_HEADER: Final = """\
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
# Made by `python -m tools.generate_mixin` with the defaults. Do not edit: `nixl-telemetry alerts export` has options.
"""

_NOTE: Final = """\
<!-- Made by `python -m tools.generate_mixin` from nixl_telemetry/mixin. Do not edit: run `make generate`. -->

"""

_ALERTS: Final = """\
# Alerts

Rules for Prometheus 2.42 and later, 3.x included, over the metrics of [Signals](signals.md).

```sh
nixl-telemetry alerts export --out nixl.rules.yaml --grafana-url https://grafana.example.com \\
    --runbook-url 'https://docs.example.com/runbooks/{alert}.html'
nixl-telemetry alerts export --format prometheusrule --namespace monitoring --label release=kube-prometheus-stack \\
    | kubectl apply -f -
```

The label is the one that your operator's Prometheus selects rules by, most often `release` with the name of its Helm
release. Without an operator, name the file under `rule_files` in `prometheus.yml`, check it with
`promtool check config`, and reload Prometheus; `examples/prometheus/prometheus.yml` shows it.

The repository has both with the defaults: `alerts/nixl.rules.yaml` and `alerts/nixl.prometheusrule.yaml`.
[Command line](cli.md#alerts-export) has the options, and `examples/alertmanager/alertmanager.yml` the grouping and the
inhibition that make one notification of one cause.

## What has to be there

- The suite in the instances that are to be watched.
  What a stock instance is made of is on none of its metrics: it takes part in a comparison only as a peer that was
  refused.
- P (the prefill instances) and D (the decode instances) of one deployment in **one job**, since they are compared with
  each other and their failures are counted together.
  Where each has a job of its own, name a label that they share: `--job-label namespace`.
- One `model_name` for both, as `--served-model-name` sets it.

An alert has the labels `job` and `model_name`, and one that names the cause; never `instance`, so that one cause is one
alert however many instances meet it. Its runbook has the query that names the instances.
`NixlTargetDown` knows no model and has `job` only; `NixlMetricsAbsent` has neither where no instance of any model is
left.

| severity | who is told |
| --- | --- |
| `critical` | somebody is woken: requests fail or answers may be wrong |
| `warning` | working hours |
| `info` | nobody; it helps to find something out |

## The alerts

"""

_SETTINGS: Final = """
## Settings

Each is set with `--set NAME=VALUE`, or in a file of YAML for `--config`:

```yaml
transfer_slow_seconds: 0.25
mixed_for: 2h
burn_windows:
  - {severity: critical, long: 1h, short: 5m, factor: 14.4, pending: 2m}
  - {severity: warning, long: 1d, short: 2h, factor: 3, pending: 1h}
```

`burn_windows` is replaced as a whole: give all windows that you want.
An unknown name and a bad value are refused.
Durations are written as Prometheus writes them: `90s`, `5m`, `1h30m`.

"""


def alerts_page() -> str:
    """The page on alerts."""
    config = MixinConfig()
    defaults = [
        (f"`{name}`", f"`{_default(config, name)}`", field.description or "")
        for name, field in MixinConfig.model_fields.items()
    ]
    return "".join(
        (
            _NOTE,
            _ALERTS,
            table(("alert", "severity", "for", "what", "settings"), _alert_rows(config)),
            _SETTINGS,
            table(("setting", "default", "what it is, and why"), defaults),
        )
    )


def _alert_rows(config: MixinConfig) -> Iterator[tuple[str, str, str, str, str]]:
    every = [alert for alerts in build_alerts(config).values() for alert in alerts]
    for (name, severity), same in groupby(every, lambda alert: (alert.name, alert.severity)):
        tiers = list(same)
        yield (
            f"[{name}](runbooks/{name}.md)",
            severity,
            ", ".join(str(alert.pending) for alert in tiers),
            tiers[0].summary,
            _thresholds(tiers[0], config),
        )


def _thresholds(alert: Alert, config: MixinConfig) -> str:
    return ", ".join(f"`{knob}` {_default(config, knob)}" for knob in alert.knobs if knob != "burn_windows")


def _default(config: MixinConfig, name: str) -> str:
    if name == "burn_windows":
        return "; ".join(f"{each.factor:g}x in {each.long} and {each.short}" for each in config.burn_windows)
    return config.text(name) if getattr(config, name) not in {"", ()} else " "


FILES: Final[Mapping[str, Callable[[], str]]] = {
    "alerts/nixl.rules.yaml": lambda: _HEADER + rules_file(MixinConfig()),
    "alerts/nixl.prometheusrule.yaml": lambda: _HEADER + prometheus_rule(MixinConfig()),
    "docs/alerts.md": alerts_page,
}
"""What is generated, by its path in the repository."""


def main() -> None:
    """Write every file."""
    for name, make in FILES.items():
        (ROOT / name).write_text(make(), encoding="utf-8")
        print(f"generated: {name}")


if __name__ == "__main__":
    main()
