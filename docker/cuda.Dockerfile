# meshtrainer on NVIDIA GPUs: docker build -f docker/cuda.Dockerfile -t meshtrainer:cuda .   (after: python -m build)
#     docker run --gpus all --ipc=host -v "$PWD:/home/trainer" meshtrainer:cuda run recipe=llama_small nproc=8
# The torch wheel includes the CUDA libraries, so the image needs no toolkit; the host provides the driver.
FROM python:3.12-slim
COPY dist/*.whl /tmp/
RUN pip install --no-cache-dir torch
RUN pip install --no-cache-dir "$(ls /tmp/meshtrainer-*.whl)[hf,data,fast]"
# Compiling kernels (train.compile) needs a C compiler.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 trainer
USER trainer
WORKDIR /home/trainer
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
ENTRYPOINT ["meshtrainer"]
CMD ["--help"]
