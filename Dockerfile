# docker build --build-arg VERSION=$(git describe --tags --always --dirty) -t weir:dev . && docker run --rm weir:dev --version
FROM --platform=$BUILDPLATFORM golang:1.26 AS build
WORKDIR /src
COPY . .
# GOPROXY is where modules come from, as for the go command.
ARG TARGETOS TARGETARCH VERSION=devel GOPROXY=https://proxy.golang.org,direct
RUN --mount=type=cache,target=/go/pkg/mod --mount=type=cache,target=/root/.cache/go-build \
    CGO_ENABLED=0 GOOS=$TARGETOS GOARCH=$TARGETARCH \
    go build -trimpath -buildvcs=false -ldflags "-s -w -X main.release=$VERSION" -o /weir ./cmd/node

# The binary holds all it needs, time zones included.
FROM scratch
COPY --from=build /weir /weir
USER 65532:65532
# HTTP, gRPC, gossip, between nodes. No HEALTHCHECK: with TLS it takes a certificate to ask; Kubernetes and Compose have
# checks of their own.
EXPOSE 8080/tcp 8081/tcp 7946/tcp 7946/udp 7947/tcp
ENTRYPOINT ["/weir"]
