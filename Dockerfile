# docker build -t weir:dev . && docker run weir:dev --help
FROM --platform=$BUILDPLATFORM golang:1.26 AS build
WORKDIR /src
COPY . .
ARG TARGETOS TARGETARCH
RUN --mount=type=cache,target=/go/pkg/mod --mount=type=cache,target=/root/.cache/go-build \
    CGO_ENABLED=0 GOOS=$TARGETOS GOARCH=$TARGETARCH go build -trimpath -o /weir ./cmd/node

# The binary holds all it needs, time zones included.
FROM scratch
COPY --from=build /weir /weir
USER 65532:65532
# HTTP, gRPC, gossip, between nodes
EXPOSE 8080/tcp 8081/tcp 7946/tcp 7946/udp 7947/tcp
ENTRYPOINT ["/weir"]
