# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Whether Prometheus sees the instances.

Which jobs are meant nobody has to say: those of which an instance with the suite has told of itself lately. Where a
namespace says what belongs together, there are jobs of other people in it: each target is judged by the job it is in.
"""

from nixl_telemetry.mixin.alert import Alert
from nixl_telemetry.mixin.config import MixinConfig

_BOARD = "nixl-overview"


def alerts(c: MixinConfig) -> tuple[Alert, ...]:
    """Targets that are down, and metrics that are gone."""
    by_job = ", ".join((*c.group_labels, c.job_label))
    own_job = ", ".join(dict.fromkeys((*c.group_labels, c.job_label, "job")))
    ours = f"group by ({own_job}) (present_over_time(nixl_connector_info[{c.memory}]))"
    # Every instance with a NIXL connector has this metric, stock ones too. A target that has not been seen yet is a new
    # one that loads its model: with these, each rollout would be an outage.
    seen = f"on ({own_job}, instance) present_over_time(vllm:nixl_bytes_transferred_count[{c.target_memory}])"
    job = f"{{{{ $labels.{c.job_label} }}}}"
    return (
        Alert(
            "NixlTargetDown",
            "warning",
            c.target_down_for,
            f"""
            count by ({by_job}) (
              up == 0 and on ({own_job}) {ours}
            ) > 0
            """,
            "Instances cannot be scraped.",
            f"{{{{ $value }}}} targets of {job} are down.",
            _BOARD,
            ("target_down_for", "memory"),
            ("job",),
        ),
        Alert(
            "NixlTargetDown",
            "critical",
            c.targets_down_for,
            f"""
            count by ({by_job}) (up == 0 and {seen})
            /
            count by ({by_job}) (up and {seen})
            > {c.targets_down_share:g}
            """,
            "Many instances cannot be scraped.",
            f"{{{{ $value | humanizePercentage }}}} of the instances of {job} are down.",
            _BOARD,
            ("targets_down_share", "targets_down_for", "target_memory"),
            ("job",),
        ),
        # The second half is for the case that nothing ever told anything; it has no labels.
        Alert(
            "NixlMetricsAbsent",
            "warning",
            c.absent_for,
            f"""
            group by ({c.by()}) (present_over_time(nixl_connector_info[{c.memory}]))
            unless
            group by ({c.by()}) (nixl_connector_info)
            or on ()
            absent(nixl_connector_info)
            """,
            "There are no NIXL metrics.",
            f"No instance of {{{{ with $labels.model_name }}}}{{{{ . }}}} in {job}{{{{ else }}}}any model{{{{ end }}}} "
            "has metrics of the suite.",
            _BOARD,
            ("absent_for", "memory"),
            (),
        ),
    )
