# The gateway: no torch, no compiler, no root. Build from the repository's root:
#   docker build -f deploy/docker/gateway.Dockerfile -t homing-gateway:0.1.0 .
# To pin the base by digest: --build-arg PYTHON_IMAGE=python@sha256:...
ARG PYTHON_IMAGE=python:3.11.13-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
WORKDIR /source
RUN python -m venv /opt/homing
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY gateway ./gateway
COPY engine_adapter ./engine_adapter
COPY cuda ./cuda
# constraints.txt pins the versions that the tests ran with.
RUN /opt/homing/bin/pip install --no-cache-dir --constraint constraints.txt '.[otel]'

FROM ${PYTHON_IMAGE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="homing-gateway" \
      org.opencontainers.image.description="Session-affinity gateway for LLM fleets" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /opt/homing /opt/homing
COPY deploy/docker/homing.yaml /etc/homing/homing.yaml
ENV PATH=/opt/homing/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
# A numeric user, so that runAsNonRoot can be checked. The gateway writes no files: the root file system may be read-only.
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000 8001
STOPSIGNAL SIGTERM
# Checks liveness, not readiness: restarting a gateway without backends does not help.
HEALTHCHECK --interval=5s --timeout=4s --start-period=15s --retries=3 \
    CMD ["homing", "health", "http://127.0.0.1:8000/livez"]
ENTRYPOINT ["homing"]
CMD ["gateway", "--config", "/etc/homing/homing.yaml"]
