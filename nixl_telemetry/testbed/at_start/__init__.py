# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""A folder for PYTHONPATH, not for import: see ``sitecustomize.py``."""
