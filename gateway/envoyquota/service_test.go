package envoyquota

import (
	"context"
	"io"
	"math"
	"net"
	"sync/atomic"
	"testing"
	"time"

	quotav3 "github.com/envoyproxy/go-control-plane/envoy/service/rate_limit_quota/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/rpc/wire"
)

func reports(domain string, all ...*quotav3.RateLimitQuotaUsageReports_BucketQuotaUsage) *quotav3.RateLimitQuotaUsageReports {
	return &quotav3.RateLimitQuotaUsageReports{Domain: domain, BucketQuotaUsages: all}
}

func report(tenant string, allowed, denied uint64) *quotav3.RateLimitQuotaUsageReports_BucketQuotaUsage {
	return &quotav3.RateLimitQuotaUsageReports_BucketQuotaUsage{BucketId: bucketID(tenant), NumRequestsAllowed: allowed, NumRequestsDenied: denied}
}

// room is how many more checks of a key pass.
func (w *world) room(key string) (n int) {
	for {
		got, err := w.limiter.Check(context.Background(), []limit.Check{{Target: limit.Target{Policy: "p", Key: key}, Cost: 1}})
		if err != nil || got[0].Err != nil {
			w.t.Fatal(err, got)
		}
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
		{"no id", reports("edge", nil, &quotav3.RateLimitQuotaUsageReports_BucketQuotaUsage{NumRequestsAllowed: 1}), 0, 0},
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
			if err != nil || len(out.GetBucketAction()) != test.actions {
				t.Fatalf("%v %v", out, err)
			}
			lent := 0
			for _, a := range out.GetBucketAction() {
				lent += int(a.GetQuotaAssignmentAction().GetRateLimitStrategy().GetTokenBucket().GetMaxTokens())
			}
			if n := w.room("a"); n+lent+test.charged != 1200 {
				t.Errorf("room for %d beside %d", n, lent)
			}
		})
	}
}

// TestUnlimited: a key without a limit is free, one that is blocked is not, and one in shadow mode is charged what was used.
func TestUnlimited(t *testing.T) {
	for policies, want := range map[string]typev3.RateLimitStrategy_BlanketRule{
		"policies:\n- {name: p, limit: 10, window: 1m, algorithm: sliding_log, overrides: [{key: a, unlimited: true}]}\n": typev3.RateLimitStrategy_ALLOW_ALL,
		"policies:\n- {name: p, limit: 10, window: 1m, algorithm: sliding_log, overrides: [{key: a, blocked: true}]}\n":   typev3.RateLimitStrategy_DENY_ALL,
		"policies:\n- {name: p, limit: 10, window: 1m, algorithm: sliding_log, shadow: true}\n":                           typev3.RateLimitStrategy_ALLOW_ALL,
		"policies:\n- {name: q, limit: 10, window: 1m, algorithm: sliding_log}\n":                                         typev3.RateLimitStrategy_DENY_ALL,
	} {
		w := newWorld(t, 1, policies)
		out, err := w.service.open("").handle(t.Context(), reports("edge", report("a", 0, 1)))
		if err != nil || len(out.GetBucketAction()) != 1 || out.BucketAction[0].GetQuotaAssignmentAction().GetRateLimitStrategy().GetBlanketRule() != want {
			t.Errorf("%s: %v %v", policies, out, err)
		}
	}
}

// TestManyBuckets: no more buckets than there are places for, and these are given back.
func TestManyBuckets(t *testing.T) {
	w := newWorld(t, 1, windowPolicy)
	w.service = New(Config{Quotas: w.limiter, Service: w.limiter, Config: w.service.cfg.Config, Now: w.now.Load, MaxBuckets: 10})
	first := w.service.open("x")
	var all []*quotav3.RateLimitQuotaUsageReports_BucketQuotaUsage
	for i := range 20 {
		all = append(all, report(string(rune('a'+i)), 0, 1))
	}
	out, err := first.handle(t.Context(), reports("edge", all...))
	if err != nil || len(first.buckets) < 5 || len(first.buckets) > 9 || len(out.BucketAction) != 2*len(first.buckets) {
		t.Fatalf("%d buckets, %v, %v", len(first.buckets), out, err)
	}
	first.close()
	if n := w.service.count.buckets.Load(); n != 0 {
		t.Error(n)
	}
	if second := w.service.open("y"); true {
		if _, err := second.handle(t.Context(), reports("edge", all[:5]...)); err != nil || len(second.buckets) != 5 {
			t.Error(len(second.buckets), err)
		}
	}
}

// cutConn closes after so many bytes in either direction.
type cutConn struct {
	net.Conn
	left *atomic.Int64
}

func (c cutConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	return c.spend(n, err)
}

func (c cutConn) Write(b []byte) (int, error) {
	if left := c.left.Load(); int64(len(b)) > left {
		n, _ := c.Conn.Write(b[:max(left, 0)])
		c.left.Store(0)
		_ = c.Conn.Close()
		return n, io.ErrClosedPipe
	}
	return c.spend(c.Conn.Write(b))
}

func (c cutConn) spend(n int, err error) (int, error) {
	if c.left.Add(-int64(n)) < 0 {
		_ = c.Conn.Close()
		return 0, io.ErrClosedPipe
	}
	return n, err
}

// TestCut cuts the stream after each byte. What the data plane may have got is not admitted by anybody else.
func TestCut(t *testing.T) {
	w := newWorld(t, 1, windowPolicy)
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer(grpc.ForceServerCodecV2(wire.Codec()))
	w.service.Register(server)
	served := make(chan struct{})
	go func() { defer close(served); _ = server.Serve(lis) }()
	defer func() { server.Stop(); <-served }()
	got := 0
	cut := func(bytes int64, key string) (most int64, whole bool) {
		left := new(atomic.Int64)
		left.Store(bytes)
		var dialed atomic.Bool
		conn, err := grpc.NewClient("passthrough:///x", grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
				if dialed.Swap(true) {
					return nil, io.EOF
				}
				c, err := new(net.Dialer).DialContext(ctx, "tcp", lis.Addr().String())
				return cutConn{c, left}, err
			}))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		stream, err := quotav3.NewRateLimitQuotaServiceClient(conn).StreamRateLimitQuotas(ctx)
		if err != nil {
			return 0, false
		}
		_ = stream.Send(reports("edge", report(key, 0, 1)))
		in, err := stream.Recv()
		if err != nil {
			return 0, false
		}
		got++
		return int64(in.BucketAction[1].GetQuotaAssignmentAction().GetRateLimitStrategy().GetTokenBucket().GetMaxTokens()), true
	}
	for bytes := int64(0); bytes < 5000; bytes += 7 {
		key := "k" + string(rune('0'+bytes/7%1000))
		lent, whole := cut(bytes, key)
		if n := w.room(key); int64(n)+lent > 1200 {
			t.Fatalf("cut after %d bytes: %d beside %d", bytes, n, lent)
		}
		if whole && got > 20 {
			return
		}
	}
	t.Fatal("nothing got through")
}

// FuzzReports: whatever a data plane sends, what it is lent and what others are admitted are within the limit.
func FuzzReports(f *testing.F) {
	for _, m := range []*quotav3.RateLimitQuotaUsageReports{reports("edge", report("a", 0, 1)), reports("edge", report("a", 1, 0), report("b", 3, 1)), reports("")} {
		b, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b, b, uint16(5000))
	}
	f.Fuzz(func(t *testing.T, first, second []byte, wait uint16) {
		w := newWorld(t, 1, windowPolicy)
		s := w.service.open("")
		defer s.close()
		for _, b := range [][]byte{first, second, first} {
			in := new(quotav3.RateLimitQuotaUsageReports)
			if proto.Unmarshal(b, in) != nil {
				return
			}
			out, err := s.handle(t.Context(), in)
			if err != nil {
				continue
			}
			lent := 0
			for _, a := range out.GetBucketAction() {
				if a.GetBucketId().GetBucket()["tenant"] == "a" {
					lent += int(a.GetQuotaAssignmentAction().GetRateLimitStrategy().GetTokenBucket().GetMaxTokens())
				}
			}
			if lent > 1200 {
				t.Fatal(lent)
			}
			w.now.Add(int64(wait) * int64(time.Millisecond))
		}
	})
}

// TestOwnerLost: an owner that knows nothing of an assignment learns of it by the next report.
func TestOwnerLost(t *testing.T) {
	for policies, part := range map[string]int{windowPolicy: 1200, tokenPolicy: 60} {
		w := newWorld(t, 1, policies)
		plane := w.service.open("")
		out, err := plane.handle(t.Context(), reports("edge", report("a", 0, 1)))
		if err != nil || len(out.GetBucketAction()) != 2 {
			t.Fatal(out, err)
		}
		lent := int(out.BucketAction[1].GetQuotaAssignmentAction().GetRateLimitStrategy().GetTokenBucket().GetMaxTokens())
		w.limiter = newWorld(t, 1, policies).limiter
		w.now.Add(int64(period))
		if out, err = plane.handle(t.Context(), reports("edge", report("a", 2, 0))); err != nil {
			t.Fatal(out, err)
		}
		if n := w.room("a"); n > part-lent {
			t.Errorf("room for %d beside %d of %d", n, lent, part)
		}
	}
}
