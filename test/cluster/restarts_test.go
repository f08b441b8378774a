package clustertest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/redis/go-redis/v9"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/client"
	"github.com/weirlimit/weir/gateway/envoy/kuadrantpb"
	pb "github.com/weirlimit/weir/gateway/gubernator/gubernatorpb"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// countedLimit is the limit of all keys here: far more than they use, of which none comes back meanwhile.
const countedLimit = 100_000

// expiredUnits counts what was charged of loans that ended without a word of who had borrowed.
const expiredUnits = "weir_loan_expired_units_total"

// watchStarving watches how long this process waits for the processor, and returns what says whether that has been long
// enough for a borrower beside it to have lost its loans: they end in a second, and it reports them a few times in
// that.
func watchStarving(t *testing.T) (starved func() bool) {
	const step, long = 10 * time.Millisecond, algo.LoanTerm / 4
	var longest atomic.Int64
	stop := make(chan struct{})
	var watching sync.WaitGroup
	watching.Go(func() {
		for last := time.Now(); ; last = time.Now() {
			select {
			case <-stop:
				return
			case <-time.After(step):
				longest.Store(max(longest.Load(), int64(time.Since(last)-step)))
			}
		}
	})
	t.Cleanup(func() {
		close(stop)
		watching.Wait()
	})
	return func() bool {
		most := time.Duration(longest.Load())
		if most >= long {
			t.Logf("this machine has kept processes waiting for up to %v: loans may have ended", most)
		}
		return most >= long
	}
}

// What a state is called over HTTP. All keys are named as an Envoy descriptor names them.
const (
	ofPolicy     = `"policy":"counted"`
	ofGubernator = `"namespace":"gubernator/counted","limit":{"algorithm":"fixed_window","limit":100000,"window":"24h"}`
	ofRedis      = `"namespace":"redis","limit":{"algorithm":"token_bucket","limit":100000,"window":"200d","capacity":100000}`
	countedKey   = "counted"
)

// A caller charges keys over one protocol.
type caller struct {
	protocol string
	state    string // one of the above
	// charge adds to a key, through a member, and says by how many units its use has changed. With an error nobody
	// knows, up to maxCharge.
	charge func(ctx context.Context, m *member, key string) (units int64, err error)

	mu       sync.Mutex
	admitted map[string]int64 // by key
	unknown  map[string]int64
	answers  atomic.Int64
	failures []string
}

// maxCharge is the most that a caller charges at a time.
const maxCharge = 3

// run charges keys in turn until quit is closed, each through the next member that stays. A member is locked while it
// is restarted.
func (c *caller) run(members []*member, staying []sync.RWMutex, keys []string, quit <-chan struct{}) {
	pace := time.NewTicker(4 * time.Millisecond)
	defer pace.Stop()
	for i := 0; ; i++ {
		select {
		case <-quit:
			return
		case <-pace.C:
		}
		at := i % len(members)
		for !staying[at].TryRLock() {
			at = (at + 1) % len(members)
		}
		key := keys[i/len(members)%len(keys)]
		ctx, cancel := context.WithTimeout(context.Background(), waitTimeout)
		units, err := c.charge(ctx, members[at], key)
		cancel()
		staying[at].RUnlock()
		c.mu.Lock()
		c.admitted[key] += units
		if err != nil {
			c.unknown[key] += maxCharge
			c.failures = append(c.failures, fmt.Sprintf("%s through %s: %v", key, members[at].name, err))
		} else {
			c.answers.Add(1)
		}
		c.mu.Unlock()
	}
}

// callers are of all protocols, each with connections of its own to the members.
func callers(t *testing.T, f *fleet) []*caller {
	var addresses []string
	resp, rls, gubernator, kuadrant := map[*member]*redis.Client{}, map[*member]ratelimitv3.RateLimitServiceClient{},
		map[*member]v1Client{}, map[*member]kuadrantpb.RateLimitServiceClient{}
	for _, m := range f.members {
		address := m.ip + ":" + fleetGRPC
		addresses = append(addresses, address)
		resp[m], rls[m], gubernator[m] = respClient(t, m.ip+":"+fleetRESP, 3), rateLimiter(t, address),
			gubernatorClient(t, address)
		kuadrant[m] = kuadrantpb.NewRateLimitServiceClient(testkit.Dial(t, address))
	}
	lib := must.Value(client.Dial(t.Context(), strings.Join(addresses, ","), client.WithTimeout(waitTimeout),
		client.WithOnError(client.FailClosed)))(t)
	t.Cleanup(func() { lib.Close() })
	return []*caller{
		{protocol: "HTTP", state: ofPolicy, charge: func(_ context.Context, m *member, key string) (int64, error) {
			d, err := m.check(fmt.Sprintf(`{%s,"key":%q}`, ofPolicy, key))
			return admittedBy(d.Allowed, d.FailedOpen, d, err)
		}},
		{protocol: "forward-auth", state: ofPolicy,
			charge: func(ctx context.Context, m *member, key string) (int64, error) {
				query := url.Values{"policy": {"counted"}, "key": {key}}
				request := must.Value(http.NewRequestWithContext(ctx, http.MethodGet,
					"http://"+m.http+"/v1/forward-auth?"+query.Encode(), nil))(t)
				response, err := m.web.Do(request)
				if err != nil {
					return 0, err
				}
				defer response.Body.Close()
				text, err := io.ReadAll(response.Body)
				return admittedBy(response.StatusCode == http.StatusOK,
					response.Header.Get("Weir-Result") != "admitted",
					text, err)
			}},
		{protocol: "gRPC Check", state: ofPolicy,
			charge: func(ctx context.Context, m *member, key string) (int64, error) {
				r, err := m.limiter.Check(ctx,
					&weirv1.CheckRequest{Checks: []*weirv1.Check{{Target: &weirv1.Target{Policy: "counted",
						Key: key}}}})
				if err != nil {
					return 0, err
				}
				d := r.Results[0].GetDecision()
				return admittedBy(d.GetAllowed(), d.GetFailedOpen(), r, nil)
			}},
		{protocol: "gRPC CheckStream", state: ofPolicy,
			charge: func(ctx context.Context, m *member, key string) (int64, error) {
				stream, err := m.limiter.CheckStream(ctx)
				if err != nil {
					return 0, err
				}
				if err := stream.Send(&weirv1.CheckStreamRequest{Sequence: 7,
					Define: []*weirv1.StreamTarget{{Policy: "counted"}}, Keys: []byte(key),
					KeyLengths: []uint32{uint32(len(key))}}); err != nil {
					return 0, err
				}
				for {
					r, err := stream.Recv()
					if err != nil || len(r.Flags) > 0 || !r.More {
						flags := append(r.GetFlags(), 0)[0]
						allowed, failedOpen := weirv1.StreamFlag_STREAM_FLAG_ALLOWED,
							weirv1.StreamFlag_STREAM_FLAG_FAILED_OPEN
						return admittedBy(flags&uint32(allowed) > 0, flags&uint32(failedOpen) > 0, r, err)
					}
				}
			}},
		reserver("gRPC Reserve and Commit", func(ctx context.Context, m *member, key string) (string, error) {
			d, err := m.limiter.Reserve(ctx, &weirv1.ReserveRequest{Target: &weirv1.Target{Policy: "counted", Key: key},
				Cost: new(int64(maxCharge)), TtlNs: int64(10 * time.Minute)})
			if err == nil && d.ReservationId == "" {
				err = fmt.Errorf("answered %v", d)
			}
			return d.GetReservationId(), err
		}, func(ctx context.Context, m *member, key, id string, cost int64) error {
			_, err := m.limiter.Commit(ctx, &weirv1.CommitRequest{Target: &weirv1.Target{Policy: "counted", Key: key},
				ReservationId: id, Cost: &cost})
			return err
		}),
		{protocol: "Go client", state: ofPolicy,
			charge: func(ctx context.Context, _ *member, key string) (int64, error) {
				d, err := lib.Policy("counted").Allow(ctx, key)
				return admittedBy(d.Allowed, d.FailedOpen, d, err)
			}},
		{protocol: "WEIR.CHECK", state: ofPolicy,
			charge: func(ctx context.Context, m *member, key string) (int64, error) {
				d, err := weirCheck(ctx, resp[m], "WEIR.CHECK", "counted", key)
				return admittedBy(d["allowed"], d["failed_open"], d, err)
			}},
		{protocol: "Envoy", state: ofPolicy, charge: func(ctx context.Context, m *member, key string) (int64, error) {
			out, err := rateLimit(ctx, rls[m], countedKey, 1, envoyValue(key))
			return admittedBy(out.GetOverallCode() == ratelimitv3.RateLimitResponse_OK, false, out, err)
		}},
		reserver("Kuadrant", func(ctx context.Context, m *member, key string) (string, error) {
			out, err := kuadrant[m].Reserve(ctx,
				&kuadrantpb.ReserveRequest{Domain: "edge", Descriptors: descriptorsOf(countedKey, 1, envoyValue(key)),
					Amount: maxCharge, Ttl: durationpb.New(10 * time.Minute)}, grpc.WaitForReady(true))
			if err == nil && out.ReservationId == "" {
				err = fmt.Errorf("answered %v", out)
			}
			return out.GetReservationId(), err
		}, func(ctx context.Context, m *member, key, id string, cost int64) error {
			out, err := kuadrant[m].Commit(ctx,
				&kuadrantpb.CommitRequest{Domain: "edge", Descriptors: descriptorsOf(countedKey, 1, envoyValue(key)),
					ReservationId: id, ActualAmount: uint64(cost)}, grpc.WaitForReady(true))
			if err == nil && !out.ReservationReleased {
				err = errors.New("the reservation was gone")
			}
			return err
		}),
		{protocol: "Gubernator", state: ofGubernator,
			charge: func(ctx context.Context, m *member, key string) (int64, error) {
				out, err := gubernator[m](ctx,
					&pb.RateLimitReq{Name: "counted", UniqueKey: key, Hits: 1, Limit: countedLimit,
						Duration: 86_400_000})
				return admittedBy(err == nil && out[0].Error == "" && out[0].Status == pb.Status_UNDER_LIMIT, false,
					out,
					err)
			}},
		{protocol: "HTTP, the limit of Gubernator's callers", state: ofGubernator,
			charge: func(_ context.Context, m *member, key string) (int64, error) {
				d, err := m.check(fmt.Sprintf(`{%s,"key":%q}`, ofGubernator, key))
				return admittedBy(d.Allowed, d.FailedOpen, d, err)
			}},
		{protocol: "CL.THROTTLE", state: ofRedis,
			charge: func(ctx context.Context, m *member, key string) (int64, error) {
				got, err := resp[m].Do(ctx, "CL.THROTTLE", key, countedLimit-1, countedLimit, 86400*200).Int64Slice()
				// Of a limit so wide nothing is left only where on_error has answered.
				return admittedBy(err == nil && got[0] == 0, err == nil && got[2] == 0, got, err)
			}},
		{protocol: "HTTP, the limit of CL.THROTTLE's callers", state: ofRedis,
			charge: func(_ context.Context, m *member, key string) (int64, error) {
				d, err := m.check(fmt.Sprintf(`{%s,"key":%q}`, ofRedis, key))
				return admittedBy(d.Allowed, d.FailedOpen, d, err)
			}},
	}
}

// admittedBy is one unit if it was admitted, and an error if it was not, or by on_error.
func admittedBy(allowed, byOnError bool, answer any, err error) (int64, error) {
	switch {
	case err != nil:
		return 0, err
	case !allowed || byOnError:
		return 0, fmt.Errorf("answered %v", answer)
	}
	return 1, nil
}

// reserver returns a caller that reserves in turn maxCharge units of a key, and commits one unit less or one more
// through whatever member is next: others than reserved them, and after that one may have been restarted.
func reserver(protocol string, reserve func(context.Context, *member, string) (id string, err error),
	commit func(ctx context.Context, m *member, key, id string, cost int64) error) *caller {
	pending, commits := map[string]string{}, 0
	return &caller{protocol: protocol, state: ofPolicy,
		charge: func(ctx context.Context, m *member, key string) (int64, error) {
			id := pending[key]
			if id == "" {
				id, err := reserve(ctx, m, key)
				if err != nil {
					return 0, err
				}
				pending[key] = id
				return maxCharge, nil
			}
			delete(pending, key)
			commits++
			change := int64(1 - 2*(commits%2))
			if err := commit(ctx, m, key, id, maxCharge+change); err != nil {
				return -1, err
			}
			return change, nil
		}}
}

// envoyValue is the value of the descriptor that has a key.
func envoyValue(key string) string { return strings.TrimPrefix(key, countedKey+"=") }

// TestProtocolsOverRestarts restarts three nodes one by one, in good order, while callers of all protocols charge keys,
// those of one state common keys besides: exactly what they were told is charged, but for what a borrower could not
// report in time.
func TestProtocolsOverRestarts(t *testing.T) {
	needsTime(t)
	t.Parallel()
	f := newFleet(t, 3, "policies:\n  - {name: counted, algorithm: fixed_window, limit: 100_000, window: 24h, on_error: closed}\n", nil)
	rule := "domain: edge\ndescriptors: [{key: counted, rate_limit: {policy: counted}}]\n"
	f.args = append(f.args, "--resp-port", fleetRESP, "--inline-max-window", "8784h", "--timeout", waitTimeout.String(),
		"--envoy-config", filepath.Dir(testkit.WriteFile(t, "edge.yaml", rule)))
	f.start(f.members...)
	f.calm(f.members...)
	all := callers(t, f)
	staying, quit := make([]sync.RWMutex, len(f.members)), make(chan struct{})
	var load sync.WaitGroup
	end := sync.OnceFunc(func() { close(quit); load.Wait() })
	defer end()
	for i, c := range all {
		keys := []string{countedKey + "=all"}
		for k := range 4 { // own keys, most of which have owners of their own
			keys = append(keys, fmt.Sprintf("%s=%d-%d", countedKey, i, k))
		}
		c.admitted, c.unknown = map[string]int64{}, map[string]int64{}
		load.Go(func() { c.run(f.members, staying, keys, quit) })
	}
	goOn := func(when string) {
		t.Helper()
		for _, c := range all {
			from := c.answers.Load()
			eventually(t, waitTimeout, c.protocol+" is answered "+when,
				func() bool { return c.answers.Load() >= from+5 })
		}
	}
	goOn("at first")
	starved := watchStarving(t)
	expired := int64(0)
	for i, m := range f.members {
		staying[i].Lock()
		expired += int64(m.metrics().value(expiredUnits))
		f.leave(m)
		goOn("without " + m.name)
		f.start(m)
		staying[i].Unlock()
		f.calm(f.members...)
		goOn("with " + m.name + " again")
	}
	end()

	// What is on loan comes back when nobody asks any more.
	type state struct{ state, key string }
	admitted, unknown := map[state]int64{}, map[state]int64{}
	asked := map[state][]string{}
	for _, c := range all {
		for key, n := range c.admitted {
			s := state{c.state, key}
			admitted[s] += n
			unknown[s] += c.unknown[key]
			asked[s] = append(asked[s], c.protocol)
		}
		expect.True(t, len(c.failures) == 0, "%s: %d were not answered, and %d were: %.1000v", c.protocol,
			len(c.failures), c.answers.Load(), c.failures)
		t.Logf("%s: %d answers", c.protocol, c.answers.Load())
	}
	beyond := map[state]int64{}
	settled := func() (total int64) {
		for s := range admitted {
			d := must.Value(f.members[0].check(fmt.Sprintf(`{%s,"key":%q,"cost":0}`, s.state, s.key)))(t)
			used := countedLimit - d.Remaining
			beyond[s] = used - admitted[s]
			total += max(beyond[s]-unknown[s], 0)
		}
		return total
	}
	for _, m := range f.members {
		expired += int64(m.metrics().value(expiredUnits))
	}
	if !starved() {
		expired = 0
	}
	eventually(t, waitTimeout, "all that is on loan to be returned", func() bool { return settled() <= expired })
	for s, n := range beyond {
		expect.True(t, n >= -unknown[s],
			"%s, asked over %v: %d units were admitted, %d are used", s.key, asked[s], admitted[s], admitted[s]+n)
	}
	t.Logf("loans expired with %d units", expired)
}

const belongings = `policies:
  - {name: ids, algorithm: sliding_log, limit: 5, window: 1h, durability: sync, on_error: closed}
  - {name: leases, algorithm: concurrency, limit: 1, ttl: 10m, durability: sync, on_error: closed}
`

// TestBelongings: what a key has besides its count goes with it when nodes come, leave and crash: the ids of requests
// that have been charged, and leases. Without voters a partition that has moved has nothing to tell its backup, which
// has everything.
func TestBelongings(t *testing.T) {
	survival(t)
	for _, voters := range []bool{true, false} {
		t.Run(fmt.Sprintf("voters=%t", voters), func(t *testing.T) {
			f := newFleet(t, 3, belongings, nil)
			if i := slices.Index(f.args, "--voters"); !voters {
				f.args = slices.Delete(f.args, i, i+2)
			}
			testBelongings(t, f)
		})
	}
}

func testBelongings(t *testing.T, f *fleet) {
	n := f.members
	f.start(n[:2]...)
	f.calm(n[:2]...)
	const keys = 150
	leases := make([]string, keys)
	charge := func(m *member, key int) {
		t.Helper()
		d := m.tell(t, "/v1/check",
			fmt.Sprintf(`{"policy":"ids","key":"key-%d","cost":2,"request_id":"request-%d"}`, key, key))
		expect.True(t, d.Allowed && d.Remaining == 3,
			"%s, key %d: the request is answered with allowed %t, %d remaining; want true, 3", m.name, key, d.Allowed,
			d.Remaining)
	}
	for key := range keys {
		charge(n[key%2], key)
		d := n[key%2].tell(t, "/v1/acquire", fmt.Sprintf(`{"policy":"leases","key":"key-%d"}`, key))
		must.True(t, d.Allowed && d.LeaseID != "", "acquire: %+v", d)
		leases[key] = d.LeaseID
	}
	// unchanged asks a member about all keys: the requests once more, which must not be charged again, and leases, of
	// which there is no second one to be had.
	unchanged := func(what string, m *member) {
		t.Helper()
		for key := range keys {
			charge(m, key)
			d := m.peek("ids", fmt.Sprintf("key-%d", key))
			expect.True(t, d.Remaining == 3, "%s: key %d has %d left, want 3", what, key, d.Remaining)
			if d := m.tell(t, "/v1/acquire", fmt.Sprintf(`{"policy":"leases","key":"key-%d"}`, key)); d.Allowed ||
				d.FailedClosed {
				t.Errorf("%s: key %d: a second lease: %+v", what, key, d)
			}
			m.tell(t, "/v1/renew", fmt.Sprintf(`{"policy":"leases","key":"key-%d","lease_id":%q}`, key, leases[key]))
		}
	}
	f.start(n[2])
	f.calm(n...)
	unchanged("a node has come", n[0])
	f.leave(n[0])
	f.calm(n[1:]...)
	unchanged("a node has left", n[1])
	n[1].kill()
	f.calm(n[2])
	unchanged("a node has crashed", n[2])
	for key := range keys {
		body := fmt.Sprintf(`{"policy":"leases","key":"key-%d","lease_id":%q}`, key, leases[key])
		d := n[2].tell(t, "/v1/release", body)
		expect.True(t, d.Released, "key %d: the lease is not known any more", key)
	}
}

// answered is what the HTTP API answers to anything.
type answered struct {
	decision
	LeaseID  string `json:"lease_id"`
	Released bool   `json:"released"`
}

// tell posts a body and takes the answer apart, which must be one to a right question.
func (m *member) tell(t *testing.T, path, body string) (a answered) {
	t.Helper()
	code, _, answer, err := m.post(path, "application/json", []byte(body))
	if err == nil {
		err = json.Unmarshal(answer, &a)
	}
	expect.True(t, err == nil && (code == http.StatusOK || code == http.StatusTooManyRequests),
		"%s %s: status %d, %v: %s", path, body, code, err, answer)
	return a
}
