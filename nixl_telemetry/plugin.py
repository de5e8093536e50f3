# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The ``vllm.general_plugins`` entry point. vLLM calls it in every process, more than once."""

import logging


def register() -> None:
    """Make vLLM find the instrumented connectors. Idempotent; never raises."""
    try:
        from nixl_telemetry.seam import wiring

        wiring.install()
    except Exception:
        logging.getLogger("vllm.nixl_telemetry").warning("nixl_telemetry could not register with vLLM", exc_info=True)
