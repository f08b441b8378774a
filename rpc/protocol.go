package rpc

import (
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// The versions of the peer protocol that this build speaks. Two nodes use the newest that both do, and refuse each other
// when there is none. During a rolling upgrade nodes of two builds live side by side, so a build that introduces a version
// goes on speaking the one before; CONTRIBUTING.md says when a version is needed.
const (
	Protocol       = 4
	OldestProtocol = 4
)

// agree returns the version that this node uses with one that speaks from oldest to newest. A build from before there
// was a choice does not say oldest, and speaks one only.
func agree(newest, oldest uint32) (uint32, error) {
	if oldest == 0 {
		oldest = newest
	}
	version := min(newest, Protocol)
	if version < oldest || version < OldestProtocol {
		return 0, status.Errorf(codes.FailedPrecondition, "protocol: this node speaks %s, not %s", versions(Protocol, OldestProtocol), versions(newest, oldest))
	}
	return version, nil
}

func versions(newest, oldest uint32) string {
	if newest == oldest {
		return fmt.Sprint(newest)
	}
	return fmt.Sprintf("%d to %d", oldest, newest)
}
