# The real commands, by name.
.PHONY: dev build test check generate bench compare release

# The version of a release is the chart's appVersion. deploy's tests hold the manifests' image to it.
VERSION = $(shell sed -n 's/^appVersion: //p' deploy/helm/weir/Chart.yaml)
COMMIT = $(shell git rev-parse HEAD)
PLATFORMS = linux/amd64 linux/arm64 darwin/amd64 darwin/arm64
NAMES = github.com/weirlimit/weir/internal/cli

dev: ; go run ./cmd/weir dev
build: ; CGO_ENABLED=0 go build -trimpath -o bin/weir ./cmd/weir
test: ; go test ./...
check: ; bash .ci/run
generate: ; ./proto/generate.sh
compare: ; cd bench && go run .
bench: ; go test -run '^$$' -bench . ./algo ./store ./limiter ./rpc

# Static binaries with an SBOM each (CycloneDX) and their checksums in dist/. The same commit and Go give the same bytes.
release:
	git diff --quiet HEAD || { echo "there are changes that are not committed" >&2; exit 1; }
	rm -rf dist && mkdir dist
	set -e; for p in $(PLATFORMS); do \
	  out=dist/weir-$(VERSION)-$${p%/*}-$${p#*/}; \
	  GOFLAGS= GOAMD64=v1 GOARM64=v8.0 CGO_ENABLED=0 GOOS=$${p%/*} GOARCH=$${p#*/} go build -trimpath -buildvcs=false \
	    -ldflags "-s -w -X $(NAMES).release=$(VERSION) -X $(NAMES).commit=$(COMMIT)" -o $$out ./cmd/weir; \
	  go tool -modfile=release.mod cyclonedx-gomod bin -json -std -noserial -notimestamp -version $(VERSION) -output $$out.cdx.json $$out; \
	done
	cd dist && sha256sum weir-* >SHA256SUMS
