package peer

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
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
	"github.com/weirlimit/weir/internal/varint"
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
		nil, {Algorithm: algo.TokenBucket, Limit: 5, Window: time.Second}, {Algorithm: algo.FixedWindow, Limit: -1, Period: algo.Day, Zone: time.UTC},
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

// packedBatch packs operations as one batch of a stream.
func packedBatch(t testing.TB, n *wire.Numbers, sequence uint64, left time.Duration, ops ...*limiter.Op) *peerv1.Batch {
	t.Helper()
	p := packer{numbers: n, sequence: sequence}
	for _, op := range ops {
		must.True(t, p.add(op, left), "no number left")
	}
	return &peerv1.Batch{Sequence: sequence, Define: p.define, Operations: p.bytes}
}

// TestPackedOperations: what arrives packed is what arrives as items, in the same order, on a stream as long as any.
func TestPackedOperations(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 20 {
		sent, names := new(wire.Numbers), new(numberedTargets)
		defined := 0
		for sequence := range uint64(20) {
			left := time.Duration(rng.IntN(3_000_000)) * time.Microsecond
			ops := make([]*limiter.Op, rng.IntN(50))
			want := make([]received, len(ops))
			for i := range ops {
				ops[i] = mixed(rng)
				ops[i].Caller = []string{"", "shop", "support"}[rng.IntN(3)]
				operation(want[i].link(), overTheWire(t, protoItem(ops[i], left)))
			}
			b := overTheWire(t, packedBatch(t, sent, sequence+1, left, ops...))
			defined += len(b.Define)
			got, err := names.unpack(b, nil)
			must.True(t, err == nil && len(got) == len(want), "%v, %d operations of %d", err, len(got), len(want))
			for i := range got {
				must.True(t, reflect.DeepEqual(got[i].link(), want[i].link()),
					"operation %d\n got %+v\nwant %+v", i, got[i], want[i])
			}
		}
		expect.True(t, defined <= 8, "%d definitions of 8 targets", defined)
	}
}

// TestPackedOutcomes: and so are outcomes, of whatever kind.
func TestPackedOutcomes(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for range 300 {
		ops := make([]*limiter.Op, 1+rng.IntN(20))
		var b []byte
		var q quota
		for i := range ops {
			ops[i] = mixed(rng)
			carryOut(rng, ops[i])
			b = appendOutcome(b, &q, ops[i])
		}
		in := outcomes{Reader: varint.Of(string(b))}
		for i, op := range ops {
			want, got := again(op), again(op)
			setOutcome(want, overTheWire(t, protoOutcome(op)))
			must.True(t, in.next(got) && reflect.DeepEqual(got, want), "outcome %d\n got %+v\nwant %+v", i, got, want)
		}
		must.True(t, in.Rest == "" && !in.next(check("k", 1)), "more outcomes than there were")
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
		out.NotHolder = &ownership.Route{Standing: ownership.Elsewhere, Node: ownership.Node{Name: "n", Boot: 3}, Term: ownership.Term{Epoch: 1, N: 2}}
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
			func() { d.Allowed = false }, func() { d.Granted = usualGrant(d.Allowed, op.Cost) }, func() { d.Limit, d.Window = 7, 9 },
			func() { d.RetryAfter = 0 }, func() { d.RetryAfter = algo.Never }, func() { d.ResetAfter = 0 }, func() { d.RememberFor = 0 },
			func() { d.Delay = 0 }, func() { d.Shadow = false }, func() { d.Degraded = false }, func() { d.FailedOpen = false },
			func() { d.FailedClosed = false }, func() { d.NearLimit = false }, func() { d.Banned = false }, func() { d.RetryAfterEstimated = false }, func() { d.Limits = nil }, func() { d.Remaining = 0 },
			func() { d.Policy = "another" }, func() { d.RequestID = "another" }, func() { d.LeaseID = "l" }, func() { d.ReservationID = "r" },
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

// TestPackedBatchBytes: a node of this protocol reads what is written here, whatever its build.
func TestPackedBatchBytes(t *testing.T) {
	plain, full := check("alice", 1), check("bob", 300)
	lease := limiter.NewOp(limiter.OpRelease, limit.Check{Target: limit.Target{Policy: "p", Key: "k"}}, limiter.Extra{LeaseID: "l"})
	lease.Hops = 1
	full.Policy, full.Namespace, full.Limit = "", "n", &algo.Limit{Algorithm: algo.TokenBucket, Limit: 5, Window: time.Second}
	full.Partial, full.RequestID, full.Hops, full.Trace = true, "r", 2, strings.Repeat("t", limiter.TraceContext)
	b := packedBatch(t, new(wire.Numbers), 1, time.Second, plain, lease, full, full, plain)
	want := "04" + "c0843d" + "05616c696365" + // alice: timeout, key
		"01" + "15" + "08011080" + "94ebdc03180422060a017022016b6a016c" + // an Item
		"fa01" + "01" + "d804" + "0172" + "02" + strings.Repeat("74", 24) + "03626f62" +
		"f801" + "d804" + "0172" + "02" + strings.Repeat("74", 24) + "03626f62" +
		"02" + "00" + "05616c696365"
	got := hex.EncodeToString(b.Operations)
	expect.True(t, got == want, "operations\n got %s\nwant %s", got, want)
	n := len(b.Define)
	expect.True(t, n == 2 && b.Define[0].Number == 0 && b.Define[0].Policy == "p" && b.Define[1].Number == 1 &&
		b.Define[1].Limit.Limit == 5, "%v", b.Define)

	window := limit.Decision{Policy: "p", Allowed: true, Granted: 1, Limit: 10, Remaining: 9, Window: time.Minute, ResetAfter: 128}
	*plain.Decision = window
	refused := check("k", 1)
	*refused.Decision = limit.Decision{Policy: "p", Limit: 10, Window: time.Minute, RetryAfter: 1, ResetAfter: 2, RememberFor: 3}
	never := check("k", 1)
	*never.Decision = limit.Decision{
		Policy: "p", Granted: 2, Limit: -1, Remaining: -1, RetryAfter: algo.Never, Delay: 4, Shadow: true, Degraded: true,
		FailedOpen: true, FailedClosed: true, Limits: []limit.LimitStatus{{Limit: 1, Window: 2, Remaining: 3, RetryAfter: algo.Never, ResetAfter: 4}, {RetryAfter: 5}},
	}
	never.Outcome.Lease = 6
	lease.Reply.Released = true
	var out []byte
	var q quota
	for _, op := range []*limiter.Op{plain, refused, lease, never, refused} {
		out = appendOutcome(out, &q, op)
	}
	want = "16" + "14" + "80b09dc2df01" + "8001" + "12" +
		"38" + "01" + "02" + "03" + "00" +
		"01" + "04" + "20043801" +
		"c4ff01" + "01" + "00" + "04" + "04" + "06" + "02" + "02" + "02" + "06" + "04" + "00" + "00" + "00" + "00" + "00" + "01" + "05" + "01" +
		"3c" + "14" + "80b09dc2df01" + "01" + "02" + "03" + "00"
	got = hex.EncodeToString(out)
	expect.True(t, got == want, "outcomes\n got %s\nwant %s", got, want)
}

// TestPackedNonsense: what no sender writes is no batch.
func TestPackedNonsense(t *testing.T) {
	good := packedBatch(t, new(wire.Numbers), 1, time.Second, check("k", 1))
	for what, b := range map[string]*peerv1.Batch{
		"an unknown flag":         {Define: good.Define, Operations: []byte{opUnknown&0x7f | 0x80, opUnknown >> 7, 1, 'k'}},
		"an item with flags":      {Define: good.Define, Operations: []byte{opItem | opCost, 0}},
		"an item that is none":    {Operations: []byte{opItem, 1, 0xff}},
		"an item cut short":       {Operations: []byte{opItem, 9, 0}},
		"a key cut short":         {Define: good.Define, Operations: []byte{0, 2, 'k'}},
		"a key of a huge length":  {Define: good.Define, Operations: append([]byte{0}, bytes.Repeat([]byte{0xff}, 9)...)},
		"a trace cut short":       {Define: good.Define, Operations: append([]byte{0x80, opTrace >> 7}, make([]byte, limiter.TraceContext-1)...)},
		"a number that overflows": {Define: good.Define, Operations: append(append([]byte{opTimeout}, bytes.Repeat([]byte{0xff}, 9)...), 2, 1, 'k')},
		"no such target":          {Define: good.Define, Operations: []byte{opTarget, 1, 1, 'k'}},
		"a target far off":        {Define: good.Define, Operations: append(append([]byte{opTarget}, bytes.Repeat([]byte{0xff}, 9)...), 1, 1, 'k')},
		"a target defined badly and another": {
			Define: []*weirv1.StreamTarget{{Number: 7, Policy: "not a name"}}, Operations: []byte{opTarget, 8, 1, 'k'},
		},
		"a number too large": {Define: []*weirv1.StreamTarget{{Number: wire.MaxTargets, Policy: "p"}}},
	} {
		_, err := new(numberedTargets).unpack(b, nil)
		expect.Equal(t, status.Code(err), codes.InvalidArgument, "%s: %v", what, err)
	}
	for what, b := range map[string][]byte{
		"an unknown flag": append(binary.AppendUvarint(nil, outUnknown), 0), "a reply with flags": {outReply | outAllowed, 0}, "a reply cut short": {outReply, 9},
		"a reply that is none": {outReply, 1, 0xff}, "nothing remains": {outAllowed}, "more limits than bytes": {0x80, 0x80, 0x01, 2, 0, 0, 0, 0, 0, 0, 0},
		"an odd limit": {0x80, 0x80, 0x01, 1, 0, 0, 0, 0, 2, 0, 0},
	} {
		in := outcomes{Reader: varint.Of(string(b))}
		expect.True(t, !in.next(check("k", 1)), "outcome: %s", what)
	}
	// A decision on what was no check is none, and what comes after it is.
	in := outcomes{Reader: varint.Of("\x02\x00\x02\x00")}
	reset, after := limiter.NewOp(limiter.OpReset, limit.Check{}, limiter.Extra{}), check("k", 1)
	expect.True(t, in.next(reset) && in.next(after) && reset.Outcome.Unreachable && after.Decision.Allowed,
		"%+v, %+v", reset.Outcome, after.Outcome)
}

// TestTargetsUnknownHere: a limit that this node cannot make sense of is an error of those who name it, until the number is given
// to another one.
func TestTargetsUnknownHere(t *testing.T) {
	names := new(numberedTargets)
	mars := &weirv1.Limit{Algorithm: 1, Limit: 1, Period: 3, TimeZone: "Mars/Olympus"}
	ops, err := names.unpack(&peerv1.Batch{
		Define:     []*weirv1.StreamTarget{{Number: 0, Limit: mars}, {Number: 1, Policy: "p"}},
		Operations: []byte{0, 1, 'a', opTarget, 1, 1, 'b'},
	}, nil)
	must.True(t, err == nil && len(ops) == 2 && ops[0].Outcome.Err != nil &&
		ops[0].Outcome.Err.Field == "limit.time_zone" && ops[1].Outcome.Err == nil, "%v: %+v", err, ops)
	ops, err = names.unpack(&peerv1.Batch{Define: []*weirv1.StreamTarget{{Number: 0, Policy: "q"}}, Operations: []byte{0, 1, 'a'}}, nil)
	must.True(t, err == nil && ops[0].Policy == "q" && ops[0].Outcome.Err == nil, "%v: %+v", err, ops)
}

// TestNumbers: a message that is repeated on a new stream defines all that it names, and those after it are not misread; nor are
// they when numbers run out.
func TestNumbers(t *testing.T) {
	l := newQueue(&ForwarderConfig{}, bob, 1, fifo.NewSignal())
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
	l.Broken()
	l.numbers.Reset() // as on every new stream
	second := new(numberedTargets)
	for i, policies := range [][]string{{"a", "b"}, {"b", "a", "b"}, {"c", "a"}} {
		if m := l.take(); m.tries != 2 || m.sequence != uint64(i+2) || !slices.Equal(named(second, m), policies) {
			t.Errorf("%v: %v", policies, m)
		}
	}
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

// steady is a stream that has seen its targets, a batch as there are many, and what comes of it.
func steady(t testing.TB) (p *packer, names *numberedTargets, ops []*limiter.Op) {
	p, names = &packer{numbers: new(wire.Numbers), sequence: 1}, new(numberedTargets)
	for i := range 100 {
		op := check(fmt.Sprintf("user-%08d", i*4711), 1)
		*op.Decision = limit.Decision{
			Policy: "p", Allowed: true, Granted: 1, Limit: 1000, Remaining: 900 + int64(i), Window: time.Minute, ResetAfter: time.Duration(i) * time.Second,
		}
		ops = append(ops, op)
		p.add(op, time.Second)
	}
	_, err := names.unpack(&peerv1.Batch{Define: p.define, Operations: p.bytes}, nil)
	must.NoError(t, err)
	return p, names, ops
}

// again packs the same operations as the next batch, in the room of the one before.
func (p *packer) again(ops []*limiter.Op) {
	*p = packer{numbers: p.numbers, sequence: p.sequence, bytes: p.bytes[:0]}
	for _, op := range ops {
		p.add(op, time.Second)
	}
}

func TestPackingTakesNoMemory(t *testing.T) {
	p, names, ops := steady(t)
	n := testing.AllocsPerRun(100, func() { p.again(ops) })
	expect.True(t, n == 0, "packing operations: %v allocations a batch", n)
	b, room := &peerv1.Batch{Operations: p.bytes}, make([]received, 0, len(ops))
	n = testing.AllocsPerRun(100, func() { _, _ = names.unpack(b, room) })
	expect.True(t, n == 1, "unpacking operations: %v allocations a batch, want one for all keys", n)
	var out []byte
	packOutcomes := func() {
		var q quota
		out = out[:0]
		for _, op := range ops {
			out = appendOutcome(out, &q, op)
		}
	}
	packOutcomes()
	n = testing.AllocsPerRun(100, packOutcomes)
	expect.True(t, n == 0, "packing outcomes: %v allocations a batch", n)
	text := string(out)
	n = testing.AllocsPerRun(100, func() {
		in := outcomes{Reader: varint.Of(text)}
		for _, op := range ops {
			in.next(op)
		}
	})
	expect.True(t, n == 0, "unpacking outcomes: %v allocations a batch", n)
}

func BenchmarkPack(b *testing.B) {
	p, names, ops := steady(b)
	batch, room := &peerv1.Batch{Operations: slices.Clone(p.bytes)}, make([]received, 0, len(ops))
	var out []byte
	var q quota
	for _, op := range ops {
		out = appendOutcome(out, &q, op)
	}
	for _, run := range []struct {
		what  string
		bytes int
		do    func()
	}{
		{"operations", len(p.bytes), func() { p.again(ops) }},
		{"operations back", len(p.bytes), func() { _, _ = names.unpack(batch, room) }},
		{"outcomes", len(out), func() {
			q = quota{}
			out = out[:0]
			for _, op := range ops {
				out = appendOutcome(out, &q, op)
			}
		}},
		{"outcomes back", len(out), func() {
			in := outcomes{Reader: varint.Of(string(out))}
			for _, op := range ops {
				in.next(op)
			}
		}},
	} {
		b.Run(run.what, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				run.do()
			}
			b.ReportMetric(float64(b.Elapsed())/float64(b.N*len(ops)), "ns/item")
			b.ReportMetric(float64(run.bytes)/float64(len(ops)), "bytes/item")
		})
	}
}

// FuzzPackedOperations: whatever bytes a peer sends become operations or an error, and operations that are packed again arrive
// as they are.
func FuzzPackedOperations(f *testing.F) {
	rng := rand.New(rand.NewPCG(5, 6))
	for range 10 {
		f.Add(packedBatch(f, new(wire.Numbers), 1, time.Second, mixed(rng), mixed(rng), mixed(rng)).Operations)
	}
	f.Add([]byte{})
	l := limiter.New(limiter.Config{Store: limiter.NewStore(store.Config{MaxKeys: 100, MaxBytes: 1 << 20}, true)})
	f.Cleanup(l.Close)
	define := []*weirv1.StreamTarget{
		{Number: 0, Policy: "p"}, {Number: 1, Limit: &weirv1.Limit{Algorithm: 5, Limit: 5, WindowNs: 1e9}}, {Number: 2, Policy: "not a name"},
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		ops, err := new(numberedTargets).unpack(&peerv1.Batch{Define: define, Operations: b}, nil)
		if err != nil {
			return
		}
		var good []*limiter.Op
		for i := range ops {
			if ops[i].Outcome.Err == nil {
				good = append(good, ops[i].link())
			}
		}
		again := packedBatch(t, new(wire.Numbers), 1, time.Second, good...)
		back, err := new(numberedTargets).unpack(again, nil)
		must.True(t, err == nil && len(back) == len(good), "%v, %d operations of %d", err, len(back), len(good))
		for i, op := range good {
			back[i].Left = op.Left
			must.True(t, reflect.DeepEqual(back[i].link(), op), "operation %d\n got %+v\nwant %+v", i, back[i], op)
		}
		must.True(t, l.Receive(good) == nil, "handed on to nobody")
		var out []byte
		var q quota
		for i := range ops {
			out = appendOutcome(out, &q, ops[i].link())
		}
		in := outcomes{Reader: varint.Of(string(out))}
		for i := range ops {
			got := ops[i]
			if !in.next(got.link()) || got.Outcome.Unreachable {
				t.Fatalf("%+v became no answer", ops[i].Outcome)
			}
		}
	})
}

// FuzzPackedOutcomes: whatever bytes a peer answers with, they are outcomes or none.
func FuzzPackedOutcomes(f *testing.F) {
	rng := rand.New(rand.NewPCG(7, 8))
	for range 10 {
		var b []byte
		var q quota
		for range 3 {
			op := mixed(rng)
			carryOut(rng, op)
			b = appendOutcome(b, &q, op)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		in := outcomes{Reader: varint.Of(string(b))}
		var read []*limiter.Op
		for op := check("k", 1); in.next(op); op = check("k", 1) {
			read = append(read, op)
		}
		var again []byte
		var q quota
		for _, op := range read {
			again = appendOutcome(again, &q, op)
		}
		in = outcomes{Reader: varint.Of(string(again))}
		for i, op := range read {
			got := check("k", 1)
			must.True(t, in.next(got) && reflect.DeepEqual(got, op), "outcome %d\n got %+v\nwant %+v", i, got, op)
		}
	})
}
