package peer

import (
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/internal/fifo"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/rpc/wire"
	"github.com/weirlimit/weir/store"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// mixed is an operation of any kind, with or without what is rare, that names one of few targets.
func mixed(rng *rand.Rand) *limiter.Op {
	kind := limiter.OpCheck
	if rng.IntN(4) == 0 {
		kind = kinds[rng.IntN(len(kinds))]
	}
	op := carried(rng, kind)
	op.Limit = []*algo.Limit{
		nil, {Algorithm: algo.TokenBucket, Limit: 5, Window: time.Second},
		{Algorithm: algo.FixedWindow, Limit: -1, Period: algo.Day, Zone: time.UTC},
	}[rng.IntN(3)]
	op.Policy, op.Namespace = "", []string{"", "n", limit.EnvoyNamespace + "d"}[rng.IntN(3)]
	if op.Limit == nil {
		op.Policy, op.Namespace = []string{"p", "q"}[rng.IntN(2)], ""
	}
	op.Configured = limit.Reserved(op.Namespace)
	if rng.IntN(2) == 0 {
	}
	op.Hops = uint8(1 + rng.IntN(3))
	if kind == limiter.OpCheck {
		switch rng.IntN(4) {
		case 0:
			op.Cost, op.Partial, op.Always, op.RequestID = 1, false, false, ""
		case 1:
			op.Cost = []int64{0, -1, math.MinInt64, math.MaxInt64}[rng.IntN(4)]
		}
		if rng.IntN(4) == 0 {
			op.Trace = strings.Repeat(string(rune('a'+rng.IntN(26))), limiter.TraceContext)
		}
	}
	return op
}

// sorted is some operations of any kind, the checks first.
func sorted(rng *rand.Rand, n int) []*limiter.Op {
	ops := make([]*limiter.Op, n)
	for i := range ops {
		ops[i] = mixed(rng)
		ops[i].Caller = []string{"", "shop", "support"}[rng.IntN(3)]
	}
	slices.SortStableFunc(ops, func(a, b *limiter.Op) int { return isItem(a) - isItem(b) })
	return ops
}

// TestPackedOperations: what arrives is what was sent, on a stream as long as any.
func TestPackedOperations(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 20 {
		sent, names := new(wire.Numbers), new(numberedTargets)
		defined := 0
		for sequence := range uint64(20) {
			ops := sorted(rng, rng.IntN(50))
			left := time.Duration(1+rng.IntN(3_000)) * time.Millisecond
			b := overTheWire(t, packedBatch(sent, sequence+1, left, ops...))
			defined += len(b.GetChecks().GetDefine())
			got, err := names.unpack(b, nil)
			must.True(t, err == nil && len(got) == len(ops), "%v, %d operations of %d", err, len(got), len(ops))
			for i, op := range ops {
				if op.Left = left; !reflect.DeepEqual(got[i].link(), op) {
					t.Fatalf("operation %d\n got %+v %+v\nwant %+v %+v", i, got[i].Op, got[i].check, op, op.Check)
				}
			}
		}
		expect.True(t, defined <= 8, "%d definitions of 8 targets", defined)
	}
	b := packedBatch(new(wire.Numbers), 1, time.Microsecond, check("k", 1))
	expect.True(t, b.Checks.TimeoutsMs[0] == 1, "%v: a time is rounded up", b.Checks)
}

// TestPackedOutcomes: and so are outcomes, of whatever kind.
func TestPackedOutcomes(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for range 300 {
		ops := sorted(rng, 1+rng.IntN(20))
		var want, got []*limiter.Op
		for _, op := range ops {
			carryOut(rng, op)
			one := again(op)
			setOutcome(one, overTheWire(t, protoOutcome(op)))
			want, got = append(want, one), append(got, again(op))
		}
		r := overTheWire(t, replyOf(1, ops...)).GetReply()
		must.True(t, read(r, got), "no reply: %v", r)
		for i := range got {
			must.True(t, reflect.DeepEqual(got[i], want[i]),
				"outcome %d\n got %+v %+v\nwant %+v %+v", i, got[i], got[i].Decision, want[i], want[i].Decision)
		}
	}
}

// again is an operation as it was before anything came of it.
func again(op *limiter.Op) *limiter.Op {
	var x limiter.Extra
	if op.Extra != nil {
		x = *op.Extra
		x.Reply = limiter.Reply{}
	}
	return limiter.NewOp(op.Kind, *op.Check, x)
}

// carryOut has anything come of an operation that may.
func carryOut(rng *rand.Rand, op *limiter.Op) {
	out := &op.Outcome
	switch rng.IntN(8) {
	case 0:
		out.Err = limit.NewError(limit.Invalid, "f", "m")
		return
	case 1:
		out.NotHolder = &ownership.Route{Standing: ownership.Elsewhere, Node: ownership.Node{Name: "n", Boot: 3},
			Term: ownership.Term{Epoch: 1, N: 2}}
		return
	case 2:
		out.Unreachable = true
		return
	}
	switch op.Kind {
	case limiter.OpCheck, limiter.OpAcquire, limiter.OpReserve:
		d := op.Decision
		fill(rng, reflect.ValueOf(d).Elem())
		d.LeaseID, d.ReservationID = "", ""
		d.Policy, d.RequestID = op.PolicyName(), op.RequestID
		for _, drop := range []func(){
			func() { d.Allowed = false }, func() { d.Granted = op.Cost }, func() { d.Limit, d.Window = 7, 9 },
			func() { d.RetryAfter = 0 }, func() { d.RetryAfter = algo.Never }, func() { d.ResetAfter = 0 },
			func() { d.RememberFor = 0 },
			func() { d.Delay = 0 }, func() { d.Shadow = false }, func() { d.Degraded = false },
			func() { d.FailedOpen = false },
			func() { d.FailedClosed = false }, func() { d.NearLimit = false }, func() { d.Banned = false },
			func() { d.RetryAfterEstimated = false }, func() { d.Limits = nil }, func() { d.Remaining = 0 },
			func() { d.Policy = "another" }, func() { d.RequestID = "another" }, func() { d.LeaseID = "l" },
			func() { d.ReservationID = "r" },
		} {
			if rng.IntN(3) == 0 {
				drop()
			}
		}
		for i := range d.Limits {
			if rng.IntN(2) == 0 {
				d.Limits[i].RetryAfter = algo.Never
			}
		}
		out.Lease = time.Duration(rng.IntN(2)) * time.Second
	case limiter.OpRenew:
		op.Reply.ExpiresIn = time.Second
	case limiter.OpRelease:
		op.Reply.Released = true
	case limiter.OpRefund, limiter.OpSettle:
		op.Reply.Refunded = 3
	}
}

// TestPackedNonsense: what no sender writes is no batch, and no reply.
func TestPackedNonsense(t *testing.T) {
	for what, change := range map[string]func(*peerv1.Batch){
		"a key cut short":                func(b *peerv1.Batch) { b.Checks.Keys = b.Checks.Keys[1:] },
		"a key of a huge length":         func(b *peerv1.Batch) { b.Checks.KeyLengths[0] = math.MaxUint32 },
		"more than keys":                 func(b *peerv1.Batch) { b.Checks.Keys = append(b.Checks.Keys, 'k') },
		"no such target":                 func(b *peerv1.Batch) { b.Checks.Targets = []uint32{1} },
		"a target far off":               func(b *peerv1.Batch) { b.Checks.Targets = []uint32{math.MaxUint32} },
		"two costs for three checks":     func(b *peerv1.Batch) { b.Checks.Costs = []int64{1, 2} },
		"two times for three checks":     func(b *peerv1.Batch) { b.Checks.TimeoutsMs = []uint32{1, 2} },
		"two traces for three checks":    func(b *peerv1.Batch) { b.Checks.TraceContexts = make([][]byte, 2) },
		"two flags for three checks":     func(b *peerv1.Batch) { b.Flags = []uint32{1, 2} },
		"two hops for three checks":      func(b *peerv1.Batch) { b.Hops = []uint32{1, 2} },
		"two callers for three checks":   func(b *peerv1.Batch) { b.Callers = []string{"a", "b"} },
		"a caller with a long name":      func(b *peerv1.Batch) { b.Callers = []string{strings.Repeat("c", maxCaller+1)} },
		"a number too large":             func(b *peerv1.Batch) { b.Checks.Define[0].Number = wire.MaxTargets },
		"no target, but one defined bad": func(b *peerv1.Batch) { b.Checks.Define[0].Number = 7 },
	} {
		b := packedBatch(new(wire.Numbers), 1, time.Second, check("k", 1), check("k", 1), check("k", 1))
		change(b)
		_, err := new(numberedTargets).unpack(b, nil)
		expect.True(t, status.Code(err) == codes.InvalidArgument, "%s: %v", what, err)
	}
	ops, err := new(numberedTargets).unpack(&peerv1.Batch{}, nil)
	expect.True(t, err == nil && len(ops) == 0, "a batch of nothing: %v", err)
	for what, change := range map[string]func(*peerv1.Reply){
		"nothing":                   func(r *peerv1.Reply) { *r = peerv1.Reply{} },
		"too few":                   func(r *peerv1.Reply) { r.Answered = 2 },
		"an item too many":          func(r *peerv1.Reply) { r.Items = make([]*peerv1.ItemReply, 1) },
		"lists too short":           func(r *peerv1.Reply) { r.Checks.Granted = []int64{1, 2} },
		"too few leases":            func(r *peerv1.Reply) { r.LeasesNs = []uint64{1, 2} },
		"another outcome of none":   func(r *peerv1.Reply) { r.Others = []*peerv1.ItemReply{{Check: 3}} },
		"outcomes not in order":     func(r *peerv1.Reply) { r.Others = []*peerv1.ItemReply{{Check: 1}, {Check: 0}} },
		"limits of none":            func(r *peerv1.Reply) { r.Checks.Limits = []*weirv1.StreamLimits{{Check: 3}} },
		"limits of one check twice": func(r *peerv1.Reply) { r.Checks.Limits = []*weirv1.StreamLimits{{}, {}} },
	} {
		ops := []*limiter.Op{check("k", 1), check("k", 1), check("k", 1)}
		r := replyOf(1, ops...).GetReply()
		change(r)
		expect.True(t, !read(r, ops), "reply: %s", what)
	}
}

// TestTargetsUnknownHere: a limit that this node cannot make sense of is an error of those who name it, until the
// number is given to another one.
func TestTargetsUnknownHere(t *testing.T) {
	names := new(numberedTargets)
	mars := &weirv1.Limit{Algorithm: 1, Limit: 1, Period: 3, TimeZone: "Mars/Olympus"}
	ops, err := names.unpack(&peerv1.Batch{Checks: &weirv1.CheckStreamRequest{
		Define: []*weirv1.StreamTarget{{Number: 0, Limit: mars}, {Number: 1, Policy: "p"}},
		Keys:   []byte("ab"), KeyLengths: []uint32{1, 1}, Targets: []uint32{0, 1},
	}}, nil)
	must.True(t, err == nil && len(ops) == 2 && ops[0].Outcome.Err != nil &&
		ops[0].Outcome.Err.Field == "limit.time_zone" && ops[1].Outcome.Err == nil, "%v: %+v", err, ops)
	ops, err = names.unpack(&peerv1.Batch{Checks: &weirv1.CheckStreamRequest{
		Define: []*weirv1.StreamTarget{{Number: 0, Policy: "q"}}, Keys: []byte("a"), KeyLengths: []uint32{1},
	}}, nil)
	must.True(t, err == nil && ops[0].check.Policy == "q" && ops[0].Outcome.Err == nil, "%v: %+v", err, ops)
}

// TestNumbers: the messages of a new stream define all that they name, and are not misread when numbers run out.
func TestNumbers(t *testing.T) {
	l := newQueue(&ForwarderConfig{}, bob, fifo.NewSignal())
	ask := func(policies ...string) *message {
		t.Helper()
		f := callOf(time.Hour, len(policies))
		for i, p := range policies {
			f.ops[i].Policy = p
		}
		must.True(t, l.add(f), "not taken")
		return l.take()
	}
	named := func(names *numberedTargets, m *message) (list []string) {
		t.Helper()
		for _, op := range asked(t, names, overTheWire(t, &m.batch)) {
			list = append(list, op.Policy)
		}
		return list
	}
	first := new(numberedTargets)
	for _, policies := range [][]string{{"a"}, {"a", "b"}, {"b", "a", "b"}, {"c", "a"}} {
		m := ask(policies...)
		expect.True(t, slices.Equal(named(first, m), policies), "%v: %v", policies, m)
	}
	l.answered(replyOf(1, check("k", 1)).GetReply())
	l.Broken(io.EOF)
	l.numbers.Reset() // as on every new stream
	second := new(numberedTargets)
	again := l.take()
	expect.True(t, slices.Equal(named(second, again), []string{"a", "b", "b", "a", "b", "c", "a"}), "%v", again)
	for _, policies := range [][]string{{"c", "d", "a"}, {"b", "d"}} {
		m := ask(policies...)
		expect.True(t, slices.Equal(named(second, m), policies), "%v: %v", policies, m)
	}
	var many []string
	for i := range maxBatch {
		many = append(many, fmt.Sprint("p", i))
	}
	for _, policies := range [][]string{many, {"a", "b"}, slices.Concat([]string{"x"}, many[1:]), {"y", "a"}, many} {
		m := ask(policies...)
		expect.True(t, slices.Equal(named(second, m), policies), "%.40v: %.400v", policies, m)
	}
}

// FuzzPackedOperations: whatever bytes a peer sends become operations or an error, and checks that are packed again
// arrive as they are.
func FuzzPackedOperations(f *testing.F) {
	rng := rand.New(rand.NewPCG(5, 6))
	for range 10 {
		b := must.Value(packedBatch(new(wire.Numbers), 1, time.Second, sorted(rng, 3)...).MarshalVT())(f)
		f.Add(b)
	}
	l := limiter.New(limiter.Config{Store: limiter.NewStore(store.Config{MaxKeys: 100, MaxBytes: 1 << 20}, true)})
	f.Cleanup(l.Close)
	f.Fuzz(func(t *testing.T, data []byte) {
		b := new(peerv1.Batch)
		if b.UnmarshalVT(data) != nil {
			return
		}
		var w work
		if w.read(b, 1, new(numberedTargets)) != nil {
			return
		}
		checks := w.good[:checksOf(w.good)]
		again := packedBatch(new(wire.Numbers), 1, time.Second, checks...)
		back, err := new(numberedTargets).unpack(again, nil)
		must.True(t, err == nil && len(back) == len(checks), "%v, %d operations of %d", err, len(back), len(checks))
		for i, op := range checks {
			back[i].Left = op.Left
			must.True(t, reflect.DeepEqual(back[i].link(), op), "operation %d\n got %+v\nwant %+v", i, back[i], op)
		}
		must.True(t, l.Receive(w.good) == nil, "handed on to nobody")
		var asked []*limiter.Op
		for i := range w.ops {
			op := w.ops[i].link()
			if op.Kind == 0 {
				op.Kind = limiter.OpReset // what this version does not know
			}
			asked = append(asked, limiter.NewOp(op.Kind, *op.Check,
				limiter.Extra{Loan: new(limiter.LoanCall)}))
		}
		must.True(t, read(reply(1, w.ops), asked), "what was answered is no answer")
	})
}

// FuzzPackedOutcomes: whatever bytes a peer answers with, they are outcomes or none.
func FuzzPackedOutcomes(f *testing.F) {
	rng := rand.New(rand.NewPCG(7, 8))
	fresh := func() (ops []*limiter.Op) {
		for range 3 {
			ops = append(ops, check("k", 1))
		}
		return append(ops, limiter.NewOp(limiter.OpReset, limit.Check{}, limiter.Extra{}))
	}
	for range 10 {
		ops := fresh()
		for _, op := range ops {
			carryOut(rng, op)
		}
		b := must.Value(replyOf(1, ops...).GetReply().MarshalVT())(f)
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		r := new(peerv1.Reply)
		if r.UnmarshalVT(data) != nil {
			return
		}
		got, back := fresh(), fresh()
		if !read(r, got) {
			return
		}
		must.True(t, read(replyOf(1, got...).GetReply(), back) && reflect.DeepEqual(got, back), "%+v became %+v", got,
			back)
	})
}
