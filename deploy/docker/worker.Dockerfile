# The reference worker, for a CPU or a CUDA GPU. Build from the repository's root:
#   docker build -f deploy/docker/worker.Dockerfile -t homing-worker:0.1.0-cpu .
#   docker build -f deploy/docker/worker.Dockerfile -t homing-worker:0.1.0-cuda12 --build-arg VARIANT=cuda12 .
# VARIANT is an extra of pyproject.toml: engine (CPU), cuda12 or cuda13. CUDA's libraries come as wheels, so all variants
# use one base image; the host provides the driver. TORCH_INDEX_URL is an index with CPU-only wheels of torch, which are
# much smaller than the default ones.
ARG PYTHON_IMAGE=python:3.11.13-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG VARIANT=engine
ARG TORCH_INDEX_URL=""
WORKDIR /source
RUN python -m venv /opt/homing
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY gateway ./gateway
COPY engine_adapter ./engine_adapter
COPY cuda ./cuda
RUN /opt/homing/bin/pip install --no-cache-dir --constraint constraints.txt \
    ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} ".[$VARIANT,grammar]"
# Compile the CPU kernels here, because the final image has no compiler.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/* \
    && /opt/homing/bin/python -m paged_kv.cpu.native /opt/homing/kernels \
       engine_adapter/engine/model/cpu_kernels.c cuda/paged_kv/cpu/cpu_attention.c

FROM ${PYTHON_IMAGE}
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG VARIANT=engine
LABEL org.opencontainers.image.title="homing-worker" \
      org.opencontainers.image.description="Reference worker of Homing: OpenAI-compatible torch engine" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      homing.variant="${VARIANT}"
COPY --from=build /opt/homing /opt/homing
# Models and compiled kernels. Besides /tmp, only this directory is written. Mount a volume to keep it.
RUN install -d -o 10001 -g 10001 /var/lib/homing
ENV PATH=/opt/homing/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOMING_CACHE=/var/lib/homing \
    HOMING_NATIVE_KERNELS=/opt/homing/kernels \
    CUPY_CACHE_DIR=/var/lib/homing/cupy
VOLUME /var/lib/homing
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000
STOPSIGNAL SIGTERM
# /health is 200 when the model is loaded. The first start may have to fetch it.
HEALTHCHECK --interval=5s --timeout=4s --start-period=15m --retries=3 \
    CMD ["homing", "health", "http://127.0.0.1:8000/health"]
ENTRYPOINT ["homing", "worker", "--host", "0.0.0.0", "--port", "8000"]
CMD []
