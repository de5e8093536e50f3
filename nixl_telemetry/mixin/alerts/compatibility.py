# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Whether the instances of a deployment fit each other.

What a stock instance is made of is on none of its metrics: only instrumented ones are compared with each other. A peer
that was refused may be a stock one.
"""

from nixl_telemetry.mixin.alert import Alert
from nixl_telemetry.mixin.config import MixinConfig
from nixl_telemetry.mixin.recording import rejections

_BOARD = "nixl-handshakes"
_REJECTED = (
    "Instances of {{ $labels.model_name }} in {{ $labels.JOB }} refused {{ $value | humanize }} handshakes in WINDOW "
)


def alerts(c: MixinConfig) -> tuple[Alert, ...]:
    """Mismatches that were met, differences that will be, and whether a mismatch is refused at all."""
    rejected = _REJECTED.replace("JOB", c.job_label).replace("WINDOW", str(c.event_window))
    model = f"{{{{ $labels.model_name }}}} in {{{{ $labels.{c.job_label} }}}}"
    return (
        Alert(
            "NixlCompatMismatch",
            "warning",
            c.event_for,
            f"{rejections(c)} > 0",
            "A prefill and a decode instance are incompatible and were paired.",
            f"{rejected}because {{{{ $labels.factor }}}} differs. Requests paired so fail until one side is changed.",
            _BOARD,
            ("event_window", "event_for"),
        ),
        Alert(
            "NixlTransferModeMismatch",
            "warning",
            c.event_for,
            f'{rejections(c)}{{factor="transfer_mode"}} > 0',
            "A pull and a push instance were paired.",
            f"{rejected}because one side pulls and the other pushes. Requests paired so fail until one has the other "
            "connector.",
            _BOARD,
            ("event_window", "event_for"),
        ),
        Alert(
            "NixlConnectorVersionMismatch",
            "warning",
            c.event_for,
            f'{rejections(c)}{{factor=~"nixl_connector_version|vllm_version"}} > 0',
            "Two versions of vLLM or of its NIXL connector were paired.",
            f"{rejected}because {{{{ $labels.factor }}}} differs. Requests paired so fail until both sides run one "
            "release.",
            _BOARD,
            ("event_window", "event_for"),
        ),
        # In one mode: push and pull instances have different hashes by construction.
        Alert(
            "NixlCompatHashesMixed",
            "warning",
            c.mixed_for,
            f"""
            count by ({c.by("transfer_mode")}) (
              count by ({c.by("transfer_mode", "compat_hash")}) (nixl_connector_info)
            ) > 1
            """,
            "Instances of one model and transfer mode have different compatibility hashes.",
            f"The {{{{ $labels.transfer_mode }}}} instances of {model} have {{{{ $value }}}} compatibility hashes. "
            "Handshakes between them are refused.",
            _BOARD,
            ("mixed_for",),
            ("job", "model_name", "transfer_mode"),
        ),
        Alert(
            "NixlConnectorVersionsMixed",
            "warning",
            c.mixed_for,
            f"""
            count by ({c.by()}) (
              count by ({c.by("connector_version", "vllm_version")}) (nixl_connector_info)
            ) > 1
            """,
            "Instances of one model run different versions of vLLM.",
            f"The instances of {model} run {{{{ $value }}}} versions of vLLM. Two releases never exchange KV.",
            _BOARD,
            ("mixed_for",),
        ),
        Alert(
            "NixlTransferModesMixed",
            "warning",
            c.mixed_for,
            f"""
            count by ({c.by()}) (
              count by ({c.by("transfer_mode")}) (nixl_connector_info)
            ) > 1
            """,
            "Some instances of one model pull and others push.",
            f"Some instances of {model} pull KV and others push it. A pull and a push instance never exchange KV.",
            _BOARD,
            ("mixed_for",),
        ),
        Alert(
            "NixlEnforcementOff",
            "warning",
            c.enforcement_off_for,
            f'count by ({c.by()}) (nixl_connector_info{{handshake_enforced="false"}}) > 0',
            "Instances take peers whose compatibility hash differs.",
            f"{{{{ $value }}}} engines of {model} run with enforce_handshake_compat set to false. KV that does not fit "
            "would give wrong output.",
            _BOARD,
            ("enforcement_off_for",),
        ),
        # No rate: the pair goes on exchanging KV after its one handshake, until one of the two is restarted.
        Alert(
            "NixlEnforcementOff",
            "critical",
            c.bypassed_for,
            f"sum by ({c.by('factor')}) (nixl_handshake_bypassed_total) > 0",
            "Incompatible instances exchange KV.",
            f"Instances of {model} let {{{{ $value }}}} handshakes through though {{{{ $labels.factor }}}} differs. "
            "Answers made of that KV may be wrong.",
            _BOARD,
            ("bypassed_for",),
        ),
    )
