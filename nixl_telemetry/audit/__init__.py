# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The audit trail: hash-chained JSONL of one process, and what verifies it offline."""
