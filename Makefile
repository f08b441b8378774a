# The real commands, by name.
.PHONY: dev build test check generate bench compare

dev: ; go run ./cmd/weir dev
build: ; CGO_ENABLED=0 go build -trimpath -o bin/weir ./cmd/weir
test: ; go test ./...
check: ; bash .ci/run
generate: ; ./proto/generate.sh
compare: ; cd bench && go run .
bench: ; go test -run '^$$' -bench . ./algo ./store ./limiter ./rpc
