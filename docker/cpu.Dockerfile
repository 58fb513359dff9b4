# meshtrainer on CPUs: docker build -f docker/cpu.Dockerfile -t meshtrainer:cpu .   (after: python -m build)
FROM python:3.12-slim
COPY dist/*.whl /tmp/
RUN pip install --no-cache-dir torch --index-url https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir "$(ls /tmp/meshtrainer-*.whl)[hf,data,fast]"
RUN useradd --create-home --uid 1000 trainer
USER trainer
WORKDIR /home/trainer
ENTRYPOINT ["meshtrainer"]
CMD ["--help"]
