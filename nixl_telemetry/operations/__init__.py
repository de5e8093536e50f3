# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Life cycles of what the connectors do, in pure Python: no vLLM, no NIXL."""
