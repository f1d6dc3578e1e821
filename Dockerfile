# The image: one virtual environment in /app, state in /data, an optional /config/config.yaml.
# Every package is the one whose SHA-256 stands in uv.lock, uv itself the one of deploy/image/uv.txt. Of a
# shell the build needs none, and the server neither. tests/system/deploy/test_dockerfile.py runs these very steps.

# The Python that the tests run on, fixed by its digest. The update bot reads it here, and would not in an argument.
FROM python:3.11.17-slim-trixie@sha256:45037981b62b34b44602584fccbc4d884d5f7dc92c7ee86bb38a698a79fe1e51 AS base

FROM base AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
ENV UV_PROJECT_ENVIRONMENT=/app UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy UV_NO_CACHE=1 UV_PYTHON_DOWNLOADS=never
WORKDIR /src
COPY deploy/image/uv.txt ./
RUN ["python", "-m", "pip", "install", "--require-hashes", "--only-binary=:all:", "--requirement=uv.txt"]
COPY pyproject.toml uv.lock ./
RUN ["uv", "sync", "--frozen", "--no-dev", "--extra=crypto", "--extra=fast", "--extra=mcp", "--extra=otel", "--extra=redis", "--no-install-project"]
COPY LICENSE README.md ./
COPY proxy ./proxy
RUN ["uv", "sync", "--frozen", "--no-dev", "--extra=crypto", "--extra=fast", "--extra=mcp", "--extra=otel", "--extra=redis", "--no-editable"]

FROM base
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="compaction-proxy" \
      org.opencontainers.image.description="An OpenAI-compatible proxy that keeps long conversations fitting" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# Nothing in the image installs packages.
RUN ["python", "-m", "pip", "uninstall", "--quiet", "--yes", "pip", "setuptools", "wheel"]
RUN ["python", "-c", "import ensurepip, shutil; shutil.rmtree(ensurepip.__path__[0])"]
# The base image has no bytecode of the standard library, and a read-only root could keep none.
RUN ["python", "-c", "import compileall, os; compileall.compile_dir(os.path.dirname(os.__file__), quiet=2, workers=0)"]
RUN ["install", "--directory", "--owner=10001", "--group=10001", "--mode=0700", "/data"]
COPY --from=build /app /app
ENV PATH=/app/bin:$PATH PYTHONDONTWRITEBYTECODE=1
# glibc keeps free memory apart for each thread, of which there are few, and keeps that of large bodies for ever.
ENV MALLOC_ARENA_MAX=1 MALLOC_MMAP_THRESHOLD_=262144 MALLOC_TRIM_THRESHOLD_=1048576
# Other containers must reach it; without server.admin_key that leaves admin and UI closed.
ENV COMPACTION_PROXY__SERVER__HOST=0.0.0.0 COMPACTION_PROXY__STORE__URL=sqlite:////data/state.db
WORKDIR /config
VOLUME ["/data"]
USER 10001:10001
EXPOSE 4141
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=6s --start-period=20s --start-interval=1s --retries=3 \
    CMD ["compaction-proxy", "health"]
ENTRYPOINT ["compaction-proxy"]
CMD ["serve"]
