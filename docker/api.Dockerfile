# The API process: HTTP in, jobs out. It does not need JAX, so JAX is not installed.
#   docker build --file docker/api.Dockerfile --tag tuneserve-api .
ARG PYTHON=3.11.14-slim-bookworm

FROM python:${PYTHON} AS build
WORKDIR /src
COPY LICENSE pyproject.toml README.md ./
COPY requirements requirements
COPY scripts/wheel_documentation.py scripts/wheel_documentation.py
COPY clients/tuneserve_client clients/tuneserve_client
COPY engine/tuneserve_engine engine/tuneserve_engine
COPY server/tuneserve_server server/tuneserve_server
# The documentation site, if `make docs` has built it: the pattern may match nothing.
COPY doc[s]/_build/html docs/_build/html
# pip checks every package from a registry against the hashes in requirements/. Building our own
# wheel downloads nothing more.
RUN python -m venv /opt/build \
    && /opt/build/bin/pip install --no-cache-dir --require-hashes --no-deps --requirement requirements/build.txt \
    && /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /opt/build/dist .
RUN python -m venv /opt/tuneserve \
    && /opt/tuneserve/bin/pip install --no-cache-dir --require-hashes --no-deps --requirement requirements/server.txt \
    && /opt/tuneserve/bin/pip install --no-cache-dir --no-index --no-deps /opt/build/dist/*.whl

FROM python:${PYTHON}
# The same user id as the worker's, because both write to one volume.
RUN groupadd --gid 10001 tuneserve \
    && useradd --uid 10001 --gid 10001 --home-dir /data --no-create-home tuneserve \
    && install --directory --owner 10001 --group 10001 /data
COPY --from=build /opt/tuneserve /opt/tuneserve
ENV PATH=/opt/tuneserve/bin:${PATH} \
    HOME=/data \
    TUNESERVE_DATA_DIR=/data
USER 10001:10001
WORKDIR /data
VOLUME /data
EXPOSE 8410
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python", "-c", "from urllib.request import ProxyHandler, build_opener; build_opener(ProxyHandler({})).open('http://127.0.0.1:8410/api/v1/healthz', timeout=4)"]
CMD ["tuneserve", "api"]
