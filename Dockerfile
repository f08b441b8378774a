# docker build --build-arg VERSION=$(git describe --tags --always --dirty) --build-arg COMMIT=$(git rev-parse HEAD) -t weir:dev .
# docker run --rm weir:dev version
# The tag says which Go, not which image: a digest of the registry that yours comes from pins it (golang:1.26@sha256:...). None is
# given here, because it could not be looked up where this file was written. What is built does not depend on the image's system:
# the modules are pinned by go.sum, and the image below is made from scratch.
FROM --platform=$BUILDPLATFORM golang:1.26 AS build
WORKDIR /src
COPY . .
# GOPROXY is where modules come from, as for the go command, which has a default of its own.
ARG TARGETOS TARGETARCH VERSION=devel COMMIT GOPROXY
RUN --mount=type=cache,target=/go/pkg/mod --mount=type=cache,target=/root/.cache/go-build \
    CGO_ENABLED=0 GOOS=$TARGETOS GOARCH=$TARGETARCH \
    go build -trimpath -buildvcs=false \
    -ldflags "-s -w -X github.com/weirlimit/weir/internal/cli.release=$VERSION -X github.com/weirlimit/weir/internal/cli.commit=$COMMIT" \
    -o /weir ./cmd/node && mkdir /data

# The binary holds all it needs, time zones included.
FROM scratch
COPY --from=build /weir /weir
COPY LICENSE NOTICE /
# For --data-dir: a new volume there belongs to the node.
COPY --from=build --chown=65532:65532 /data /var/lib/weir
USER 65532:65532
# HTTP, gRPC, gossip, between nodes. No HEALTHCHECK: with TLS it takes a certificate to ask; Kubernetes and Compose have
# checks of their own.
EXPOSE 8080/tcp 8081/tcp 7946/tcp 7946/udp 7947/tcp
ENTRYPOINT ["/weir"]
