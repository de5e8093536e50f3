# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Options that several commands have."""

from typing import Annotated

import typer

Timeout = Annotated[
    float, typer.Option(min=0.01, max=3600, help="Seconds for a connection, and again for each answer.")
]
Wait = Annotated[
    float,
    typer.Option(
        min=0,
        max=86_400,
        metavar="SECONDS",
        help="How long to try again while an instance does not listen or answer yet.",
    ),
]
SearchSeconds = Annotated[
    float,
    typer.Option(
        min=0,
        max=86_400,
        help="How much CPU time to search with, for the factors behind digests of instances that tell no more.",
    ),
]
Likes = Annotated[
    list[str] | None,
    typer.Option(
        "--like",
        metavar="SOURCE",
        help="An instance of the same fleet that tells its factors, or whose factors were computed: HOST:PORT or a "
        "file. The search starts from it. May be given several times.",
        show_default=False,
    ),
]
Factors = Annotated[
    list[str] | None,
    typer.Option(
        "--factor",
        metavar="NAME=VALUE",
        help="A factor that a side probably has, for example model=NAME. May be given several times.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
