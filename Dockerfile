# syntax=docker/dockerfile:1
# SPDX-License-Identifier: BSD-3-Clause
# An image with the `muster` command, the Python package and one torch; no compiler, no root.
#
#   docker build -t muster .
#   docker run --rm muster                # muster doctor
#   docker run --rm muster run --standalone -n 4 /opt/muster/examples/digits/digits.py
#
# --build-arg TORCH=2.14 takes another minor of tools/wheel/matrix.toml, TORCH_INDEX another index
# of packages for torch, and JOBS the number of compilers at once. docs/user/containers.md has more;
# `tools/image/try` takes these steps without an engine.

FROM debian:12 AS build
WORKDIR /muster
# What changes seldom comes first: the compiler, and torch's headers and libraries.
COPY tools/setup tools/requirements.txt tools/
RUN MUSTER_TORCH=LIBTORCH tools/setup \
 && .venv/bin/python -m pip install --no-cache-dir $(grep ^scikit-build-core tools/requirements.txt)
COPY . .
ARG TORCH=2.15
ARG JOBS
RUN .venv/bin/python tools/wheel/build --torch "$TORCH" ${JOBS:+--jobs "$JOBS"}

FROM debian:12-slim
LABEL org.opencontainers.image.title="muster" org.opencontainers.image.licenses="BSD-3-Clause"
RUN apt-get update -q \
 && apt-get install -q -y --no-install-recommends ca-certificates python3 python3-venv \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 1000 --create-home muster
ARG TORCH=2.15
ARG TORCH_INDEX
RUN python3 -m venv /opt/muster \
 && /opt/muster/bin/pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} \
      numpy "torch==$TORCH.*"
COPY --from=build /muster/dist/*.whl /opt/muster/wheel/
RUN /opt/muster/bin/pip install --no-cache-dir --no-index /opt/muster/wheel/*.whl
COPY examples/digits/digits.py /opt/muster/examples/digits/
COPY examples/data/digits.csv /opt/muster/examples/data/
ENV PATH=/opt/muster/bin:$PATH
# A number: Kubernetes cannot tell by a name that a user is not root.
USER 1000:1000
WORKDIR /home/muster
ENTRYPOINT ["muster"]
CMD ["doctor"]
