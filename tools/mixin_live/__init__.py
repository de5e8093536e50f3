# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Boards and alerts on the real thing: real servers, a real Prometheus, a real Alertmanager and a real browser."""
