# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What the servers with measured connectors and their observer agree on; imports nothing of vLLM."""

from typing import Final

FOLDER: Final = "NIXLTEL_TESTBED_METER"
"""Variable that names the folder for what the processes counted."""
