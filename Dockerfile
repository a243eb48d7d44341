# Image of the nightly job: vLLM in the version of requirements/<EXTRA>.txt, and this project.
#
#   docker build --build-arg EXTRA=gpu -t kv-acceptance-harness .
#   docker run --rm --gpus all --shm-size 8g --ulimit memlock=-1 kv-acceptance-harness doctor --profile gpu
#
# Pipelines name the image by digest: HARNESS_IMAGE=NAME@sha256:DIGEST. See docs/ci.md.

# python:3.11.15-slim-bookworm. `docker buildx imagetools inspect python:3.11.15-slim-bookworm` says whether that tag
# still has this digest; a later patch release is named with --build-arg BASE=NAME@sha256:DIGEST.
ARG BASE=python@sha256:b18992999dbe963a45a8a4da40ac2b1975be1a776d939d098c647482bcad5cba
FROM ${BASE}

ARG EXTRA=gpu

# vLLM compiles kernels while it starts; the versions of Debian's packages come with the base image's release.
# hadolint ignore=DL3008
RUN case "${EXTRA}" in cpu|gpu) ;; *) \
      printf 'expected --build-arg EXTRA=cpu or EXTRA=gpu, found "%s"\n' "${EXTRA}" >&2; exit 64 ;; esac \
 && apt-get update \
 && apt-get install -y --no-install-recommends g++ libnuma1 \
 && rm -rf /var/lib/apt/lists/*

ENV VIRTUAL_ENV=/opt/venv \
    PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONDONTWRITEBYTECODE=1 \
    UV_COMPILE_BYTECODE=1 \
    UV_NO_CACHE=1

WORKDIR /opt/harness

# The lock first: its layer of several gigabytes is kept while only the project changes.
COPY requirements/ requirements/
RUN python -m venv "${VIRTUAL_ENV}" \
 && python -m pip install --no-cache-dir --require-hashes -r requirements/uv.txt \
 && if [ "${EXTRA}" = cpu ]; then export UV_TORCH_BACKEND=cpu; fi \
 && uv pip install --no-deps -r "requirements/${EXTRA}.txt"

# FlashInfer's compiled kernels, which have no lock: there is no nvcc here to compile them with. `harness doctor` says
# whether they are there.
RUN if [ "${EXTRA}" = gpu ]; then \
      vllm download-kernels || printf 'FlashInfer has no kernels: cells with FLASHINFER will be UNKNOWN\n' >&2; fi

# Editable, because profiles, prompts and baselines are found beside the package.
COPY pyproject.toml setup.py README.md known-defects.yaml ./
COPY harness/ harness/
COPY prompts/ prompts/
COPY baselines/ baselines/
COPY models/ models/
RUN uv pip install --no-deps --no-build-isolation --editable . \
 && useradd --uid 10001 --create-home harness \
 && install -d -o harness -g harness reports

# By number, so that it can be told not to be root without the image's user list.
USER 10001
ENTRYPOINT ["harness"]
CMD ["--help"]
