# syntax=docker/dockerfile:1
# A server of one pipeline. The CUDA base and the wheels of torch are build arguments:
#
#   docker build -t tritium .
#   docker run --gpus all -p 8000:8000 -v /models:/models:ro -v tritium:/var/lib/tritium tritium /models/flux
#
# On a CPU:
#   docker build -t tritium --build-arg BASE=ubuntu:24.04 --build-arg TORCH_INDEX=<the index of torch's CPU wheels> .

ARG BASE=nvidia/cuda:13.0.0-base-ubuntu24.04

FROM ${BASE} AS build
ARG TORCH=torch==2.13.0
# Empty for the wheels that pip finds by itself, which are for CUDA.
ARG TORCH_INDEX=
ARG EXTRAS=cli,diffusers,serve
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/tritium
ENV PATH=/opt/tritium/bin:${PATH} PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# torch goes first: whatever depends on it then finds it installed. This layer stays when the source changes.
RUN pip install "${TORCH}" ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"}
WORKDIR /src
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE NOTICE ./
COPY src ./src
RUN pip install ".[${EXTRAS}]"

FROM ${BASE}
# Inductor compiles C++ for CPUs, and Triton its launchers, with gcc and Python's headers.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-dev g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --create-home --home-dir /var/lib/tritium --shell /usr/sbin/nologin tritium
COPY --from=build /opt/tritium /opt/tritium
ENV PATH=/opt/tritium/bin:${PATH} \
    HF_HUB_OFFLINE=1 \
    PYTHONUNBUFFERED=1 \
    TORCHINDUCTOR_CACHE_DIR=/var/lib/tritium/cache \
    TRITON_CACHE_DIR=/var/lib/tritium/cache/triton
USER tritium
WORKDIR /var/lib/tritium
VOLUME /var/lib/tritium
EXPOSE 8000
# Ready when the model is warm: loading and compiling may take minutes, and an unhealthy start is not a failed one.
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/healthz', timeout=4)"]
# A drain takes up to a minute: run with --stop-timeout 75.
STOPSIGNAL SIGTERM
ENTRYPOINT ["tritium", "serve", "--host", "0.0.0.0", "--port", "8000"]
CMD ["example"]
