package clustertest

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	common "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/redis/go-redis/v9"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/wrapperspb"

	pb "github.com/weirlimit/weir/gateway/gubernator/gubernatorpb"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

const fleetRESP = "6380"

// respClient is a client of the Redis protocol.
func respClient(t *testing.T, address string, protocol int) *redis.Client {
	c := redis.NewClient(&redis.Options{Addr: address, Protocol: protocol, ReadTimeout: 20 * time.Second,
		MaxRetries: -1})
	t.Cleanup(func() { c.Close() })
	return c
}

// weirCheck sends a command that a decision answers, and returns its booleans.
func weirCheck(ctx context.Context, c *redis.Client, args ...any) (map[string]bool, error) {
	reply, err := c.Do(ctx, args...).Result()
	if err != nil {
		return nil, err
	}
	out := make(map[string]bool)
	switch m := reply.(type) {
	case map[any]any:
		for k, v := range m {
			out[fmt.Sprint(k)] = v == true
		}
	case []any:
		for i := 0; i+1 < len(m); i += 2 {
			out[fmt.Sprint(m[i])] = m[i+1] == int64(1)
		}
	default:
		return nil, fmt.Errorf("answered %T", reply)
	}
	return out, nil
}

// throttle asks CL.THROTTLE for units of a bucket of 16, which come back in a day.
func throttle(ctx context.Context, c redis.Cmdable, key string, quantity int) *redis.Cmd {
	return c.(interface {
		Do(context.Context, ...any) *redis.Cmd
	}).Do(ctx, "CL.THROTTLE", key, 15, 16, 86400, quantity)
}

// forwarded counts what a node has sent to others.
func (p *process) forwarded() int {
	_, page := p.get("/metrics")
	sum := 0
	for _, m := range regexp.MustCompile(`(?m)^weir_forwarded_total\{.*\} (\d+)`).FindAllStringSubmatch(page, -1) {
		n, _ := strconv.Atoi(m[1]) // digits
		sum += n
	}
	return sum
}

// foreign returns n keys that other nodes than the asked one decide for; look asks about a key without charging it.
func foreign(t *testing.T, p *process, look func(key string) error, n int) []string {
	t.Helper()
	var keys []string
	for _, key := range keysNamed("foreign", 20*n) {
		before := p.forwarded()
		must.NoError(t, look(key))
		if p.forwarded() > before {
			if keys = append(keys, key); len(keys) == n {
				return keys
			}
		}
	}
	t.Fatalf("only %d of %d keys are another node's", len(keys), 20*n)
	return nil
}

// TestRESP: the usual clients, through a node that owns nothing of what is asked.
func TestRESP(t *testing.T) {
	t.Parallel()
	nodes := startCluster(t, 3, "--resp-port=0", "--policies", testkit.WriteFile(t, "policies.yaml", exactPolicies))
	entry := nodes[1]
	two, three := respClient(t, entry.resp, 2), respClient(t, entry.resp, 3)
	keys := foreign(t, entry, func(key string) error { return throttle(t.Context(), three, key, 0).Err() }, 4)

	t.Run("go-redis", func(t *testing.T) {
		for i, c := range []*redis.Client{two, three} {
			pipe := c.Pipeline()
			var cmds []*redis.Cmd
			for range 20 {
				cmds = append(cmds, throttle(t.Context(), pipe, keys[i], 1))
			}
			_, err := pipe.Exec(t.Context())
			must.NoError(t, err)
			for n, cmd := range cmds {
				got, err := cmd.Int64Slice()
				expect.True(t, err == nil && len(got) == 5 && (got[0] == 0) == (n < 16) && got[1] == 16 &&
					got[2] == int64(max(15-n, 0)), "protocol %d, command %d: %v, %v", i+2, n, got, err)
			}
			// The same state over HTTP, through another node.
			d, err := nodes[0].check(
				fmt.Sprintf(`{"namespace":"redis","key":%q,"limit":{"algorithm":"token_bucket","limit":16,"window":"24h","capacity":16}}`, keys[i]))
			expect.True(t, err == nil && !d.Allowed && d.Limit == 16 && d.Remaining == 0, "over HTTP: %+v, %v", d, err)
			got, err := weirCheck(t.Context(), c, "WEIR.CHECK", "token_bucket", keys[i], 100)
			expect.True(t, err == nil && got["allowed"] && !got["failed_open"], "WEIR.CHECK: %v, %v", got, err)
			d = nodes[0].peek("token_bucket", keys[i])
			expect.Equal(t, d.Remaining, 0, "over HTTP: %+v", d)
			got, err = weirCheck(t.Context(), c, "WEIR.PEEK", "token_bucket", keys[i])
			expect.True(t, err == nil && !got["allowed"], "WEIR.PEEK: %v, %v", got, err)
		}
	})

	t.Run("redis-cli", func(t *testing.T) {
		ask := redisTool(t, "redis-cli", entry.resp)
		for _, c := range []struct{ args, want string }{
			{"PING", "PONG"}, {"CL.THROTTLE " + keys[2] + " 15 30 60", "0\n16\n15\n-1\n2"},
			{"CL.THROTTLE " + keys[2] + " 15 30 60 17", "1\n16\n15\n-1\n2"},
			{"-3 --json WEIR.PEEK token_bucket " + keys[2],
				`{"allowed":true,"limit":100,"remaining":100,"retry_after_ms":0,"reset_after_ms":0,"delay_ms":0,"shadow":false,"degraded":false,"failed_open":false,"near_limit":false,"banned":false}`},
			{"GET a", "ERR unknown command 'GET', with args beginning with: 'a'"}, {"COMMAND COUNT", "13"},
		} {
			expect.Equal(t, strings.TrimSpace(ask(strings.Fields(c.args)...)), c.want, "redis-cli %s", c.args)
		}
	})

	t.Run("redis-benchmark", func(t *testing.T) {
		// 32 connections with 50 commands on their way ask one key, of which a hundred are to pass.
		out := redisTool(t, "redis-benchmark", entry.resp)("-n", "5000", "-c", "32", "-P", "50", "--csv", "WEIR.CHECK",
			"token_bucket", keys[3])
		expect.True(t, !strings.Contains(strings.ToLower(out), "error from server"), "it says: %s", out)
		d := nodes[2].peek("token_bucket", keys[3])
		expect.True(t, d.Remaining == 0 && !d.Allowed, "afterwards: %+v", d)
	})
}

// redisTool returns a function that runs a tool of Redis against an address, and returns what it writes. A tool that is
// not installed has the test skipped.
func redisTool(t *testing.T, name, address string) func(args ...string) string {
	path, err := exec.LookPath(name)
	if err != nil {
		t.Skipf("%s is not installed (Debian: redis-tools)", name)
	}
	host, port, err := net.SplitHostPort(address)
	must.NoError(t, err)
	return func(args ...string) string {
		out, err := exec.CommandContext(t.Context(), path,
			append([]string{"-h", host, "-p", port}, args...)...).CombinedOutput()
		must.True(t, err == nil, "%s %v: %v: %s", name, args, err, out)
		return string(out)
	}
}

// buildGubernatorClient makes the program around Gubernator's own Go client. It is of another module, whose
// dependencies are many.
var buildGubernatorClient = sync.OnceValues(func() (string, error) {
	path := filepath.Join(buildDir, "gubernatorclient")
	cmd := exec.Command("go", "build", "-o", path, "./cmd/gubernatorclient")
	cmd.Dir = "../../bench"
	out, err := cmd.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%w: %s", err, out)
	}
	return path, err
})

// A v1Client asks for limits as Gubernator's callers do.
type v1Client func(context.Context, ...*pb.RateLimitReq) ([]*pb.RateLimitResp, error)

// gubernatorClient is Gubernator's own client, which asks an address.
func gubernatorClient(t *testing.T, address string) v1Client {
	t.Helper()
	path, err := buildGubernatorClient()
	if err != nil {
		t.Skipf("Gubernator's client cannot be built (cd bench && go mod download): %v", err)
	}
	cmd := exec.Command(path, address)
	stdin := must.Value(cmd.StdinPipe())(t)
	stdout := must.Value(cmd.StdoutPipe())(t)
	must.NoError(t, cmd.Start())
	t.Cleanup(func() {
		stdin.Close() // which ends it
		expect.NoError(t, cmd.Wait(), "Gubernator's client")
	})
	lines := bufio.NewScanner(stdout)
	lines.Buffer(nil, 4<<20)
	var mu sync.Mutex
	read := func() ([]byte, error) {
		if !lines.Scan() {
			return nil, fmt.Errorf("it has ended: %v", lines.Err())
		}
		var failure struct{ Failed string }
		if json.Unmarshal(lines.Bytes(), &failure) == nil && failure.Failed != "" {
			return nil, errors.New(failure.Failed)
		}
		return lines.Bytes(), nil
	}
	health := new(pb.HealthCheckResp)
	text, err := read()
	if err == nil {
		err = protojson.Unmarshal(text, health)
	}
	must.True(t, err == nil && health.Status == "healthy" && health.PeerCount == 3 &&
		health.AdvertiseAddress == address, "HealthCheck: %v, %v", health, err)
	return func(_ context.Context, requests ...*pb.RateLimitReq) ([]*pb.RateLimitResp, error) {
		mu.Lock()
		defer mu.Unlock()
		line, err := protojson.Marshal(&pb.GetRateLimitsReq{Requests: requests})
		if err != nil {
			return nil, err
		}
		if _, err := stdin.Write(append(line, '\n')); err != nil {
			return nil, err
		}
		if line, err = read(); err != nil {
			return nil, err
		}
		out := new(pb.GetRateLimitsResp)
		return out.Responses, protojson.Unmarshal(line, out)
	}
}

// v1Caller is the generated client, which asks many at a time.
func v1Caller(t *testing.T, address string) v1Client {
	c := pb.NewV1Client(testkit.Dial(t, address))
	return func(ctx context.Context, requests ...*pb.RateLimitReq) ([]*pb.RateLimitResp, error) {
		out, err := c.GetRateLimits(ctx, &pb.GetRateLimitsReq{Requests: requests}, grpc.WaitForReady(true))
		return out.GetResponses(), err
	}
}

// bucketOf is a request for hits of a limit of 16 in a day.
func bucketOf(key string, hits int64) *pb.RateLimitReq {
	return &pb.RateLimitReq{Name: "requests", UniqueKey: key, Hits: hits, Limit: 16, Duration: 86_400_000}
}

// TestGubernator: Gubernator's own client, through a node that owns nothing of what is asked.
func TestGubernator(t *testing.T) {
	t.Parallel()
	nodes := startCluster(t, 3)
	entry := nodes[1]
	own := gubernatorClient(t, entry.grpc)
	addresses := make(map[string]bool)
	for _, p := range nodes {
		addresses[p.grpc] = true
	}

	// The answers name the owner where that is another node.
	var requests []*pb.RateLimitReq
	for _, key := range keysNamed("foreign", 100) {
		requests = append(requests, bucketOf(key, 0))
	}
	answers, err := own(t.Context(), requests...)
	must.True(t, err == nil && len(answers) == len(requests), "%d answers, %v", len(answers), err)
	var keys []string
	for i, a := range answers {
		owner := a.Metadata["owner"]
		expect.True(t, a.Error == "" && a.Remaining == 16 && owner != entry.grpc && (owner == "" || addresses[owner]),
			"%s: %v", requests[i].UniqueKey, a)
		if owner != "" {
			keys = append(keys, requests[i].UniqueKey)
		}
	}
	must.True(t, len(keys) >= 20, "only %d of 100 keys are another node's", len(keys))

	third := v1Caller(t, nodes[2].grpc)
	for _, key := range keys[:4] {
		var batch []*pb.RateLimitReq
		for range 20 {
			batch = append(batch, bucketOf(key, 1))
		}
		answers := must.Value(own(t.Context(), batch...))(t)
		for i, a := range answers {
			want := int64(max(15-i, 0))
			expect.True(t, a.Error == "" && (a.Status == pb.Status_UNDER_LIMIT) == (i < 16) && a.Remaining == want &&
				a.Limit == 16, "%s, hit %d: %v", key, i, a)
		}
		// The same state through another node, and as the inline limit that it is.
		refund := must.Value(third(t.Context(), bucketOf(key, -3)))(t)
		expect.Equal(t, refund[0].Remaining, 3, "negative hits: %v", refund)
		d, err := nodes[0].check(
			fmt.Sprintf(`{"namespace":"gubernator/requests","limit":{"algorithm":"fixed_window","limit":16,"window":"24h"},"key":%q,"cost":2}`, key))
		expect.True(t, err == nil && d.Allowed && d.Remaining == 1, "as an inline limit: %+v, %v", d, err)
	}
	_, err = own(t.Context(), slices.Repeat([]*pb.RateLimitReq{bucketOf("many", 1)}, 1001)...)
	expect.ErrorContains(t, err, "OutOfRange", "1001 requests")
}

const envoyFile = `
domain: edge
descriptors:
  - key: user
    rate_limit: {unit: year, requests_per_unit: 10}
  - key: exact
    rate_limit: {unit: year, requests_per_unit: 100}
  - key: log
    rate_limit: {policy: sliding_log}
`

// envoyDir is a directory with the file.
func envoyDir(t *testing.T) string { return filepath.Dir(testkit.WriteFile(t, "edge.yaml", envoyFile)) }

// rateLimiter is the generated client of Envoy's rate limit service.
func rateLimiter(t *testing.T, address string) ratelimitv3.RateLimitServiceClient {
	return ratelimitv3.NewRateLimitServiceClient(testkit.Dial(t, address))
}

// descriptorsOf returns descriptors of one key, with hits, which may be negative.
func descriptorsOf(key string, hits int, values ...string) (list []*common.RateLimitDescriptor) {
	for _, value := range values {
		list = append(list, &common.RateLimitDescriptor{
			Entries:    []*common.RateLimitDescriptor_Entry{{Key: key, Value: value}},
			HitsAddend: wrapperspb.UInt64(uint64(max(hits, -hits))), IsNegativeHits: hits < 0,
		})
	}
	return list
}

// rateLimit adds hits, negative ones too, to descriptors of one key.
func rateLimit(ctx context.Context, c ratelimitv3.RateLimitServiceClient, key string, hits int,
	values ...string) (*ratelimitv3.RateLimitResponse, error) {
	in := &ratelimitv3.RateLimitRequest{Domain: "edge", Descriptors: descriptorsOf(key, hits, values...)}
	out, err := c.ShouldRateLimit(ctx, in, grpc.WaitForReady(true))
	if err == nil && len(out.Statuses) != len(values) {
		err = fmt.Errorf("%d statuses of %d descriptors", len(out.Statuses), len(values))
	}
	return out, err
}

// TestEnvoy: go-control-plane's generated client, through a node that owns nothing of what is asked.
func TestEnvoy(t *testing.T) {
	t.Parallel()
	nodes := startCluster(t, 3, "--envoy-config", envoyDir(t), "--policies",
		testkit.WriteFile(t, "policies.yaml", exactPolicies), "--no-inline")
	entry := nodes[1]
	own, third := rateLimiter(t, entry.grpc), rateLimiter(t, nodes[2].grpc)
	keys := foreign(t, entry, func(key string) error {
		_, err := rateLimit(t.Context(), own, "user", 0, key)
		return err
	}, 4)
	want := func(c ratelimitv3.RateLimitServiceClient, key string, hits int, code ratelimitv3.RateLimitResponse_Code,
		left uint32) {
		t.Helper()
		out := must.Value(rateLimit(t.Context(), c, "user", hits, key))(t)
		st := out.Statuses[0]
		expect.True(t, out.OverallCode == code && st.Code == code && st.LimitRemaining == left &&
			st.CurrentLimit.GetRequestsPerUnit() == 10, "%s, %d hits: %v, not %v with %d left", key, hits, out, code,
			left)
	}
	const ok, over = ratelimitv3.RateLimitResponse_OK, ratelimitv3.RateLimitResponse_OVER_LIMIT
	for _, key := range keys {
		for i := range 10 {
			want(own, key, 1, ok, uint32(9-i))
		}
		// What is over the limit is added as well, and known through every node.
		want(own, key, 2, over, 0)
		want(third, key, 0, over, 0)
		want(third, key, -3, ok, 1)
		want(own, key, 0, ok, 1)
		code, _, text, err := nodes[0].post("/json", "application/json",
			[]byte(`{"domain":"edge","descriptors":[{"entries":[{"key":"user","value":"`+key+`"}],"hitsAddend":2}]}`))
		expect.True(t, err == nil && code == http.StatusTooManyRequests && strings.Contains(string(text), "OVER_LIMIT"),
			"as JSON: %d %s, %v", code, text, err)
	}
	// A policy's state is that of its other callers.
	d := must.Value(nodes[0].check(`{"policy":"sliding_log","key":"log=shared","cost":99}`))(t)
	expect.True(t, d.Allowed, "%+v", d)
	out, err := rateLimit(t.Context(), own, "log", 1, "shared")
	expect.True(t, err == nil && out.OverallCode == ok && out.Statuses[0].LimitRemaining == 0,
		"the last of a policy: %v, %v", out, err)
	t.Run("exact", func(t *testing.T) {
		var askers []asker
		for _, p := range nodes {
			c := rateLimiter(t, p.grpc)
			askers = append(askers, func(ctx context.Context, key string) (bool, error) {
				out, err := rateLimit(ctx, c, "exact", 1, key)
				return out.GetOverallCode() == ok, err
			})
		}
		wantEach(t, ask(t, keysNamed("envoy", 3), 300, askers), 100)
	})
}
