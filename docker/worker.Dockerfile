# A worker: it takes jobs from the store and writes results to the store. It listens on no port.
#   docker build --file docker/worker.Dockerfile --tag tuneserve-worker .
#   docker build --file docker/worker.Dockerfile --tag tuneserve-worker:cuda --build-arg EXTRA=cuda \
#       --build-arg PYTHON=3.13.9-slim-bookworm .
ARG PYTHON=3.11.14-slim-bookworm

FROM python:${PYTHON} AS build
# engine: JAX for the CPU. cuda, cuda13: the newest JAX with the libraries of CUDA 12 or 13, which needs
# Python 3.12; the host provides the driver.
ARG EXTRA=engine
WORKDIR /src
COPY LICENSE pyproject.toml README.md ./
COPY requirements requirements
COPY scripts/wheel_documentation.py scripts/wheel_documentation.py
COPY clients/tuneserve_client clients/tuneserve_client
COPY engine/tuneserve_engine engine/tuneserve_engine
COPY server/tuneserve_server server/tuneserve_server
# pip checks every package from a registry against the hashes in requirements/. Building our own
# wheel downloads nothing more.
RUN python -m venv /opt/build \
    && /opt/build/bin/pip install --no-cache-dir --require-hashes --no-deps --requirement requirements/build.txt \
    && /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /opt/build/dist .
RUN python -m venv /opt/tuneserve \
    && /opt/tuneserve/bin/pip install --no-cache-dir --require-hashes --no-deps --requirement requirements/${EXTRA}.txt \
    && /opt/tuneserve/bin/pip install --no-cache-dir --no-index --no-deps /opt/build/dist/*.whl

FROM python:${PYTHON}
# The same user id as the API's, because both write to one volume.
RUN groupadd --gid 10001 tuneserve \
    && useradd --uid 10001 --gid 10001 --home-dir /data --no-create-home tuneserve \
    && install --directory --owner 10001 --group 10001 /data
COPY --from=build /opt/tuneserve /opt/tuneserve
ENV PATH=/opt/tuneserve/bin:${PATH} \
    HOME=/data \
    TUNESERVE_DATA_DIR=/data \
    TUNESERVE_ALIVE_FILE=/tmp/alive
USER 10001:10001
WORKDIR /data
VOLUME /data
# The worker may have to download, load and compile a base model before it has a lease to renew.
HEALTHCHECK --interval=15s --timeout=10s --start-period=30m --retries=2 \
    CMD ["python", "-m", "tuneserve_engine.worker.health"]
CMD ["python", "-m", "tuneserve_engine.worker"]
