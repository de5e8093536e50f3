# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Whether the instances of a deployment fit each other.

What a stock instance is made of is on none of its metrics: only instrumented ones are compared with each other. A peer
that was refused may be a stock one.
"""

from nixl_telemetry.mixin.alert import COUNT, Alert, model_in_job
from nixl_telemetry.mixin.config import MixinConfig
from nixl_telemetry.mixin.recording import rejections

_BOARD = "nixl-handshakes"


def alerts(c: MixinConfig) -> tuple[Alert, ...]:
    """Mismatches that were met, differences that will be, and whether a mismatch is refused at all."""
    model = model_in_job(c)
    refused = f"Instances of {model} refused handshakes, {COUNT} in {c.event_window}"
    events = ("event_for", "event_window")
    return (
        Alert(
            "NixlCompatMismatch",
            "warning",
            c.event_for,
            f"{rejections(c)} > 0",
            "Incompatible prefill and decode instances are paired.",
            f"{refused}: {{{{ $labels.factor }}}} differs. Requests paired so fail until one side is changed.",
            _BOARD,
            events,
        ),
        Alert(
            "NixlTransferModeMismatch",
            "warning",
            c.event_for,
            f'{rejections(c)}{{factor="transfer_mode"}} > 0',
            "A pull and a push instance are paired.",
            f"{refused}: one side pulls and the other pushes. Requests paired so fail until one is changed.",
            _BOARD,
            events,
        ),
        Alert(
            "NixlConnectorVersionMismatch",
            "warning",
            c.event_for,
            f'{rejections(c)}{{factor=~"nixl_connector_version|vllm_version"}} > 0',
            "Two versions of vLLM or of its NIXL connector are paired.",
            f"{refused}: {{{{ $labels.factor }}}} differs. Requests paired so fail until both sides run one release.",
            _BOARD,
            events,
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
            "Handshakes between these are refused.",
            _BOARD,
            ("mixed_for",),
            ("job", "model", "mode"),
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
            "Instances would take peers whose compatibility hash differs.",
            f"{{{{ $value }}}} engines of {model} run with enforce_handshake_compat set to false. KV that does not fit "
            "would give wrong output.",
            _BOARD,
            ("enforcement_off_for",),
        ),
        # No rate: after its one handshake the pair goes on exchanging KV, until one of the two is restarted.
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
