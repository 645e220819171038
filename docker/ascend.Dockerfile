# MindRLHF on Ascend: the training environment on one CANN, the rollout environment on another.
#   docker build -f docker/ascend.Dockerfile -t mindrlhf:ascend .
# The images of CANN are Huawei's; name others for other devices:
#   --build-arg TRAINING_CANN=... --build-arg ROLLOUT_CANN=...
# How to start it, with devices and driver: docs/install.md. Not built or run by us: no NPU is at hand.
ARG TRAINING_CANN=ascendai/cann:9.0.0-910b-ubuntu22.04-py3.11
ARG ROLLOUT_CANN=ascendai/cann:9.1.0-910b-ubuntu22.04-py3.11

FROM ${ROLLOUT_CANN} AS rollout

FROM ${TRAINING_CANN}
# The driver is the host's, mounted at /usr/local/Ascend/driver.
COPY --from=rollout /usr/local/Ascend /usr/local/Ascend-rollout

RUN apt-get update && apt-get install -y --no-install-recommends iproute2 procps libnuma1 git \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /workspace/mindrlhf
COPY . .
RUN python3.11 -m venv .venv \
    && .venv/bin/python -m pip install --no-cache-dir -e '.[ascend-train,dev]'
RUN python3.11 -m venv .venv-rollout \
    # Built without device code: the wheel of vllm asks for another torch than vllm-ascend does.
    && VLLM_TARGET_DEVICE=empty .venv-rollout/bin/python -m pip install --no-cache-dir --no-binary vllm 'vllm==0.23.0' \
    && .venv-rollout/bin/python -m pip install --no-cache-dir 'vllm-ascend==0.23.0'

# The server's interpreter, with its own CANN loaded in the place of the trainer's.
RUN printf '%s\n' '#!/usr/bin/env bash' \
        'unset LD_LIBRARY_PATH ASCEND_HOME_PATH ASCEND_TOOLKIT_HOME ASCEND_OPP_PATH ASCEND_AICPU_PATH' \
        'export LD_LIBRARY_PATH=/usr/local/Ascend/driver/lib64/driver:/usr/local/Ascend/driver/lib64/common' \
        'source /usr/local/Ascend-rollout/ascend-toolkit/set_env.sh' \
        'exec /workspace/mindrlhf/.venv-rollout/bin/python "$@"' > /usr/local/bin/rollout-python \
    && chmod +x /usr/local/bin/rollout-python
ENV MINDRLHF_ROLLOUT_PYTHON=/usr/local/bin/rollout-python
ENV PATH=/workspace/mindrlhf/.venv/bin:$PATH
ENTRYPOINT ["bash", "-c", "source /usr/local/Ascend/ascend-toolkit/set_env.sh && exec \"$@\"", "mindrlhf"]
CMD ["mindrlhf", "doctor"]
