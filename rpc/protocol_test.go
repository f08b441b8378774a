package rpc

import (
	"strings"
	"testing"
)

// TestAgree: two builds that both speak a version use the newest of them, and others refuse each other and say why.
func TestAgree(t *testing.T) {
	for _, c := range []struct {
		newest, oldest uint32
		want           uint32
		says           string
	}{
		{Protocol, OldestProtocol, Protocol, ""},
		{Protocol + 1, Protocol, Protocol, ""},       // the next release, in the middle of an upgrade to it
		{Protocol + 9, OldestProtocol, Protocol, ""}, // it still knows all that this one does
		{Protocol, 0, Protocol, ""},
		{Protocol + 1, 0, 0, "not 5"},                 // the same, of another version
		{Protocol + 2, Protocol + 1, 0, "not 5 to 6"}, // two releases on
		{OldestProtocol - 1, 0, 0, "not 3"},
	} {
		got, err := agree(c.newest, c.oldest)
		if got != c.want || (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%d to %d: %d, %v", c.oldest, c.newest, got, err)
		}
	}
}

// TestNextReleaseIsWelcome: a node of a build to come, which still speaks this build's protocol, is answered in it.
func TestNextReleaseIsWelcome(t *testing.T) {
	noLeaks(t)
	_, addr := servePeer(t, bob, localLimiter(t))
	h := hello()
	h.Protocol, h.OldestProtocol = Protocol+1, Protocol
	stream := rawStream(t, addr, h)
	if n := ask(t, stream, batch(1, 0, check("k", 1))); n != 1 {
		t.Errorf("granted %d", n)
	}
}
