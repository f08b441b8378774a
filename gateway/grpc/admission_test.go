package grpc

import (
	"context"
	"fmt"
	"testing"

	"github.com/weirlimit/weir/internal/admission"
	"github.com/weirlimit/weir/internal/fairshare"
	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/rpc/wire"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// Requests of many checks wait where those that are being carried out take all the memory that there is for them; those of few
// do not. All of it is given back.
func TestRequestsShareMemory(t *testing.T) {
	noLeaks(t)
	d := &distant{answer: make(chan struct{})}
	full := func(prefix string) *weirv1.CheckStreamRequest {
		in := streamed(1)
		for i := range limit.MaxBatch {
			key := fmt.Sprintf("%s %d", prefix, i)
			in.Keys, in.KeyLengths = append(in.Keys, key...), append(in.KeyLengths, uint32(len(key)))
		}
		return in
	}
	most := int64(full("far").SizeVT())*perByte + limit.MaxBatch*perCheck + lightRequest
	gate := admission.NewGate(most)
	c := client(t, ServerConfig{Service: d, Requests: gate})
	first, second, light := openStream(t, c), openStream(t, c), openStream(t, c)
	must.NoError(t, first.Send(full("far")))
	out := nextOf(t, first)
	must.True(t, out.More, "%v", out)
	must.NoError(t, second.Send(full("near")))
	const few = 50
	for range few {
		out := exchange(t, light, streamed(1, "near"))
		must.True(t, out.Error == nil && len(out.Flags) == 1, "%v", out)
	}
	d.mu.Lock()
	expect.Equal(t, d.begun, 1+few, "requests are begun")
	d.mu.Unlock()
	close(d.answer)
	out = nextOf(t, second)
	expect.Equal(t, out.Error, nil, "%v", out)
	// What cannot be decoded and what is refused as a whole gives back what it took, too.
	bad := full("near")
	bad.KeyLengths[0] = 1 << 20
	out = exchange(t, second, bad)
	expect.True(t, out.Error != nil, "a request that is not acceptable is answered")
	_, err := c.Check(t.Context(), &weirv1.CheckRequest{Checks: make([]*weirv1.Check, 2000)})
	expect.True(t, err != nil, "2000 checks are answered")
	taken, err := gate.Enter(t.Context(), most)
	expect.True(t, err == nil && taken == most, "%d, %v", taken, err)
}

// TestDefinitionsByBytes is an attack: streams that define as many targets as there may be. What a caller's streams keep takes no more than its share of
// the bytes that there are; other callers' define theirs; all is given back when the streams end.
func TestDefinitionsByBytes(t *testing.T) {
	noLeaks(t)
	const all = 1 << 20
	kept := fairshare.New(all)
	t.Cleanup(func() { // after the servers' ends
		taken, _ := kept.InUse()
		expect.Equal(t, taken, 0, "bytes are taken without streams")
	})
	client := func(caller string) weirv1.LimiterClient {
		return client(t, ServerConfig{Service: &distant{}, Kept: kept, Caller: func(context.Context) string { return caller }})
	}
	define := func(c weirv1.LimiterClient, number uint32) bool {
		in := streamed(1, "near")
		in.Define = append(in.Define, &weirv1.StreamTarget{Number: number, Policy: "p"})
		return exchange(t, openStream(t, c), in).Error == nil
	}
	thief, shop := client("thief"), client("shop")
	defined := 0
	for range 20 {
		if define(thief, wire.MaxTargets-1) {
			defined++
		}
	}
	taken, _ := kept.InUse()
	expect.True(t, defined != 0 && defined*(wire.MaxTargets-freeTargets)*targetBytes == int(taken) && taken <= all*3/4,
		"%d streams take %d bytes of %d", defined, taken, all)
	expect.True(t, define(shop, 100) && define(thief, freeTargets-1), "a stream with few targets is denied")
}

// lenderFunc is a Lender that nobody can be asked by.
type lenderFunc func(in []limit.Borrow, out []limit.Lent)

func (f lenderFunc) Lend(_ context.Context, in []limit.Borrow, out []limit.Lent) (func(), error) {
	f(in, out)
	return nil, nil
}

func (lenderFunc) OpenBorrower(uint64, func(limit.Recall)) func() { return func() {} }

// What a request of many loans takes is counted while it is carried out.
func TestLoansShareMemory(t *testing.T) {
	noLeaks(t)
	in := &weirv1.BorrowRequest{Borrower: 1}
	for range limit.MaxBatch {
		in.Loans = append(in.Loans, report(0))
	}
	need := int64(in.SizeVT())*perByte + limit.MaxBatch*perCheck
	gate := admission.NewGate(need + 1)
	lends := make(chan error, 2)
	stream := openLoans(t, connect(t, ServerConfig{Service: &distant{}, Requests: gate, Lender: lenderFunc(func([]limit.Borrow, []limit.Lent) {
		none, cancel := context.WithCancel(context.Background())
		cancel()
		_, err := gate.Enter(none, 2)
		lends <- err
	})}))
	for range 2 {
		must.NoError(t, stream.Send(in))
		out, err := stream.Recv()
		must.True(t, err == nil && len(out.Loans) == limit.MaxBatch, "%v, %v", out, err)
		expect.True(t, <-lends != nil, "there is room for more than is left beside the request")
	}
	taken, err := gate.Enter(t.Context(), need+1)
	expect.True(t, err == nil && taken == need+1, "%d, %v", taken, err)
}
