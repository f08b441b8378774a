#!/usr/bin/env bash
# Regenerates the Go code from the .proto files, with the plugins pinned in go.mod. Needs protoc (protobuf-compiler).
set -euo pipefail
cd "$(dirname "$0")"
bin=$(mktemp -d)
trap 'rm -rf "$bin"' EXIT
GOBIN=$bin go install google.golang.org/protobuf/cmd/protoc-gen-go google.golang.org/grpc/cmd/protoc-gen-go-grpc \
  github.com/planetscale/vtprotobuf/cmd/protoc-gen-go-vtproto
# Of what is pooled whoever takes one from the pool gives it back; all others are plain messages with faster marshalling.
v1=github.com/weirlimit/weir/proto/weir/v1
peer=github.com/weirlimit/weir/proto/weir/peer/v1
pools=$(printf -- '--go-vtproto_opt=pool=%s ' $v1.CheckRequest $v1.Check $v1.Target $v1.CheckStreamRequest $v1.CheckStreamResponse \
  $peer.Batch $peer.Reply)
PATH=$bin:$PATH protoc -I . \
  --go_out=. --go_opt=paths=source_relative \
  --go-grpc_out=. --go-grpc_opt=paths=source_relative \
  --go-vtproto_out=. --go-vtproto_opt=paths=source_relative,features=marshal+unmarshal+size+pool $pools \
  weir/v1/limiter.proto weir/v1/admin.proto weir/v1/overrides.proto weir/peer/v1/peer.proto weir/peer/v1/ownership.proto weir/peer/v1/gossipkeys.proto weir/peer/v1/overrides.proto
# Gubernator's interface, for its callers only.
PATH=$bin:$PATH protoc -I ../gateway/gubernator/gubernatorpb \
  --go_out=../gateway/gubernator/gubernatorpb --go_opt=paths=source_relative \
  --go-grpc_out=../gateway/gubernator/gubernatorpb --go-grpc_opt=paths=source_relative \
  gubernator.proto
# Kuadrant's, which imports Envoy's.
go run ./envoyset >"$bin/envoy.pb"
PATH=$bin:$PATH protoc --descriptor_set_in="$bin/envoy.pb" -I ../gateway/envoy/kuadrantpb \
  --go_out=../gateway/envoy/kuadrantpb --go_opt=paths=source_relative \
  --go-grpc_out=../gateway/envoy/kuadrantpb --go-grpc_opt=paths=source_relative \
  kuadrantrls.proto
