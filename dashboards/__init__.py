# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The dashboards as code; ``python -m dashboards`` writes the JSON that the package ships."""
