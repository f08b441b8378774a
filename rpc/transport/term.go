package transport

import (
	"github.com/weirlimit/weir/cluster/ownership"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
)

func ProtoTerm(t ownership.Term) *peerv1.Term {
	if t == (ownership.Term{}) {
		return nil
	}
	return &peerv1.Term{Epoch: t.Epoch, N: t.N}
}

func Term(t *peerv1.Term) ownership.Term { return ownership.Term{Epoch: t.GetEpoch(), N: t.GetN()} }
