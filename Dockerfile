# The server in an image:
#   docker build -t quire .
#   docker run -p 8080:8080 -v quire:/var/cache/quire quire --hf-repo user/model-GGUF
# Without a flag the small model that comes with quire answers. A CPU build: the image has no nvcc.
FROM debian:13-slim AS build
WORKDIR /quire
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends make && rm -rf /var/lib/apt/lists/*
COPY tools/setup.sh tools/setup.sh
RUN tools/setup.sh build && tools/setup.sh package
COPY . .
RUN make package SETUP=:

FROM debian:13-slim
COPY --from=build /quire/build/release/package/quire_*.deb /tmp/
# hadolint ignore=DL3008
RUN apt-get update && \
    apt-get install -y --no-install-recommends /tmp/quire_*.deb ca-certificates curl && \
    rm -rf /var/lib/apt/lists/* /tmp/quire_*.deb && \
    useradd --system --uid 10001 --home-dir /var/cache/quire --create-home quire
# The number, as a system that runs the image may not look into its list of users.
USER 10001
ENV HF_HOME=/var/cache/quire QUIRE_PORT=8080
VOLUME /var/cache/quire
EXPOSE 8080
# Ready means that the model is loaded; a large one may have to be fetched first.
HEALTHCHECK --interval=30s --timeout=5s --start-period=30m \
    CMD ["sh", "-c", "curl -fsS http://127.0.0.1:$QUIRE_PORT/health/ready >/dev/null"]
ENTRYPOINT ["quire-server", "--host", "0.0.0.0"]
