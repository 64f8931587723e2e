# Images of nwor-server.
#
#   docker build --target cpu  -t nwor-server:cpu  .
#   docker build --target cuda -t nwor-server:cuda .
#
# Settings of pip (an index of your own, for one) come as a build secret and stay out of the image:
#   docker build --secret id=pip_conf,src=$HOME/.config/pip/pip.conf ...

ARG PYTHON_IMAGE=docker.io/library/python:3.11.16-slim-bookworm@sha256:0bee7276f83efd4a1ee05bbbf4281d95ed28e079220a9457f25a93e3f1e3c31b
ARG VLLM_IMAGE=docker.io/vllm/vllm-openai:v0.32.0
ARG CUDA_TOOLKIT_IMAGE=docker.io/nvidia/cuda:13.0.3-devel-ubuntu22.04

# ---- cpu-builder: the packages of the lock file and the wheel, in a virtual environment that the image copies ----
FROM ${PYTHON_IMAGE} AS cpu-builder
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++=4:12.2.0-3 \
    && rm -rf /var/lib/apt/lists/*
# The image's environment has no pip: the builder's own one installs into it.
RUN python3 -m venv /opt/build && python3 -m venv --without-pip /opt/nwor
ARG TORCH_CPU=torch==2.13.0+cpu
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf \
    install="/opt/build/bin/pip --python /opt/nwor/bin/python3 install --no-deps" \
    && { $install "${TORCH_CPU}" || $install --index-url "${TORCH_CPU_INDEX}" "${TORCH_CPU}"; }
COPY deploy/requirements/cpu.txt deploy/requirements/build.txt /src/deploy/requirements/
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf \
    /opt/build/bin/pip --python /opt/nwor/bin/python3 install --no-deps --require-hashes \
        -r /src/deploy/requirements/cpu.txt \
    && /opt/build/bin/pip install --no-deps --require-hashes -r /src/deploy/requirements/build.txt
COPY pyproject.toml README.md LICENSE /src/
COPY csrc /src/csrc
COPY nwor /src/nwor
COPY server /src/server
WORKDIR /src
RUN torch=$(/opt/nwor/bin/python3 -c 'import importlib.util as u; print(*u.find_spec("torch").submodule_search_locations)') \
    && PATH=/opt/build/bin:$PATH NWOR_CUDA=OFF pip wheel --no-build-isolation --no-deps --no-index \
        --config-settings=cmake.define.NWOR_TORCH_DIR="$torch" -w /wheels . \
    && pip --python /opt/nwor/bin/python3 install --no-deps --no-index /wheels/*.whl

# ---- cpu: what runs ----
FROM ${PYTHON_IMAGE} AS cpu
# tini: as process 1 a Python program would not hear SIGTERM before it has a handler. libnuma: vLLM's CPU kernels.
RUN apt-get update \
    && apt-get install -y --no-install-recommends libnuma1=2.0.16-1 tini=0.19.0-1* \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 nwor \
    && useradd --uid 10001 --gid nwor --home-dir /var/cache/nwor --no-create-home --shell /usr/sbin/nologin nwor \
    && install -d -o nwor -g nwor -m 0755 /var/cache/nwor
COPY --from=cpu-builder /opt/nwor /opt/nwor
COPY LICENSE server/demo/README.md server/dashboard/static/vendor/uPlot.LICENSE.txt /usr/share/licenses/nwor/
COPY --chmod=0755 deploy/container/entrypoint.sh /usr/local/bin/nwor-entrypoint
COPY deploy/container/healthcheck.py deploy/container/licences.py /usr/local/lib/nwor/
# HF_TOKEN_PATH is where a token may be found, not one.
# hadolint ignore=DL3064
ENV PATH=/opt/nwor/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/var/cache/nwor \
    HF_HOME=/var/cache/nwor/huggingface \
    HF_TOKEN_PATH=/run/secrets/hf_token \
    VLLM_CACHE_ROOT=/var/cache/nwor/vllm \
    VLLM_CONFIG_ROOT=/var/cache/nwor/vllm-config \
    XDG_CACHE_HOME=/var/cache/nwor
RUN python3 /usr/local/lib/nwor/licences.py > /usr/share/licenses/nwor/python-packages.tsv
USER 10001:10001
WORKDIR /var/cache/nwor
RUN ["python3", "-m", "nwor.doctor"]
ARG NWOR_VERSION
ARG NWOR_REVISION
LABEL org.opencontainers.image.title="nwor-server" \
      org.opencontainers.image.description="OpenAI-compatible inference server with EAGLE speculative decoding and no-write-on-reject KV caching on vLLM, for CPUs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${NWOR_VERSION}" \
      org.opencontainers.image.revision="${NWOR_REVISION}"
EXPOSE 8000
VOLUME ["/var/cache/nwor"]
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python3", "/usr/local/lib/nwor/healthcheck.py"]
ENTRYPOINT ["/usr/bin/tini", "--", "/usr/local/bin/nwor-entrypoint"]

# ---- cuda-builder: the kernels against the very PyTorch that will load them, with a whole toolkit beside it ----
FROM ${CUDA_TOOLKIT_IMAGE} AS cuda-toolkit

FROM ${VLLM_IMAGE} AS cuda-builder
# Nothing runs in this stage but the build.
# hadolint ignore=DL3002
USER 0:0
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_BREAK_SYSTEM_PACKAGES=1
# The base says which Ubuntu it is, and so which g++.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
COPY --from=cuda-toolkit /usr/local/cuda-13.0 /usr/local/cuda-13.0
COPY deploy/requirements/build.txt /src/deploy/requirements/
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf \
    python3 -m pip install --no-deps --require-hashes -r /src/deploy/requirements/build.txt
COPY pyproject.toml README.md LICENSE /src/
COPY csrc /src/csrc
COPY nwor /src/nwor
COPY server /src/server
WORKDIR /src
# Empty: every architecture that csrc/CMakeLists.txt lists.
ARG NWOR_CUDA_ARCHS
RUN CUDA_HOME=/usr/local/cuda-13.0 NWOR_CUDA=ON python3 -m pip wheel --no-build-isolation --no-deps --no-index \
        -w /wheels . \
    && sha256sum /wheels/*.whl > /wheels/SHA256SUMS

# ---- cuda: vLLM's own image with one wheel more ----
FROM ${VLLM_IMAGE} AS cuda
USER 0:0
RUN apt-get update \
    && apt-get install -y --no-install-recommends tini=0.19.0-1* \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 nwor \
    && useradd --uid 10001 --gid nwor --home-dir /var/cache/nwor --no-create-home --shell /usr/sbin/nologin nwor \
    && install -d -o nwor -g nwor -m 0755 /var/cache/nwor
# The mounted wheel is no part of the layer's key in every builder's cache; its sum, copied, is.
COPY --from=cuda-builder /wheels/SHA256SUMS /usr/local/lib/nwor/SHA256SUMS
RUN --mount=type=bind,from=cuda-builder,source=/wheels,target=/wheels \
    sha256sum --check /usr/local/lib/nwor/SHA256SUMS \
    && PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir --no-deps --no-index /wheels/*.whl
COPY LICENSE server/demo/README.md server/dashboard/static/vendor/uPlot.LICENSE.txt /usr/share/licenses/nwor/
COPY --chmod=0755 deploy/container/entrypoint.sh /usr/local/bin/nwor-entrypoint
COPY deploy/container/healthcheck.py deploy/container/licences.py /usr/local/lib/nwor/
# hadolint ignore=DL3064
ENV PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/var/cache/nwor \
    HF_HOME=/var/cache/nwor/huggingface \
    HF_TOKEN_PATH=/run/secrets/hf_token \
    VLLM_CACHE_ROOT=/var/cache/nwor/vllm \
    VLLM_CONFIG_ROOT=/var/cache/nwor/vllm-config \
    XDG_CACHE_HOME=/var/cache/nwor \
    TRITON_CACHE_DIR=/var/cache/nwor/triton \
    TORCHINDUCTOR_CACHE_DIR=/var/cache/nwor/inductor \
    FLASHINFER_WORKSPACE_BASE=/var/cache/nwor
RUN python3 /usr/local/lib/nwor/licences.py > /usr/share/licenses/nwor/python-packages.tsv
USER 10001:10001
WORKDIR /var/cache/nwor
# Without a GPU the doctor checks the CPU's ops and the CUDA library's record; with one it runs the kernels.
RUN ["python3", "-m", "nwor.doctor"]
ARG NWOR_VERSION
ARG NWOR_REVISION
LABEL org.opencontainers.image.title="nwor-server" \
      org.opencontainers.image.description="OpenAI-compatible inference server with EAGLE speculative decoding and no-write-on-reject KV caching on vLLM, for NVIDIA GPUs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${NWOR_VERSION}" \
      org.opencontainers.image.revision="${NWOR_REVISION}"
EXPOSE 8000
VOLUME ["/var/cache/nwor"]
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 \
    CMD ["python3", "/usr/local/lib/nwor/healthcheck.py"]
ENTRYPOINT ["/usr/bin/tini", "--", "/usr/local/bin/nwor-entrypoint"]
