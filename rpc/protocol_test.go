package rpc

import (
	"strings"
	"testing"
	"time"

	"github.com/weirlimit/weir/limiter"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
)

// TestAgree: two builds that both speak a version use the newest of them, and others refuse each other and say why.
func TestAgree(t *testing.T) {
	for _, c := range []struct {
		newest, oldest uint32
		want           uint32
		says           string
	}{
		{Protocol, OldestProtocol, Protocol, ""},
		{Protocol - 1, OldestProtocol, Protocol - 1, ""}, // the release before
		{OldestProtocol, 0, OldestProtocol, ""},          // one that had no choice yet
		{Protocol + 1, Protocol, Protocol, ""},           // the next release, in the middle of an upgrade to it
		{Protocol + 9, OldestProtocol, Protocol, ""},     // it still knows all that this one does
		{Protocol, 0, Protocol, ""},
		{Protocol + 1, 0, 0, "not 4"},                 // the same, of another version
		{Protocol + 2, Protocol + 1, 0, "not 4 to 5"}, // two releases on
		{OldestProtocol - 1, 0, 0, "not 0"},
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

// TestLastReleaseIsWelcome: a node of the build before sends items, and is answered with items.
func TestLastReleaseIsWelcome(t *testing.T) {
	noLeaks(t)
	_, addr := servePeer(t, bob, localLimiter(t))
	h := hello()
	h.Protocol, h.OldestProtocol = 1, 1
	stream := rawStream(t, addr, nil)
	sendTo(t, stream, &peerv1.ForwardRequest{Body: &peerv1.ForwardRequest_Hello{Hello: h}})
	if w := recv(t, stream).GetWelcome(); w.GetProtocol() != 1 {
		t.Fatalf("%v", w)
	}
	b := &peerv1.Batch{Sequence: 1, Items: []*peerv1.Item{protoItem(check("k", 1), time.Second), protoItem(check("k", 2), time.Second)}}
	sendTo(t, stream, &peerv1.ForwardRequest{Body: &peerv1.ForwardRequest_Batch{Batch: b}})
	r := recv(t, stream).GetReply()
	if r.GetSequence() != 1 || len(r.GetItems()) != 2 || len(r.GetOutcomes()) != 0 {
		t.Fatalf("%v", r)
	}
	for i, item := range r.Items {
		if d := item.GetDecision(); !d.GetAllowed() || d.GetGranted() != int64(i+1) {
			t.Errorf("%d: %v", i, d)
		}
	}
}

// TestLastReleaseIsAsked: a node of the build before gets items, and may answer another number of them than it was asked for.
func TestLastReleaseIsAsked(t *testing.T) {
	noLeaks(t)
	addr := serveBob(t, func(s peerv1.Peer_ForwardServer) error {
		_ = s.Send(welcome(1))
		for {
			in, err := s.Recv()
			if err != nil {
				return nil
			}
			b := in.GetBatch()
			if b == nil {
				continue
			}
			if len(b.Items) == 0 || len(b.Operations) > 0 || len(b.Define) > 0 {
				t.Errorf("%v", b)
			}
			r := &peerv1.Reply{Sequence: b.Sequence}
			for _, item := range b.Items {
				op := new(limiter.Op)
				operation(op, item)
				if op.Cost != 5 {
					r.Items = append(r.Items, protoOutcome(admitted(op)))
				}
			}
			_ = s.Send(&peerv1.ForwardReply{Body: &peerv1.ForwardReply_Reply{Reply: r}})
		}
	})
	p := newPeers(t, addr)
	ctx := within(t, patience)
	soon(t, func() {
		wantAnswer(t, forward(p, ctx, 1))
		wantUnreachable(t, forward(p, ctx, 5))
		many := []*limiter.Op{check("a", 2), {Kind: limiter.OpReset, Check: check("b", 0).Check}, check("c", 3)}
		p.Forward(ctx, holder(bob), many)
		wantAnswer(t, many[0])
		wantAnswer(t, many[2])
	})
}
