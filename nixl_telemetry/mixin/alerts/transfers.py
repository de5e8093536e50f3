# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Whether KV moves: without failures, in time, and at all."""

from nixl_telemetry.mixin.alert import Alert, model_in_job
from nixl_telemetry.mixin.config import BurnWindow, MixinConfig
from nixl_telemetry.mixin.recording import transfer_failures, transfers

_BOARD = "nixl-transfers"


def alerts(c: MixinConfig) -> tuple[Alert, ...]:
    """Transfers that fail, are slow or hang, and decode instances that do without."""
    model = model_in_job(c)
    by_direction = c.by("direction")
    window = c.transfer_window
    return (
        *(_burn(c, burn) for burn in c.burn_windows),
        Alert(
            "NixlTransferFailureRatioHigh",
            "warning",
            c.transfer_failure_for,
            f"""
            sum by ({by_direction}) (rate(nixl_transfer_duration_seconds_count{{error_type!=""}}[{window}]))
            /
            sum by ({by_direction}) (rate(nixl_transfer_duration_seconds_count[{window}]))
            > {c.transfer_failure_ratio:g}
            and
            sum by ({by_direction}) (increase(nixl_transfer_duration_seconds_count[{window}])) >= {c.transfer_floor:g}
            """,
            "Transfers fail.",
            f"{{{{ $value | humanizePercentage }}}} of the {{{{ $labels.direction }}}} transfers of {model} fail.",
            _BOARD,
            ("transfer_failure_ratio", "transfer_floor", "transfer_failure_for", "transfer_window"),
        ),
        Alert(
            "NixlTransferSlow",
            "warning",
            c.transfer_slow_for,
            f"""
            histogram_quantile(
              {c.transfer_slow_quantile:g},
              sum by ({c.by("direction", "le")}) (
                rate(nixl_transfer_duration_seconds_bucket{{error_type=""}}[{window}])
              )
            ) > {c.transfer_slow_seconds:g}
            and
            sum by ({by_direction}) (
              increase(nixl_transfer_duration_seconds_count{{error_type=""}}[{window}])
            ) >= {c.transfer_floor:g}
            """,
            "Transfers are slow.",
            f"1 in {1 / (1 - c.transfer_slow_quantile):.3g} {{{{ $labels.direction }}}} transfers of {model} takes "
            "longer than {{ $value | humanizeDuration }}. It is part of the time to the first token.",
            _BOARD,
            ("transfer_slow_seconds", "transfer_slow_quantile", "transfer_floor", "transfer_slow_for"),
        ),
        # The start of the oldest transfer is told every two seconds, and an engine that goes idle right after its last
        # transfer does not tell that it is over; what is in flight is told by the step that saw the end.
        Alert(
            "NixlTransferStalled",
            "warning",
            c.stalled_for,
            f"""
            max by ({by_direction}) (
              time() - (nixl_transfer_oldest_start_timestamp_seconds > 0)
              and ignoring (rank)
              nixl_transfers_in_flight > 0
            ) > {c.stalled_age.seconds:g}
            """,
            "A transfer does not end.",
            f"The oldest {{{{ $labels.direction }}}} transfer of {model} has been in flight for "
            "{{ $value | humanizeDuration }}. Its request waits, and the blocks of both sides are held.",
            _BOARD,
            ("stalled_age", "stalled_for"),
        ),
        # In push it is P that counts transfers, so D is judged by what it received itself. An instance that may be both
        # (kv_both) serves requests that need no KV from elsewhere, and is left out.
        Alert(
            "NixlDecodeWithoutTransfers",
            "warning",
            c.decode_for,
            f"""
            count by ({c.by()}) (
              sum by ({c.by("instance")}) (
                increase(vllm:request_success_total{{finished_reason=~"stop|length|repetition"}}[{c.decode_window}])
              ) >= {c.decode_floor:g}
              and on ({c.by("instance")})
              nixl_connector_info{{kv_role="kv_consumer"}}
              unless on ({c.by("instance")})
              sum by ({c.by("instance")}) (
                increase(nixl_receive_wait_seconds_count{{outcome="received"}}[{c.decode_window}])
              ) > 0
            ) > 0
            """,
            "Decode instances serve without KV from prefill instances.",
            f"{{{{ $value }}}} decode instances of {model} answered requests in {c.decode_window} and received no KV: "
            "they prefill everything themselves.",
            _BOARD,
            ("decode_floor", "decode_for", "decode_window"),
        ),
    )


def _burn(c: MixinConfig, burn: BurnWindow) -> Alert:
    too_fast = f"({burn.factor:g} * {1 - c.transfer_objective:g})"
    return Alert(
        "NixlTransferErrorBudgetBurn",
        burn.severity,
        burn.pending,
        f"""
        {transfer_failures(c, burn.long)} > {too_fast}
        and
        {transfer_failures(c, burn.short)} > {too_fast}
        and
        {transfer_failures(c, burn.long)} * {transfers(c, burn.long)} >= {c.burn_floor:g}
        """,
        "Transfers use up their error budget too fast.",
        f"{{{{ $value | humanizePercentage }}}} of the transfers of {model_in_job(c)} failed in the last {burn.long}: "
        f"the budget of {100 - 100 * c.transfer_objective:g} % burns {burn.factor:g} times too fast or more.",
        _BOARD,
        ("transfer_objective", "burn_windows", "burn_floor"),
        labels=(("window", str(burn.long)),),
    )
