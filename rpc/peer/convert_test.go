package peer

import (
	"context"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/rpc/wire"
	"github.com/weirlimit/weir/store"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

var kinds = []limiter.OpKind{limiter.OpAcquire, limiter.OpRenew, limiter.OpRelease, limiter.OpRefund, limiter.OpReset,
	limiter.OpReserve, limiter.OpSettle, limiter.OpExtend, limiter.OpQuota}

// fill sets every exported field that v has, at any depth, to something that is not its zero value: a field that a
// conversion forgets, also one that is yet to be added, comes back as zero.
func fill(rng *rand.Rand, v reflect.Value) {
	switch v.Interface().(type) {
	case *time.Location:
		named := &weirv1.Limit{Algorithm: 1,
			TimeZone: []string{"Europe/Berlin", "America/New_York", "UTC"}[rng.IntN(3)]}
		target, err := wire.Target(&weirv1.Target{Limit: named})
		if err != nil {
			panic(err)
		}
		v.Set(reflect.ValueOf(target.Limit.Zone))
		return
	case algo.Algorithm:
		v.SetUint(1 + rng.Uint64N(uint64(algo.Concurrency)))
		return
	case algo.Period:
		v.SetUint(1 + rng.Uint64N(uint64(algo.Year)))
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				fill(rng, v.Field(i))
			}
		}
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(rng, v.Elem())
	case reflect.Array:
		for i := range v.Len() {
			fill(rng, v.Index(i))
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1+rng.IntN(3), 4))
		for i := range v.Len() {
			fill(rng, v.Index(i))
		}
	case reflect.String:
		v.SetString(strings.Repeat("é", rng.IntN(3)) + string(rune('a'+rng.IntN(26))))
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int8: // a day of the month
		v.SetInt(1 + rng.Int64N(31))
	case reflect.Int, reflect.Int32:
		v.SetInt(1 + rng.Int64N(1<<31-1))
	case reflect.Int64:
		if n := rng.Int64(); rng.IntN(2) == 0 {
			v.SetInt(-n - 2) // not -1, which means something of its own
		} else {
			v.SetInt(n + 1)
		}
	case reflect.Uint8, reflect.Uint32, reflect.Uint64:
		v.SetUint(1 + rng.Uint64N(255))
	default:
		panic("fill: " + v.Type().String())
	}
}

// carried is an operation with every field filled that its kind has.
func carried(rng *rand.Rand, kind limiter.OpKind) *limiter.Op {
	op := limiter.NewOp(kind, limit.Check{}, limiter.Extra{})
	fill(rng, reflect.ValueOf(op.Check).Elem())
	fill(rng, reflect.ValueOf(&op.LeaseID).Elem())
	fill(rng, reflect.ValueOf(&op.TTL).Elem())
	op.Hops = uint8(rng.IntN(256))
	fill(rng, reflect.ValueOf(&op.Reservation).Elem())
	op.Atomic, op.Release = rng.IntN(2) == 0, rng.IntN(2) == 0
	if kind != limiter.OpReserve {
		op.Atomic, op.Release = false, false
		if kind != limiter.OpSettle && kind != limiter.OpExtend {
			op.Reservation = limiter.ReservationID{}
		}
		op.Exact = kind == limiter.OpSettle && rng.IntN(2) == 0
	}
	op.Limit.MaxLog = 0 // the operator's, not the caller's
	op.Configured = false
	if kind != limiter.OpCheck {
		op.Always = false
	}
	switch kind {
	case limiter.OpCheck:
		op.Extra = nil
	case limiter.OpAcquire:
		op.Partial, op.LeaseID = false, ""
	case limiter.OpRenew:
		op.Cost, op.Partial, op.RequestID = 0, false, ""
	case limiter.OpRelease:
		op.Cost, op.Partial, op.RequestID, op.TTL = 0, false, "", 0
	case limiter.OpRefund:
		op.Partial, op.RequestID, op.LeaseID, op.TTL = false, "", "", 0
	case limiter.OpReset:
		op.Cost, op.Partial, op.RequestID, op.LeaseID, op.TTL = 0, false, "", "", 0
	case limiter.OpReserve, limiter.OpExtend:
		op.Partial, op.LeaseID = false, ""
	case limiter.OpSettle:
		op.Partial, op.RequestID, op.LeaseID, op.TTL = false, "", "", 0
	case limiter.OpQuota:
		op.Cost, op.Partial, op.RequestID, op.LeaseID, op.TTL = 0, false, "", "", 0
	}
	if kind == limiter.OpQuota {
		op.Loan = &limiter.LoanCall{Forwarded: true}
		fill(rng, reflect.ValueOf(&op.Loan.Report.ID).Elem())
		fill(rng, reflect.ValueOf(&op.Loan.Report.Totals).Elem())
		fill(rng, reflect.ValueOf(&op.Loan.Report.Known).Elem())
		fill(rng, reflect.ValueOf(&op.Loan.Ask).Elem())
	}
	return op
}

// overTheWire returns what arrives of a message.
func overTheWire[M proto.Message](t testing.TB, m M) M {
	t.Helper()
	b := must.Value(proto.Marshal(m))(t)
	out := m.ProtoReflect().New().Interface()
	must.NoError(t, proto.Unmarshal(b, out))
	return out.(M)
}

func TestOperationsKeepEveryField(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		for _, kind := range kinds {
			op := carried(rng, kind)
			switch rng.IntN(4) {
			case 0:
				op.Limit, op.Namespace = nil, ""
			case 3:
				op.Namespace, op.Configured = limit.EnvoyNamespace+"d", true
			case 1:
				op.Limit.Zone = nil
			case 2:
				if op.Cost = 0; op.Extra != nil { // a peek stays one
					op.TTL = 0
				}
			}
			if kind == limiter.OpRenew || kind == limiter.OpRelease || kind == limiter.OpReset ||
				kind == limiter.OpQuota {
				op.Cost = 0
			}
			op.Left = time.Second
			got := new(received).link()
			operation(got, overTheWire(t, protoItem(op, time.Second)))
			must.True(t, reflect.DeepEqual(got, op), "sent %+v %+v\n got %+v %+v", op, op.Limit, got, got.Limit)
		}
	}
	item := protoItem(carried(rng, limiter.OpReset), -time.Second)
	expect.Equal(t, item.TimeoutNs, 0, "%+v", item)
}

func TestOutcomesKeepEveryField(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	trip := func(sent *limiter.Op) {
		t.Helper()
		got := again(sent)
		if sent.Kind == limiter.OpQuota {
			got.Loan = new(limiter.LoanCall)
		}
		setOutcome(got, overTheWire(t, protoOutcome(sent)))
		must.True(t, reflect.DeepEqual(got, sent), "sent %+v\n got %+v", sent, got)
	}
	failed := func(kind limiter.OpKind, out limiter.Outcome) {
		t.Helper()
		sent := limiter.NewOp(kind, limit.Check{}, limiter.Extra{Loan: new(limiter.LoanCall)})
		sent.Outcome = out
		trip(sent)
	}
	for range 300 {
		for _, kind := range kinds {
			op := limiter.NewOp(kind, limit.Check{}, limiter.Extra{Loan: new(limiter.LoanCall)})
			out, d := &op.Reply, op.Decision
			switch kind {
			case limiter.OpCheck, limiter.OpAcquire, limiter.OpReserve, limiter.OpExtend:
				fill(rng, reflect.ValueOf(d).Elem())
				if rng.IntN(3) == 0 {
					d.RetryAfter, d.Limits[0].RetryAfter = algo.Never, algo.Never
				}
				if rng.IntN(3) == 0 {
					d.RetryAfter, d.Limits = 0, nil
				}
			case limiter.OpRenew:
				fill(rng, reflect.ValueOf(&out.ExpiresIn).Elem())
			case limiter.OpRelease:
				out.Released = rng.IntN(2) == 0
			case limiter.OpRefund:
				fill(rng, reflect.ValueOf(&out.Refunded).Elem())
			case limiter.OpSettle:
				fill(rng, reflect.ValueOf(&out.Refunded).Elem())
				fill(rng, reflect.ValueOf(&out.Excess).Elem())
				out.Over, op.Outcome.Lease = rng.IntN(2) == 0, time.Duration(rng.IntN(2))*time.Second
			case limiter.OpQuota:
				op.Loan.Quota = limit.QuotaLent{Granted: rng.Int64(), Rate: rng.Int64(), Spent: rng.Int64(), Free: true,
					Charged: true}
			}
			trip(op)
			for _, k := range []limit.Kind{limit.Invalid, limit.NotFound, limit.TooLarge, limit.Unavailable} {
				failed(kind, limiter.Outcome{Err: limit.NewError(k, "f", "m")})
			}
			r := ownership.Route{}
			fill(rng, reflect.ValueOf(&r).Elem())
			r.Heard, r.HeardTerm = ownership.Node{}, ownership.Term{} // a hint is what Route.Handed made of them
			// a hint is always somebody else's word, and not to be waited for
			r.Standing = ownership.Elsewhere
			failed(kind, limiter.Outcome{NotHolder: &r})
			failed(kind, limiter.Outcome{NotHolder: &ownership.Route{Standing: ownership.Elsewhere}})
			failed(kind, limiter.Outcome{Unreachable: true})
		}
	}
}

// TestRepliesThatDoNotFit: they are as good as none, for a made-up decision would be worse than none.
func TestRepliesThatDoNotFit(t *testing.T) {
	type reply struct {
		*peerv1.ItemReply
		fits map[limiter.OpKind]bool
	}
	replies := []reply{
		{&peerv1.ItemReply{}, nil},
		{nil, nil},
		{&peerv1.ItemReply{Decision: &weirv1.Decision{}}, nil},
		{&peerv1.ItemReply{Error: &weirv1.Error{Code: 0}}, nil},
		{&peerv1.ItemReply{Error: &weirv1.Error{Code: int32(codes.Internal)}}, nil},
		{&peerv1.ItemReply{Error: &weirv1.Error{Code: -1}}, nil},
	}
	decide := map[limiter.OpKind]bool{limiter.OpCheck: true, limiter.OpAcquire: true, limiter.OpReserve: true,
		limiter.OpExtend: true}
	for _, kind := range append(kinds, limiter.OpBorrow, limiter.OpRecall) {
		bare, full := &peerv1.ItemReply{Operation: peerv1.Operation(kind)},
			&peerv1.ItemReply{Operation: peerv1.Operation(kind)}
		fits := map[limiter.OpKind]bool{kind: true}
		switch {
		case decide[kind]:
			full.Decision = &weirv1.Decision{}
		case kind == limiter.OpBorrow:
			full.Lent = &weirv1.LoanAnswer{Number: 7}
			replies = append(replies,
				reply{&peerv1.ItemReply{Operation: bare.Operation, Lent: &weirv1.LoanAnswer{Number: 8}}, nil})
		case kind == limiter.OpQuota:
			full.QuotaLent = &peerv1.QuotaLent{}
		default:
			replies = append(replies, reply{bare, fits})
			continue
		}
		replies = append(replies, reply{bare, nil}, reply{full, fits})
	}
	for i, r := range replies {
		for _, kind := range append(kinds, limiter.OpBorrow, limiter.OpRecall) {
			op := limiter.NewOp(kind, limit.Check{}, limiter.Extra{})
			if kind == limiter.OpQuota || kind == limiter.OpBorrow || kind == limiter.OpRecall {
				op.Loan = &limiter.LoanCall{Report: limit.Borrow{ID: algo.LoanID{Number: 7}}}
			}
			setOutcome(op, r.ItemReply)
			expect.True(t, op.Outcome.Unreachable != r.fits[kind], "reply %d to operation %d: %+v", i, kind, op.Outcome)
		}
	}
}

// Reports and recalls of loans cross, and so does what comes of them; the borrower is who sends, whoever it says it is,
// unless it forwards what a client has reported.
func TestLoansCross(t *testing.T) {
	noLeaks(t)
	target := limit.Target{Policy: "p", Key: "k"}
	report := limit.Borrow{ID: algo.LoanID{Borrower: 99, Number: 3},
		Totals: algo.Totals{Granted: 9, Spent: 4, Returned: 1, Checks: 2}, Known: 3, Want: 16}
	lent := limit.Lent{Granted: 20, Spent: 4, Term: 5, Again: 6, Limit: 7, Remaining: 8, Window: 9, ResetAfter: 10,
		WarnAt: 11,
		Limits: []limit.LimitStatus{{Limit: 12, Window: 13, Remaining: 14, ResetAfter: 15},
			{Limit: 16, Window: 17, Remaining: 18, ResetAfter: 19}}}
	var got []limiter.LoanCall
	var gotTarget limit.Target
	_, addr := servePeer(t, bob, receiver(func(ops []*limiter.Op) func(context.Context) {
		for _, op := range ops {
			got = append(got, *op.Loan)
			switch {
			case op.Kind == limiter.OpBorrow:
				op.Loan.Lent, gotTarget = lent, op.Target
			case op.Loan.Recall.Number == 3:
				op.Loan.Known = true
				op.Loan.Report = limit.Borrow{ID: algo.LoanID{Number: 3}, Totals: report.Totals, Known: 3}
			}
		}
		return nil
	}))
	p := newPeers(t, addr)
	ofClient := report
	ofClient.ID.Borrower = 77
	ops := []*limiter.Op{
		limiter.NewOp(limiter.OpBorrow, limit.Check{Target: target},
			limiter.Extra{Loan: &limiter.LoanCall{Report: report}}),
		limiter.NewOp(limiter.OpRecall, limit.Check{},
			limiter.Extra{Loan: &limiter.LoanCall{Recall: limit.Recall{Number: 3, Granted: 20}}}),
		limiter.NewOp(limiter.OpRecall, limit.Check{},
			limiter.Extra{Loan: &limiter.LoanCall{Recall: limit.Recall{Number: 4, Granted: 20}}}),
		limiter.NewOp(limiter.OpBorrow, limit.Check{Target: target},
			limiter.Extra{Loan: &limiter.LoanCall{Report: ofClient, Forwarded: true}}),
	}
	p.Forward(t.Context(), bob, ops)
	for _, op := range ops {
		must.True(t, !op.Outcome.Unreachable && op.Outcome.Err == nil && op.Outcome.NotHolder == nil, "%+v", op.Outcome)
	}
	want := report
	want.ID.Borrower, want.Counted = alice.Boot, true
	expect.True(t, got[0].Report == want && gotTarget == target, "%+v arrives, want %+v", got[0].Report, want)
	want = ofClient
	want.Counted = false
	expect.True(t, got[3].Report == want && got[3].Forwarded, "%+v arrives of a client's, want %+v", got[3], want)
	expect.Equal(t, got[1].Recall, ops[1].Loan.Recall)
	l := ops[0].Loan.Lent
	expect.True(t, reflect.DeepEqual(l, lent), "%+v is answered, want %+v", l, lent)
	if l := ops[1].Loan; !l.Known || l.Report.Totals != report.Totals || l.Report.Known != 3 {
		t.Errorf("%+v", l)
	}
	if l := ops[2].Loan; l.Known {
		t.Errorf("of a loan that there is not: %+v", l)
	}
}

// FuzzOperation: whatever bytes a peer sends as an item become an operation or an error, and that a reply.
func FuzzOperation(f *testing.F) {
	rng := rand.New(rand.NewPCG(5, 6))
	for _, kind := range kinds {
		b := must.Value(proto.Marshal(protoItem(carried(rng, kind), time.Second)))(f)
		f.Add(b)
	}
	f.Add([]byte{})
	f.Add([]byte{0x2a, 0})
	l := limiter.New(limiter.Config{Store: limiter.NewStore(store.Config{MaxKeys: 100, MaxBytes: 1 << 20}, true)})
	f.Cleanup(l.Close)
	f.Fuzz(func(t *testing.T, b []byte) {
		item := new(peerv1.Item)
		if proto.Unmarshal(b, item) != nil {
			return
		}
		op := new(received).link()
		operation(op, item)
		if op.Outcome.Err == nil {
			must.True(t, op.Kind != 0, "neither operation nor error")
			must.True(t, l.Receive([]*limiter.Op{op}) == nil, "handed on to nobody")
		}
		back := again(op)
		setOutcome(back, overTheWire(t, protoOutcome(op)))
		must.True(t, !back.Outcome.Unreachable, "%+v became no answer", op.Outcome)
	})
}
