#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
# The small collector: rotel takes spans by gRPC and HTTP on loopback, batches them and passes all of them on. It has no
# tail sampling; with NIXLTEL_KEEP_FAILED (on by default) and OTEL_TRACES_SAMPLER, the instances themselves choose.
# To change: the backend. ROTEL is the program: `rotel` of its container image and its releases, or `rotel-agent`, which
# is in the folder of the Python package `rotel`.
#   BACKEND=http://tempo.observability:4317 ./rotel.sh
set -eu
exec "${ROTEL:-rotel}" start \
  --otlp-grpc-endpoint "${GRPC:-127.0.0.1:4317}" \
  --otlp-http-endpoint "${HTTP:-127.0.0.1:4318}" \
  --batch-max-size 512 \
  --batch-timeout 1s \
  --exporter otlp \
  --otlp-exporter-protocol grpc \
  --otlp-exporter-endpoint "${BACKEND:?is the OTLP endpoint to pass spans on to, for example http://tempo:4317}" \
  --otlp-exporter-retry-max-elapsed-time 30s
