# vllm-router from the Python package index.
FROM python:3.12-slim
RUN pip install --no-cache-dir vllm-router==0.1.17
USER nobody
EXPOSE 30000
ENTRYPOINT ["vllm-router", "--host", "0.0.0.0", "--port", "30000"]
