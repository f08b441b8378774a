package envoyquota

import (
	"context"
	"fmt"
	"io"
	"math"
	"net"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	quotav3 "github.com/envoyproxy/go-control-plane/envoy/service/rate_limit_quota/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/weirlimit/weir/internal/fairshare"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/rpc/wire"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

func reports(domain string,
	all ...*quotav3.RateLimitQuotaUsageReports_BucketQuotaUsage) *quotav3.RateLimitQuotaUsageReports {
	return &quotav3.RateLimitQuotaUsageReports{Domain: domain, BucketQuotaUsages: all}
}

func report(tenant string, allowed, denied uint64) *quotav3.RateLimitQuotaUsageReports_BucketQuotaUsage {
	return &quotav3.RateLimitQuotaUsageReports_BucketQuotaUsage{BucketId: bucketID(tenant), NumRequestsAllowed: allowed,
		NumRequestsDenied: denied}
}

// room is how many more checks of a key pass.
func (w *world) room(key string) (n int) {
	for {
		got, err := w.limiter.Check(context.Background(),
			[]limit.Check{{Target: limit.Target{Policy: "p", Key: key}, Cost: 1}})
		must.True(w.t, err == nil && got[0].Err == nil, "%v %v", err, got)
		if !got[0].Allowed {
			return n
		}
		n++
	}
}

// TestStrangeReports: what a data plane says is believed as far as it can be, and breaks nothing.
func TestStrangeReports(t *testing.T) {
	strange := report("a", 3, math.MaxUint64)
	strange.TimeElapsed = &durationpb.Duration{Seconds: math.MinInt64, Nanos: math.MaxInt32}
	many := &quotav3.BucketId{Bucket: make(map[string]string)}
	for i := range 17 {
		many.Bucket[string(rune('a'+i))] = ""
	}
	for _, test := range []struct {
		name    string
		in      *quotav3.RateLimitQuotaUsageReports
		actions int
		charged int
	}{
		{"nothing", reports("edge"), 0, 0},
		{"another domain", reports("core", report("a", 1, 0)), 0, 0},
		{"no id", reports("edge", nil, &quotav3.RateLimitQuotaUsageReports_BucketQuotaUsage{NumRequestsAllowed: 1}), 0,
			0},
		{"a long id", reports("edge", report(string(make([]byte, 2000)), 1, 0)), 0, 0},
		{"many entries", reports("edge", &quotav3.RateLimitQuotaUsageReports_BucketQuotaUsage{BucketId: many}), 0, 0},
		{"an empty key", reports("edge", report("", 0, 1)), 1, 0},
		{"the same bucket twice", reports("edge", report("a", 2, 0), report("a", 3, 0)), 2, 5},
		{"no request", reports("edge", report("a", 0, 0)), 1, 0},
		{"absurd numbers", reports("edge", strange), 2, 3},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := newWorld(t, 1, windowPolicy)
			out, err := w.service.open("").handle(t.Context(), test.in)
			must.True(t, err == nil && len(out.GetBucketAction()) == test.actions, "%v %v", out, err)
			lent := 0
			for _, a := range out.GetBucketAction() {
				lent += int(a.GetQuotaAssignmentAction().GetRateLimitStrategy().GetTokenBucket().GetMaxTokens())
			}
			n := w.room("a")
			expect.Equal(t, n+lent+test.charged, 1200, "room for %d beside %d", n, lent)
		})
	}
}

// TestDomain: all messages of a stream are of one domain, which the first one names.
func TestDomain(t *testing.T) {
	w := newWorld(t, 1, windowPolicy)
	s := w.service.open("")
	defer s.close()
	for _, step := range []struct {
		domain string
		ok     bool
	}{{"", false}, {"", false}, {"edge", true}, {"", true}, {"core", false}, {"edge", true}} {
		_, err := s.handle(t.Context(), reports(step.domain, report("a", 0, 1)))
		expect.Equal(t, (err == nil), step.ok, "%q: %v", step.domain, err)
	}
}

// TestHugeReports: of a message with ever so many buckets, and of ids of any size, no more is kept than there is room
// for.
func TestHugeReports(t *testing.T) {
	w := newWorld(t, 1, windowPolicy)
	s := w.service.open("")
	defer s.close()
	var all []*quotav3.RateLimitQuotaUsageReports_BucketQuotaUsage
	for i := range maxBuckets + 50 {
		all = append(all, report(fmt.Sprint(i), math.MaxUint64, math.MaxUint64))
	}
	all = append(all, report(strings.Repeat("x", 1<<20), 1, 1),
		report(all[0].BucketId.Bucket["tenant"], math.MaxUint64, 0))
	for range 2 {
		_, err := s.handle(t.Context(), reports("edge", all...))
		must.True(t, err == nil && len(s.buckets) == maxBuckets, "%d buckets, %v", len(s.buckets), err)
	}
	rejected, unmatched := testutil.ToFloat64(w.service.count.rejected), testutil.ToFloat64(w.service.count.unmatched)
	expect.True(t, rejected == 100 && unmatched == 2, "%v were rejected and %v ignored", rejected, unmatched)
}

// TestUnlimited: a key without a limit is free, one that is blocked is not, and one in shadow mode is charged what was
// used.
func TestUnlimited(t *testing.T) {
	for policies, want := range map[string]typev3.RateLimitStrategy_BlanketRule{
		"policies:\n- {name: p, limit: 10, window: 1m, algorithm: sliding_log, overrides: [{key: a, unlimited: true}]}\n": typev3.RateLimitStrategy_ALLOW_ALL,
		"policies:\n- {name: p, limit: 10, window: 1m, algorithm: sliding_log, overrides: [{key: a, blocked: true}]}\n":   typev3.RateLimitStrategy_DENY_ALL,
		"policies:\n- {name: p, limit: 10, window: 1m, algorithm: sliding_log, shadow: true}\n":                           typev3.RateLimitStrategy_ALLOW_ALL,
		"policies:\n- {name: q, limit: 10, window: 1m, algorithm: sliding_log}\n":                                         typev3.RateLimitStrategy_DENY_ALL,
	} {
		w := newWorld(t, 1, policies)
		out, err := w.service.open("").handle(t.Context(), reports("edge", report("a", 0, 1)))
		expect.True(t, err == nil && len(out.GetBucketAction()) == 1 &&
			out.BucketAction[0].GetQuotaAssignmentAction().GetRateLimitStrategy().GetBlanketRule() == want,
			"%s: %v %v", policies, out, err)
	}
}

// far is a Service that is 50 ms away.
type far struct {
	limit.Service
	w *world
}

func (f far) Check(ctx context.Context, checks []limit.Check) ([]limit.Result, error) {
	f.w.now.Add(int64(50 * time.Millisecond))
	return f.Service.Check(ctx, checks)
}

// TestChargedTogether: a data plane that has many buckets without assignments, as after a restart of its node, gets all
// of these by its first report.
func TestChargedTogether(t *testing.T) {
	w := newWorld(t, 1, windowPolicy)
	w.service.cfg.Service = far{w.limiter, w}
	var all []*quotav3.RateLimitQuotaUsageReports_BucketQuotaUsage
	for i := range 100 {
		all = append(all, report(fmt.Sprint(i), 7, 0))
	}
	out, err := w.service.open("").handle(t.Context(), reports("edge", all...))
	charged := testutil.ToFloat64(w.service.count.unassigned)
	expect.True(t, err == nil && len(out.GetBucketAction()) == 200 && charged == 700, "%v, %d actions, %v charged", err,
		len(out.GetBucketAction()), charged)
}

// refuser lends nothing: what a bucket takes is what is kept of it.
type refuser struct{}

func (refuser) Quota(_ context.Context, _ []limit.Quota, out []limit.QuotaLent) error {
	for i := range out {
		out[i] = limit.QuotaLent{Granted: 1}
	}
	return nil
}

// TestBucketsByBytes is an attack: buckets with ids as long as may be, with what no file describes beside them, that
// ask again and again. They take no more memory than is counted.
func TestBucketsByBytes(t *testing.T) {
	w := newWorld(t, 1, windowPolicy)
	kept := fairshare.New(16 << 20)
	s := w.serving(refuser{}, kept).open("thief")
	defer s.close()
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	for n := range 30 { // more buckets than there is memory for
		all := make([]*quotav3.RateLimitQuotaUsageReports_BucketQuotaUsage, 100)
		for i := range all {
			all[i] = report(fmt.Sprint(strings.Repeat("x", 900), n, " ", i), 0, 1000)
			all[i].BucketId.ProtoReflect().SetUnknown(protowire.AppendBytes(protowire.AppendTag(nil, 100,
				protowire.BytesType), make([]byte, 4000)))
		}
		for range 20 { // more often than a bucket may have loans
			_, err := s.handle(t.Context(), reports("edge", all...))
			must.NoError(t, err)
			w.now.Add(int64(time.Millisecond))
		}
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	taken, most := kept.InUse()
	heap := int64(after.HeapAlloc) - int64(before.HeapAlloc)
	expect.True(t, len(s.buckets) >= 1000 && taken <= most*3/4 && heap <= taken,
		"%d buckets take %d bytes of %d, and %d of the heap", len(s.buckets), taken, most, heap)
	t.Logf("%d buckets: %d bytes each, of %d that are counted", len(s.buckets), heap/int64(len(s.buckets)),
		taken/int64(len(s.buckets)))
}

// TestManyBuckets: no more buckets than there are bytes for, of which no caller has all, and these are given back.
func TestManyBuckets(t *testing.T) {
	bytes := bucketBytes + pairBytes + 3*len(appendID(nil, report("a", 0, 1).BucketId))
	w := newWorld(t, 1, windowPolicy)
	w.service = w.serving(w.limiter, fairshare.New(10*bytes))
	first := w.service.open("x")
	var all []*quotav3.RateLimitQuotaUsageReports_BucketQuotaUsage
	for i := range 20 {
		all = append(all, report(string(rune('a'+i)), 0, 1))
	}
	out, err := first.handle(t.Context(), reports("edge", all...))
	must.True(t, err == nil && len(first.buckets) >= 5 && len(first.buckets) <= 9 &&
		len(out.BucketAction) == 2*len(first.buckets), "%d buckets, %v, %v", len(first.buckets), out, err)
	first.close()
	expect.Equal(t, testutil.ToFloat64(w.service.count.buckets), 0)
	if second := w.service.open("y"); true {
		_, err := second.handle(t.Context(), reports("edge", all[:5]...))
		expect.True(t, err == nil && len(second.buckets) == 5, "%v %v", len(second.buckets), err)
	}
}

// cutConn closes after so many bytes in one direction: those before are delivered.
type cutConn struct {
	net.Conn
	read, write *atomic.Int64 // what is left
}

func (c cutConn) Read(b []byte) (int, error) {
	if left := c.read.Load(); int64(len(b)) > left {
		b = b[:left]
	}
	if len(b) == 0 {
		_ = c.Conn.Close()
		return 0, io.EOF
	}
	n, err := c.Conn.Read(b)
	c.read.Add(-int64(n))
	return n, err
}

func (c cutConn) Write(b []byte) (int, error) {
	if left := c.write.Load(); int64(len(b)) > left {
		n, _ := c.Conn.Write(b[:left])
		c.write.Store(0)
		_ = c.Conn.Close()
		return n, io.ErrClosedPipe
	}
	n, err := c.Conn.Write(b)
	c.write.Add(-int64(n))
	return n, err
}

// TestCut cuts the stream after each byte that the data plane sends, and after each that it gets, of two reports and
// what it is assigned, which it spends at once. It and others together admit no more than the limit, then and when its
// loans have ended.
func TestCut(t *testing.T) {
	w := newWorld(t, 1, windowPolicy)
	// Without failing, whose random numbers are one goroutine's: a stream that is cut may still be served when the next
	// one is.
	w.service = w.serving(w.limiter, fairshare.New(0))
	lis := bufconn.Listen(1 << 16)
	server := grpc.NewServer(grpc.ForceServerCodecV2(wire.Codec()))
	w.service.Register(server)
	served := make(chan struct{})
	go func() { defer close(served); _ = server.Serve(lis) }()
	defer func() { server.Stop(); <-served }()
	// run has a data plane report twice, and returns what it has admitted.
	run := func(key string, read, write int64) (spent int64, whole bool) {
		c := cutConn{read: new(atomic.Int64), write: new(atomic.Int64)}
		c.read.Store(read)
		c.write.Store(write)
		var dialed atomic.Bool
		conn := must.Value(grpc.NewClient("passthrough:///x", grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
				if dialed.Swap(true) {
					return nil, io.EOF
				}
				var err error
				c.Conn, err = lis.DialContext(ctx)
				return c, err
			})))(t)
		defer conn.Close()
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		stream, err := quotav3.NewRateLimitQuotaServiceClient(conn).StreamRateLimitQuotas(ctx)
		if err != nil {
			return 0, false
		}
		var last int64
		for range 2 {
			_ = stream.Send(reports("edge", report(key, uint64(last), 40)))
			in, err := stream.Recv()
			must.NoError(t, ctx.Err(), "nothing came of a stream that is cut")
			if err != nil {
				return spent, false
			}
			last = int64(in.BucketAction[1].GetQuotaAssignmentAction().GetRateLimitStrategy().GetTokenBucket().GetMaxTokens())
			spent += last
			w.now.Add(int64(renewAfter))
		}
		return spent, true
	}
	judge := func(key string, spent int64) {
		t.Helper()
		n := w.room(key)
		must.True(t, int64(n)+spent <= 1200, "%s: %d beside %d", key, n, spent)
		w.now.Add(int64(term)) // less than a window
		n = w.room(key)
		must.True(t, n <= 0, "%s: %d more when the loans have ended", key, n)
	}
	const all = math.MaxInt64
	for _, cut := range []struct {
		name string
		run  func(key string, bytes int64) (int64, bool)
	}{
		{"sent", func(key string, bytes int64) (int64, bool) { return run(key, all, bytes) }},
		{"got", func(key string, bytes int64) (int64, bool) { return run(key, bytes, all) }},
	} {
		assigned, through := 0, 0
		for bytes := int64(0); through < 20; bytes++ { // HTTP/2 sends a little more or less each time
			must.True(t, bytes <= 3000, "%s: nothing got through", cut.name)
			key := fmt.Sprint(cut.name, bytes)
			spent, whole := cut.run(key, bytes)
			judge(key, spent)
			if spent > 0 {
				assigned++
			}
			if whole {
				through++
			}
		}
		expect.True(t, assigned >= 40, "%s: an assignment was had %d times only", cut.name, assigned)
	}
}

// FuzzSessions has several data planes say anything, in any order: whatever that is, the assignments that are in effect
// and what others are admitted are within the limit.
func FuzzSessions(f *testing.F) {
	f.Add([]byte{0x01, 0x00, 0x12, 0x10, 0x21, 0x05, 0x33, 0x40})
	f.Add([]byte("\x10\x21\xf0\x10\x23\x71\x10\x0f\x44\x10\x21"))
	f.Fuzz(func(t *testing.T, steps []byte) {
		if len(steps) > 60 {
			return
		}
		w := newWorld(t, 1, windowPolicy)
		type assigned struct{ units, until int64 }
		sessions, has := make([]*session, 3), make([]assigned, 3)
		counts := []uint64{0, 1, 7, 100, 5000, math.MaxInt64, 1 << 63, math.MaxUint64}
		for i := 0; i+1 < len(steps); i += 2 {
			n := int(steps[i]) % 3
			w.now.Add(int64(steps[i]>>2) * int64(500*time.Millisecond))
			if sessions[n] == nil {
				sessions[n] = w.service.open("")
			}
			if steps[i+1] == 0xff {
				sessions[n].close()
				sessions[n] = nil
				continue
			}
			one := report([]string{"a", "b"}[steps[i]>>7], counts[steps[i+1]&7], counts[steps[i+1]>>3&7])
			one.TimeElapsed = &durationpb.Duration{Seconds: int64(counts[steps[i+1]&7])}
			in := reports([]string{"edge", "", "core"}[steps[i+1]>>6%3], one)
			if steps[i+1]&0x40 != 0 {
				in.BucketQuotaUsages = append(in.BucketQuotaUsages, one, report("a", 1, 0))
			}
			out, err := sessions[n].handle(t.Context(), in)
			if err != nil {
				continue
			}
			for _, a := range out.GetBucketAction() {
				if a.GetBucketId().GetBucket()["tenant"] == "a" {
					q := a.GetQuotaAssignmentAction()
					has[n] = assigned{int64(q.GetRateLimitStrategy().GetTokenBucket().GetMaxTokens()),
						w.now.Load() + int64(q.GetAssignmentTimeToLive().AsDuration())}
				}
			}
		}
		lent := int64(0)
		for _, a := range has {
			if w.now.Load() < a.until {
				lent += a.units
			}
		}
		n := w.room("a")
		must.True(t, lent <= 1200 && (n <= 0 || int64(n)+lent <= 1200), "room for %d beside %d", n, lent)
	})
}

// TestOwnerLost: an owner that knows nothing of an assignment learns of it by the next report.
func TestOwnerLost(t *testing.T) {
	for policies, part := range map[string]int{windowPolicy: 1200, tokenPolicy: 60} {
		w := newWorld(t, 1, policies)
		plane := w.service.open("")
		out, err := plane.handle(t.Context(), reports("edge", report("a", 0, 1)))
		must.True(t, err == nil && len(out.GetBucketAction()) == 2, "%v %v", out, err)
		lent := int(out.BucketAction[1].GetQuotaAssignmentAction().GetRateLimitStrategy().GetTokenBucket().GetMaxTokens())
		w.limiter = newWorld(t, 1, policies).limiter
		w.now.Add(int64(period))
		out, err = plane.handle(t.Context(), reports("edge", report("a", 2, 0)))
		must.NoError(t, err, "%v", out)
		n := w.room("a")
		expect.True(t, n <= part-lent, "room for %d beside %d of %d", n, lent, part)
	}
}
